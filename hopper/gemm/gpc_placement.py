"""Which cluster of a launch computes which tile, where each has one: the tiles of a GPC are
neighbours.

What SMs of one GPC read from L2 at about the same time costs L2 little more than one of them: on an
H100 1024 in tiles of 64×128 takes 5.2 µs so, 6.6 dealt out as they come. The hardware spreads
neighbouring CTAs over all GPCs, in an order of each board's own. Probes see it: one which SMs
clusters of eight ever have together, one where the CTAs of a launch run, one whether a launch of as
many CTAs as there are SMs has them all to itself.

Probes see it as it is while they run. Other work on the GPU, a share of it under MPS, or a green
context gives CTAs other SMs. So what they tell is one context's (`Board`), and of each kind of
launch there it goes like this (`Look`):

1. The first call planned that has a table looks: up to `TRIES` pairs of probes, until two agree. If
   all SMs were free before and after, what was seen is final.
2. Else the plan takes the best order there is: by what was seen, or down the columns, which is
   right as well. The order that it took is never changed in memory: kernels that run, and CUDA
   graphs, hold its address, and half of a launch with either order would write wrong results. Every
   order that was ever handed out stays for good.
3. A later call of such a plan looks again (`watched`): the next one at once, then one after a
   second, two, four, and so on, `RETRIES` in all, a pair of probes each; never in a capture. Each
   waits for the stream once. If that sees more, the plan goes on with a new table, at another
   address; graphs keep the old one.
4. When a look is final, or the last has failed, it stays. Plans that were made before go through
   `watched` for ever, which asks for two numbers; plans that are made later do not.

Threads look one at a time: probes would take SMs from each other. While another thread captures a
CUDA graph they neither fail nor disturb it (`driver.relaxed_capture`).
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import make_fake_stream

from ...core import forks
from ...device import driver, raster
from ...runtime import fallback
from ...runtime.cuda_graphs import capturing
from ..core import compile, tile_order
from ..core.config import HopperConfig
from . import smid_probe

BAND = 4  # rows of tiles in a band: the sixteen of a GPC are about 4 x 4
EIGHT = 8  # CTAs of a cluster, as many as every Hopper GPU takes
TURNS = 24  # waves of such clusters, whose CTAs end at different times: the SMs of a GPC mix
TRIES = 5  # pairs of probes of a first look, with pauses from a millisecond on that double
RETRIES = 10  # later looks, with pauses from a second on that double


@dataclass
class Look:
    """What is known of where the clusters of a kind of launch run: the first SM of each, `homes` of
    SMs by GPC, None where probes never agreed. `version` counts the changes, `due` says when to
    look again (`time.monotonic`).
    """

    sms: list[int] | None = None
    homes: dict[int, int] = field(default_factory=dict)
    version: int = 0
    attempts: int = 0
    due: float = 0.0
    final: bool = False

    def places(self) -> list[tuple[int, ...]]:
        """Where each cluster runs, as what sorts by GPC, then by SM; SMs of an unknown GPC first,
        so that they cut no GPC's run."""
        return [(sm in self.homes, self.homes.get(sm, sm), sm) for sm in self.sms or ()]


class Board:
    """The SMs that a context has of a GPU. `homes`: the GPC of each SM that a cluster of eight ever
    had, by the lowest SM that clusters connect it with. Every probe adds to it, and none can be
    wrong; `known`: it was seen while all SMs were free. Whoever looks holds `lock`.
    """

    def __init__(self) -> None:
        self.lock = forks.Lock()
        self.homes: dict[int, int] = {}
        self.known = False
        self.looks: dict[tuple[int, int], Look] = {}


_boards: dict[tuple[torch.device, int | None], Board] = {}


