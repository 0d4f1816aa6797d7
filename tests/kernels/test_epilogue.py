"""Epilogues of `portable`, run by Triton's interpreter, and of `turing.cp_async`: what both compile
to.
"""

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.fused import Fused, run
from support.portable_builds import check, copies, operand
from support.rungs import own, rung

import outblas
from outblas.core.epilogue import ACTIVATIONS, FUNCTIONS, EpilogueArgs, apply, glu_split
from outblas.core.problem import Problem, problem
from outblas.device import grid
from outblas.inspect.machine_code import read_cubin
from outblas.kernels.portable import Config, plan
from outblas.turing.cp_async import SIZES

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SQUARE = (4096, 4096, 4096)
ALL = {"bias": "row", "residual": "matrix", "aux": True}


@pytest.mark.interpreter
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_every_activation(activation: str | None) -> None:
    Fused(33, 41, 37, BF16, activation, **ALL).check("portable")
    Fused(33, 41, 37, FP32, activation, "column", layout="tts", offset=1).check("portable")


@pytest.mark.interpreter
@pytest.mark.parametrize("shape", [(6, 5), (3, 6, 5)])
@pytest.mark.parametrize("activation", ["reglu", "swiglu"])
def test_a_gated_pair_without_columns(activation: str, shape: tuple[int, ...]) -> None:
    """Where B is a vector, the halves are those of a column, and no memory behind the output is
    written.
    """
    a, b, bias = torch.randn(shape), torch.randn(5), torch.randn(shape[:-1])
    want = apply(a @ b + bias, activation, None)
    memory = torch.full((want.numel() + 64,), 7.0)
    out, aux = memory[: want.numel()].view(want.shape), torch.empty(shape[:-1])
    how: dict[str, Any] = {"bias": bias, "activation": activation, "kernel": "portable"}
    torch.testing.assert_close(outblas.matmul(a, b, **how), want)
    torch.testing.assert_close(outblas.matmul(a, b, out=out, aux=aux, **how), want)
    torch.testing.assert_close(aux, a @ b + bias)
    assert memory[want.numel() :].eq(7).all()


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("activation", ["", "gelu", "reglu", "swiglu"])
@pytest.mark.parametrize(
    "case",
    [
        Fused(1, 70, 5, **ALL | {"residual": "row"}, layout="ntn"),
        Fused(65, 1, 70, bias="column", residual="column", aux=True, layout="tnt"),
        Fused(64, 64, 64, **ALL | {"bias": "matrix"}, layout="sss", pad=3, offset=5),
        Fused(20, 70, 9, **ALL, alpha=0.5, beta=-2.0, layout="ntt", pad=1),
        Fused(9, 35, 17, bias="matrix", residual="column", aux=True, batch=(2, 3), pad=1),
        Fused(9, 20, 17, **ALL, batch=(2, 1, 2, 3), pad=1, layout="nnt"),
        Fused(20, 35, 9, **ALL, out_dtype=FP32, layout="tts"),
    ],
    ids=str,
)
def test_every_form(case: Fused, activation: str, dtype: torch.dtype) -> None:
    if case.out_dtype != dtype:
        replace(case, activation=activation or None, dtype=dtype).check("portable")


@pytest.mark.interpreter
@pytest.mark.parametrize("name", ["bias", "activation", "residual", "aux"])
def test_what_is_wrong_is_found(name: str) -> None:
    with pytest.raises(AssertionError, match=r"Fused\("):
        Fused(20, 24, 8, FP16, "silu", **ALL).check(
            "portable", run=lambda *a, **b: run(*a, **b | {name: None})
        )


@pytest.mark.interpreter
@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_is_not_finite_goes_the_way_of_torch(function: str) -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan, -0.0, 3e38, -3e38, 90.0, -90.0, 20.0, -20.0])[
        :, None
    ]
    got = outblas.matmul(x, torch.ones(1, 1), activation=function, kernel="portable").double()
    torch.testing.assert_close(
        got, FUNCTIONS[function](x.double()), rtol=1e-5, atol=1e-30, equal_nan=True
    )


