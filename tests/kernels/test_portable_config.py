"""What the host decides for the portable kernel: what it takes, its configs and presets, and how
wide it loads.
"""

import dataclasses
import functools

import pytest
import torch
from support.portable_builds import DEVICES, KIB, form

from outblas.call.problem import Problem, problem
from outblas.kernels import portable_config
from outblas.kernels.portable import Config, choose, invalid_reason, plan, unsupported
from outblas.kernels.portable_config import cycles, uses_fma, vector

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
H100 = DEVICES[90]
row_major = functools.partial(form, layout="nn")


# ---- what it takes
def square(dtype: torch.dtype, device: str) -> Problem:
    """A product of one matrix with itself, into itself."""
    matrix = torch.empty(16, 16, dtype=dtype, device=device)
    return problem(matrix, matrix, matrix)


@pytest.mark.parametrize(
    ("dtype", "device", "reason"),
    [
        pytest.param(
            torch.float64,
            "cpu",
            "needs bfloat16, float16 or float32, but was given float64 operands for float64 "
            "outputs",
            id="a dtype",
        ),
        pytest.param(
            FP32,
            "meta",
            "needs CUDA or CPU tensors, but was given tensors on meta",
            id="a device",
        ),
        pytest.param(FP16, "cpu", None, id="nothing"),
    ],
)
def test_unsupported_says_what_it_needs_and_what_it_was_given(
    dtype: torch.dtype, device: str, reason: str | None
) -> None:
    assert unsupported(square(dtype, device)) == reason


# ---- configs
def test_an_invalid_config_is_not_planned() -> None:
    with pytest.raises(ValueError, match="block_m is 24, expected a power of two"):
        plan(square(FP16, "cpu"), Config(block_m=24))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"block_m": 8}, "block_m is 8"),
        ({"block_n": 48}, "block_n is 48"),
        ({"block_k": 0}, "block_k is 0"),
        ({"num_warps": 3}, "num_warps is 3"),
        ({"num_warps": 64}, "num_warps is 64"),
        ({"group_m": 0}, "group_m is 0"),
        ({"num_stages": 0}, "num_stages is 0"),
        ({"block_n": 256}, "256 accumulators per thread, expected at most 128"),
        ({"num_stages": 8}, "needs 262208 bytes of shared memory, but the device has 232448"),
    ],
    ids=str,
)
def test_invalid_configs_say_why(change: dict[str, int], complaint: str) -> None:
    reason = invalid_reason(dataclasses.replace(Config(), **change), FP16, H100[2])

    assert complaint in str(reason)


# ---- presets


SHAPES = [
    (1, 1, 1),
    (16, 4096, 4096),
    (4096, 16, 4096),
    (512, 512, 512),
    (4096, 4096, 4096),
    (1001, 77, 1),
]


@pytest.mark.parametrize("device", DEVICES.values(), ids=[f"sm_{arch}" for arch in DEVICES])
@pytest.mark.parametrize(
    ("dtype", "tf32"),
    [(BF16, False), (FP16, False), (FP32, False), (FP32, True)],
    ids=["bf16", "fp16", "fp32", "tf32"],
)
@pytest.mark.parametrize("pad", [0, 1, 2, 4])
def test_choose_finds_the_cheapest_preset_that_fits(
    device: tuple[int, int, int], dtype: torch.dtype, tf32: bool, pad: int
) -> None:
    sms, arch, limit = device
    for shape in SHAPES:
        given = row_major(*shape, dtype=dtype, pad=pad, tf32=tf32)
        presets = portable_config.FMA if uses_fma(given, arch) else portable_config.TENSOR_CORE

        config = choose(given, *device)

        assert invalid_reason(config, dtype, limit) is None, shape
        assert config in presets, shape
        costs = [
            cycles(other, given, sms, arch)
            for other in portable_config.candidates(given, arch, limit)
        ]
        assert cycles(config, given, sms, arch) <= min(costs), shape


def test_a_device_without_room_for_any_preset_is_refused() -> None:
    with pytest.raises(ValueError, match="no preset"):
        choose(row_major(64, 64, 64), 1, 90, KIB)


# ---- vectors
AT_8_BYTES = dataclasses.replace(row_major(64, 64, 64), alignment=(8, 16, 16))
WITH_GAPS = dataclasses.replace(row_major(64, 64, 64), a=(128, 2))


@pytest.mark.parametrize(
    ("given", "operand", "arch", "width"),
    [
        pytest.param(row_major(64, 64, 64), "a", 90, 8, id="16 bytes of bf16"),
        pytest.param(row_major(64, 64, 64, FP32), "a", 90, 4, id="16 bytes of fp32"),
        pytest.param(row_major(64, 64, 64, pad=4), "a", 90, 4, id="rows aligned to 8 bytes"),
        pytest.param(row_major(64, 64, 64, pad=1), "b", 90, 1, id="rows aligned to 2 bytes"),
        pytest.param(AT_8_BYTES, "a", 90, 4, id="an address aligned to 8 bytes"),
        pytest.param(WITH_GAPS, "a", 90, 1, id="elements with gaps"),
        pytest.param(row_major(64, 66, 64, pad=6), "b", 90, 2, id="edge within a vector"),
        pytest.param(row_major(64, 64, 64, FP32, tf32=True), "a", 90, 4, id="tf32, along K"),
        pytest.param(
            row_major(64, 64, 64, FP32, tf32=True), "b", 90, 1, id="tf32 by wgmma, along N"
        ),
        pytest.param(row_major(64, 64, 64, FP32, tf32=True), "b", 80, 4, id="tf32 by mma, along N"),
    ],
)
def test_loads_are_as_wide_as_addresses_strides_and_extents_allow(
    given: Problem, operand: str, arch: int, width: int
) -> None:
    assert vector(given, operand, arch) == width
