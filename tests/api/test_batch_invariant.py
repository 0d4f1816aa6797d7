"""Batch-invariance: a row of the product has the same bits alone, in any batch and beside
any rows.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from support.causes import CAUSES
from torch.fx.experimental.proxy_tensor import make_fx

from outblas import FallbackWarning, addmm, batch_invariant, matmul
from outblas.autotune import automatic
from outblas.core import invariance, machines, registry
from outblas.core.problem import Problem, problem
from outblas.kernels import portable
from outblas.kernels.portable_config import PortableConfig
from outblas.runtime import default_kernel, dispatch, launcher

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SEED = torch.Generator().manual_seed(0)


def normal(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.randn(*shape, generator=SEED).to(dtype)


A, B = normal(6, 5), normal(5, 4)


@pytest.fixture(autouse=True)
def _as_if_for_the_first_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torch 2.11 no compiled call keeps one graph once a context has been entered."""
    monkeypatch.setattr(invariance, "_ever", False)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """CPU tensors as on a GPU: a kernel of ours takes them. What was planned: batch-invariant or
    not.
    """
    asked = []
    best = launcher.best_launcher

    def noted(problem: Problem, tune: str, *, no_product: bool) -> Any:
        asked.append(problem.batch_invariant)
        return best(problem, tune, no_product=no_product)

    monkeypatch.setattr(launcher, "no_kernel_reason", lambda problem: None)
    monkeypatch.setattr(launcher, "best_launcher", noted)
    dispatch.clear_cache()
    yield asked
    dispatch.clear_cache()


# ---- bits
ROWS = (1, 2, 3, 16, 17, 64, 65, 130)


@pytest.mark.parametrize("transposed", [False, True], ids=["n", "t"])
@pytest.mark.parametrize(
    ("dtype", "out_dtype"), [(FP32, None), (BF16, None), (BF16, FP32)], ids=str
)
def test_rows_have_the_same_bits(
    dtype: torch.dtype, out_dtype: torch.dtype | None, transposed: bool
) -> None:
    a, b = normal(130, 97, dtype=dtype), normal(97, 33, dtype=dtype)
    if transposed:
        b = b.t().contiguous().t()

    def product(a: torch.Tensor, b: torch.Tensor = b) -> torch.Tensor:
        return matmul(a, b, out_dtype=out_dtype, kernel="portable", batch_invariant=True)

    whole = product(a)
    assert whole.dtype == (out_dtype or dtype)
    for rows in ROWS:
        assert torch.equal(product(a[:rows]), whole[:rows])
        assert torch.equal(product(a[130 - rows :]), whole[130 - rows :])
    by_columns = a.t().contiguous().t()
    assert torch.equal(product(by_columns), whole)
    assert torch.equal(product(a[77]), whole[77])
    assert torch.equal(product(by_columns[77]), whole[77])
    batch, folded = a.view(10, 13, 97), whole.view(10, 13, 33)
    assert torch.equal(product(batch), folded)
    assert torch.equal(product(batch.transpose(0, 1)), folded.transpose(0, 1))
    assert torch.equal(product(batch, b.expand(10, 97, 33).contiguous()), folded)
    column = product(a, b[:, 0])
    assert torch.equal(product(a[:3], b[:, 0]), column[:3])
    assert torch.equal(product(a[5], b[:, 0]), column[5])


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("wide", [False, True], ids=["row", "matrix"])
def test_rows_of_addmm_have_the_same_bits(dtype: torch.dtype, wide: bool) -> None:
    a, b, c = (
        normal(130, 70, dtype=dtype),
        normal(70, 33, dtype=dtype),
        normal(130 if wide else 1, 33, dtype=dtype),
    )

    def product(rows: slice, out: torch.Tensor | None = None) -> torch.Tensor:
        addend = c[rows] if wide else c
        return addmm(
            addend,
            a[rows],
            b,
            alpha=0.7,
            beta=-1.3,
            out=out,
            kernel="portable",
            batch_invariant=True,
        )

    whole = product(slice(None))
    for rows in ROWS:
        assert torch.equal(product(slice(9, 9 + rows)), whole[9 : 9 + rows])
    out = torch.empty(33, 17, dtype=dtype).t()
    assert torch.equal(product(slice(17), out), whole[:17])