@pytest.mark.interpreter
@pytest.mark.parametrize("block_n", [32, 128])
def test_tiles_and_launches_of_any_size(monkeypatch: pytest.MonkeyPatch, block_n: int) -> None:
    """Launches of a part of the batch start inside of all tensors."""
    monkeypatch.setattr(grid, "MAX_PROGRAMS", 7)
    config = Config(16, block_n, 16, 2, 4, 1)

    def planned(a: Any, b: Any, c: Any, out: Any, *scales: Any, **extra: Any) -> None:
        given = problem(a, b, out, extra=EpilogueArgs(**extra))
        assert len(grid.chunks_of(given, config)) > 1
        plan(given, config)(a, b, c, out, *scales[:2], *EpilogueArgs(**extra)[1:])

    for activation in ("relu", "reglu"):
        case = Fused(
            20,
            3 + block_n // 2,
            17,
            FP32,
            activation,
            "matrix",
            "matrix",
            True,
            batch=(2, 3),
            pad=1,
        )
        case.check("", run=planned)


def form(
    M: int,
    N: int,
    K: int,
    activation: str,
    dtype: torch.dtype = BF16,
    layout: str = "nt",
    *,
    result: torch.dtype | None = None,
    addend: bool = False,
    tf32: bool = False,
) -> Problem:
    wide, result = N * glu_split(activation), result or dtype
    a, b, out = (
        operand(M, K, layout[0], dtype),
        operand(K, wide, layout[1], dtype),
        operand(M, N, "n", result),
    )
    x, c = operand(M, wide, "n", result), operand(M, wide, "n", dtype) if addend else None
    return problem(
        a, b, out, c, tf32=tf32, scaled=addend, extra=EpilogueArgs(activation, x[0], out, x)
    )


@pytest.mark.compile
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize(
    "given",
    [
        form(*SQUARE, "gelu"),
        form(*SQUARE, "swiglu", layout="nn"),
        form(1000, 1000, 1000, "geglu", layout="tn", addend=True),
        form(*SQUARE, "geglu", result=FP32),
        form(1000, 1024, 512, "geglu_tanh", FP32),
        form(*SQUARE, "silu", FP32, tf32=True),
    ],
)
def test_portable_compiles_without_spills(given: Problem, arch: int) -> None:
    compiled = check(given, arch=arch)
    assert set(copies(compiled)) == {16}
    assert "st.global.v4" in compiled.asm["ptx"]


@pytest.mark.compile
def test_unaligned_products_and_those_of_fma() -> None:
    assert 16 not in copies(check(form(1001, 1001, 1001, "swiglu", layout="nn")))
    check(form(1000, 1000, 1000, "geglu"), arch=75)


@pytest.mark.compile
@pytest.mark.parametrize(
    ("activation", "layout"), [("gelu", "nt"), ("swiglu", "nn"), ("geglu", "tt")]
)
@pytest.mark.parametrize("config", [SIZES[0][0], SIZES[-1][0]], ids=str)
def test_cp_async_compiles_without_spills(config: Any, activation: str, layout: str) -> None:
    given = form(1000, 1000, 1000, activation, FP16, layout, addend=True)
    of = rung("turing.cp_async")
    compiled = of._compiled(config, given, of.constants(config, given, 80), 80, None)
    code = read_cubin(compiled.asm["cubin"])
    assert (code.stack, code.spills) == (0, 0)
    assert set(copies(compiled)) == {16}
    assert not re.search(r"[ls][td]\.global(\.v2)?\.b\d", compiled.asm["ptx"]), (
        "narrower than 16 bytes"
    )


def test_what_an_epilogue_is_refused_for() -> None:
    given = form(*SQUARE, "swiglu", FP16)
    reason = "has no epilogue beside alpha and C, and was given bias, aux, swiglu, residual"
    assert rung("turing.ldmatrix").unsupported(given) == reason
    unstaged = own("turing.cp_async", stage_out=False)
    assert "stage_out" in str(rung("turing.cp_async").unsupported_reason(given, unstaged, 80))


def test_offsets_of_an_epilogue_are_64_bit_where_they_must_be() -> None:
    assert not grid.needs_int64(form(32768, 32768, 64, "relu"), Config())
    assert grid.needs_int64(form(32768, 32768, 64, "reglu"), Config()), "aux"
