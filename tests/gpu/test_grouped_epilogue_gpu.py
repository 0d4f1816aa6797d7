"""`outblas.grouped_mm` with epilogue, gather and scatter on a GPU, by the portable kernel and by
the best one, beside products of single groups in float64; and its gradients.
"""

from collections.abc import Iterator

import pytest
import torch
from support.grouped_calls import (
    EXTENT,
    FLOATING,
    FORMS,
    GroupedCall,
    check_close,
    check_equal,
    draw,
    empty_aux,
    subsets,
)

from outblas.core.epilogue import ACTIVATIONS, GATED
from outblas.core.grouped import Form

Tensor = torch.Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

ROWS = "a_index", "scatter_index", "scatter_weights"
EXACT = "", "relu", "reglu"  # of integers
SIZES = ((19, 34, 20), (64, 128, 64), (200, 264, 72))
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def _memory_is_full_of_nan() -> Iterator[None]:
    """Whatever a call leaves undefined is NaN."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def check(call: GroupedCall, kernel: str | None) -> None:
    dtype = call.tensors["mat_a"].dtype
    x, want, there = call.x(), call.expected(), call.on("cuda")
    aux = empty_aux(there, dtype)

    results = there.run(kernel=kernel), there.run(kernel=kernel, aux=aux)

    for result in results:
        if call.activation in EXACT:
            check_equal(result.cpu(), want)
        else:
            check_close(result.cpu(), want, {F32: 1e-4, F16: 2e-3, BF16: 1 / 64}[dtype])
    check_equal(aux.cpu(), x)
    assert aux.cpu()[x.isnan()].isnan().all(), "of no group, so not written"


@pytest.mark.parametrize("kernel", [None, "portable"])
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("form", [*FORMS, "batch"])
def test_epilogues(form: Form, dtype: torch.dtype, kernel: str | None) -> None:
    names = ("residual",) if form == "ragged_n" else ("bias", "residual")
    for activation in ("", *ACTIVATIONS):
        if form == "ragged_n" and activation in GATED:
            continue
        for M, N, K in SIZES:
            call = draw(form, *names, activation=activation, dtype=dtype, M=M, N=N, K=K)
            check(call, kernel)


@pytest.mark.parametrize("kernel", [None, "portable"])
@pytest.mark.parametrize("activation", ["", "relu", "silu", "reglu", "swiglu"])
def test_rows_are_gathered_and_scattered(activation: str, kernel: str | None) -> None:
    for names in subsets(("residual", *ROWS)):
        for _, N, K in SIZES:
            check(draw("ragged_m", *names, activation=activation, N=N, K=K), kernel)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("activation", ["", "swiglu"])
def test_gradients(activation: str, dtype: torch.dtype) -> None:
    """Of real numbers; those of gathered rows are the same bits every time."""
    torch.use_deterministic_algorithms(False)
    for rows in subsets(ROWS):
        names = "bias", "residual", *rows
        call = draw("ragged_m", *names, activation=activation, dtype=dtype, real=True, N=128, K=64)
        leaves = [name for name in FLOATING if name in call.tensors]
        defined = ~call.expected().isnan()
        wide = {name: call.tensors[name].double().requires_grad_() for name in leaves}
        result = call.replaced(**wide).expected()
        expected = torch.autograd.grad(result[defined].sum(), list(wide.values()))

        runs = [gradients(call.on("cuda"), leaves, defined.cuda()) for _ in range(2)]

        tolerance = 0.1 if dtype == BF16 else 1e-3
        for name, one, again, other in zip(leaves, *runs, expected, strict=True):
            assert torch.equal(one, again), name
            torch.testing.assert_close(
                one.cpu().double(), other, rtol=tolerance, atol=tolerance * EXTENT, msg=name
            )


def gradients(call: GroupedCall, names: list[str], defined: Tensor) -> tuple[Tensor, ...]:
    leaves = {name: call.tensors[name].clone().requires_grad_() for name in names}
    result = call.replaced(**leaves).run()
    return torch.autograd.grad(result[defined].float().sum(), list(leaves.values()))


def test_a_graph_is_replayed_with_other_places() -> None:
    call = draw("ragged_m", "residual", *ROWS, activation="reglu", index=torch.int32).on("cuda")
    call.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call.run()

    for seed in range(20):
        torch.manual_seed(seed)
        other = draw("ragged_m", "residual", *ROWS, activation="reglu", index=torch.int32)
        for name, t in other.tensors.items():
            call.tensors[name].copy_(t)
        result.fill_(torch.nan)
        graph.replay()
        check_equal(result.cpu(), other.expected())