# ---- what is chosen
def asked(M: int, dtype: torch.dtype = BF16, **changed: Any) -> Problem:
    a, b = (
        torch.empty(M, 512, dtype=dtype, device="meta"),
        torch.empty(384, 512, dtype=dtype, device="meta").t(),
    )
    out = torch.empty(M, 384, dtype=dtype, device="meta")
    found = problem(a, b, out, batch_invariant=True)
    return replace(
        found, **{"device": torch.device("cuda", 0), "alignment": (16, 16, 16), **changed}
    )


@pytest.mark.parametrize("arch", [75, 80, 90])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_portable_has_one_config_for_all_rows(arch: int, dtype: torch.dtype) -> None:
    machine = machines.reference(arch)

    def config(found: Problem) -> PortableConfig:
        return portable.choose(found, machine.sms, machine.arch, machine.shared_memory_per_cta)

    alike = [
        asked(1, dtype, a=(0, 1)),
        asked(9, dtype, alignment=(2, 2, 2)),
        asked(9, dtype, alignment=(4, 8, 2, 2), c=(384, 1)),
        asked(9, dtype, batch=(3, 2), a=(1, 99, 512, 1), b=(0, 7, 1, 512), out=(1, 9999, 384, 1)),
    ]
    for M in (1, 2, 16, 63, 128, 4096, 8192, 100_000):
        alike += [asked(M, dtype), asked(M, dtype, a=(1, M), out=(1, M))]
    assert len({config(found) for found in alike}) == 1
    if arch >= 80 and dtype != FP32:
        chosen = {config(replace(asked(M, dtype), batch_invariant=False)) for M in (1, 4096)}
        assert len(chosen) == 2  # there is something to keep from


def test_the_kernel_is_fixed_by_architecture_and_dtype() -> None:
    for M in (1, 8192):
        assert default_kernel.by_rule(asked(M), 90, 132) == "hopper.gemm"
        assert default_kernel.by_rule(asked(M, FP32), 90, 132) == "portable"
        assert default_kernel.by_rule(asked(M), 80, 108) == "portable"
        assert default_kernel.by_rule(asked(M, FP16), 75, 40) == "portable"


def test_what_was_tuned_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automatic, "choices", lambda *_: pytest.fail("asked"))
    monkeypatch.setattr(default_kernel, "kernel_for", lambda problem: "portable")
    monkeypatch.setattr(
        launcher, "named_launcher", lambda kernel, config, problem, *, no_product: (kernel, config)
    )
    assert launcher.best_launcher(asked(64), "on", no_product=False) == ("portable", "")


def test_a_kernel_that_promises_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(portable, "BATCH_INVARIANT")
    with pytest.raises(ValueError, match="kernel 'portable' does not promise batch_invariant=True"):
        matmul(A, B, kernel="portable", batch_invariant=True)
    with batch_invariant(), pytest.raises(ValueError, match="kernel 'portable' does not promise"):
        addmm(B[0], A, B, kernel="portable")
    matmul(A, B, kernel="portable")
    promising = [
        k.name
        for k in registry.ladder()
        if getattr(registry.load(k.name), "BATCH_INVARIANT", False)
    ]
    assert set(promising) <= {"portable", "hopper.gemm"}


def test_a_config_of_ones_own_is_one_for_all_rows() -> None:
    a, b = normal(40, 50), normal(50, 20)
    config = PortableConfig(block_m=16, block_n=32, block_k=32)
    product = partial(matmul, b=b, kernel="portable", config=config, batch_invariant=True)
    assert torch.equal(product(a[33]), product(a)[33])


# ---- what torch would take
@pytest.mark.filterwarnings("error::outblas.FallbackWarning")
@pytest.mark.parametrize("cause", CAUSES)
def test_what_torch_takes_is_refused(cause: str) -> None:
    message = rf"batch_invariant is True, and torch would take this call \(.*{cause}"
    for _ in range(3):
        with pytest.raises(ValueError, match=message):
            CAUSES[cause](batch_invariant=True)
        with batch_invariant(), pytest.raises(ValueError, match=message):
            CAUSES[cause]()
    with pytest.warns(FallbackWarning, match=cause), batch_invariant():
        CAUSES[cause](batch_invariant=False)


def test_the_argument_is_a_bool() -> None:
    for call in (
        lambda: matmul(A, B, batch_invariant=1),
        lambda: addmm(B[0], A, B, batch_invariant=1),
    ):
        with pytest.raises(TypeError, match="batch_invariant is int, expected a bool"):
            call()
    with pytest.raises(TypeError, match="enabled is str, expected a bool"):
        batch_invariant("yes")


