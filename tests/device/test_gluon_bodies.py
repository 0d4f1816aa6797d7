"""The bodies of the CUDA-core and Turing ladders compute right products, run on the CPU over a
model of Gluon (`support.gluon_model`).
"""

import importlib
from typing import Any

import pytest
import torch
from support import gluon_model

from outblas.base.registry import LADDERS
from outblas.call import problem as operands
from outblas.call.epilogue import EpilogueArgs, apply, glu_split
from outblas.verify import oracle
from outblas.verify.cases import Case

KERNELS = [name for ladder in ("simt", "turing") for name in LADDERS[ladder]]
ARCH = 80


# The model takes seconds for four tiles of 128×256, and as many smaller ones have the same edges.
SMALLER = {"turing.cp_async": {"block_m": 32, "block_n": 64}}


def rung_of(name: str):
    """A rung, and its own config, with a smaller tile where its own is large."""
    folder, _, file = name.partition(".")
    package = "kernels" if folder == "simt" else folder
    module = importlib.import_module(f"outblas.{package}.{file}")
    return module.plan.__self__, module.Config(**SMALLER.get(name, {}))


def case(config, dtype: torch.dtype, k_blocks: int = 3, edge=(3, 5, 1), **options) -> Case:
    """Two by two tiles and so many k-blocks, and an `edge` of M, N and K behind them."""
    whole = config.block_m, config.block_n, k_blocks * config.block_k
    M, N, K = (extent + more for extent, more in zip(whole, edge, strict=True))
    return Case(M, N, K, dtype, **options)


OPTIONS: dict[str, dict[str, Any]] = {
    "rows": {"layout": "nn"},
    "columns": {"layout": "tt"},
    "mixed, C by columns": {"layout": "tn", "out_layout": "t"},
    "vectors of rows": {"layout": "nn", "edge": (8, 8, 8)},
    "vectors of columns": {"layout": "tt", "edge": (8, 8, 8)},
    "unaligned": {"layout": "nt", "offset": 1, "pad": 3},
    "alpha and beta": {"addend": "matrix", "alpha": 2.0, "beta": -3.0},
    "one term": {"k_blocks": 0},
    "one term behind whole pairs": {"k_blocks": 4},
    "batch": {"batch_a": (2,), "batch_b": (2,)},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", KERNELS)
def test_a_body_computes_the_product(name: str, option: str) -> None:
    rung, config = rung_of(name)
    dtype = torch.float32 if name.startswith("simt") else torch.float16

    def run(a, b, c, out, alpha, beta) -> None:
        problem = operands.problem(a, b, out, c, scaled=c is not None)
        gluon_model.launch_of(rung, problem, config, ARCH)(a, b, c, out, alpha, beta)

    result = oracle.exact(run, case(config, dtype, **OPTIONS[option]))

    assert result.ok, f"{name}, {option}: {result.message}"


@pytest.mark.parametrize("activation", ["relu", "reglu"])
def test_a_body_computes_its_epilogue(activation: str) -> None:
    rung, config = rung_of("turing.cp_async")
    M, N, K = config.block_m + 8, config.block_n + 8, 24
    columns = N * glu_split(activation)
    draw = torch.Generator().manual_seed(0)
    a, b, bias, residual = (
        torch.randint(-2, 3, shape, generator=draw).half()
        for shape in ((M, K), (K, columns), (columns,), (M, N))
    )
    out, aux = torch.full((M, N), torch.nan).half(), torch.full((M, columns), torch.nan).half()
    extra = EpilogueArgs(activation, bias, residual, aux)

    problem = operands.problem(a, b, out, extra=extra)
    gluon_model.launch_of(rung, problem, config, ARCH)(a, b, None, out, 1, 0, *extra[1:])

    x = (a.double() @ b.double() + bias).half()
    torch.testing.assert_close(aux, x, rtol=0, atol=0)
    expected = apply(x.double(), activation, residual.double()).half()
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
