"""One plan serves every number of rows of a layer: with the right results, whatever number it was
made for, and without compiling or waiting for a new one.
"""

import contextlib
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from support.probed_gpu import unprobed_context
from support.served_by_pack import forget_packs
from support.warm_calls import stand_in_launcher

from outblas import FallbackWarning
from outblas.autotune import lookup
from outblas.autotune.search import gpu as gpus
from outblas.base import compiling, pack
from outblas.base.configs import to_text
from outblas.call import default_kernel, dispatch, launcher
from outblas.call import problem as operands
from outblas.call.artifact import example
from outblas.call.dispatch import Call
from outblas.call.epilogue import EpilogueArgs, apply
from outblas.call.errors import OperandError
from outblas.call.problem import Launch, Problem
from outblas.device import driver
from outblas.hopper.gemm import heuristic, host
from outblas.hopper.gemm.variant import example_variant
from outblas.hopper.parts import compile, tile_order
from outblas.hopper.parts.config import compile_key

Tensor = torch.Tensor
F32 = torch.float32


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands for kernels computes calls on the CPU."""
    monkeypatch.setattr(launcher, "no_kernel_reason", lambda problem: None)
    monkeypatch.setattr(launcher, "best_launcher", stand_in_launcher)


def numbers(*shape: int) -> Tensor:
    return torch.randint(-4, 5, shape).float()


def call_of(a: Tensor, b: Tensor, **changes: Any) -> Call:
    return Call(a, b, None, None, None, 1, 0, "", "")._replace(**changes)


# ---- results
class Layer:
    """Random calls of one layer, which differ in rows alone."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.packed = rng, rng.random() < 0.6
        self.pad = 0 if self.packed else rng.choice([0, 3])
        self.b = numbers(5, 7) if rng.random() < 0.5 else numbers(7, 5).t()
        self.kinds = rng.choices(["none", "matrix", "columns", "row"], k=3)  # bias, residual, c
        self.gives_out, self.stores = rng.random() < 0.3, rng.random() < 0.3
        self.activation = rng.choice(["", "relu"])

    def _matrix(self, rows: tuple[int, ...], columns: int) -> Tensor:
        memory = numbers(*rows, columns + self.pad)
        return memory[..., :columns]

    def _tensor(self, kind: str, rows: tuple[int, ...]) -> Tensor | None:
        match kind:
            case "matrix":
                return self._matrix(rows, 7)
            case "columns":
                return numbers(7)
            case "row":
                return numbers(*(1 for _ in rows), 7)
        return None

    def call(self) -> tuple[Call, Tensor]:
        """A call, and its result by torch."""
        rows = tuple(self.rng.choices([1, 1, 2, 3, 8], k=self.rng.choice([1, 2, 3])))
        rows = rows if self.packed else rows[:1]
        a, b = self._matrix(rows, 5), self.b
        bias, residual, c = (self._tensor(kind, rows) for kind in self.kinds)
        c = c if len(rows) == 1 else None
        x = a @ b + (0 if bias is None else bias) + (0 if c is None else 2 * c)
        expected = apply(x, self.activation, residual)
        extra = None
        if self.activation or self.stores or bias is not None or residual is not None:
            aux = self._matrix(rows, 7) if self.stores else None
            extra = EpilogueArgs(self.activation, bias, residual, aux)
        out = self._matrix(rows, 7).fill_(torch.nan) if self.gives_out else None
        beta = 0 if c is None else 2
        return call_of(a, b, c=c, out=out, beta=beta, extra=extra), expected


@pytest.mark.usefixtures("kernels")
def test_a_plan_is_right_for_every_number_of_rows() -> None:
    """In any order, with one row too, with leading dimensions, and with tensors that rows share."""
    rng = random.Random(0)
    torch.manual_seed(0)
    for _ in range(150):
        layer = Layer(rng)
        for _ in range(6):
            call, expected = layer.call()

            result = dispatch.run(call)

            case = f"{vars(layer)} with {tuple(call.a.shape)}"
            assert result.shape == expected.shape, case
            assert torch.equal(result, expected), case
            assert result.is_contiguous() or call.out is not None, case