# ---- the context
def planned(found: list[bool]) -> bool:
    """What one more call is planned as, warm calls of both kinds or none before it."""
    dispatch.clear_cache()
    matmul(A, B)
    return found.pop()


def test_contexts_nest_and_end(on_cpu: list[bool]) -> None:
    assert not planned(on_cpu)
    with batch_invariant():
        assert planned(on_cpu)
        with batch_invariant(False):
            assert not planned(on_cpu)
            with batch_invariant(enabled=True):
                assert planned(on_cpu)
            assert not planned(on_cpu)
        assert planned(on_cpu)
        with pytest.raises(ZeroDivisionError), batch_invariant(False):
            raise ZeroDivisionError
        assert planned(on_cpu)
    assert not planned(on_cpu)
    with pytest.raises(ValueError, match=r"input.shape\[1\] is 5"), batch_invariant():
        matmul(A, B[:4])
    assert not planned(on_cpu)


def test_calls_that_say_otherwise_keep_apart_when_warm(
    on_cpu: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = []

    def noted(problem: Problem, tune: str, *, no_product: bool) -> Any:
        return lambda *_: launched.append("same" if problem.batch_invariant else "any")

    monkeypatch.setattr(launcher, "best_launcher", noted)
    for _ in range(4):
        launched.clear()
        matmul(A, B)
        matmul(A, B, batch_invariant=True)
        with batch_invariant():
            matmul(A, B)
            matmul(A, B, batch_invariant=False)
            matmul(A, B, tune="off")
        matmul(A, B, out_dtype=FP32)
        addmm(B[0], A, B, batch_invariant=True)
        assert launched == ["any", "same", "same", "any", "same", "any", "same"]


def test_other_threads_are_not_asked(on_cpu: list[bool]) -> None:
    with batch_invariant(), ThreadPoolExecutor(1) as pool:
        assert not pool.submit(planned, on_cpu).result()
        assert planned(on_cpu)


# ---- graphs
def test_graphs_carry_it(on_cpu: list[bool]) -> None:
    graph = make_fx(lambda a, b: matmul(a, b, batch_invariant=True))(A, B)
    on_cpu.clear()
    dispatch.clear_cache()
    assert torch.equal(graph(A, B), matmul(A, B, batch_invariant=True))
    assert on_cpu == [True]


def test_compiled_calls_carry_it(on_cpu: list[bool]) -> None:
    named = torch.compile(
        lambda a, b: matmul(a, b, batch_invariant=True) + 1, backend="eager", fullgraph=True
    )
    named(A, B)
    assert on_cpu == [True]
    asks = torch.compile(lambda a, b: matmul(a, b) + 1, backend="eager", fullgraph=True)
    for enabled in (False, True, False):
        dispatch.clear_cache()
        with batch_invariant(enabled):
            asks(A, B)
        assert on_cpu.pop() == enabled

    def inside(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        with batch_invariant():
            return matmul(a, b) + 1

    dispatch.clear_cache()
    torch.compile(inside, backend="eager")(A, B)
    assert on_cpu.pop()


# ---- on a GPU
@pytest.mark.gpu
@pytest.mark.parametrize(("N", "K"), [(4096, 512), (509, 100), (1, 700)])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_rows_have_the_same_bits_on_a_gpu(dtype: torch.dtype, N: int, K: int) -> None:
    a, b, c = (normal(*shape, dtype=dtype).cuda() for shape in ((700, K), (K, N), (700, N)))
    for b in (b, b.t().contiguous().t()):  # noqa: B020
        with batch_invariant():
            whole, sums = matmul(a, b), addmm(c, a, b, alpha=0.7, beta=-1.3)
            for rows in (1, 3, 17, 64, 130, 513):
                some = slice(7, 7 + rows)
                assert torch.equal(matmul(a[some], b), whole[some])
                assert torch.equal(matmul(a.t().contiguous().t()[some], b), whole[some])
                assert torch.equal(addmm(c[some], a[some], b, alpha=0.7, beta=-1.3), sums[some])
            assert torch.equal(matmul(a[77], b), whole[77])
            assert torch.equal(matmul(a.view(7, 100, K), b), whole.view(7, 100, N))
            assert torch.equal(matmul(a.view(7, 100, K), b.expand(7, K, N)), whole.view(7, 100, N))