def table(config: HopperConfig, rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """int32 (clusters,): the tile of each cluster as row · columns + column, of a grid of cluster
    tiles that all run at once. Where probes fail, with a warning, tiles go down the columns, as
    they do without a table. Takes `schedule.compiling`, which its caller must not hold.
    """
    return Placed(config, rows, columns, device).table


class Placed:
    """A plan's `table`, of the context in which it was made, and whether there may be a better one
    some day."""

    def __init__(self, config: HopperConfig, rows: int, columns: int, device: torch.device):
        self.rows, self.columns, self.device = rows, columns, device
        self.band, self.cluster = max(1, BAND // config.cluster_m), config.cluster
        self.context = driver.context()
        self.board = _boards.setdefault((device, self.context), Board())
        self.table = self._looked()

    @property
    def final(self) -> bool:
        return self.look.final and self.look.version == self.version

    @property
    def stale(self) -> bool:
        """Whether it is time to look again, or another plan has seen more."""
        if self.look.version == self.version and time.monotonic() < self.look.due:
            return False
        same = self.context is None or driver.context() in (
            self.context,
            None,
        )  # none yet: the thread will get it
        return same and not capturing(self.device)

    def renewed(self) -> torch.Tensor:
        """The table by all that is known now."""
        self.table = self._looked()
        return self.table

    def _looked(self) -> torch.Tensor:
        with self.board.lock:
            self.look = look = _look(
                self.board, self.device, self.cluster, self.rows * self.columns
            )
            self.version, places = look.version, look.places()
        if places:
            tiles = dealt(raster.order("serpentine", self.rows, self.columns, self.band), places)
        else:
            tiles = raster.order("column", self.rows, self.columns)
        return tile_order.kept(self.device, ("tiles", *tiles), lambda: tiles)


def watched(
    launch: Callable[..., None], placed: Placed, renew: Callable[[torch.Tensor], None]
) -> Callable[..., None]:
    """The launch of a plan: itself where its table is final; else one that looks again from time to
    time, and gives what comes of it to `renew`.
    """
    if placed.final:
        return launch

    def run(*args: Any) -> None:
        if placed.stale:
            renew(placed.renewed())
        launch(*args)

    return run


def dealt(tiles: Sequence[int], places: Sequence[tuple[int, ...]]) -> list[int]:
    """The tile of each cluster: what are neighbours among tiles are neighbours by places."""
    made = [0] * len(tiles)
    for tile, cluster in zip(
        tiles, sorted(range(len(tiles)), key=lambda at: places[at]), strict=True
    ):
        made[cluster] = tile
    return made


def _look(board: Board, device: torch.device, cluster: int, clusters: int) -> Look:
    """What is known of a kind of launch, looked at again if it is time; never raises for what only
    costs speed. The caller holds the board's lock, and is in its context.
    """
    seen = board.looks.setdefault((cluster, clusters), Look())
    if time.monotonic() < seen.due or capturing(device):
        return seen
    seen.attempts += 1
    try:
        with driver.relaxed_capture():
            sms, free = _probed(
                board, device, cluster, clusters, TRIES if seen.attempts == 1 else 1
            )
    except Exception as error:  # whatever it is: for an order no product fails
        if seen.attempts == 1:
            fallback.warn_once(
                "tiles are dealt out to SMs as they come, and short calls take up to 1.7 times as "
                f"long: {error}"
            )
    else:
        if (sms, board.homes) != (seen.sms, seen.homes):
            seen.sms, seen.homes, seen.version = sms, dict(board.homes), seen.version + 1
        seen.final = free
    pause = 0.0 if seen.attempts == 1 else 2.0 ** (seen.attempts - 2)
    done = seen.final or seen.attempts > RETRIES
    seen.due = math.inf if done else time.monotonic() + pause
    return seen


def _probed(
    board: Board, device: torch.device, cluster: int, clusters: int, pairs: int
) -> tuple[list[int], bool]:
    """The first SM of each cluster, and whether all SMs of the GPU were free before and after.
    Raises RuntimeError where no two probes in a row agree, and as a launch does.
    """
    count = torch.cuda.get_device_properties(device).multi_processor_count
    free = _free(device, count)
    sms = _agreed(device, cluster, clusters, pairs)
    if not board.known:
        seen = _seen(device, EIGHT, count // EIGHT * EIGHT * TURNS, True)
        together = [seen[first : first + EIGHT] for first in range(0, len(seen), EIGHT)]
        board.homes = joined([*map(list, board.homes.items()), *together])
    free = free and _free(device, count)
    board.known = board.known or free
    return sms, free


def _free(device: torch.device, count: int) -> bool:
    """Whether a launch of as many CTAs as the GPU has SMs gets one each."""
    return len(set(_seen(device, 1, count, False))) == count


def _agreed(device: torch.device, cluster: int, clusters: int, pairs: int) -> list[int]:
    """The first SM of each cluster, which two probes in a row saw, of so many pairs of probes."""
    for attempt in range(pairs):
        first, second = (_seen(device, cluster, cluster * clusters, False) for _ in range(2))
        if first == second and len(set(first)) == len(first):
            return first[::cluster]
        if attempt + 1 < pairs:
            time.sleep(0.001 * 2**attempt)
    raise RuntimeError("where clusters run differs from probe to probe: other work is on the GPU")


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
        return {"kernel": self.name} | compile.toolchain_facts()


def _seen(device: torch.device, cluster: int, ctas: int, jitter: bool) -> list[int]:
    variant = Variant(cluster)
    sms = torch.full((ctas,), -1, dtype=torch.int32, device=device)
    with torch.cuda.device(device):
        compile.load(variant, lambda: compile_variant(variant))(sms, int(jitter))
    seen: list[int] = sms.tolist()
    return seen


def compile_variant(variant: Variant) -> Any:
    """Compiles for sm_90a, with or without a GPU. Returns CuTe DSL's compiled function."""
    smid_probe.Probe.kernel.set_name_prefix(
        variant.name, remove_cutlass_symbol=True, keep_mangled_name=False
    )
    arguments = (
        compile.compact(cutlass.Int32, 1),
        cutlass.Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
    with compile.target_arch():
        return cute.compile(smid_probe.Probe(variant.cluster), *arguments, options=compile.OPTIONS)
