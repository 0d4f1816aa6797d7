"""Which cluster of a launch computes which tile, where each has one: the tiles of a GPC are neighbours.

What SMs of one GPC read from L2 at about the same time costs L2 little more than one of them: at 1024 tiles of 64×128
take 5.2 µs so, 6.6 dealt out as they come. The hardware spreads neighbouring CTAs over all GPCs, in an order of each
board's own. Probes see it: one which SMs clusters ever have together, one where the CTAs of a launch run.
"""

import functools
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import make_fake_stream

from ..device import raster
from . import host, probe, schedule
from .config import HopperConfig

BAND = 4  # rows of tiles in a band: the sixteen of a GPC are about 4 x 4
TOGETHER = 8  # CTAs of a cluster, as many as every Hopper GPU takes
TURNS = 24  # waves of such clusters, whose CTAs end at different times: the SMs of a GPC mix
TRIES = 3
_making = threading.Lock()


def table(config: HopperConfig, rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """int32 (clusters,): the tile of each as row · columns + column, of a grid of cluster tiles that all run at once.
    It stays, as `schedule.table`'s do, and takes `schedule.compiling`. Raises RuntimeError as that does.
    """
    with _making:
        return _table(rows, columns, config.cluster_m, config.cluster, device)


@functools.cache
def _table(rows: int, columns: int, cluster_m: int, cluster: int, device: torch.device) -> torch.Tensor:
    schedule.refuse_capture()
    tiles = raster.order("serpentine", rows, columns, max(1, BAND // cluster_m))
    seen = places(device, cluster, len(tiles))
    return schedule.kept(tiles if seen is None else dealt(tiles, seen), device)


def dealt(tiles: Sequence[int], places: Sequence[tuple[int, ...]]) -> list[int]:
    """The tile of each cluster: what are neighbours among tiles are neighbours by places."""
    made = [0] * len(tiles)
    for tile, cluster in zip(tiles, sorted(range(len(tiles)), key=lambda at: places[at]), strict=True):
        made[cluster] = tile
    return made


@functools.cache
def places(device: torch.device, cluster: int, clusters: int) -> list[tuple[int, ...]] | None:
    """Where each cluster of a launch runs: what sorts by GPC, then by SM. None where other work kept SMs from it."""
    for _ in range(TRIES):
        sms = _seen(device, cluster, cluster * clusters, False)
        if len(set(sms)) == len(sms):
            home = gpcs(device)
            sizes = Counter(home.values())
            return [(sizes[home[sm]], home[sm], sm) for sm in sms[::cluster]]  # parts of a GPC beside one another
    return None


@functools.cache
def gpcs(device: torch.device) -> dict[int, int]:
    """The GPC of each SM, by its lowest SM: some cluster had them together. SMs that no cluster had are alone."""
    count = torch.cuda.get_device_properties(device).multi_processor_count
    seen = _seen(device, TOGETHER, count // TOGETHER * TOGETHER * TURNS, True)
    return joined(count, [seen[first : first + TOGETHER] for first in range(0, len(seen), TOGETHER)])


def joined(count: int, clusters: Sequence[Sequence[int]]) -> dict[int, int]:
    """The lowest of all that clusters connect each of `count` SMs with."""
    home = {sm: sm for sm in range(count)}

    def root(sm: int) -> int:
        while home[sm] != sm:
            sm = home[sm]
        return sm

    for cluster in clusters:
        roots = [root(sm) for sm in cluster]
        for found in roots:
            home[found] = min(roots)
    return {sm: root(sm) for sm in home}


def _seen(device: torch.device, cluster: int, ctas: int, jitter: bool) -> list[int]:
    sms = torch.full((ctas,), -1, dtype=torch.int32, device=device)
    with torch.cuda.device(device):
        _compiled(cluster)(sms, int(jitter))
    seen: list[int] = sms.tolist()
    return seen


@functools.cache
def _compiled(cluster: int) -> Any:
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    arguments = host.compact(cutlass.Int32, 1), cutlass.Int32(1), stream
    with schedule.compiling, host.target_arch():
        return cute.compile(probe.Probe(cluster), *arguments, options=host.OPTIONS)
