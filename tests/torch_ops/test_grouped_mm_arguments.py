"""The aux of `outblas.grouped_mm`, and what it says of arguments that do not fit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.grouped_calls import ENDS, EXTENT, check_equal, draw, empty_aux

import outblas
from outblas.call.errors import OperandError

Tensor = torch.Tensor

pytestmark = pytest.mark.filterwarnings("ignore:torch takes this call")

ROWS = "a_index", "scatter_index", "scatter_weights"
ALL = "bias", "residual", *ROWS
F32, F16 = torch.float32, torch.float16


# ---- aux
def test_a_lazily_negated_aux_is_written() -> None:
    call = draw("ragged_m", "bias", activation="relu", dtype=F32)
    aux = torch._neg_view(torch.full((EXTENT, 34), torch.nan))

    call.run(aux=aux)

    check_equal(aux, call.x())


@pytest.mark.parametrize("name", ["mat_a", "residual"])
def test_an_aux_shares_no_memory(name: str) -> None:
    call = draw("ragged_m", *ALL, dtype=F32, N=20)
    memory = torch.zeros(EXTENT * 20 + 200)
    shared = call.tensors[name]
    part = memory[: shared.numel()].view(shared.shape).copy_(shared)
    aux = memory[1 : 1 + EXTENT * 20].view(EXTENT, 20)
    before = memory.clone()

    with pytest.raises(OperandError, match=f"aux overlaps {name} in memory"):
        call.replaced(**{name: part}).run(aux=aux)

    assert torch.equal(memory, before), "nothing is written"


@pytest.mark.parametrize("name", ["mat_b", "scatter_weights"])
def test_an_aux_has_no_gradients(name: str) -> None:
    call = draw("ragged_m", *ALL, dtype=F32)
    call.tensors[name].requires_grad_()
    aux = empty_aux(call, F32)

    with pytest.raises(OperandError, match="aux is given with inputs that need gradients"):
        call.run(aux=aux)
    with torch.no_grad():
        call.run(aux=aux)

    assert not aux[: ENDS[-1]].isnan().any()


# ---- wrong arguments
A, B, OFFS = torch.ones(6, 8), torch.ones(2, 8, 4), torch.tensor([2, 6], dtype=torch.int32)
INDEX, ONES = torch.arange(6), torch.ones(6)


def run(a: Any = A, b: Any = B, **named: Any) -> Tensor:
    return outblas.grouped_mm(a, b, **{"offs": OFFS} | named)


def masked(a: Tensor = B.mT, b: Tensor = B, counts: Any = OFFS, **named: Any) -> Tensor:
    return outblas.grouped_mm(a, b, counts=counts, **named)  # of 2 groups, 4 rows, 8 terms


WRONG: dict[str, Callable[[], object]] = {
    # operands and groups
    "offs is None, expected the ends of groups": lambda: run(offs=None),
    "offs is given, expected None where both": lambda: run(B, B.mT),
    "offs is torch.int64 .* expected torch.int32": lambda: run(offs=OFFS.long()),
    r"mat_b.shape\[0\] is 2 but offs has 1": lambda: run(offs=OFFS[:1]),
    r"mat_a.shape\[-1\] is 7 but mat_b.shape\[-2\] is 8": lambda: run(A[:, :7]),
    r"mat_a.shape\[-1\] is 4 but": lambda: run(B, A.t()),
    "mat_a has 1 dimensions, expected 2 or 3": lambda: run(A[0]),
    "mat_a.dtype is torch.int32, expected one of": lambda: run(A.int()),
    "mat_b.dtype is torch.float16 but mat_a.dtype": lambda: run(b=B.half()),
    "out_dtype is torch.float16": lambda: run(out_dtype=F16),
    "offs has 0 elements, expected 1": lambda: run(b=B[:0], offs=OFFS[:0]),
    # epilogue
    r"bias is .* expected .*\(2, 4\)": lambda: run(bias=torch.ones(4)),
    "bias is given, expected None where groups are columns": lambda: run(
        B.mT, A.t(), bias=torch.ones(2, 6)
    ),
    r"residual is torch.float32 of shape \(6, 3\) .* of shape \(6, 4\)": lambda: run(
        residual=torch.ones(6, 3)
    ),
    r"residual is .* expected torch.float32 of shape \(6, 2\)": lambda: run(
        residual=torch.ones(6, 4), activation="swiglu"
    ),
    "residual is torch.float16": lambda: run(residual=torch.ones(6, 4).half()),
    "residual is .* on meta, expected .* on cpu": lambda: run(
        residual=torch.ones(6, 4, device="meta")
    ),
    r"aux is .*shape \(6, 4\)": lambda: run(aux=torch.ones(6, 2), activation="swiglu"),
    "aux is torch.float16": lambda: run(aux=torch.ones(6, 4).half()),
    "aux has strides .* share memory": lambda: run(aux=torch.ones(1, 4).expand(6, 4)),
    "activation 'geglu' pairs the columns": lambda: run(b=B[..., :3], activation="geglu"),
    "activation 'reglu' pairs columns, expected another": lambda: run(
        B.mT, A.t(), activation="reglu"
    ),
    # rows
    "a_index is torch.float32 of shape": lambda: run(a_index=INDEX.float()),
    r"a_index is .*\(2, 3\).* of 1 dimension": lambda: run(a_index=INDEX.reshape(2, 3)),
    r"mat_a.shape\[0\] is 0 but a_index has 6": lambda: run(A[:0], a_index=INDEX),
    "a_index is given, expected None where groups": lambda: run(A.t(), A, a_index=INDEX),
    "a_index is given, expected None": lambda: run(B, B.mT, offs=None, a_index=INDEX),
    "scatter_index is given, expected": lambda: run(B, B.mT, offs=None, scatter_index=INDEX),
    r"scatter_index is .*\(6,\).* of shape \(5,\)": lambda: run(
        a_index=INDEX[:5], scatter_index=INDEX
    ),
    "scatter_weights is given without": lambda: run(scatter_weights=ONES),
    r"scatter_weights has shape \(5,\) .* expected \(6,\)": lambda: run(
        scatter_index=INDEX, scatter_weights=ONES[:5]
    ),
    "scatter_weights.dtype is torch.float16, expected torch.float32": lambda: run(
        scatter_index=INDEX, scatter_weights=ONES.half()
    ),
    # counts
    "counts is given, expected None where mat_a has 2 and mat_b 3": lambda: masked(A),
    "counts is given, expected None where mat_a has 2 and mat_b 2": lambda: masked(A, A.t()),
    "offs is given, expected None beside counts": lambda: masked(offs=OFFS),
    "a_index is given, expected None beside counts": lambda: masked(a_index=INDEX),
    "scatter_weights is given, expected None beside counts": lambda: masked(scatter_weights=ONES),
    r"counts is torch.int64 of shape \(2,\) on cpu, expected": lambda: masked(counts=OFFS.long()),
    r"counts is torch.int32 of shape \(1, 2\)": lambda: masked(counts=OFFS.view(1, 2)),
    "counts is .* on meta, expected .* on cpu": lambda: masked(counts=OFFS.to("meta")),
    r"mat_a.shape\[0\] is 2 but counts has 1": lambda: masked(counts=OFFS[:1]),
    r"mat_b.shape\[0\] is 1 but counts has 2": lambda: masked(b=B[:1]),
    "counts has 0 elements, expected 1 to 1024": lambda: masked(B[:0].mT, B[:0], OFFS[:0]),
    "counts has 1025 elements, expected 1 to 1024": lambda: masked(
        torch.ones(1025, 1, 1), torch.ones(1025, 1, 1), torch.ones(1025, dtype=torch.int32)
    ),
    r"residual is .* of shape \(2, 4, 2\)": lambda: masked(
        residual=torch.ones(2, 4, 4), activation="swiglu"
    ),
    "zero_tail is True, expected False beside counts": lambda: torch.ops.outblas.grouped_gemm(
        B.mT, B, zero_tail=True, counts=OFFS
    ),
    r"counts is given with .* gradients \(mat_a\)": lambda: masked(B.mT.clone().requires_grad_()),
    r"counts is given with .* gradients \(bias\)": lambda: masked(
        bias=torch.ones(2, 4).requires_grad_()
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_an_argument_that_does_not_fit_is_named(message: str) -> None:
    with pytest.raises(OperandError, match=message):
        WRONG[message]()


def test_gradients_of_counted_groups_are_refused_though_a_plan_is_there() -> None:
    leaf = B.clone().requires_grad_()
    with torch.no_grad():
        for _ in range(2):
            assert not masked(b=leaf, kernel="portable").requires_grad

    with pytest.raises(OperandError, match=r"counts is given with .* gradients \(mat_b\)"):
        masked(b=leaf, kernel="portable")


TYPES = [*("offs", "counts", "bias", "residual", "aux", *ROWS), "kernel", "out_dtype"]


def test_an_argument_of_another_type_is_named() -> None:
    for name in ("mat_a", *TYPES):
        named: dict[str, Any] = {"a" if name == "mat_a" else name: [0, 1]}
        with pytest.raises(TypeError, match=f"{name} is list, expected a"):
            run(**named)


def test_an_unknown_activation_is_named() -> None:
    wrong: Any = 3
    with pytest.raises(ValueError, match="activation is 'tanh', expected None or one of relu"):
        run(activation="tanh")
    with pytest.raises(TypeError, match="activation is int, expected a str or None"):
        run(activation=wrong)
    with pytest.raises(ValueError, match="activation is 'tanh', expected '' or one of relu"):
        torch.ops.outblas.grouped_gemm(A, B, OFFS, activation="tanh")
