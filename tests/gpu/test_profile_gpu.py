"""`outblas profile` with ncu itself."""

import json
from typing import Any

import pytest
from support.profiles import invoke

from outblas.inspect import ncu

pytestmark = pytest.mark.gpu

OPERANDS_BYTES = 2 * 2 * 1024**2
Profile = dict[str, Any]


def profiles_of(*arguments: str) -> list[Profile]:
    """The results of the command for a product of 1024 x 1024 x 1024; skips where nobody may
    profile.
    """
    result = invoke(*arguments, "--shapes", "1024", "--json")
    if result.exit_code == 3:
        pytest.skip(result.stderr.strip())
    assert result.exit_code == 0, result.stderr
    profiles: list[Profile] = json.loads(result.stdout)["results"]
    return profiles


@pytest.fixture(
    scope="module",
    params=["portable", pytest.param("hopper.tma_wgmma", marks=pytest.mark.sm90)],
)
def profiles(request: pytest.FixtureRequest) -> list[Profile]:
    """The profiles of cuBLAS and of a kernel, taken once."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(ncu, "TIMEOUT_SECONDS", 100.0)
        return profiles_of(request.param)


def are_ours(profile: Profile) -> list[bool]:
    """Of each launch, whether it is of a kernel of ours."""
    return [launch["kernel"].startswith("outblas_") for launch in profile["launches"]]


def test_launches_are_told_apart(profiles: list[Profile]) -> None:
    cublas, ours = profiles

    assert ours["launches"]
    assert all(are_ours(ours))
    assert not any(are_ours(cublas))


def test_the_tensor_cores_multiply(profiles: list[Profile]) -> None:
    _, ours = profiles

    assert ours["ffma"] == 0


def test_both_operands_reach_the_sms(profiles: list[Profile]) -> None:
    for profile in profiles:
        assert profile["l2_to_sm_bytes"] >= OPERANDS_BYTES
        assert 0 < profile["flop_per_l2_byte"] <= 2 * 1024**3 / OPERANDS_BYTES


@pytest.mark.parametrize("share", ["tensor_active", "occupancy"])
def test_a_share_that_cannot_be_zero(share: str, profiles: list[Profile]) -> None:
    for profile in profiles:
        assert 0 < profile[share] <= 1


def test_shares_that_may_be_zero(profiles: list[Profile]) -> None:
    for profile in profiles:
        assert 0 <= profile["l2_hit_rate"] <= 1
        assert 0 <= profile["not_selected_share"] < 1  # 0: no scheduler has two warps


def test_a_profile_has_its_time_and_rates(profiles: list[Profile]) -> None:
    for profile in profiles:
        assert profile["us"] > 1
        assert min(profile["l1_gbs"] + 1, profile["l2_gbs"], profile["dram_gbs"]) > 0


def test_warps_stall_somewhere(profiles: list[Profile]) -> None:
    for profile in profiles:
        assert sum(size or 0 for size in profile["stalls"].values()) > 0


def test_instructions_name_what_memory_they_reach() -> None:
    for profile in profiles_of("portable", "--dtype", "float32", "--instructions"):
        totals = {(each["space"], each["operation"]): each for each in profile["memory"]}

        assert ("shared", "load") in totals
        assert totals["global", "store"]["requests"] == profile["global_store_requests"]
        assert 0 < totals["global", "store"]["efficiency"] <= 1
