"""Launches of `hopper.grouped` on the model: groups of rows or of terms, and whether each has its
own product, with what its epilogue reads and stores.
"""

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from outblas.hopper.parts.config import HopperConfig

from . import dsl, state
from .fault import ProtocolFault
from .launch import Launch, modules
from .machine import Timing
from .memory import Copy, InFlight
from .scale_memory import Root, root
from .tensors import Shared


@dataclass(frozen=True)
class GroupedCase:
    """A call: `ends` of groups in the ragged dimension of size `extent`, which are rows or terms.
    `M` and `K` are the sizes of the dimension that is not ragged, and `N` columns are stored.
    With a `capacity`, `ends` are the numbers of rows of groups that have room for so many each.
    `epilogue` is any of "residual", "aux", "gated" and "scatter", or "unstaged": registers are
    stored, as for ragged columns. With "scaled" operands are fp8 with scales of blocks; `K`, and
    `extent` where terms are divided, are then in values, of which a word has two; they are "wide"
    where TMA loads those of rows.
    """

    config: HopperConfig
    form: str
    ends: tuple[int, ...]
    extent: int
    N: int
    clusters: int
    M: int = 0
    K: int = 0
    zero_tail: bool = False
    out_dtype: torch.dtype = torch.bfloat16
    in_place: bool = False
    epilogue: frozenset[str] = frozenset()
    capacity: int = 0

    @property
    def values(self) -> int:
        """The terms in a word of K."""
        return 2 if "scaled" in self.epilogue else 1

    @property
    def halves(self) -> int:
        """The columns of B that make one of C."""
        return 2 if "gated" in self.epilogue else 1

    def scales(self) -> list[Root]:
        """The scales of A and of B, where operands are fp8."""
        if "scaled" not in self.epilogue:
            return []
        blocks, groups = (self.extent if self.form == "ragged_k" else self.K) // 128, len(self.ends)
        rows = {"index": self.M if self.form == "ragged_k" else self.capacity or self.extent}
        of_a = rows | {"block": blocks}
        if self.capacity:
            of_a = {"group": groups} | of_a
        columns, block = self.N * self.halves, {"block": blocks}
        of_b = block | {"index": columns}
        if self.form == "ragged_m":
            of_b = {"group": groups} | block | {"index": -(-columns // 128)}
        fastest = ("index", "block") if "wide" in self.epilogue else ("block", "index")
        return [
            root(operand, extents, (*fastest, "group") if "group" in extents else fastest)
            for operand, extents in (("A", of_a), ("B", of_b))
        ]

    @property
    def turns(self) -> bool:
        """Whether clusters turn for the last tile row of a group."""
        upright = (self.config.cluster_m, self.config.cluster_n) == (2, 1)
        return self.form == "ragged_m" and upright and "gather" not in self.epilogue

    @cached_property
    def bounds(self) -> list[tuple[int, int]]:
        """Where groups begin and end; what is left over last, where it counts as a group."""
        if self.capacity:
            begins = range(0, self.extent, self.capacity)
            return [(row, row + count) for row, count in zip(begins, self.ends, strict=True)]
        found = list(zip((0, *self.ends[:-1]), self.ends, strict=True))
        return [*found, (self.ends[-1], self.extent)] if self.zero_tail else found


class Offsets:
    """The ends of groups in global memory."""

    def __init__(self, ends):
        self.ends, self.shape = ends, (len(ends),)

    def __getitem__(self, index):
        assert 0 <= index < len(self.ends), f"offs[{index}] is read"
        return self.ends[index]


class GroupedLaunch(Launch):
    """One call on the model."""

    case: Any

    def scaled_row(self, row: int, group: int) -> int | None:
        case, begin = self.case, 0
        if case.capacity:
            begin = group * case.capacity
        rows = case.M if case.form == "ragged_k" else case.capacity or case.extent
        return row - begin if row - begin < rows else None

    def stored(self, agent, target, found, columns=None, end_row=None):
        """A part of C, or of x, is written, by TMA or, where `end_row` is given, those of its rows
        that lie before it.
        """
        del agent
        case = self.case
        (name, (row, column, *rest)), contents = target, set(found)
        if end_row is not None and row >= end_row:
            return
        half, matrix = (rest[:1], rest[1:]) if self._has_halves(name) else ([], rest)
        if len(contents) != 1:
            raise ProtocolFault("wrong result", f"{name} at {(row, column)} gets {found}")
        ((_, value),) = contents
        total, came = value if isinstance(value, tuple) else (value, None)
        self._check_source(name, (row, column, *matrix), came)
        if name == "C" and "scatter" in case.epilogue and end_row is None:
            raise ProtocolFault("wrong result", f"C at {(row, column)} is not scattered")
        group = self._group_at(row, matrix)
        begin, end = case.bounds[group]
        if case.form == "ragged_m":
            last = row + 64 if end_row is None else min(row + 64, end_row)
            if last > end:
                raise ProtocolFault(
                    "wrong result", f"rows {row} to {last} of group {group} to {end}"
                )
        terms = [self._terms_multiplied(p, row, column, group) for p in total.products]
        is_empty = begin == end if case.form == "ragged_k" else group == len(case.ends)
        wanted = [] if is_empty else self._terms_of(group)
        if sorted(terms, key=str) != sorted(wanted, key=str) and not (
            is_empty and len(terms) == 1 and terms[0][0] >= self._depth
        ):
            raise ProtocolFault(
                "wrong result", f"C at {(row, column)} of group {group} sums {terms}"
            )
        for c in range(column, column + (columns or self.columns_at_once), 8):
            key = (name, row, c, *half, *matrix)
            if key in self.written:
                raise ProtocolFault("wrong result", f"{key} is stored twice")
            self.written.add(key)

    def _has_halves(self, name) -> bool:
        return name == "aux" and self.case.halves == 2

    def _check_source(self, name, offset, came) -> None:
        """C is added to the residual at its place, x to nothing."""
        has_source = name == "C" and bool(self.traits.source)
        if has_source != (came is not None) or (came is not None and came[1] != offset):
            raise ProtocolFault("wrong result", f"{name} at {offset} is added to {came}")

    @property
    def _depth(self) -> int:
        """The terms of K in all."""
        return self.case.extent if self.case.form == "ragged_k" else self.case.K

    def _group_at(self, row, matrix) -> int:
        if matrix:
            return matrix[0]
        for group, (begin, end) in enumerate(self.case.bounds):
            if begin <= row < end and (row - begin) % 64 == 0:
                return group
        raise ProtocolFault("wrong result", f"C at row {row} belongs to no group")

    def _terms_of(self, group):
        """The k tiles of a group: where they begin, and how many terms were left where some were
        cleared.
        """
        tile_k, values = self.config.tile_k, self.case.values
        begin, end = self.case.bounds[group] if self.case.form == "ragged_k" else (0, self.case.K)
        begin, end = begin // values, -(-end // values)
        found = [(k, None) for k in range(begin, end, tile_k)]
        rest = (end - begin) % tile_k
        if self.case.form == "ragged_k" and rest and values == 1:
            found[-1] = (found[-1][0], rest)
        return found

    def _terms_multiplied(self, product, row, column, group):
        of_a, of_b = product
        (name_a, at_a), left_a = _cleared(of_a)
        inside = 0 <= row - at_a[0] < self.config.tile_m
        halves = of_b if isinstance(of_b[0], tuple) else (of_b,)
        if len(halves) != self.case.halves:
            raise ProtocolFault("wrong result", f"C at {(row, column)} multiplies {product}")
        for number, half in enumerate(halves):
            (name_b, at_b), left_b = _cleared(half)
            if left_a != left_b:
                raise ProtocolFault("wrong result", f"{left_a} terms of A meet {left_b} of B")
            inside &= 0 <= column - at_b[0] < self.config.tile_n // self.case.halves
            inside &= self.case.halves == 1 or at_b[2] == number
            if (name_a, name_b) != ("A@0", "B@0") or not inside or at_a[1] != at_b[1]:
                raise ProtocolFault("wrong result", f"C at {(row, column)} multiplies {product}")
            if self.case.form == "ragged_m" and at_b[-1] != min(group, len(self.case.ends) - 1):
                raise ProtocolFault("wrong result", f"group {group} multiplies {half}")
        return at_a[1], left_a

    def check_all(self) -> None:
        """All of C, and all of x where a call asks for it, has been stored."""
        case = self.case
        for name in ("C", "aux") if "aux" in case.epilogue else ("C",):
            dims: list[Any] = [(name,), range(0, case.M, 64), range(0, case.N, 8)]
            if case.form == "ragged_m":
                dims[1] = [row for begin, end in case.bounds for row in range(begin, end, 64)]
            dims += [range(case.halves)] if self._has_halves(name) else []
            dims += [range(len(case.ends))] if case.form == "ragged_k" else []
            if missing := set(itertools.product(*dims)) - self.written:
                raise ProtocolFault("wrong result", f"{min(missing)} is never stored")


def _cleared(operand):
    """A part of an operand, and how many of its terms were left."""
    if operand[0] == "cleared":
        return operand[1], operand[2]
    return operand, None


def simulate_grouped(
    case: GroupedCase, seed: int, *, patches: tuple = (), slow: dict[str, float] | None = None
) -> GroupedLaunch:
    """Runs the call. Returns the launch. Raises ProtocolFault."""
    loaded = modules(patches)
    groups = len(case.ends) + case.zero_tail
    traits = (
        modules()
        .find("gemm.traits")
        .KernelTraits(
            width=8,
            by_columns="unstaged" in case.epilogue,
            staged="unstaged" not in case.epilogue,
            batched=case.form == "ragged_k",
            form=case.form,
            capacity=-(-groups // 32) * 32,
            zero_tail=case.zero_tail,
            masked=case.capacity > 0,
            gated=case.halves == 2,
            residual="staged" if "residual" in case.epilogue else "",
            aux="staged" if "aux" in case.epilogue else "",
            gathers="gather" in case.epilogue,
            scatters="scatter" in case.epilogue,
            row_order=case.form == "ragged_k" and case.config.order == "row",
            wide_scales="wide" in case.epilogue,
            from_any_row="wide" in case.epilogue and case.form == "ragged_m" and not case.capacity,
            turns=case.turns,
            **_formats(case),
        )
    )
    given: Any = case
    launch = GroupedLaunch(given, traits, Timing(seed, slow), 0)
    dsl.use(launch)
    wide = case.N * case.halves
    shapes: tuple[tuple[int, ...], ...]
    if case.form == "ragged_m":
        K = case.K // case.values
        shapes = (case.extent, K), (len(case.ends), K, wide), (case.extent,)
    else:
        K = case.extent // case.values
        shapes = (case.M, K), (K, wide), (len(case.ends), case.M)
    a, b = (dsl.Matrix(f"{x}@0", shape) for x, shape in zip("AB", shapes[:2], strict=True))

    def like_result(name: str, columns: int) -> Any:
        return dsl.Matrix(name, (*shapes[2], columns)) if name in ("C", *case.epilogue) else None

    tiles = loaded.find("gemm.group_kernel").GroupedTiles(case.config, traits)
    kernel = loaded.find("gemm.kernel").Gemm(case.config, traits, tiles)
    kernel(
        a,
        b,
        like_result("C", case.N),
        Offsets(case.ends),
        None,  # addend, bias
        None,
        like_result("residual", case.N),
        like_result("aux", wide),
        *([scale.tensor for scale in case.scales()] or [None, None]),
        None,  # scales of a C in fp8
        range(case.extent) if "scatter" in case.epilogue else None,
        None,
        dsl.Matrix("index", (case.extent,)) if "gather" in case.epilogue else None,
        None,  # sums, counters
        None,
        1,
        case.clusters,
        1.0,
        0.0,
        None,
    )
    launch.check_stages()
    launch.check_all()
    return launch


def _formats(case: GroupedCase) -> dict[str, str]:
    """The traits of fp8 operands."""
    if "scaled" not in case.epilogue:
        return {}
    recipe = "128x128" if case.form == "ragged_m" else "1x128"
    formats = f"e4m3 e4m3 promoted 1x128 {recipe}"
    return {"formats": formats, "scale_a": "blocks", "scale_b": "blocks"}


def _case() -> GroupedCase:
    """The call that runs on the model."""
    launch: Any = state.machine
    found: GroupedCase = launch.case
    return found


# ---- what stands for functions whose arithmetic other tests check
def make_tile_counts(params, config, traits):
    """A warp writes how many cluster tiles the groups up to each one have."""
    agent, total = state.machine.agent, 0
    bounds = _case().bounds
    for group in range(traits.capacity):
        agent.pause()
        if group < len(bounds):
            begin, end = bounds[group]
            total += _cluster_tiles(-(-(end - begin) // config.tile_m), params.columns)
        params.table[group] = total


def _cluster_tiles(rows, columns):
    """The tiles that clusters compute of a group with so many tile rows."""
    config, traits = state.machine.config, state.machine.traits
    whole, rest = divmod(rows, config.cluster_m)
    if traits.turns:
        return whole * columns + rest * -(-columns // 2)
    return (whole + (rest > 0)) * columns


def find_group(scheduler, tile):
    table = scheduler.params.table
    return sum(table[group] <= tile for group in range(scheduler.traits.capacity))


def make_order(params, thread, threads, capacity):
    """The threads of an agent write the places of their groups."""
    agent, bounds = state.machine.agent, _case().bounds
    by_terms = sorted(range(len(bounds)), key=lambda g: (bounds[g][0] - bounds[g][1], g))
    for place, group in enumerate(by_terms):
        if agent.tidx <= group % threads < agent.tidx + agent.threads or agent.tidx == 0:
            agent.pause()
            params.table[place] = group


def clear_terms(operand, stage, terms, thread, threads):
    """Each agent of the consumers clears its part of a stage."""
    agent, config = state.machine.agent, state.machine.config
    agent.pause()
    whole: Shared = operand[None, None, stage]
    low, high = whole.range()
    ordinal, of = agent.ordinal
    number = (agent.tidx // 128 - 1) * of + ordinal
    count = of * config.consumers
    step = (high - low) // count
    begin = low + number * step
    end = high if number == count - 1 else begin + step
    memory = agent.cta.memory
    for region in list(memory.read(begin, end, agent.name)):
        write = dsl.Write(agent.name)
        tag = ("cleared", region.tag, terms)
        memory.write(max(region.low, begin), min(region.high, end), tag, write)
        agent.unfenced.append(write)


def row_offsets(cta, work):
    """The model's index names every row itself."""
    state.machine.agent.pause("global read")
    return work.row


def copy_k_tile(cta, row, k_tile, stage):
    """A warp copies its part of a k tile, which lands some time."""
    agent, machine = state.machine.agent, state.machine
    agent.pause("issue")
    low, high = cta.loads.sA[None, None, stage].range()
    half = (high - low) // 2
    low, high = (low, low + half) if agent.warp == 2 else (low + half, high)
    tag, copy, memory = (
        ("A@0", (row, k_tile * cta.config.tile_k)),
        Copy(agent.name),
        agent.cta.memory,
    )
    in_flight = InFlight(tag)
    memory.write(low, high, in_flight, copy)

    def land():
        agent.cta.check_present(f"a copy of {agent.name}")
        if memory.in_range(low, high) != [in_flight]:
            raise ProtocolFault("overwritten", f"{tag} lands where something else is")
        memory.write(low, high, tag, copy)
        copy.landed = True
        agent.cta.copied.append(copy)
        for then in copy.then:
            then()
        agent.copies_landed.changed()

    agent.copies.append(copy)
    machine.after(machine.timing.delay("copy", agent.name), land)


def store_rows(tile, stores, number, buffer):
    """The threads of a consumer copy rows from a buffer, which takes a while; one of them tells the
    model.
    """
    agent, consumer, work = state.machine.agent, tile.consumer, tile.work
    config, writer = tile.epilogue.config, tile.consumer.writer
    i, start = stores.subtiles[number]
    row = work.row + (i * config.warpgroups_per_tile + consumer.warpgroup_in_tile) * 64
    agent.pause()
    low, high = writer.buffers[None, None, buffer].range()
    memory, reader = agent.cta.memory, f"a copy of {agent.name}"
    found = [region.tag for region in memory.read(low, high, reader)]
    number = memory.begin_read(low, high, reader)
    agent.pause()
    memory.end_read(number)
    if agent.tidx % 128 == 0:
        name = "aux" if stores.aux else "C"
        half = (stores.half,) if stores.aux and _case().halves == 2 else ()
        target = name, (row, work.column + start, *half)
        launch: Any = state.machine
        launch.stored(agent, target, found, end_row=work.end_row)
