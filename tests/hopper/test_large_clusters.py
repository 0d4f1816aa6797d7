"""Plans with clusters of more than two CTAs compile nothing but what a pack has, on a GPU of 132
SMs that this machine has not.
"""

import contextlib
from types import SimpleNamespace
from typing import Any, NoReturn

import cutlass.cute as cute
import pytest
import torch
from support.gemm_problems import gemm_config, product
from support.probed_gpu import unprobed_context

from outblas.base import machines
from outblas.call.problem import Problem
from outblas.device import driver
from outblas.hopper import gemm
from outblas.hopper.gemm import smid_probe
from outblas.hopper.parts import compile, tile_order

# One tile each, several waves of whole tiles, and several of partitions of K.
SMALL, LARGE, DEEP = product(64, 64, 4096), product(8192, 8192, 4096), product(4096, 2048, 8192)
CLUSTERS = {
    "2x2": "cluster_m=2,cluster_n=2",
    "four along K": "cluster_m=1,cluster_k=4",
    "2x1x2": "cluster_m=2,cluster_k=2",
    "eight along K": "cluster_m=1,cluster_k=8",
    "2x1x4": "cluster_m=2,cluster_k=4",
}


@pytest.fixture(autouse=True)
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The variants that a plan loads. The GPU of the plan is imagined, and what compiles fails."""
    variants: list[Any] = []

    def load(variant: Any, build: Any) -> Any:
        variants.append(variant)
        return lambda *given: None

    def compiles(*given: Any, **options: Any) -> NoReturn:
        raise AssertionError("something was compiled")

    properties = SimpleNamespace(multi_processor_count=132, name="NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(tile_order, "_copied", lambda device, tiles: torch.from_numpy(tiles))
    monkeypatch.setattr(tile_order, "_kept", {})
    monkeypatch.setattr(compile, "load", load)
    monkeypatch.setattr(cute, "compile", compiles)
    return variants


@pytest.mark.parametrize("given", [SMALL, LARGE, DEEP], ids=["one tile", "large", "deep"])
@pytest.mark.parametrize("clusters", CLUSTERS.values(), ids=CLUSTERS)
def test_a_plan_loads_what_a_pack_has_and_compiles_nothing(
    clusters: str, given: Problem, loaded: list[Any]
) -> None:
    config = gemm_config(f"{clusters},tile_m=64,consumers=1,tile_n=64,gpc_local=False")

    gemm.plan(given, config)

    assert config.cluster in (4, 8)
    assert tuple(loaded) == gemm.pack_variants(given, config, machines.find("H100"))


def test_the_probes_of_a_plan_are_in_a_pack(
    loaded: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = gemm_config("cluster_m=1,cluster_k=4,tile_m=64,consumers=1,tile_n=64")
    given = product(128, 512, 4096)  # 16 clusters
    probed: list[int] = []

    def probe(device: Any, cluster: int, ctas: int, *, jitter: bool) -> list[int]:
        probed.append(cluster)
        return list(range(ctas))

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    context = unprobed_context()
    monkeypatch.setattr(driver, "context", lambda: context)
    monkeypatch.setattr(driver, "relaxed_capture", contextlib.nullcontext)
    monkeypatch.setattr(driver, "background", lambda: SimpleNamespace(submit=lambda job: job()))
    monkeypatch.setattr(smid_probe, "sm_of_each_cta", probe)

    gemm.plan(given, config)

    variants = {*loaded, *map(smid_probe.ProbeVariant, probed)}
    assert set(probed) == {1, 4, 8}
    assert variants <= set(gemm.pack_variants(given, config, machines.find("H100")))
