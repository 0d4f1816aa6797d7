"""Which configs of the Hopper ladder can be built, and in which words others are refused."""

import itertools
import pickle
from dataclasses import asdict

import pytest
from support.hopper_problems import load, problem

from outblas.base import configs, registry
from outblas.hopper.parts.config import SHARED_MEMORY, HopperConfig
from outblas.hopper.parts.config_limits import invalid_reason


def refusal(rung: str, text: str) -> str:
    """Why a rung refuses its config with the fields of the text."""
    module = load(rung)
    return str(module.unsupported(problem(), configs.from_text(module.Config, text)))


def test_a_config_is_valid_and_fits_or_says_what_is_expected() -> None:
    sizes_m, sizes_n = (64, 96, 128, 256), (8, 16, 64, 128, 192, 256, 264)
    tiles = itertools.product(sizes_m, sizes_n, (8, 16, 64, 128, 256))
    reasons = {config: invalid_reason(config) for config in itertools.starmap(HopperConfig, tiles)}

    valid = [config for config, reason in reasons.items() if reason is None]
    assert len(valid) > 20
    assert HopperConfig() in valid
    assert max(config.shared_memory_bytes for config in valid) <= SHARED_MEMORY
    assert all("expected" in reason for reason in reasons.values() if reason)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tile_m=80", "64, 128, 192, 256 or 320"),
        ("tile_n=24", "a multiple of 16 from 16 to 512"),
        ("tile_k=48", "16, 32, 64 or 128"),
        ("mma_n=96", "0 or a multiple of 16 that divides tile_n (256)"),
        ("consumers=3", "1, 2 or 3 that share tile_m (128)"),
        ("stages=0", "1 to 64"),
        ("in_flight=1,stages=1", "0 or 1 and fewer than stages (1)"),
        ("in_flight=2", "0 or 1"),
        ("producer_registers=0", "a multiple of 8 from 24 to 168"),
        ("consumer_registers=250", "a multiple of 8 from 168"),
        ("mma_n=96,tile_n=192,epilogue_stages=0", "a divisor or a multiple of 64"),
        ("consumer_registers=240,consumers=1,tile_n=128", "0 with one consumer"),
        ("group_m=0", "at least 1"),
        ("sms=1", "0 (all) or at least the 2 CTAs"),
        ("cluster_m=3", "1, 2 or 4 CTAs that load tile_n"),
        ("epilogue_stages=5", "0 to 4, the epilogue subtiles of a consumer"),
    ],
)
def test_the_last_rung_refuses_the_first_field(text: str, expected: str) -> None:
    field, value = text.split(",")[0].split("=")

    assert refusal("hilbert", text).startswith(f"config: {field} is {value}, expected {expected}")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "producer_registers=40",
            "setmaxnreg 40/240 adds up to 520 over the warpgroups, expected at most 504",
        ),
        (
            "producer_registers=32",
            "setmaxnreg 32/240 adds up to 512 over the warpgroups, expected at most 504",
        ),
        (
            "tile_m=256,epilogue_stages=1",
            "tile 256x256 needs 256 accumulator registers, expected at most 208",
        ),
        ("order=spiral", "order is 'spiral', expected one of row, column"),
        ("cluster_m=4,cluster_n=4", "a cluster of 4x4 has 16 CTAs, expected at most 8"),
        (
            "tile_n=240,cluster_m=1,epilogue_stages=1",
            "tile_n is 240 and mma_n 240, expected multiples of 64",
        ),
        ("stages=4", "the tiles need 263168 bytes of shared memory, expected at most 232448"),
    ],
)
def test_the_last_rung_refuses_fields_that_do_not_go_together(text: str, reason: str) -> None:
    assert refusal("hilbert", text).startswith(f"config: {reason}")


@pytest.mark.parametrize(
    ("rung", "text", "neutral"),
    [
        ("tma_wgmma", "stages=2", "1"),
        ("large_tile", "consumers=2", "1"),
        ("warp_specialized", "consumer_registers=240", "0"),
        ("two_consumers", "order=hilbert", "column"),
        ("lean_barriers", "cluster_m=2", "1"),
        ("cluster_multicast", "accumulate_flag=True", "False"),
        ("store_tuning", "epilogue_stages=2", "0"),
    ],
)
def test_a_rung_refuses_what_a_later_one_introduces(rung: str, text: str, neutral: str) -> None:
    field, value = text.split("=")

    expected = f"config: {field} is {value}, expected {neutral}: a later rung"
    assert refusal(rung, text).startswith(expected)


@pytest.mark.parametrize("name", [kernel.name for kernel in registry.ladder("hopper")])
def test_a_rung_s_config_is_valid_and_its_parent_s_but_for_what_it_states(name: str) -> None:
    kernel, config = registry.find(name), registry.load(name).Config()
    parent = registry.load(kernel.parent).Config() if kernel.parent else HopperConfig()

    assert invalid_reason(config) is None
    assert asdict(config) == asdict(parent) | dict(kernel.config)
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_field_that_the_base_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "defaults", lambda name: {"slots": 4})

    with pytest.raises(
        ValueError, match=r"has config \['slots'\], expected fields of HopperConfig"
    ):
        registry.config_type(HopperConfig, "hopper.gemm")
