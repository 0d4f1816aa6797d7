"""`outblas profile` with ncu itself."""

import json

import pytest
from support.profiles import invoke

from outblas.inspect import ncu


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kernel", ["portable", pytest.param("hopper.tma_wgmma", marks=pytest.mark.sm90)]
)
def test_on_a_gpu(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ncu, "TIMEOUT_SECONDS", 100.0)
    result = invoke(kernel, "--shapes", "1024", "--json")
    if result.exit_code == 3:
        pytest.skip(result.stderr.strip())
    assert result.exit_code == 0, result.stderr
    cublas, ours = json.loads(result.stdout)["results"]
    assert ours["launches"]
    assert ours["ffma"] == 0, "the tensor cores multiply"
    assert all(launch["kernel"].startswith("outblas_") for launch in ours["launches"])
    assert not any(launch["kernel"].startswith("outblas_") for launch in cublas["launches"])
    for profile in (cublas, ours):
        assert profile["us"] > 1
        assert 0 < profile["tensor_active"] <= 1
        assert 0 < profile["occupancy"] <= 1
        assert profile["l2_to_sm_bytes"] >= 2 * 2 * 1024**2, "both operands reach the SMs"
        assert 0 < profile["flop_per_l2_byte"] <= 2 * 1024**3 / (2 * 2 * 1024**2)
        assert 0 <= profile["l2_hit_rate"] <= 1
        assert sum(size or 0 for size in profile["stalls"].values()) > 0
        assert 0 <= profile["not_selected_share"] < 1  # 0: no scheduler has two warps
        assert min(profile["l1_gbs"] + 1, profile["l2_gbs"], profile["dram_gbs"]) > 0


@pytest.mark.gpu
def test_instructions_on_a_gpu() -> None:
    result = invoke(
        "portable", "--shapes", "1024", "--dtype", "float32", "--instructions", "--json"
    )
    if result.exit_code == 3:
        pytest.skip(result.stderr.strip())
    assert result.exit_code == 0, result.stderr
    for profile in json.loads(result.stdout)["results"]:
        totals = {(each["space"], each["operation"]): each for each in profile["memory"]}
        assert ("shared", "load") in totals
        assert totals["global", "store"]["requests"] == profile["global_store_requests"]
        assert 0 < totals["global", "store"]["efficiency"] <= 1