@pytest.mark.usefixtures("kernels")
def test_calls_of_a_layer_share_a_plan() -> None:
    memory, b, residual = numbers(60, 5), numbers(5, 7), numbers(12, 7)

    def plan(*rows: int, of_residual: int = 1) -> dispatch.Plan:
        a = memory[: math.prod(rows)].view(*rows, 5)
        extra = EpilogueArgs("", None, residual[:of_residual])
        return dispatch.find_plan(call_of(a, b, extra=extra))

    shared = plan(3)

    assert dispatch.any_rows(shared)
    assert {plan(8), plan(60), plan(2, 3), plan(2, 5, 6)} == {shared}
    assert plan(12, of_residual=12) is not shared, "each row has a residual of its own"
    assert plan(1) is plan(12, of_residual=12), "so has the only one"


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    "call",
    [
        pytest.param(call_of(numbers(2, 3, 5), numbers(2, 5, 7)), id="a batch of B"),
        pytest.param(call_of(numbers(5), numbers(5, 7)), id="a vector"),
        pytest.param(call_of(numbers(3, 5), numbers(5)), id="a vector B"),
        pytest.param(call_of(numbers(2, 6, 5)[:, ::2], numbers(5, 7)), id="rows apart"),
        pytest.param(call_of(numbers(3, 5), numbers(5, 7), tune="on"), id="to be tuned"),
        pytest.param(
            call_of(numbers(2, 3, 5), numbers(5, 7), extra=EpilogueArgs("", None, numbers(3, 7))),
            id="a residual of a batch",
        ),
        pytest.param(call_of(numbers(0, 5), numbers(5, 7)), id="nothing"),
    ],
)
def test_other_calls_have_plans_of_their_own(call: Call) -> None:
    assert not dispatch.any_rows(dispatch.find_plan(call))


@pytest.mark.usefixtures("kernels")
def test_memory_that_only_more_rows_share_is_seen() -> None:
    """`out` begins behind the rows that the plan was made for, and A's later rows reach it."""
    memory, b = torch.zeros(200), numbers(5, 5)
    out = memory[50:100].view(10, 5)
    assert dispatch.run(call_of(memory[:10].view(2, 5), b, out=out[:2])) is not None

    with pytest.raises(OperandError, match="overlaps"):
        dispatch.run(call_of(memory[:55].view(11, 5), b, out=memory[50:105].view(11, 5)))


@pytest.mark.usefixtures("kernels")
def test_a_plan_forgets_the_sizes_that_it_met_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "SIZES_LIMIT", 4)
    b = numbers(5, 7)
    plan = dispatch.find_plan(call_of(numbers(1, 5), b))
    for rows in range(1, 20):
        a = numbers(rows, 5)
        assert torch.equal(plan(a, b, None, None, 1, 0), a @ b)

    assert list(vars(plan)["sizes"]) == [(rows, 5) for rows in range(16, 20)]


def test_torchs_plan_serves_all_sizes_of_the_cpu() -> None:
    with pytest.warns(FallbackWarning, match="CPU tensors"):
        dispatch.run(call_of(numbers(3, 5), numbers(5, 7)))
    plan = dispatch.find_plan(call_of(numbers(4, 5), numbers(5, 7)))

    assert dispatch.any_rows(plan)
    assert dispatch.torch_reason(plan) == "CPU tensors"
    assert dispatch.at_rows(plan, torch.Size((9, 5))) is plan


