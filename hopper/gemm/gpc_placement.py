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

1. No call probes, because a probe waits for the GPU. The first call of a size asks a thread for it
   (`driver.background`), which launches probes on the default stream, between the kernels of the
   calls there: up to `TRIES` pairs, until two agree. If all SMs were free before and after, the
   observation is final.
2. Until then a call takes the best order available: by the observation so far, or down the columns,
   which is also correct. The order of a launch is never changed in memory: running kernels and CUDA
   graphs hold its address, and a launch that read half of each order would write wrong results.
   Every order that was ever handed out is kept until the process ends.
3. A later call (`watched`) compares two numbers. Where more was observed it continues with a new
   table at another address; graphs keep the old one. While nothing final is, it asks for another
   attempt with a pair of probes: the next call at once, then calls after one second, two, four, and
   so on, `RETRIES` times in all; never during a capture.
4. When an observation is final, or the last attempt has failed, it no longer changes. Launches that
   were made before keep going through `watched`; later ones do not.

The thread is in the primary context of a GPU. In any other one tiles go down the columns: it may be
gone when the thread gets there. While another thread captures a CUDA graph, probes neither fail nor
disturb the capture (`driver.relaxed_capture`).
"""

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from outblas.base import compiling
from outblas.base.compiling import CompilePending
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
    clusters: the clusters in the order of their locations. A change replaces the array.
    attempts: how often it was probed.
    due: when to probe again, on the clock of `time.monotonic`; infinity while a probe is asked for.
    final: whether all SMs were free during the probes, so that nothing can change.
    """

    sms: list[int] | None = None
    gpcs: dict[int, int] = field(default_factory=dict)
    clusters: Any = None
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

    Only the thread that probes changes them, but for new observations and their `due`.
    """

    def __init__(self) -> None:
        self.gpcs: dict[int, int] = {}
        self.complete = False
        self.observations: dict[tuple[int, int], Observation] = {}


_context_maps: dict[tuple[torch.device, int | None], ContextMap] = {}


class Placement:
    """The `table` of a launch in the context in which it was made, and whether a better table may
    become available: the tile of each cluster, int32 (clusters,), as row · columns + column in a
    grid of cluster tiles that all run at once. Until probes have agreed tiles go down the columns,
    which is the order without a table.
    """

    def __init__(self, config: HopperConfig, rows: int, columns: int, device: torch.device):
        self.rows, self.columns, self.device = rows, columns, device
        self.band, self.cluster = max(1, BAND // config.cluster_m), config.cluster
        self.context = driver.context()
        self.map = _context_maps.setdefault((device, self.context), ContextMap())
        size = self.cluster, rows * columns
        self.observation = self.map.observations.setdefault(size, Observation())
        self._ask()
        self.table = self.renew()

    @property
    def final(self) -> bool:
        """Whether no better table can become available."""
        return self.observation.final and not self.stale

    @property
    def stale(self) -> bool:
        """Whether more was observed than `table` was made by."""
        return self.observation.clusters is not self.clusters

    def improved(self) -> bool:
        """Returns whether a call now may take a better table. Asks for a probe if it is time."""
        if time.monotonic() >= self.observation.due:
            self._ask()
        return self.stale and self._is_here()

    def renew(self) -> torch.Tensor:
        """Returns `table`, made anew according to the current observation."""
        rows, columns = self.rows, self.columns
        self.clusters = clusters = self.observation.clusters
        if clusters is None:
            tiles = raster.tiles("column", rows, columns)
        else:
            tiles = assigned(raster.tiles("serpentine", rows, columns, self.band), clusters)
        self.table = tile_order.kept(self.device, ("tiles", tiles.tobytes()), lambda: tiles)
        return self.table

    def _is_here(self) -> bool:
        """Returns whether a call now is in the context of this placement, and no capture."""
        current = driver.context()  # None in a thread that has no context yet; it will get this one
        return self.context in (None, current) and not capturing(self.device)

    def _ask(self) -> None:
        """Asks for a probe, if it is time."""
        seen = self.observation
        if time.monotonic() < seen.due or not self._is_here():
            return
        seen.due = math.inf
        with contextlib.suppress(RuntimeError):  # Python ends, and starts no more jobs
            driver.background().submit(self._observe)

    def _observe(self) -> None:
        """Probes, in the thread for it. Never raises."""
        seen, size = self.observation, (self.cluster, self.rows * self.columns)
        with driver.relaxed_capture(), torch.cuda.device(self.device):
            if self.context in (None, driver.context()):
                _observe(self.map, seen, self.device, *size)


def watched(bind: Callable[[torch.Tensor], Launch], placement: Placement) -> Launch:
    """Returns the launch of a plan, which `bind` makes for a table. If the placement's table is not
    final, calls ask for probes from time to time, and continue with a better table.
    """
    launch = bind(placement.table)
    if placement.final:
        return launch

    def run(*args: Any) -> None:
        nonlocal launch
        if placement.improved():
            launch = bind(placement.renew())
        launch(*args)

    return run


def assigned(tiles: raster.Tiles, clusters: Any) -> raster.Tiles:
    """Returns the tile of each cluster: those that are neighbours in `clusters`, the clusters in
    the order of their locations, get neighbouring tiles.
    """
    of_cluster = np.empty_like(tiles)
    of_cluster[clusters] = tiles
    return of_cluster


def _observe(
    context_map: ContextMap, seen: Observation, device: torch.device, cluster: int, clusters: int
) -> None:
    """Probes for launches of one size. A failure only costs speed."""
    seen.attempts += 1
    try:
        pairs = TRIES if seen.attempts == 1 else 1
        with compiling.deferred():
            sms, all_free = _probe(context_map, device, cluster, clusters, pairs)
    except CompilePending:  # nothing was probed
        seen.attempts -= 1
        seen.due = time.monotonic() + 1.0
        return
    except Exception as error:  # whatever it is, a product must not fail for its tile order
        if seen.attempts == 1:
            fallback.warn_once(
                "tiles are assigned to SMs in the order of CTAs, and short calls take up to 1.7 "
                f"times as long: {error}"
            )
    else:
        if (sms, context_map.gpcs) != (seen.sms, seen.gpcs):
            seen.sms, seen.gpcs = sms, dict(context_map.gpcs)
            locations = seen.locations()
            seen.clusters = np.array(sorted(range(clusters), key=locations.__getitem__))
        seen.final = all_free  # after `clusters`: a launch that sees it asks for nothing more
    pause = 0.0 if seen.attempts == 1 else 2.0 ** (seen.attempts - 2)
    done = seen.final or seen.attempts > RETRIES
    seen.due = math.inf if done else time.monotonic() + pause


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
