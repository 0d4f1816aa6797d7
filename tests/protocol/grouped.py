"""Launches of `hopper.grouped` on the model: groups of rows or of terms, and whether each has its
own product.
"""

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from outblas.hopper.core.config import HopperConfig

from . import dsl, state
from .fault import ProtocolFault
from .launch import Launch, modules
from .machine import Timing
from .tensors import Shared


@dataclass(frozen=True)
class GroupedCase:
    """A call: `ends` of groups in the ragged dimension of size `extent`, which are rows or terms.
    `M` and `K` are the sizes of the dimension that is not ragged.
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

    @cached_property
    def bounds(self) -> list[tuple[int, int]]:
        """Where groups begin and end; what is left over last, where it counts as a group."""
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

    def stored(self, agent, target, found, columns=None, end_row=None):
        """A part of C is written, by TMA or, where `end_row` is given, those of its rows that lie
        before it.
        """
        del agent
        case = self.case
        (_, (row, column, *matrix)), contents = target, set(found)
        if len(contents) != 1:
            raise ProtocolFault("wrong result", f"C at {(row, column)} gets {found}")
        ((_, total),) = contents
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
            key = (row, c, *matrix)
            if key in self.written:
                raise ProtocolFault("wrong result", f"C at {key} is stored twice")
            self.written.add(key)

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
        tile_k = self.config.tile_k
        begin, end = self.case.bounds[group] if self.case.form == "ragged_k" else (0, self.case.K)
        found = [(k, None) for k in range(begin, end, tile_k)]
        rest = (end - begin) % tile_k
        if self.case.form == "ragged_k" and rest:
            found[-1] = (found[-1][0], rest)
        return found

    def _terms_multiplied(self, product, row, column, group):
        (a, left_a), (b, left_b) = map(_cleared, product)
        if left_a != left_b:
            raise ProtocolFault("wrong result", f"{left_a} terms of A meet {left_b} of B")
        (name_a, at_a), (name_b, at_b) = a, b
        inside = 0 <= row - at_a[0] < self.config.tile_m
        inside &= 0 <= column - at_b[0] < self.config.tile_n
        if (name_a, name_b) != ("A@0", "B@0") or not inside or at_a[1] != at_b[1]:
            raise ProtocolFault("wrong result", f"C at {(row, column)} multiplies {product}")
        if self.case.form == "ragged_m" and at_b[2] != min(group, len(self.case.ends) - 1):
            raise ProtocolFault("wrong result", f"group {group} multiplies {b}")
        return at_a[1], left_a

    def check_all(self) -> None:
        """All of C has been stored."""
        case = self.case
        parts: set[tuple[int, ...]]
        if case.form == "ragged_m":
            rows = [row for begin, end in case.bounds for row in range(begin, end, 64)]
            parts = set(itertools.product(rows, range(0, case.N, 8)))
        else:
            groups = range(len(case.ends))
            parts = set(itertools.product(range(0, case.M, 64), range(0, case.N, 8), groups))
        if missing := parts - self.written:
            raise ProtocolFault("wrong result", f"C at {min(missing)} is never stored")


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
        .find("grouped.traits")
        .GroupedTraits(
            width=8,
            by_columns=False,
            staged=True,
            transposed=False,
            batched=case.form == "ragged_k",
            ordered=False,
            single_wave=False,
            scaled=False,
            form=case.form,
            capacity=-(-groups // 32) * 32,
            zero_tail=case.zero_tail,
        )
    )
    given: Any = case
    launch = GroupedLaunch(given, traits, Timing(seed, slow), 0)
    dsl.use(launch)
    shapes: tuple[tuple[int, ...], ...]
    if case.form == "ragged_m":
        shapes = (case.extent, case.K), (len(case.ends), case.K, case.N), (case.extent, case.N)
    else:
        shapes = (case.M, case.extent), (case.extent, case.N), (len(case.ends), case.M, case.N)
    a, b, c = (
        dsl.Matrix(f"{x}@0" if x != "C" else x, s) for x, s in zip("ABC", shapes, strict=True)
    )
    kernel = loaded.find("grouped.kernel").Grouped(case.config, traits)
    kernel(a, b, c, Offsets(case.ends), case.clusters, None)
    launch.check_stages()
    launch.check_all()
    return launch


def _case() -> GroupedCase:
    """The call that runs on the model."""
    launch: Any = state.machine
    found: GroupedCase = launch.case
    return found


# ---- what stands for functions whose arithmetic other tests check
def make_tile_rows(params, rows, traits):
    """A warp writes how many tile rows the groups up to each one have."""
    agent, total = state.machine.agent, 0
    bounds = _case().bounds
    for group in range(traits.capacity):
        agent.pause()
        if group < len(bounds):
            begin, end = bounds[group]
            total += -(-(end - begin) // rows)
        params.table[group] = total


def find_group(scheduler, tile_row):
    table = scheduler.params.table
    return sum(table[group] <= tile_row for group in range(scheduler.traits.capacity))


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


def store_rows_of_group(tile, stores, number, buffer):
    """The threads of a consumer copy rows from a buffer; one of them tells the model."""
    agent, consumer, work = state.machine.agent, tile.consumer, tile.work
    config, writer = tile.epilogue.config, tile.consumer.writer
    i, start = stores.subtiles[number]
    row = work.row + (i * config.warpgroups_per_tile + consumer.warpgroup_in_tile) * 64
    agent.pause()
    low, high = writer.buffers[None, None, buffer].range()
    found = [region.tag for region in agent.cta.memory.read(low, high, agent.name)]
    if agent.tidx % 128 == 0 and row < work.end_row:
        target = "C", (row, work.column + start)
        launch: Any = state.machine
        launch.stored(agent, target, found, end_row=work.end_row)
