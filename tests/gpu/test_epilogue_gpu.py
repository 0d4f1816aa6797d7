"""Epilogues on a GPU: any steps together, on any dtypes and layouts, by every kernel that
has them.
"""

from typing import Any

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from support import sanitizer
from support.fused import Fused, run
from support.paths import TESTS

from outblas import matmul
from outblas.core import configs
from outblas.core.epilogue import ACTIVATIONS, apply, glu_split

pytestmark = pytest.mark.gpu
EXTENTS = st.sampled_from([1, 2, 17, 64, 128, 200, 256, 333, 520])


@st.composite
def calls(draw: Any) -> Fused:
    """Batches have no addend, which is addmm's; a product in fp32 of 16-bit operands has none
    either.
    """
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
    addend = draw(st.booleans())
    batch = () if addend else draw(st.sampled_from([(), (), (3,), (2, 3)]))
    form, layout = (
        st.sampled_from(["", "row", "column", "matrix"]),
        st.sampled_from(["nn", "nt", "tn", "tt"]),
    )
    scales: dict[str, Any] = {"alpha": 2.0, "beta": 0.5} if addend else {}
    if not addend and dtype != torch.float32 and draw(st.booleans()):
        scales = {"out_dtype": torch.float32}
    return Fused(
        draw(EXTENTS),
        max(2, draw(EXTENTS)),
        draw(EXTENTS),
        dtype,
        draw(st.sampled_from([None, *ACTIVATIONS])),
        bias=draw(form),
        residual=draw(form),
        aux=draw(st.booleans()),
        batch=batch,
        layout=draw(layout) + draw(st.sampled_from("nts")),
        pad=draw(st.sampled_from([0, 8, 3])),
        offset=draw(st.sampled_from([0, 8, 1])),
        **scales,
    )


HOPPER = pytest.param("hopper.gemm", 90, marks=pytest.mark.sm90)


@pytest.mark.parametrize(
    ("kernel", "examples"), [(None, 90), ("portable", 90), ("turing.cp_async", 30), HOPPER]
)
def test_any_combination(kernel: str | None, examples: int) -> None:
    @settings(max_examples=examples, derandomize=True, deadline=None, database=None)
    @given(call=calls())
    def right(call: Fused) -> None:
        try:
            call.check(kernel, "cuda")
        except ValueError as error:
            if kernel is None or not str(error).startswith(f"kernel {kernel!r}"):
                raise
            reject()

    right()


# Several tiles a CTA: consumers in turn, slots that carry residuals between those of two tiles,
# slabs used again, "variable_tile_n" ones that overlap but come in other slots.
WAYS = {
    "two": "tile_n=256,sms=8",
    "variable_tile_n": "tile_n=160,variable_tile_n=True,sms=8",
    "pingpong": "tile_n=176,pingpong=True,cluster_m=1,stages=4,epilogue_stages=1,sms=8",
    "few slots": "tile_m=256,tile_n=128,stages=2,epilogue_stages=1,sms=8",
    "registers": "tile_n=128,epilogue_stages=0,sms=8",
    "pieces": "tile_n=256,split_k=3,k_serpentine=False,sms=8",
}
STEPS = {
    "all": {"activation": "gelu", "bias": "row", "residual": "matrix", "aux": True},
    "addend": {"activation": "silu", "alpha": 2.0, "beta": 0.5},
    "pairs": {"activation": "swiglu", "bias": "row", "residual": "matrix"},
    "columns": {"activation": "gelu", "bias": "column", "residual": "matrix", "layout": "ntt"},
}
PROGRAM = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
from test_epilogue_gpu import STEPS, WAYS, check
for way in WAYS:
    for steps in STEPS:
        check(way, steps, "", 1)
    print("right:", way)
"""


def check(way, steps, options, times) -> None:
    """A call made so many times: right, and the same bits each time, over the addend too."""
    from outblas.hopper import gemm

    config, first = configs.from_text(gemm.Config, WAYS[way] + options), None

    def by_config(a, b, c, out, *given, **extra):
        nonlocal first
        for _ in range(times):
            run(a, b, c, out, *given, config=config, **extra)
            first = first if first is not None else out.clone()
            assert torch.equal(out, first)
            if c is not None:
                run(a, b, out.copy_(c), out, *given, config=config, **extra)
                assert torch.equal(out, first)

    try:
        Fused(520, 776, 584, **STEPS[steps]).check("hopper.gemm", "cuda", by_config)
    except ValueError as error:  # they have tiles of their own
        assert (steps, "gated pairs" in str(error)) == ("pairs", True)


@pytest.mark.sm90
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("steps", STEPS)
def test_jittered_calls_give_equal_bits(way: str, steps) -> None:
    check(way, steps, ",jitter=True", 100)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("activation", ["gelu", "silu", "swiglu"])
def test_rows_have_the_same_bits_in_all_batches(activation, dtype):
    columns = 776 * glu_split(activation)
    x, w = (torch.randn(n, 520, device="cuda").bfloat16() for n in (1024, columns))
    bias, residual = (
        torch.randn(shape, device="cuda").to(dtype) for shape in ((columns,), (1024, 776))
    )

    def product(rows):
        how = {"activation": activation, "residual": residual[rows], "out_dtype": dtype}
        return matmul(x[rows], w.t(), bias=bias, **how, batch_invariant=True)

    whole = product(slice(None))
    for rows in [slice(n) for n in (1, 17, 64, 200, 1000)] + [
        slice(1024 - n, None) for n in (1, 63, 520)
    ]:
        assert torch.equal(product(rows), whole[rows]), rows


@pytest.mark.parametrize("kernel", ["portable", HOPPER.values[0]])
def test_more_than_two_to_the_31_elements(kernel) -> None:
    M, N, K = 2**16 + 8, 2**15 + 8, 16
    a, b, bias = (torch.randn(shape, device="cuda").bfloat16() for shape in ((M, K), (N, K), N))
    residual = torch.randn(M, N, device="cuda", dtype=torch.bfloat16)
    aux = torch.empty_like(residual)
    out = matmul(a, b.t(), bias=bias, activation="gelu", residual=residual, aux=aux, kernel=kernel)
    for rows in (slice(100), slice(M // 2, M // 2 + 100), slice(M - 100, None)):
        x = a[rows].double() @ b.t().double() + bias.double()
        torch.testing.assert_close(aux[rows].double(), x, rtol=2**-8, atol=1e-5)
        want = apply(x, "gelu", residual[rows].double())
        torch.testing.assert_close(out[rows].double(), want, rtol=2**-8, atol=1e-5)


@pytest.mark.sm90
@pytest.mark.slow
@pytest.mark.parametrize("tool", ["memcheck", "synccheck", "racecheck"])
def test_sanitizers_find_nothing(tool: str) -> None:
    sanitizer.finds_nothing(tool, PROGRAM, len(WAYS))
