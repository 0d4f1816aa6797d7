"""SMs that the production kernels leave to others, on a GPU of 132 that this machine has not."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.gemm_problems import gemm_config, kernel_arguments, record_launches

import outblas
from outblas.call.grouped import describe
from outblas.call.problem import problem
from outblas.hopper import gemm
from outblas.hopper.gemm import group_host as grouped_host
from outblas.hopper.gemm import host as gemm_host
from outblas.hopper.parts import tile_order

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(multi_processor_count=132, name="NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


@pytest.mark.parametrize(
    ("config", "carveout", "sms"),
    [
        ("cluster_m=1", 16, 116),
        ("cluster_m=2", 16, 116),
        ("cluster_m=2,sms=100", 16, 100),
        ("cluster_m=2,sms=120", 16, 116),
        ("cluster_m=2", 132, 2),
    ],
)
def test_a_config_uses_what_is_left(config: str, carveout: int, sms: int) -> None:
    device = torch.device("cuda", 0)

    assert tile_order.within(device, gemm_config(config), carveout).sms == sms


def clusters_of(device: torch.device, sms: int, cluster: int) -> int:
    return (sms or 132) // cluster


@pytest.mark.parametrize("config", ["cluster_m=2,tile_n=256", "cluster_m=1,tile_n=128"])
def test_hopper_gemm_launches_as_many_clusters_as_are_left(
    config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = record_launches(monkeypatch)
    monkeypatch.setattr(tile_order, "clusters", clusters_of)
    monkeypatch.setattr(tile_order, "table", lambda *_: torch.zeros(2, 4, dtype=torch.int32))
    a, b = torch.zeros(8192, 64, dtype=BF16), torch.zeros(8192, 64, dtype=BF16).t()
    out = torch.empty(8192, 8192, dtype=BF16)
    given = problem(a, b, out)

    chosen = gemm_config(f"{config},gpc_local=False")
    for carveout in (0, 32, 128):
        gemm.plan(replace(given, sm_carveout=carveout), chosen)(a, b, None, out, 1.0, 0.0)

    used = [launch.clusters for launch in launches]
    size = chosen.cluster
    assert used[0] * size > 100
    assert used[1] * size <= 100
    assert 1 <= used[2] * size <= 4


def test_the_rule_counts_the_sms_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """What 132 SMs compute in a single wave, 32 compute in several."""
    monkeypatch.setattr(tile_order, "clusters", clusters_of)
    gemm_host.device_rates.cache_clear()
    a, b = torch.zeros(2048, 512, dtype=BF16), torch.zeros(2048, 512, dtype=BF16).t()
    given = problem(a, b, torch.empty(2048, 2048, dtype=BF16))

    configs = {count: gemm_host.own_config(replace(given, sm_carveout=count)) for count in (0, 100)}

    assert configs[0] != configs[100]


def test_hopper_grouped_launches_as_many_clusters_as_are_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched: list[int] = []
    monkeypatch.setattr(tile_order, "clusters", clusters_of)
    monkeypatch.setattr(
        grouped_host.compile,
        "load",
        lambda *_: lambda *given: launched.append(kernel_arguments(*given).clusters),
    )
    gemm_host.device_rates.cache_clear()
    grouped_host.launch.cache_clear()
    a, b = torch.zeros(4096, 64, dtype=BF16), torch.zeros(8, 256, 64, dtype=BF16).mT
    out, offs = torch.empty(4096, 256, dtype=BF16), torch.arange(512, 4097, 512, dtype=torch.int32)
    given = describe("ragged_m", a, b, out, 8)

    def run() -> Any:
        grouped_host.run(given, a, b, out, offs, grouped_host.NO_TENSORS)

    run()
    with outblas.sm_carveout(32):
        run()
    run()

    first, limited, last = launched
    assert first == last > 0
    assert limited == first * 100 // 132
