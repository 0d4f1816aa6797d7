"""Which cluster of a launch computes which tile, where each has one: GPC-local tiles are
neighbours.

What SMs of one GPC read from L2 at about the same time costs L2 little more than one of them: on an
H100 1024 in tiles of 64×128 takes 5.2 µs so, 6.6 where tiles are assigned in the order of CTAs. The
hardware spreads neighbouring CTAs over all GPCs, in an order of each board's own. Probes find it
out: one sees which SMs clusters of eight ever have together, one where the CTAs of a launch run,
one whether a launch of as many CTAs as there are SMs has them all to itself.

Probes see it as it is while they run. Other work on the GPU, a share of it under MPS, or a green
context gives CTAs other SMs. So what they tell belongs to one context (`ContextMap`), and each size
of launch there has its observations (`Observation`):

1. The first call planned that has a table probes: up to `TRIES` pairs of probes, until two agree.
   If all SMs were free before and after, what was seen is final.
2. Else the plan takes the best order there is: by what was seen, or down the columns, which is
   right as well. The order that it took is never changed in memory: kernels that run, and CUDA
   graphs, hold its address, and half of a launch with either order would write wrong results. Every
   order that was ever handed out stays for good.
3. A later call of such a plan probes again (`watched`): the next one at once, then one after a
   second, two, four, and so on, `RETRIES` in all, a pair of probes each; never in a capture. Each
   waits for the stream once. If that sees more, the plan goes on with a new table, at another
   address; graphs keep the old one.
4. When an observation is final, or the last attempt has failed, it stays. Plans that were made
   before go through `watched` for ever, which compares two numbers; plans that are made later do
   not.

Threads probe one at a time: probes would take SMs from each other. While another thread captures a
CUDA graph they neither fail nor disturb it (`driver.relaxed_capture`).
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...core import forks
from ...core.problem import Launch
from ...device import driver, raster
from ...runtime import fallback
from ...runtime.cuda_graphs import capturing
from ..core import tile_order
from ..core.config import HopperConfig
from . import smid_probe

BAND = 4  # rows of tiles in a band: the sixteen of a GPC are about 4 x 4
CLUSTER = 8  # CTAs of a cluster, as many as every Hopper GPU takes
WAVES = 24  # waves of such clusters, whose CTAs end at different times: the SMs of a GPC mix
TRIES = 5  # pairs of probes of a first attempt, with pauses from a millisecond on that double
RETRIES = 10  # later attempts, with pauses from a second on that double


@dataclass
class Observation:
    """What is known of where the clusters of a launch run, for launches of one size in a context.

    sms: the first SM of each cluster, None where probes never agreed.
    gpcs: the GPC of each SM that is known, named by the lowest SM of it.
    version: counts the changes of the two.
    attempts: how often it was probed.
    due: when to probe again, on the clock of `time.monotonic`.
    final: whether all SMs were free meanwhile, so that nothing can change.
    """

    sms: list[int] | None = None
    gpcs: dict[int, int] = field(default_factory=dict)
    version: int = 0
    attempts: int = 0
    due: float = 0.0
    final: bool = False

    def locations(self) -> list[tuple[int, ...]]:
        """Where each cluster runs, as what sorts by GPC, then by SM; SMs of an unknown GPC first,
        so that they cut no GPC's run.
        """
        return [(sm in self.gpcs, self.gpcs.get(sm, sm), sm) for sm in self.sms or ()]


class ContextMap:
    """The SMs that a context has of a GPU.

    gpcs: the GPC of each SM that a cluster of eight ever had, named by the lowest SM that clusters
        connect it with. Every probe adds to it, and none can be wrong.
    complete: whether `gpcs` was seen while all SMs were free.
    observations: by cluster size and number of clusters.

    Whoever probes holds `lock`.
    """

    def __init__(self) -> None:
        self.lock = forks.Lock()
        self.gpcs: dict[int, int] = {}
        self.complete = False
        self.observations: dict[tuple[int, int], Observation] = {}


_context_maps: dict[tuple[torch.device, int | None], ContextMap] = {}


def table(config: HopperConfig, rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """int32 (clusters,): the tile of each cluster as row · columns + column, of a grid of cluster
    tiles that all run at once. Where probes fail, with a warning, tiles go down the columns, as
    they do without a table. Takes `tile_order.compiling`, which its caller must not hold.
    """
    return Placement(config, rows, columns, device).table


class Placement:
    """The `table` of a plan, in the context in which it was made, and whether there may be a better
    one some day.
    """

    def __init__(self, config: HopperConfig, rows: int, columns: int, device: torch.device):
        self.rows, self.columns, self.device = rows, columns, device
        self.band, self.cluster = max(1, BAND // config.cluster_m), config.cluster
        self.context = driver.context()
        self.map = _context_maps.setdefault((device, self.context), ContextMap())
        self.table = self._current_table()

    @property
    def final(self) -> bool:
        """Whether there will be no better table."""
        return self.observation.final and self.observation.version == self.version

    @property
    def stale(self) -> bool:
        """Whether it is time to probe again, or another plan has seen more."""
        if self.observation.version == self.version and time.monotonic() < self.observation.due:
            return False
        current = driver.context()  # None where the thread has none yet: it will get this one
        same_context = self.context is None or current in (self.context, None)
        return same_context and not capturing(self.device)

    def renewed(self) -> torch.Tensor:
        """The table by all that is known now."""
        self.table = self._current_table()
        return self.table

    def _current_table(self) -> torch.Tensor:
        with self.map.lock:
            self.observation = observation = _observe(
                self.map, self.device, self.cluster, self.rows * self.columns
            )
            self.version, locations = observation.version, observation.locations()
        if locations:
            order = raster.order("serpentine", self.rows, self.columns, self.band)
            tiles = assigned(order, locations)
        else:
            tiles = raster.order("column", self.rows, self.columns)
        return tile_order.kept(self.device, ("tiles", *tiles), lambda: tiles)


def watched(bind: Callable[[torch.Tensor], Launch], placement: Placement) -> Launch:
    """The launch of a plan, which `bind` makes for a table: that of the placement's table where it
    is final, else one that probes again from time to time, and goes on with a better table.
    """
    launch = bind(placement.table)
    if placement.final:
        return launch

    def run(*args: Any) -> None:
        nonlocal launch
        if placement.stale:
            launch = bind(placement.renewed())
        launch(*args)

    return run


def assigned(tiles: Sequence[int], locations: Sequence[tuple[int, ...]]) -> list[int]:
    """The tile of each cluster: neighbours among the tiles are neighbours by location."""
    clusters = sorted(range(len(tiles)), key=lambda cluster: locations[cluster])
    of_cluster = [0] * len(tiles)
    for tile, cluster in zip(tiles, clusters, strict=True):
        of_cluster[cluster] = tile
    return of_cluster


def _observe(
    context_map: ContextMap, device: torch.device, cluster: int, clusters: int
) -> Observation:
    """The observation of launches of one size, probed again if it is time; never raises for what
    only costs speed. The caller holds the map's lock, and is in its context.
    """
    seen = context_map.observations.setdefault((cluster, clusters), Observation())
    if time.monotonic() < seen.due or capturing(device):
        return seen
    seen.attempts += 1
    try:
        with driver.relaxed_capture():
            pairs = TRIES if seen.attempts == 1 else 1
            sms, all_free = _probe(context_map, device, cluster, clusters, pairs)
    except Exception as error:  # whatever it is: for an order no product fails
        if seen.attempts == 1:
            fallback.warn_once(
                "tiles are assigned to SMs in the order of CTAs, and short calls take up to 1.7 "
                f"times as long: {error}"
            )
    else:
        if (sms, context_map.gpcs) != (seen.sms, seen.gpcs):
            seen.sms, seen.gpcs = sms, dict(context_map.gpcs)
            seen.version += 1
        seen.final = all_free
    pause = 0.0 if seen.attempts == 1 else 2.0 ** (seen.attempts - 2)
    done = seen.final or seen.attempts > RETRIES
    seen.due = math.inf if done else time.monotonic() + pause
    return seen


def _probe(
    context_map: ContextMap, device: torch.device, cluster: int, clusters: int, pairs: int
) -> tuple[list[int], bool]:
    """The first SM of each cluster, and whether all SMs of the GPU were free before and after.
    Raises RuntimeError where no two probes in a row agree, and as a launch does.
    """
    count = torch.cuda.get_device_properties(device).multi_processor_count
    free_before = _all_free(device, count)
    sms = _first_sms(device, cluster, clusters, pairs)
    if not context_map.complete:
        ctas = count // CLUSTER * CLUSTER * WAVES
        seen = smid_probe.sm_of_each_cta(device, CLUSTER, ctas, jitter=True)
        together = [seen[first : first + CLUSTER] for first in range(0, len(seen), CLUSTER)]
        context_map.gpcs = connected([*map(list, context_map.gpcs.items()), *together])
    all_free = free_before and _all_free(device, count)
    context_map.complete = context_map.complete or all_free
    return sms, all_free


def _all_free(device: torch.device, count: int) -> bool:
    """Whether a launch of as many CTAs as the GPU has SMs gets one each."""
    return len(set(smid_probe.sm_of_each_cta(device, 1, count, jitter=False))) == count


def _first_sms(device: torch.device, cluster: int, clusters: int, pairs: int) -> list[int]:
    """The first SM of each cluster, which two probes in a row saw, of so many pairs of probes."""
    for attempt in range(pairs):
        first, second = (
            smid_probe.sm_of_each_cta(device, cluster, cluster * clusters, jitter=False)
            for _ in range(2)
        )
        if first == second and len(set(first)) == len(first):
            return first[::cluster]
        if attempt + 1 < pairs:
            time.sleep(0.001 * 2**attempt)
    raise RuntimeError("where clusters run differs from probe to probe: other work is on the GPU")


def connected(clusters: Sequence[Sequence[int]]) -> dict[int, int]:
    """For each SM of these clusters the lowest SM that clusters connect it with."""
    parent = {sm: sm for cluster in clusters for sm in cluster}

    def root(sm: int) -> int:
        while parent[sm] != sm:
            sm = parent[sm]
        return sm

    for cluster in clusters:
        roots = [root(sm) for sm in cluster]
        for found in roots:
            parent[found] = min(roots)
    return {sm: root(sm) for sm in parent}
