"""Epilogues on a GPU: any steps together, on any dtypes and layouts, by every kernel that has them."""

import pytest
import torch
from fused import Fused, run
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from outblas import configs
from outblas.epilogue import ACTIVATIONS

pytestmark = pytest.mark.gpu
EXTENTS = st.sampled_from([1, 2, 17, 64, 128, 200, 256, 333, 520])


@st.composite
def calls(draw):
    """Batches have no addend, which is addmm's; a product in fp32 of 16-bit operands has none either."""
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
    addend = draw(st.booleans())
    batch = () if addend else draw(st.sampled_from([(), (), (3,), (2, 3)]))
    form, layout = st.sampled_from(["", "row", "column", "matrix"]), st.sampled_from(["nn", "nt", "tn", "tt"])
    scales = {"alpha": 2.0, "beta": 0.5} if addend else {}
    if not addend and dtype != torch.float32 and draw(st.booleans()):
        scales = {"out_dtype": torch.float32}
    return Fused(
        draw(EXTENTS), max(2, draw(EXTENTS)), draw(EXTENTS), dtype, draw(st.sampled_from([None, *ACTIVATIONS])),
        bias=draw(form), residual=draw(form), aux=draw(st.booleans()), batch=batch,
        layout=draw(layout) + draw(st.sampled_from("nts")), pad=draw(st.sampled_from([0, 8, 3])),
        offset=draw(st.sampled_from([0, 8, 1])), **scales,
    )  # fmt: skip


HOPPER = pytest.param("hopper.gemm", 90, marks=pytest.mark.sm90)


@pytest.mark.parametrize(("kernel", "examples"), [(None, 90), ("portable", 90), ("turing.cp_async", 30), HOPPER])
def test_any_combination(kernel, examples):
    @settings(max_examples=examples, derandomize=True, deadline=None, database=None)
    @given(call=calls())
    def right(call):
        try:
            call.check(kernel, "cuda")
        except ValueError as error:
            if kernel is None or not str(error).startswith(f"kernel {kernel!r}"):
                raise
            reject()

    right()


@pytest.mark.sm90
@pytest.mark.parametrize(
    "config", ["elastic=True,tile_n=200", "pingpong=True,tile_n=192", "store_buffers=0", "split_k=3,k_serpentine=False"]
)
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_every_way_of_the_production_kernel(config, activation):
    """Tiles that a shape gets by tuning alone."""
    from outblas.hopper import gemm

    chosen = configs.from_text(gemm.Config, f"slots=3,tile_m=128,{config}")

    def by_config(*given, **extra):
        run(*given, config=chosen, **extra)

    call = Fused(1000, 1096, 520, activation=activation, bias="row", residual="matrix", aux=True)
    try:
        call.check("hopper.gemm", "cuda", by_config)
    except ValueError as error:
        assert ("gated pairs" in str(error)) == (activation == "swiglu")