# ---- choices
def test_numbers_of_rows_share_choices_up_to_the_next_of_a_series() -> None:
    ends = [default_kernel.rows_of_choice(rows) for rows in range(1, 10_000)]

    assert ends == sorted(ends)
    assert all(rows <= end < rows + max(8, rows // 4) for rows, end in enumerate(ends, 1))
    assert all(default_kernel.rows_of_choice(end) == end for end in ends)
    assert len(set(ends[:8192])) == 109


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """An H100 whose kernels are all compiled; the list has those that ran. Tensors of the CPU count
    as its own. Where a call would wait for it, or compile, it fails.
    """
    ran: list[Any] = []
    context, h100 = unprobed_context(), gpus.imagined("H100")
    properties = SimpleNamespace(multi_processor_count=132, name="NVIDIA H100 80GB HBM3")
    pose = operands.problem

    def posed(*given: Any, **options: Any) -> Problem:
        return replace(pose(*given, **options), device=torch.device("cuda", 0))

    def refuse(*_: object, **__: object) -> NoReturn:
        raise AssertionError("a call compiles, or waits for the GPU")

    monkeypatch.setattr(operands, "problem", posed)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(gpus, "current", lambda _=None: h100)
    monkeypatch.setattr(compile, "load", lambda kernel, _: lambda *given: ran.append(kernel))
    monkeypatch.setattr(tile_order, "_copied", lambda device, tiles: torch.from_numpy(tiles))
    monkeypatch.setattr(tile_order, "_kept", {})
    monkeypatch.setattr(driver, "context", lambda: context)
    monkeypatch.setattr(driver, "relaxed_capture", contextlib.nullcontext)
    monkeypatch.setattr(driver, "background", lambda: SimpleNamespace(submit=lambda job: None))
    monkeypatch.delenv("OUTBLAS_TUNE", raising=False)
    lookup.clear_cache()
    host.device_rates.cache_clear()
    for owner, name in (
        (host, "compile_variant"),
        (compile, "keep"),
        (driver, "for_good"),
        (torch.cuda, "synchronize"),
        (torch.cuda.Stream, "synchronize"),
        (torch.cuda.Event, "synchronize"),
        (Tensor, "item"),
        (Tensor, "cpu"),
    ):
        monkeypatch.setattr(owner, name, refuse)
    yield ran
    lookup.clear_cache()
    host.device_rates.cache_clear()


def test_a_new_number_of_rows_neither_compiles_nor_waits(gpu: list[Any]) -> None:
    """Nor is anything looked up for one between numbers that were met."""
    b = torch.empty(4096, 512, dtype=torch.bfloat16).t()
    a = torch.empty(8192, 512, dtype=torch.bfloat16)

    def plan(rows: int) -> dispatch.Plan:
        dispatch.run(call_of(a[:rows], b))
        return dispatch.find_plan(call_of(a[:rows], b))

    plans = {plan(rows) for rows in (*range(1, 513), *range(576, 8193, 64))}
    kernels = set(gpu)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "best_launcher", lambda *_, **__: pytest.fail("looked up"))
        plans |= {plan(rows) for rows in range(300, 2048, 7)}

    assert len(plans) == 1
    assert len(gpu) == 512 + 120 + 250
    assert set(gpu) == kernels
    assert len(kernels) < 60


def test_a_choice_does_not_depend_on_which_number_of_rows_came_first(gpu: list[Any]) -> None:
    """Nor whether the number is tuned for itself."""
    b = torch.empty(4096, 4096, dtype=torch.bfloat16).t()
    a = torch.empty(8192, 4096, dtype=torch.bfloat16)
    rng, chosen = random.Random(0), list[dict[int, Any]]()
    for _ in range(2):
        rows = [*range(1, 80), *range(500, 530), *range(1024, 1200, 8), *range(4000, 4100, 9)]
        rng.shuffle(rows)
        dispatch.clear_cache()
        chosen.append({})
        for M in rows:
            dispatch.run(call_of(a[:M], b))
            chosen[-1][M] = gpu[-1]

    assert chosen[0] == chosen[1]
    assert chosen[0][512] == chosen[0][511]


@pytest.mark.parametrize("lead", [(), (1,)], ids=["a matrix", "a batch of one"])
@pytest.mark.parametrize("shape", [(512,), (1, 512)], ids=["columns", "a row of columns"])
@pytest.mark.parametrize("name", ["bias", "residual"])
def test_what_rows_share_is_read_for_each_where_one_row_came_first(
    gpu: list[Any], name: str, shape: tuple[int, ...], lead: tuple[int, ...]
) -> None:
    """Many rows get the kernel that they get without that row before them."""
    b = torch.empty(512, 512, dtype=torch.bfloat16).t()
    a = torch.empty(640, 512, dtype=torch.bfloat16)
    shared: dict[str, Any] = {name: torch.empty(shape, dtype=torch.bfloat16)}
    extra = EpilogueArgs()._replace(**shared)
    kernels = []
    for numbers_of_rows in ([1, 640], [640]):
        dispatch.clear_cache()
        for rows in numbers_of_rows:
            dispatch.run(call_of(a[:rows].view(*lead, rows, 512), b, extra=extra))
        kernels.append(gpu[-1])

    assert kernels[0] == kernels[1]


# ---- kernels that are not there
def test_torch_computes_the_sizes_alone_whose_kernel_may_not_be_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def best_launcher(problem: Problem, *given: Any, no_product: bool) -> Launch:
        if problem.M == 2:
            raise compiling.CompileForbidden("the kernel of two rows")
        return stand_in_launcher(problem, *given, no_product=no_product)

    monkeypatch.setattr(launcher, "no_kernel_reason", lambda problem: None)
    monkeypatch.setattr(launcher, "best_launcher", best_launcher)
    b = numbers(5, 7)
    plan = dispatch.find_plan(call_of(numbers(1, 5), b))
    with pytest.warns(FallbackWarning, match="the kernel of two rows"):
        plan(numbers(2, 5), b, None, None, 1, 0)

    reasons = [
        dispatch.torch_reason(dispatch.at_rows(plan, torch.Size((rows, 5)))) for rows in (1, 2, 3)
    ]
    assert [reason is None for reason in reasons] == [True, False, True]
    with pytest.raises(compiling.CompileForbidden):
        dispatch.at_rows(
            dispatch.find_plan(call_of(numbers(1, 6), numbers(6, 7))),
            torch.Size((2, 6)),
            by_torch=False,
        )


@pytest.mark.usefixtures("gpu")
def test_a_kernel_of_a_pack_may_stand_in_for_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(pack, "SHIPPED", tmp_path / "none")
    forget_packs()
    problem = replace(
        example(torch.bfloat16, None, "nt", (64, 4096, 512)), device=torch.device("cuda", 0)
    )
    rates = host.device_rates(problem.device)
    best = heuristic.config(problem, rates)
    assert launcher.packed_launcher(problem) is None

    about = {"configs": {"bfloat16": [to_text(compile_key(best))]}}
    pack.write(
        tmp_path / "x.pack",
        about,
        [(example_variant(problem, best, rates.sms).cache_key_fields, b"")],
    )
    pack.load(tmp_path / "x.pack")

    assert launcher.packed_launcher(problem) is not None
    assert launcher.packed_launcher(replace(problem, batch_invariant=True)) is None
    forget_packs()
