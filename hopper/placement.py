"""Which cluster of a launch computes which tile, where each has one: the tiles of a GPC are neighbours.

What SMs of one GPC read from L2 at about the same time costs L2 little more than one of them: on an H100 1024 in tiles
of 64×128 takes 5.2 µs so, 6.6 dealt out as they come. The hardware spreads neighbouring CTAs over all GPCs, in an order
of each board's own. Probes see it: one which SMs clusters of eight ever have together, one where the CTAs of a launch
run.
"""

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import make_fake_stream

from .. import fallback
from ..device import raster
from . import host, probe, schedule
from .config import HopperConfig

BAND = 4  # rows of tiles in a band: the sixteen of a GPC are about 4 x 4
EIGHT = 8  # CTAs of a cluster, as many as every Hopper GPU takes
TURNS = 24  # waves of such clusters, whose CTAs end at different times: the SMs of a GPC mix
TRIES = 5  # pairs of probes, with pauses from a millisecond on that double


def table(config: HopperConfig, rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """int32 (clusters,): the tile of each cluster as row · columns + column, of a grid of cluster tiles that all run at
    once. Where probes fail, with a warning, tiles go down the columns, as they do without a table. Takes
    `schedule.compiling`, which its caller must not hold.
    """

    def order() -> list[int]:
        try:
            found = places(device, config.cluster, rows * columns)
        except Exception as error:  # whatever it is: for an order no product fails
            fallback.complain(
                f"tiles are dealt out to SMs as they come, and short calls take up to 1.7 times as long: {error}"
            )
            return raster.order("column", rows, columns)
        return dealt(raster.order("serpentine", rows, columns, max(1, BAND // config.cluster_m)), found)

    return schedule.kept(device, ("gpc", rows, columns, config.cluster_m, config.cluster), order)


def dealt(tiles: Sequence[int], places: Sequence[tuple[int, ...]]) -> list[int]:
    """The tile of each cluster: what are neighbours among tiles are neighbours by places."""
    made = [0] * len(tiles)
    for tile, cluster in zip(tiles, sorted(range(len(tiles)), key=lambda at: places[at]), strict=True):
        made[cluster] = tile
    return made


@functools.cache
def places(device: torch.device, cluster: int, clusters: int) -> list[tuple[int, ...]]:
    """Where each cluster of a launch runs, as what sorts by GPC, then by SM; SMs of an unknown GPC first, so that they
    cut no GPC's run. Raises RuntimeError where no two probes in a row agree, and as a launch does.
    """
    for attempt in range(TRIES):
        first, second = (_seen(device, cluster, cluster * clusters, False) for _ in range(2))
        if first == second and len(set(first)) == len(first):
            home = gpcs(device)
            return [(sm in home, home.get(sm, sm), sm) for sm in first[::cluster]]
        time.sleep(0.001 * 2**attempt)
    raise RuntimeError("where clusters run differs from probe to probe: other work is on the GPU")


@functools.cache
def gpcs(device: torch.device) -> dict[int, int]:
    """The GPC of each SM that a cluster of eight ever had, by the lowest SM that clusters connect it with."""
    count = torch.cuda.get_device_properties(device).multi_processor_count
    seen = _seen(device, EIGHT, count // EIGHT * EIGHT * TURNS, True)
    return joined([seen[first : first + EIGHT] for first in range(0, len(seen), EIGHT)])


def joined(clusters: Sequence[Sequence[int]]) -> dict[int, int]:
    """The lowest number that clusters connect each of theirs with."""
    home = {sm: sm for cluster in clusters for sm in cluster}

    def root(sm: int) -> int:
        while home[sm] != sm:
            sm = home[sm]
        return sm

    for cluster in clusters:
        roots = [root(sm) for sm in cluster]
        for found in roots:
            home[found] = min(roots)
    return {sm: root(sm) for sm in home}


@dataclass(frozen=True)
class Variant:
    """The compile of a probe."""

    cluster: int

    @property
    def name(self) -> str:
        return f"outblas_hopper_probe_{self.cluster}"

    @property
    def facts(self) -> dict[str, object]:
        return {"kernel": self.name} | host.toolchain_facts()


def _seen(device: torch.device, cluster: int, ctas: int, jitter: bool) -> list[int]:
    variant = Variant(cluster)
    sms = torch.full((ctas,), -1, dtype=torch.int32, device=device)
    with torch.cuda.device(device):
        host.load(variant, lambda: compile_variant(variant))(sms, int(jitter))
    seen: list[int] = sms.tolist()
    return seen


def compile_variant(variant: Variant) -> Any:
    """Compiles for sm_90a, with or without a GPU. Returns CuTe DSL's compiled function."""
    probe.Probe.kernel.set_name_prefix(variant.name, remove_cutlass_symbol=True, keep_mangled_name=False)
    arguments = host.compact(cutlass.Int32, 1), cutlass.Int32(1), make_fake_stream(use_tvm_ffi_env_stream=True)
    with host.target_arch():
        return cute.compile(probe.Probe(variant.cluster), *arguments, options=host.OPTIONS)
