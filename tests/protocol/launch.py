"""Launches of `hopper.gemm` on the model: what a config computes, and whether all of it is
right.
"""

import itertools
import random
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch

from outblas.base import configs
from outblas.call import fp8
from outblas.call import problem as operands
from outblas.call.epilogue import EpilogueArgs
from outblas.device import raster
from outblas.hopper.gemm import subtiles
from outblas.hopper.gemm.schedule import tile_grid
from outblas.hopper.gemm.variant import variant_of, waves_of
from outblas.hopper.parts import tile_order
from outblas.hopper.parts.config import HopperConfig

from . import dsl
from .fault import ProtocolFault
from .machine import Machine, Timing
from .memory import GlobalMemory
from .scale_memory import Root, known_scales, root

ADDED = "addend", "bias", "residual", "aux"


@dataclass(frozen=True)
class Case:
    """A call. `M` and `N` are of C; `clusters` fit on the GPU at once; `epilogue` is any of
    "addend", "residual", "aux", "bias", "gated" and "unstaged" (a C whose rows TMA cannot store);
    `in_place`: C lies where the addend does; `transposed`: the call computes the transpose of what
    the caller asked for, so its A is the caller's B. `formats`: of fp8 operands, of which a word
    has two values; `wide`: scales that vary along K lie so that TMA can load those of rows.
    """

    config: HopperConfig
    M: int
    N: int
    k_tiles: int
    clusters: int
    matrices: int = 0
    epilogue: frozenset[str] = frozenset()
    out_dtype: torch.dtype = torch.bfloat16
    in_place: bool = False
    transposed: bool = False
    formats: str = ""
    wide: bool = False

    def __str__(self) -> str:
        batch = f"{self.matrices} of " if self.matrices else ""
        with_ = "".join(f", {name}" for name in sorted(self.epilogue)) + (
            ", in place" if self.in_place else ""
        )
        with_ += ", transposed" if self.transposed else ""
        with_ += f", {self.formats}" + ", wide" * self.wide
        return (
            f"{batch}{self.M}x{self.N}, {self.k_tiles} k tiles, {self.clusters} clusters{with_}, "
            f"{self.out_dtype}: "
            f"{configs.to_text(self.config)}"
        )

    def scales(self) -> list[Root]:
        """The caller's scales of A and of B, where they vary along K."""
        given = fp8.formats(self.formats or "e4m3 e4m3")
        if not given.block_a:
            return []
        columns = self.N * (2 if "gated" in self.epilogue else 1)
        extents = {"A": -(-self.M // given.block_a), "B": -(-columns // given.block_b)}
        of_a, of_b = "BA" if self.transposed else "AB"
        fastest = ("index", "block") if self.wide else ("block", "index")
        return [
            root(of_a, {"index": extents[of_a], "block": self.k_tiles}, fastest),
            root(of_b, {"block": self.k_tiles, "index": extents[of_b]}, fastest),
        ]


class Launch(Machine):
    """One call on the model. `order` has of each part of C that was stored the k tiles in the order
    of their sum. `workspace`: its partial sums, None without split-K.
    """

    def __init__(self, case: Case, traits, timing: Timing, number: int):
        super().__init__(timing, content=dsl.content)
        self.case, self.config, self.traits, self.number = case, case.config, traits, number
        self.workspace: dsl.GlobalTensor | None = None
        self.weights = "A" if traits.transposed else "B"
        if case.config.pdl:
            self.previous.run(self)
        self.order: dict[tuple, tuple[int, ...]] = {}
        self.written: set[tuple] = set()
        width = 32 if case.out_dtype is torch.float32 else 16
        self.scales = {root.number: root for root in case.scales()}
        self.known_scales = known_scales(*self.scales.values())
        self.types = {
            name: dsl.Numeric("out", width) for name in ("C", "addend", "residual", "aux")
        }

    def scaled_row(self, row: int, group: int) -> int | None:
        """Which row of the scales of A, or of those of a group, belongs to a row of A; None where
        there is none.
        """
        return row if row < self.case.M else None

    def run_kernel(self, body, grid: int, warpgroups: int, cluster: int) -> None:
        lanes = max(self.config.cluster, 1)
        self.launch(grid, cluster, warpgroups, lanes, body)

    def fetched(self, tag) -> None:
        """A load has landed."""
        name, offset = tag
        if self.case.in_place and name.startswith("addend") and self._touched(offset):
            raise ProtocolFault(
                "overwritten", f"the addend at {offset} is fetched where C has been stored"
            )

    def _touched(self, offset) -> bool:
        row, column, *matrix = offset
        wide = self.columns_at_once
        return any((row, c, *matrix) in self.written for c in range(column, column + wide, 8))

    @cached_property
    def columns_at_once(self) -> int:
        """Of a part of C that is stored or fetched at once."""
        stored = self.config.epilogue_config(self.traits.gated)
        return subtiles.subtile_columns(stored, self.case.out_dtype.itemsize)

    def stored(self, agent, target, found, columns=None, end_row=None) -> None:
        """A part of C, or of x, is written. `end_row`: where its rows end."""
        name, offset = target
        self.previous.check_ended(f"{name} at {offset} is stored")
        row, column, *rest = offset
        contents = set(found)
        if len(contents) != 1:
            raise ProtocolFault(
                "wrong result", f"{name} at {offset} gets {len(contents)} things: {found}"
            )
        ((_, value),) = contents
        total, came = value if isinstance(value, tuple) else (value, None)
        ks = tuple(
            self._check_product(product, row, column, total.part, rest)
            for product in total.products
        )
        if sorted(ks) != list(range(self.case.k_tiles)):
            raise ProtocolFault(
                "wrong result", f"{name} at {offset} sums k tiles {ks} of {self.case.k_tiles}"
            )
        if name.startswith("aux"):
            return
        if self.traits.source and (came is None or came[1] != offset):
            raise ProtocolFault("wrong result", f"C at {offset} is added to {came}")
        matrix = tuple(rest[-1:]) if self.traits.batched else ()
        wide = columns or self.columns_at_once
        key = (row, column, *matrix)
        if key in self.order:
            raise ProtocolFault("wrong result", f"C at {key} is stored twice")
        self.order[key] = ks
        self.written |= {(row, c, *matrix) for c in range(column, column + wide, 8)}

    def _check_product(self, product, row, column, part, rest) -> int:
        """The k tile of a product that is part of C at (row, column)."""
        config = self.config
        (name_a, a), b = product
        halves = b if isinstance(b[0], tuple) else (b,)
        if name_a != f"A@{self.number}" or any(name != f"B@{self.number}" for name, _ in halves):
            raise ProtocolFault("wrong result", f"C at {(row, column)} multiplies {product}")
        first = halves[0][1]
        if a[1] != first[1] or any(at[:2] != first[:2] for _, at in halves):
            raise ProtocolFault(
                "wrong result", f"C at {(row, column)} multiplies k of {a} and {halves}"
            )
        wide = config.tile_n // (2 if self.traits.gated else 1)
        own = wide // config.cluster_k
        low = first[0] + part * own
        if not (0 <= row - a[0] < config.tile_m and low <= column < low + own):
            raise ProtocolFault(
                "wrong result", f"C at {(row, column)} multiplies {product}, part {part}"
            )
        if self.traits.batched and not a[-1] == first[-1] == rest[-1]:
            raise ProtocolFault("wrong result", f"matrix {rest[-1]} multiplies {product}")
        return int(a[1]) // config.tile_k

    def check_all(self) -> None:
        """All of C has been stored."""
        case = self.case
        matrices = [range(case.matrices)] if case.matrices else []
        parts = itertools.product(range(0, case.M, 64), range(0, case.N, 8), *matrices)
        if missing := set(parts) - self.written:
            raise ProtocolFault("wrong result", f"C at {min(missing)} is never stored")

    def check_stages(self) -> None:
        """Every stage that was filled has been released."""
        slots = self.config.stages
        for cta in self.ctas:
            for s in range(slots):
                full, empty = cta.barriers[8 * s], cta.barriers.get(8 * (slots + s))
                if empty is not None and full.phase != empty.phase:
                    raise ProtocolFault(
                        "unreleased stage",
                        f"{cta.name}: stage {s} was filled {full.phase} times and released "
                        f"{empty.phase} times",
                    )


INTACT = dsl.Modules()


@lru_cache(maxsize=64)
def modules(patches: tuple = ()) -> dsl.Modules:
    """The kernel's modules with planted faults: (module, old text, new text) each."""
    if not patches:
        return INTACT
    by_module: dict[str, list[tuple[str, str]]] = {}
    for name, old, new in patches:
        by_module.setdefault(name, []).append((old, new))
    return dsl.Modules(by_module, INTACT)


@lru_cache(maxsize=256)
def traits_of(case: Case):
    """What the host makes of the call, on a GPU where so many clusters fit."""
    config, dtype = case.config, torch.bfloat16
    K = max(case.k_tiles, 1) * config.tile_k  # the traits are those of any K
    lead = (case.matrices,) if case.matrices else ()

    def empty(*shape, of=case.out_dtype):
        return torch.empty(*lead, *shape, dtype=of, device="meta")

    has = case.epilogue
    columns = 2 * case.N if "gated" in has else case.N
    a, b = empty(case.M, K, of=dtype), empty(columns, K, of=dtype).mT
    out = empty(case.M, case.N)
    if "unstaged" in has:
        out = empty(case.M, case.N + 1)[..., : case.N]
    extra = EpilogueArgs(
        "reglu" if "gated" in has else "",
        torch.empty(columns, dtype=case.out_dtype, device="meta") if "bias" in has else None,
        empty(case.M, case.N) if "residual" in has else None,
        empty(case.M, columns) if "aux" in has else None,
    )
    c = empty(case.M, columns) if "addend" in has else None
    problem = operands.problem(
        a,
        b,
        out,
        c,
        scaled=c is not None,
        extra=extra,
        scales=_scales(case, empty) if case.formats else None,
        formats=case.formats,
    )
    problem = replace(problem, batch=lead) if lead and not problem.batch else problem
    waves = waves_of(tile_grid(problem, config), config, case.clusters)
    traits = variant_of(problem, case.transposed, config, waves).traits
    return modules().find("gemm.traits").KernelTraits(**vars(traits))


def _scales(case: Case, empty) -> tuple:
    """The scales of fp8 operands, without data, as the problem of the launch has them."""
    roots = case.scales()
    if not roots:
        return empty(case.M, 1, of=torch.float32), torch.empty((), device="meta")
    given = (torch.empty(1, device="meta").as_strided(r.shape, r.stride) for r in roots)
    return tuple(scale.mT if case.transposed else scale for scale in given)


def table(case: Case, traits, launched: int):
    """The order of tiles, in any order that has them all where each cluster has one."""
    config = case.config
    if not traits.ordered:
        return None
    rows, columns = tile_order.cluster_tiles(config, case.M, case.N * (2 if traits.gated else 1))
    if traits.single_wave:
        tiles = list(range(rows * columns * max(case.matrices, 1)))
        random.Random(len(tiles)).shuffle(tiles)
        return dsl.Table(tiles)
    apart = launched if config.order == "consecutive" else case.clusters
    steps = raster.schedule(config.order, rows, columns, apart, config.group_m, config.group_n)
    return dsl.Table([tile for step in steps for tile in step])


def simulate(
    case: Case,
    seed: int,
    *,
    patches: tuple = (),
    slow: dict[str, float] | None = None,
    calls: int = 1,
):
    """Runs the call, `calls` times over the same workspace. Returns the last launch. Raises
    ProtocolFault.
    """
    config, traits = case.config, traits_of(case)
    gemm = modules(patches).find("gemm.kernel").Gemm(config, traits)
    rows, columns = tile_order.cluster_tiles(config, case.M, case.N * (2 if traits.gated else 1))
    tiles = rows * columns * max(case.matrices, 1)
    pieces = min(config.split_k, max(case.k_tiles, 1))
    launched = min(case.clusters, tiles * (case.k_tiles if config.stream_k else pieces))
    sums = counters = None
    if config.split:
        cut = tiles % launched if config.stream_k else tiles
        parts = config.cluster * config.warpgroups_per_tile
        places = (launched + cut if config.stream_k else tiles * pieces) * parts
        sums = dsl.GlobalTensor(GlobalMemory(places * config.accumulator_registers * 128))
        counters = dsl.GlobalTensor(GlobalMemory(max(cut, 1) * parts))
    for number in range(calls):
        launch = Launch(
            case, traits, Timing(seed + 1_000_003 * number if seed else 0, slow), number
        )
        launch.workspace = sums
        dsl.use(launch)
        lead = (case.matrices,) if traits.batched else ()
        wide = case.N * (2 if traits.gated else 1)

        def matrix(name, m, n, lead=lead, number=number):
            m, n = (n, m) if case.transposed else (m, n)
            return dsl.Matrix(f"{name}@{number}", (*lead, m, n))

        K = case.k_tiles * config.tile_k
        shapes = {"addend": wide, "residual": case.N, "aux": wide, "bias": wide}
        added = [
            matrix(name, case.M, shapes[name]) if getattr(traits, name) == "staged" else None
            for name in ADDED
        ]
        added += [scale.tensor for scale in case.scales()] or [None, None]
        gemm(
            matrix("A", case.M, K),
            matrix("B", K, wide),
            matrix("C", case.M, case.N),
            table(case, traits, launched),
            *added,
            None,  # scales of a C in fp8
            *(None, None, None),  # of groups
            sums,
            counters,
            pieces,
            launched,
            1.0,
            1.0,
            None,
        )
        launch.check_stages()
        launch.check_all()
        if counters is not None and any(counters.memory.values.values()):
            raise ProtocolFault("wrong result", f"counters are left at {counters.memory.values}")
    return launch


@dataclass(frozen=True)
class PlainTraits:
    """What the rungs of the ladder compute: C = A B."""

    transposed: bool = False
    gated: bool = False
    batched: bool = False
    source: str = ""


def simulate_rung(
    name: str,
    config,
    M: int,
    N: int,
    k_tiles: int,
    clusters: int,
    seed: int,
    *,
    patches: tuple = (),
):
    """Runs a rung of the ladder, by its module. Returns the launch. Raises ProtocolFault."""
    module = modules(patches).find(name)
    kind = module.__dict__[next(n for n in vars(module) if n.lower() == name.replace("_", ""))]
    case = Case(config, M, N, k_tiles, clusters)
    launch = Launch(case, PlainTraits(), Timing(seed), 0)
    dsl.use(launch)
    table = None
    if kind.persistent:
        rows, columns = tile_order.cluster_tiles(config, M, N)
        steps = raster.schedule(
            config.order, rows, columns, clusters, config.group_m, config.group_n
        )
        table = dsl.Table([list(step) for step in steps])
    K = k_tiles * config.tile_k
    a, b, c = (
        dsl.Matrix(f"{x}@0", shape) for x, shape in (("A", (M, K)), ("B", (K, N)), ("C", (M, N)))
    )
    kind(config, width=8)(a, b, c, table, None, None)
    launch.check_stages()
    launch.check_all()
    return launch
