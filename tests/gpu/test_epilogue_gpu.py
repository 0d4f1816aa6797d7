"""Epilogues on a GPU: any steps together, on any dtypes and layouts, by every kernel that
has them.
"""

import random
from typing import Any

import pytest
import torch
from support.epilogue_schedules import EPILOGUES, SCHEDULES, check
from support.fused import Fused

from outblas.base.shapes import LAYOUTS
from outblas.call.epilogue import ACTIVATIONS

pytestmark = pytest.mark.gpu
EXTENTS = 1, 2, 17, 64, 128, 200, 256, 333, 520


def draw(rng: random.Random) -> Fused:
    """Batches have no addend, which is addmm's; a product in fp32 of 16-bit operands has none
    either.
    """
    dtype = rng.choice([torch.bfloat16, torch.float16, torch.float32])
    has_addend = rng.random() < 0.5
    forms = "", "row", "column", "matrix"
    scales: dict[str, Any] = {"alpha": 2.0, "beta": 0.5} if has_addend else {}
    if not has_addend and dtype != torch.float32 and rng.random() < 0.5:
        scales = {"out_dtype": torch.float32}
    return Fused(
        rng.choice(EXTENTS),
        max(2, rng.choice(EXTENTS)),
        rng.choice(EXTENTS),
        dtype,
        rng.choice([None, *ACTIVATIONS]),
        bias=rng.choice(forms),
        residual=rng.choice(forms),
        aux=rng.random() < 0.5,
        batch=() if has_addend else rng.choice([(), (), (3,), (2, 3)]),
        layout=rng.choice(LAYOUTS) + rng.choice("nts"),
        pad=rng.choice([0, 8, 3]),
        offset=rng.choice([0, 8, 1]),
        **scales,
    )


KERNELS = None, "portable", "turing.cp_async", pytest.param("hopper.gemm", marks=pytest.mark.sm90)


@pytest.mark.usefixtures("float32_by_kernels")
@pytest.mark.parametrize("part", range(6))
@pytest.mark.parametrize("kernel", KERNELS)
def test_any_combination_of_steps_is_right(kernel: str | None, part: int) -> None:
    """A call that the kernel refuses does not count."""
    rng, count = random.Random(part), 0
    while count < 12:
        call = draw(rng)
        try:
            call.check(kernel, "cuda")
            count += 1
        except ValueError as error:
            if kernel is None or not str(error).startswith(f"kernel {kernel!r}"):
                raise


@pytest.mark.sm90
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_jittered_calls_give_equal_bits(schedule: str, epilogue: str) -> None:
    check(schedule, epilogue, ",jitter=True", 100)
