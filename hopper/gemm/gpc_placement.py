"""Assigns tiles to clusters where each cluster has one tile, so that the SMs of a GPC compute
neighbouring tiles.

When SMs of one GPC read the same data from L2 at about the same time, it costs L2 little more than
one read. On an H100, 1024 in tiles of 64×128 takes 5.2 µs this way, and 6.6 µs where tiles are
assigned in the order of CTAs. The hardware spreads neighbouring CTAs over all GPCs, in an order
that differs from board to board. Probes find it out: one shows which SMs clusters of eight ever
share, one where the CTAs of a launch run, and one whether a launch of as many CTAs as there are SMs
has all SMs to itself.

Probes see the state of the GPU while they run. Other work on the GPU, an MPS partition or a green
context gives CTAs other SMs. The result of a probe therefore belongs to one context (`ContextMap`),
and each launch size has its own observations there (`Observation`):

1. The first planned call that has a table probes: up to `TRIES` pairs of probes, until two agree.
   If all SMs were free before and after, the observation is final.
2. Otherwise the plan takes the best order available: by the observation, or down the columns, which
   is also correct. The order of a plan is never changed in memory: running kernels and CUDA graphs
   hold its address, and a launch that read half of each order would write wrong results. Every
   order that was ever handed out is kept until the process ends.
3. A later call of such a plan probes again (`watched`): the next call at once, then calls after one
   second, two, four, and so on, `RETRIES` times in all, with a pair of probes each; never during a
   capture. Each attempt waits for the stream once. If it observes more, the plan continues with a
   new table at another address; graphs keep the old one.
4. When an observation is final, or the last attempt has failed, it no longer changes. Plans that
   were made before keep going through `watched`, which compares two numbers; later plans do not.

Threads probe one at a time, because concurrent probes would take SMs from each other. While another
thread captures a CUDA graph, probes neither fail nor disturb the capture
(`driver.relaxed_capture`).
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from outblas.base import forks
from outblas.base.cuda_graphs import capturing
from outblas.call import fallback
from outblas.call.problem import Launch
from outblas.device import driver, raster
from outblas.hopper.gemm import smid_probe
from outblas.hopper.parts import tile_order
from outblas.hopper.parts.config import HopperConfig

BAND = 4  # rows of tiles in a band: the sixteen tiles of a GPC form about 4 x 4
CLUSTER = 8  # CTAs per cluster, the most that every Hopper GPU supports
WAVES = 24  # waves of clusters, whose CTAs end at different times, so that SMs of a GPC mix
TRIES = 5  # pairs of probes in a first attempt, with pauses that double from a millisecond on
RETRIES = 10  # later attempts, with pauses that double from a second on


@dataclass
class Observation:
    """Where the clusters of a launch run, for launches of one size in a context.

    sms: the first SM of each cluster, None where probes never agreed.
    gpcs: the GPC of each known SM, named by its lowest SM.
    version: counts the changes of `sms` and `gpcs`.
    attempts: how often it was probed.
    due: when to probe again, on the clock of `time.monotonic`.
    final: whether all SMs were free during the probes, so that nothing can change.
    """

    sms: list[int] | None = None
    gpcs: dict[int, int] = field(default_factory=dict)
    version: int = 0
    attempts: int = 0
    due: float = 0.0
    final: bool = False

    def locations(self) -> list[tuple[int, ...]]:
        """Returns a sort key for the location of each cluster: by GPC, then by SM. SMs of an
        unknown GPC come first, so that they do not interrupt the run of a GPC.
        """
        return [(sm in self.gpcs, self.gpcs.get(sm, sm), sm) for sm in self.sms or ()]


class ContextMap:
    """The SMs that a context may use on a GPU.

    gpcs: the GPC of each SM that a cluster of eight ever ran on, named by the lowest SM that
        clusters connect it with. Every probe adds entries, and no entry can be wrong.
    complete: whether `gpcs` was seen while all SMs were free.
    observations: by cluster size and number of clusters.

    A thread that probes holds `lock`.
    """

    def __init__(self) -> None:
        self.lock = forks.Lock()
        self.gpcs: dict[int, int] = {}
        self.complete = False
        self.observations: dict[tuple[int, int], Observation] = {}


_context_maps: dict[tuple[torch.device, int | None], ContextMap] = {}


class Placement:
    """The `table` of a plan in the context in which it was made, and whether a better table may
    become available: the tile of each cluster, int32 (clusters,), as row · columns + column in a
    grid of cluster tiles that all run at once. If probes fail, warns and assigns tiles down the
    columns, which is the order without a table. Acquires the lock of `compile.load`, which the
    caller must not hold.
    """

    def __init__(self, config: HopperConfig, rows: int, columns: int, device: torch.device):
        self.rows, self.columns, self.device = rows, columns, device
        self.band, self.cluster = max(1, BAND // config.cluster_m), config.cluster
        self.context = driver.context()
        self.map = _context_maps.setdefault((device, self.context), ContextMap())
        self.renew()

    @property
    def final(self) -> bool:
        """Whether no better table can become available."""
        return self.observation.final and self.observation.version == self.version

    @property
    def stale(self) -> bool:
        """Whether it is time to probe again, or another plan has observed more."""
        if self.observation.version == self.version and time.monotonic() < self.observation.due:
            return False
        current = driver.context()  # None in a thread that has no context yet; it will get this one
        same_context = self.context is None or current in (self.context, None)
        return same_context and not capturing(self.device)

    def renew(self) -> torch.Tensor:
        """Returns `table`, made anew according to the current observation."""
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
        self.table = tile_order.kept(self.device, ("tiles", *tiles), lambda: tiles)
        return self.table


def watched(bind: Callable[[torch.Tensor], Launch], placement: Placement) -> Launch:
    """Returns the launch of a plan, which `bind` makes for a table. If the placement's table is not
    final, the launch probes again from time to time, and continues with a better table.
    """
    launch = bind(placement.table)
    if placement.final:
        return launch

    def run(*args: Any) -> None:
        nonlocal launch
        if placement.stale:
            launch = bind(placement.renew())
        launch(*args)

    return run


def assigned(tiles: Sequence[int], locations: Sequence[tuple[int, ...]]) -> list[int]:
    """Returns the tile of each cluster: clusters that are neighbours by location get neighbouring
    tiles.
    """
    clusters = sorted(range(len(tiles)), key=lambda cluster: locations[cluster])
    of_cluster = [0] * len(tiles)
    for tile, cluster in zip(tiles, clusters, strict=True):
        of_cluster[cluster] = tile
    return of_cluster


def _observe(
    context_map: ContextMap, device: torch.device, cluster: int, clusters: int
) -> Observation:
    """Returns the observation for launches of one size, probed again if it is time. Never raises
    for a failure that only costs speed. The caller holds the map's lock and is in its context.
    """
    seen = context_map.observations.setdefault((cluster, clusters), Observation())
    if time.monotonic() < seen.due or capturing(device):
        return seen
    seen.attempts += 1
    try:
        with driver.relaxed_capture():
            pairs = TRIES if seen.attempts == 1 else 1
            sms, all_free = _probe(context_map, device, cluster, clusters, pairs)
    except Exception as error:  # whatever it is, a product must not fail for its tile order
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
    """Returns the first SM of each cluster, and whether all SMs of the GPU were free before and
    after. Raises RuntimeError where no two consecutive probes agree, and the errors of a launch.
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
    """Returns whether a launch of as many CTAs as the GPU has SMs gets one SM per CTA."""
    return len(set(smid_probe.sm_of_each_cta(device, 1, count, jitter=False))) == count


def _first_sms(device: torch.device, cluster: int, clusters: int, pairs: int) -> list[int]:
    """Returns the first SM of each cluster as soon as two consecutive probes agree, within `pairs`
    pairs of probes.
    """
    for attempt in range(pairs):
        first, second = (
            smid_probe.sm_of_each_cta(device, cluster, cluster * clusters, jitter=False)
            for _ in range(2)
        )
        if first == second and len(set(first)) == len(first):
            return first[::cluster]
        if attempt + 1 < pairs:
            time.sleep(0.001 * 2**attempt)
    raise RuntimeError(
        "clusters run on different SMs from probe to probe: the GPU is running other work"
    )


def connected(clusters: Sequence[Sequence[int]]) -> dict[int, int]:
    """Returns for each SM of these clusters the lowest SM that clusters connect it with."""
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
