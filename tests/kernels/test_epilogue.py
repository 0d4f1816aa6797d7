"""Epilogues of `portable`, run by Triton's interpreter, and of `turing.cp_async`: what both compile
to.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.covering import covering
from support.fused import Fused
from support.portable_builds import operand
from support.rungs import own, rung

import outblas
from outblas.call.epilogue import ACTIVATIONS, FUNCTIONS, Activation, EpilogueArgs, glu_split
from outblas.call.problem import Problem, problem
from outblas.device import grid
from outblas.kernels.portable import Config, plan

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SQUARE = (4096, 4096, 4096)
ALL: dict[str, Any] = {"bias": "row", "residual": "matrix", "aux": True}


@pytest.mark.interpreter
@pytest.mark.oldest_triton
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_every_activation_is_right_with_all_steps(activation: Activation | None) -> None:
    Fused(33, 41, 37, BF16, activation, **ALL).check("portable")


FORMS = {
    "a row": Fused(1, 70, 5, **ALL | {"residual": "row"}, layout="ntn"),
    "a column": Fused(65, 1, 70, bias="column", residual="column", aux=True, layout="tnt"),
    "gaps between elements": Fused(
        64, 64, 64, **ALL | {"bias": "matrix"}, layout="sss", pad=3, offset=5
    ),
    "an addend": Fused(20, 70, 9, **ALL, alpha=0.5, beta=-2.0, layout="ntt", pad=1),
    "a batch": Fused(9, 35, 17, bias="matrix", residual="column", aux=True, batch=(2, 3), pad=1),
    "four batch dimensions": Fused(9, 20, 17, **ALL, batch=(2, 1, 2, 3), pad=1, layout="nnt"),
    "fp32 output": Fused(20, 35, 9, **ALL, out_dtype=FP32, layout="tts"),
}
DTYPES = {"bf16": BF16, "fp16": FP16, "fp32": FP32}


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("case", "activation", "dtype"),
    covering(
        FORMS,
        {str(name): name for name in (None, "gelu", "reglu", "swiglu")},
        DTYPES,
        of=2,
        possible=lambda case, activation, dtype: case.out_dtype != dtype,
    ),
)
def test_every_form_of_an_epilogue_s_tensors_is_right(
    case: Fused, activation: Activation | None, dtype: torch.dtype
) -> None:
    replace(case, activation=activation, dtype=dtype).check("portable")


@pytest.mark.parametrize(
    ("left", "right"),
    [((0,), (0,)), ((3, 0), (0,)), ((0,), (0, 4)), ((3, 0), (0, 4))],
    ids=["two vectors", "a vector on the right", "a vector on the left", "matrices"],
)
def test_an_epilogue_follows_an_empty_sum(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    bias, residual = torch.tensor(-2.0), torch.tensor(3.0)

    out = outblas.matmul(
        torch.empty(left),
        torch.empty(right),
        bias=bias,
        activation="relu",
        residual=residual,
        kernel="portable",
    )

    assert torch.equal(out, torch.full(left[:-1] + right[1:], 3.0))


@pytest.mark.interpreter
@pytest.mark.parametrize("function", FUNCTIONS)
def test_infinities_nans_and_extremes_become_what_torch_makes_of_them(function: Activation) -> None:
    values = [math.inf, -math.inf, math.nan, -0.0, 3e38, -3e38, 90.0, -90.0, 20.0, -20.0]
    x = torch.tensor(values)[:, None]

    out = outblas.matmul(x, torch.ones(1, 1), activation=function, kernel="portable")

    torch.testing.assert_close(
        out.double(), FUNCTIONS[function](x.double()), rtol=1e-5, atol=1e-30, equal_nan=True
    )


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("block_n", "activation"),
    covering({"32 columns": 32, "128 columns": 128}, {"relu": "relu", "reglu": "reglu"}),
)
def test_launches_of_a_part_of_the_batch_start_inside_of_all_tensors(
    monkeypatch: pytest.MonkeyPatch, block_n: int, activation: Activation
) -> None:
    monkeypatch.setattr(grid, "MAX_PROGRAMS", 7)
    config = Config(16, block_n, 16, 2, 4, 1)
    launches = []

    def run_in_chunks(a: Any, b: Any, c: Any, out: Any, *scales: Any, **extra: Any) -> None:
        given = problem(a, b, out, extra=EpilogueArgs(**extra))
        launches.extend(grid.chunks_of(given, config))
        plan(given, config)(a, b, c, out, *scales[:2], *EpilogueArgs(**extra)[1:])

    columns = 3 + block_n // 2
    case = Fused(20, columns, 17, FP32, activation, "matrix", "matrix", True, batch=(2, 3), pad=1)
    case.check("", run=run_in_chunks)

    assert len(launches) > 1


def problem_with_epilogue(
    M: int,
    N: int,
    K: int,
    activation: Activation,
    dtype: torch.dtype = BF16,
    layout: str = "nt",
    *,
    out_dtype: torch.dtype | None = None,
    addend: bool = False,
    tf32: bool = False,
) -> Problem:
    """An aligned product with a row of bias, a residual and an aux, without data."""
    columns, out_dtype = N * glu_split(activation), out_dtype or dtype
    a, b = operand(M, K, layout[0], dtype), operand(K, columns, layout[1], dtype)
    out, aux = operand(M, N, "n", out_dtype), operand(M, columns, "n", out_dtype)
    c = operand(M, columns, "n", dtype) if addend else None
    extra = EpilogueArgs(activation, bias=aux[0], residual=out, aux=aux)
    return problem(a, b, out, c, tf32=tf32, scaled=addend, extra=extra)


def test_a_rung_without_epilogues_refuses_one_by_name() -> None:
    given = problem_with_epilogue(*SQUARE, "swiglu", FP16)

    reason = rung("turing.ldmatrix").unsupported(given)

    expected = "has no epilogue besides alpha and C, but was given bias, aux, swiglu, residual"
    assert reason == expected


def test_an_epilogue_needs_an_output_that_is_staged() -> None:
    given = problem_with_epilogue(*SQUARE, "swiglu", FP16)
    unstaged = own("turing.cp_async", stage_out=False)

    reason = rung("turing.cp_async").unsupported_reason(given, unstaged, 80)

    assert "stage_out" in str(reason)


@pytest.mark.parametrize(
    ("activation", "needs_int64"),
    [("relu", False), pytest.param("reglu", True, id="reglu, whose aux is twice as wide")],
)
def test_offsets_are_64_bit_where_a_tensor_has_more_than_two_to_the_31_elements(
    activation: Activation, needs_int64: bool
) -> None:
    given = problem_with_epilogue(32768, 32768, 64, activation)

    assert grid.needs_int64(given, Config()) == needs_int64
