"""Epilogues on a GPU: any steps together, on any dtypes and layouts, by every kernel that
has them.
"""

from typing import Any

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from support.epilogue_schedules import EPILOGUES, SCHEDULES, check
from support.fused import Fused

from outblas.core.epilogue import ACTIVATIONS

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
    form = st.sampled_from(["", "row", "column", "matrix"])
    layout = st.sampled_from(["nn", "nt", "tn", "tt"])
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


@pytest.mark.usefixtures("float32_by_kernels")
@pytest.mark.parametrize(
    ("kernel", "examples"), [(None, 90), ("portable", 90), ("turing.cp_async", 30), HOPPER]
)
def test_any_combination_of_steps_is_right(kernel: str | None, examples: int) -> None:
    """A call that the kernel refuses does not count."""

    @settings(max_examples=examples, derandomize=True, deadline=None, database=None)
    @given(call=calls())
    def is_right(call: Fused) -> None:
        try:
            call.check(kernel, "cuda")
        except ValueError as error:
            if kernel is None or not str(error).startswith(f"kernel {kernel!r}"):
                raise
            reject()

    is_right()


@pytest.mark.sm90
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_jittered_calls_give_equal_bits(schedule: str, epilogue: str) -> None:
    check(schedule, epilogue, ",jitter=True", 100)
