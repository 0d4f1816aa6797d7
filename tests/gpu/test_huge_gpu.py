"""Tensors of more than 2³¹ elements on a GPU, where offsets of 32 bits overflow."""

import pytest
import torch

import outblas
from outblas.base import registry
from outblas.call.epilogue import apply
from outblas.verify.cases import Case
from outblas.verify.kernels import check

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.xdist_group("most of the GPU's memory"),  # one at a time
]

BF16 = torch.bfloat16
# More than 2³¹ elements in out, in A and in B, where offsets of 32 bits overflow; in the last two a
# k tile alone spans more. Extents are odd, and rows are copied and written one by one.
ODD = [
    Case(2**16 + 1, 2**15 + 1, 16, BF16, layout="nt"),
    Case(2**25 + 1, 8, 65, BF16, layout="nt"),
    Case(8, 2**25 + 1, 65, BF16, layout="nt"),
    Case(2**26 + 1, 8, 65, BF16, layout="tn"),
    Case(8, 2**26 + 1, 65, BF16, layout="nn"),
]
# TMA reads and writes all.
ALIGNED = [
    Case(2**16 + 8, 2**15 + 8, 16, BF16, layout="nt"),
    Case(2**16 + 8, 2**15 + 8, 16, BF16, layout="nt", out_layout="t"),
    Case(2**16 + 8, 2**15 + 8, 16, BF16, layout="nt", addend="matrix", alpha=2.0, beta=-0.5),
    Case(2**15 + 8, 2**14 + 8, 16, BF16, layout="nt", batch_a=(5,), batch_b=(5,)),
    Case(2**25 + 8, 8, 72, BF16, layout="nt"),
    Case(8, 2**25 + 8, 72, BF16, layout="nt"),
    Case(2**26 + 8, 8, 40, BF16, layout="tn"),
    Case(8, 2**26 + 8, 40, BF16, layout="nn"),
    Case(2**14 + 8, 8, 2**15 + 8, BF16, layout="nt", batch_a=(5,), batch_b=(5,)),
]
OF_ANY_STRIDE = (
    "portable",
    "simt.shared",
    "simt.pipelined",
    "turing.wmma",
    "turing.shared",
    "turing.double_buffer",
    "turing.cp_async",
    "hopper.gemm",
)
HOPPER = [kernel.name for kernel in registry.ladder("hopper")]
PRODUCTS = [
    *((kernel, case) for kernel in OF_ANY_STRIDE for case in ODD),
    *(("hopper.gemm", case) for case in ALIGNED),
    *((kernel, case) for kernel in HOPPER[:-1] for case in (ODD[0], ALIGNED[4])),
]


@pytest.mark.parametrize(
    ("kernel", "case"),
    [
        pytest.param(*product, marks=[pytest.mark.sm90] if product[0] in HOPPER else [])
        for product in PRODUCTS
    ],
    ids=str,
)
def test_products(kernel: str, case: Case) -> None:
    result = check(kernel, case)

    assert result.ok, result.message


@pytest.mark.parametrize(
    "kernel", ["portable", pytest.param("hopper.gemm", marks=pytest.mark.sm90)]
)
def test_epilogues(kernel: str) -> None:
    M, N, K = 2**16 + 8, 2**15 + 8, 16
    a, b = (torch.randn(n, K, device="cuda").bfloat16() for n in (M, N))
    bias = torch.randn(N, device="cuda").bfloat16()
    residual = torch.randn(M, N, device="cuda", dtype=BF16)
    aux = torch.empty_like(residual)

    out = outblas.matmul(
        a, b.t(), bias=bias, activation="gelu", residual=residual, aux=aux, kernel=kernel
    )

    for rows in (slice(100), slice(M // 2, M // 2 + 100), slice(M - 100, None)):
        x = a[rows].double() @ b.t().double() + bias.double()
        torch.testing.assert_close(aux[rows].double(), x, rtol=2**-8, atol=1e-5)
        expected = apply(x, "gelu", residual[rows].double())
        torch.testing.assert_close(out[rows].double(), expected, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("recipe", ["1x128", "rowwise", "tensorwise"])
def test_quantize(recipe: str) -> None:
    x = torch.zeros(2**18 + 3, 2**13, dtype=BF16, device="cuda")
    x[-1] = 7

    values, scale = outblas.quantize(x, recipe)

    assert (values[-1].float() == 448).all()
    assert (scale.flatten()[-1] if recipe != "1x128" else scale[-1]).max() == 7 / 448
