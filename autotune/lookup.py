"""Chooses the kernel and config of a call.

A winner that was measured at this very workload is taken, on this GPU before shipped ones.
Otherwise the winners of the same kind within `REACH` compete with the production kernel's own rule:
that is taken which is expected to be the fastest here, by the time there and the model's ratio of
here to there. Otherwise the model compares all that won at some workload.
"""

import functools
import math
import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from outblas.autotune import packed_tables
from outblas.autotune.named_configs import ChosenConfig, GpuModel, brief_text
from outblas.autotune.search.target import HOPPER_GROUPED
from outblas.autotune.store.records import WEIGHTS, Gpu, Workload, base_name
from outblas.autotune.store.tables import TABLES
from outblas.autotune.tuned_entries import (
    COUSIN,
    ORIGINS,
    TunedEntry,
    bare_of,
    best_by_kernel,
    distance,
    from_shipped,
    from_store,
    is_akin,
    nearest_to,
    read_tables,
    width_of,
)
from outblas.base import pack
from outblas.base.configs import from_text
from outblas.base.grouped_shapes import Grouping
from outblas.base.ownership import shown
from outblas.base.shapes import to_text
from outblas.call import default_kernel, fallback
from outblas.call.default_kernel import MODES, PRODUCTION, Mode
from outblas.call.epilogue import NONE
from outblas.call.grouped import GroupedProblem
from outblas.call.problem import Problem

# The largest distance at which a winner is used for another shape, in binary orders of magnitude.
REACH = 1.5
MOST_CHOICES = (
    1024  # workloads whose choices are remembered; beyond it, those unused for longest go
)
NEIGHBOURS = 12  # that are compared for a shape at most
SHORTLIST = 3  # choices of the model, for calls that the first one does not support
# A winner that was measured elsewhere must be expected to be faster than the production kernel's
# rule by this factor, whose calls cost the host less.
TIE = 1.06
# A config that another layout or dtype was measured with at this shape counts as measured here
# where the model predicts at most this factor of its time there.
ALIKE = 1.02


class Reason(NamedTuple):
    """Why a config was chosen for a workload; it becomes text when somebody asks.

    Attributes:
        workload: What the config was chosen for.
        on_gpu: Whether that runs on a GPU.
        us: The time that is expected there; None where it was measured, or nothing is expected.
        entry: The winner whose config it is; None for the kernel's rule and for the model.
        by: What chose it if there is no entry.
    """

    workload: Workload
    on_gpu: bool
    us: float | None = None
    entry: TunedEntry | None = None
    by: str = ""

    def __str__(self) -> str:
        expected = "" if self.us is None else f", {self.us:.1f} µs expected here"
        entry = self.entry
        if entry is None:
            return f"{self.by}{expected}"
        is_there = entry.workload.plain == self.workload.plain
        place = str(entry.workload) if is_there else f"neighbour {entry.workload}"
        return f"{entry.origin}, {place}, {_figure(entry, self.on_gpu)} there{expected}"


def is_faster(reason: object, workload: Workload) -> bool:
    """Returns whether a choice was made because its config was faster than torch at this very
    workload, on this model of GPU.
    """
    entry = reason.entry if isinstance(reason, Reason) else None
    return (
        entry is not None
        and entry.ratio > 1
        and entry.origin != COUSIN
        and replace(entry.workload, weights=workload.weights) == workload
    )


def _figure(entry: TunedEntry, on_gpu: bool) -> str:
    """Formats the ratio of a winner, or its time where there is nothing to compare it with."""
    base = base_name(entry.workload, on_gpu=on_gpu)
    return f"{entry.ratio:.3f} × {base}" if base else f"{entry.us:.1f} µs"


class TuningIndex:
    """The winners known for one GPU, from the store and from shipped tables.

    A call does not tell whether its weights are in L2: what was measured with warm weights comes
    first, because it represents repeated calls. A winner with cold weights stands in at its own
    workload, and is a neighbour where L2 can hold the weights of neither.

    A call with an epilogue takes the winner with that epilogue at its workload, and otherwise what
    the bare GEMM takes. Winners of groups serve `grouped_config` alone.
    """

    def __init__(
        self,
        gpu: Gpu,
        store: Path | None = None,
        tables: Path | None = None,
        packed: Iterable[TunedEntry] | None = None,
    ) -> None:
        """`packed`: the winners of a pack's tables, which are in the place of shipped ones."""
        self.gpu = gpu
        self._model = GpuModel(gpu)
        if packed is None:
            packed = from_shipped(gpu, read_tables(tables or TABLES))
        entries = (*from_store(gpu, store), *packed)
        self.entries = tuple(entry for entry in entries if not entry.workload.grouping)
        self.grouped = tuple(entry for entry in entries if entry.workload.grouping)
        self._measured: dict[Workload, list[TunedEntry]] = {}  # on this GPU model
        for entry in self.entries:
            if entry.origin != COUSIN:
                self._measured.setdefault(entry.workload, []).append(entry)
        self._bare_measured = {bare_of(entry.workload) for entry in self.entries}
        self._rows: dict[tuple[object, ...], set[int]] = {}  # of the measured workloads of a layer
        for workload in self._measured:
            self._rows.setdefault(_layer(workload), set()).add(workload.M)
        self._choices = functools.lru_cache(MOST_CHOICES)(self._ranked)
        self._in_reach = functools.lru_cache(64)(self._in_reach_of_layer)
        self._akin: dict[tuple[object, ...], list[TunedEntry]] = {}  # by kind, and L2
        # By the identity of an entry: what the model predicts for it at its own workload.
        self._predictions: dict[int, float | None] = {}

    def choices(self, workload: Workload) -> tuple[ChosenConfig, ...]:
        """Returns the kernels and configs for a workload, the best first; empty where nothing is
        known. All numbers of rows up to one of `rows_of_choice` have the choices that are made
        there, except those of `tuned_rows`.
        """
        if workload.M not in self.tuned_rows(workload):
            workload = replace(workload, M=default_kernel.rows_of_choice(workload.M))
        return self._choices(workload)

    def tuned_rows(self, workload: Workload) -> frozenset[int]:
        """Returns the numbers of rows at which a workload was measured on this GPU model, or its
        bare GEMM.
        """
        whole, bare = (self._rows.get(_layer(w), ()) for w in (workload, bare_of(workload)))
        return frozenset((*whole, *bare))

    def _ranked(self, workload: Workload) -> tuple[ChosenConfig, ...]:
        bare = bare_of(workload)
        ranked = self._at(bare) or self._near(bare)
        if workload.epilogue:
            ranked = self._at(workload) + ranked
        ranked = ranked or self._by_model(bare)[:SHORTLIST]
        by_config: dict[tuple[str, str], ChosenConfig] = {}
        for choice in ranked:
            by_config.setdefault((choice.kernel, choice.config), choice)
        return tuple(by_config.values())

    def measured_gain(self, workload: Workload) -> float | None:
        """Returns cuBLAS's time over that of the fastest winner at the workload itself; None where
        it was not measured on this GPU model.
        """
        entries = self._entries_at(workload)
        return entries[0].ratio if entries else None

    def measured_gains(self, workload: Workload) -> dict[int, float]:
        """Returns `measured_gain` of workloads that differ from this plain one in M only, by M."""
        rows = sorted(self._rows.get(_layer(workload), ()))
        gains = {M: self.measured_gain(replace(workload, M=M)) for M in rows}
        return {M: gain for M, gain in gains.items() if gain is not None}

    def pruned_reason(self, kernel: str, workload: Workload, problem: Problem) -> str | None:
        """Returns why a kernel that supports a problem of this workload is likely slow for it; None
        if it is not.

        Where the workload itself was tuned with packed operands that are copied as well, the
        measurement has decided, so the kernel is not excluded.
        """
        from outblas.autotune.search import prune

        reason = default_kernel.pruned_reason(kernel, problem)
        if reason and bare_of(workload) in self._bare_measured:
            packed = prune.problem(workload)
            return reason if default_kernel.pruned_reason(kernel, packed) is None else None
        return reason

    # A winner here.

    def _entries_at(self, workload: Workload) -> list[TunedEntry]:
        """Returns the winners at a workload on this GPU model, with warm weights or else with cold
        ones, the fastest kernel first.
        """
        for weights in WEIGHTS:
            if entries := self._measured.get(replace(workload, weights=weights)):
                return best_by_kernel(entries)
        return []

    def _at(self, workload: Workload) -> list[ChosenConfig]:
        return [self._choice(entry, workload) for entry in self._entries_at(workload)]

    def _choice(
        self, entry: TunedEntry, workload: Workload, us: float | None = None
    ) -> ChosenConfig:
        reason = Reason(workload, self.gpu.arch > 0, us, entry)
        return ChosenConfig(entry.kernel, entry.config, reason)

    # The nearest winners.

    def _near(self, workload: Workload) -> list[ChosenConfig]:
        """Returns the winners within reach and the production kernel's rule, the fastest first as
        far as the model predicts; the nearest first where it predicts nothing.

        Those of the nearest other GPU model count where this one has none within reach.
        """
        near = self._within_reach(workload)
        at = self._model.at(workload)
        ranked: list[tuple[float, ChosenConfig]] = []
        scales = []  # of the production kernel's times to the model's
        for entry in near:
            here, where_it_won = at.us(entry.kernel, entry.config), self._predicted(entry)
            if here is None and self._model.machine is not None:
                continue  # it does not run here
            if here is None or where_it_won is None:
                ranked.append((math.inf, self._choice(entry, workload)))
                continue
            us = entry.us * here / where_it_won
            is_measured = entry.shape == workload.shape and here <= ALIKE * where_it_won
            weight = us if is_measured else TIE * us
            ranked.append((weight, self._choice(entry, workload, us)))
            if entry.kernel == PRODUCTION:
                scales.append(entry.us / where_it_won)
        by_rule = at.us(PRODUCTION, "") if scales else None
        if by_rule is not None:
            us = by_rule * statistics.median(scales)
            ranked.append((us, self._by("its own heuristic", PRODUCTION, "", workload, us)))
        ranked.sort(key=lambda pair: pair[0])
        return [choice for _, choice in ranked]

    def _within_reach(self, workload: Workload) -> list[TunedEntry]:
        rows, apart_of = math.log2(workload.M), []
        for apart, place, entry in self._in_reach(replace(workload, M=1)):
            apart = round(math.hypot(apart, entry.doublings[0] - rows), 9)
            if apart <= REACH:
                apart_of.append((entry.origin == COUSIN, apart, place, entry))
        near = sorted(apart_of)[:NEIGHBOURS]
        return [entry for is_cousin, *_, entry in near if is_cousin == near[0][0]]

    def _in_reach_of_layer(self, layer: Workload) -> list[tuple[float, int, TunedEntry]]:
        """Returns the winners whose N and K are within reach of a workload's, how far they are, and
        their places among those of its kind.
        """
        columns, terms = math.log2(layer.N), math.log2(layer.K)
        found = []
        for place, entry in enumerate(self._of_kind(layer)):
            _, n, k = entry.doublings
            if (apart := math.hypot(n - columns, k - terms)) <= REACH:
                found.append((apart, place, entry))
        return found

    def _of_kind(self, workload: Workload) -> list[TunedEntry]:
        """Returns the winners that apply to the kind of a bare workload, however far they are."""
        key = (*workload.kind, self._exceeds_l2(workload))
        entries = self._akin.get(key)
        if entries is None:
            representing = self._representing(workload)
            entries = [entry for entry in representing if is_akin(entry, workload)]
            entries.sort(key=lambda entry: (entry.workload, -entry.ratio))
            self._akin[key] = entries
        return entries

    def _representing(self, workload: Workload) -> list[TunedEntry]:
        """Returns the winners at bare GEMMs that were measured as calls of this workload run: with
        warm weights, or with cold ones where L2 can hold the weights of neither.
        """
        beyond_l2 = self._exceeds_l2(workload)
        return [
            entry
            for entry in self.entries
            if entry.workload.is_plain
            or (beyond_l2 and not entry.workload.epilogue and self._exceeds_l2(entry.workload))
        ]

    def _exceeds_l2(self, workload: Workload) -> bool:
        """Returns whether the weights are larger than the L2 cache of this GPU, as far as known."""
        machine = self._model.machine
        bytes_of_b = width_of(workload)[0] * workload.N * workload.K
        return machine is not None and bytes_of_b > machine.l2_bytes

    def _predicted(self, entry: TunedEntry) -> float | None:
        """Returns what the model predicts for a winner where it won."""
        if id(entry) not in self._predictions:
            at = self._model.at(entry.workload)
            self._predictions[id(entry)] = at.us(entry.kernel, entry.config)
        return self._predictions[id(entry)]

    # The model.

    def _by_model(self, workload: Workload) -> list[ChosenConfig]:
        """Returns what won at any workload with operands of this width, and the production kernel's
        rule, the fastest first by the model; the production kernel comes first in a tie.
        """
        at, width = self._model.at(workload), width_of(workload)
        entries = [entry for entry in self._representing(workload) if entry.width == width]
        configs = {(entry.kernel, entry.config) for entry in entries}
        configs |= {(kernel, "") for kernel, _ in configs if kernel == PRODUCTION}
        ranked: list[tuple[float, ChosenConfig]] = []
        for kernel, config in sorted(configs):
            us = at.us(kernel, config)
            if us is not None:
                weight = us if kernel == PRODUCTION else TIE * us
                ranked.append((weight, self._by("analytic model", kernel, config, workload, us)))
        ranked.sort(key=lambda pair: pair[0])
        return [choice for _, choice in ranked]

    def _by(self, by: str, kernel: str, config: str, workload: Workload, us: float) -> ChosenConfig:
        return ChosenConfig(kernel, config, Reason(workload, self.gpu.arch > 0, us, by=by))

    # Groups.

    def grouped_config(self, problem: GroupedProblem) -> str:
        """Returns the config of `hopper.grouped`, as text, of the nearest winner with as many
        groups and the same weights, and with about as many rows; "" where there is none, and for a
        problem with an epilogue, gather, scatter or scales, which sweeps do not measure.

        The sizes of groups are not known here. Of two winners that differ in them alone, that of
        balanced groups is taken. With counts of rows, that for as many rows as are likely is.
        """
        is_plain = problem.epilogue == NONE and problem.scales is None
        if not is_plain or problem.gathers or problem.scatters:
            return ""
        near = []
        for place, entry in enumerate(self.grouped):
            # Where DRAM limits the stores, other tiles are the best if it is faster.
            if entry.origin == COUSIN and problem.writes_more_than_it_reads:
                continue
            apart = _rows_apart(entry, problem)
            if apart <= REACH:
                grouping = Grouping.parse(entry.workload.grouping)
                is_skewed = grouping.distribution != "balanced"
                is_cousin = entry.origin == COUSIN
                order = (is_cousin, round(apart, 9), is_skewed, entry.workload, place)
                near.append((order, entry.config))
        return next((text for _, text in sorted(near) if _runs(problem, text)), "")

    # For the user.

    def steps(self, workload: Workload) -> list[tuple[str, str]]:
        """Returns the steps of the choice in words: each place that was searched, and what it
        contains; of the epilogue and of cold weights those places that have something.
        """
        bare = bare_of(workload)
        steps = []
        for subject in dict.fromkeys((workload, bare, replace(bare, weights="cold"))):
            for origin in ORIGINS:
                entries = self._from(origin, subject)
                if entries or subject == bare:
                    place = f"{origin}, {subject.conditions}" if subject.conditions else origin
                    steps.append((place, self._contents(entries, subject)))
        ranked = self._by_model(bare)
        message = "no config that won at some shape runs here"
        if ranked:
            message = (
                f"of {len(ranked)} configs that won at some shape, {brief_text(ranked[0])} is "
                "predicted to be the fastest here"
            )
        return [*steps, ("model", message)]

    def _from(self, origin: str, workload: Workload) -> list[TunedEntry]:
        kind = workload.kind
        return [e for e in self.entries if e.origin == origin and e.workload.kind == kind]

    def _contents(self, entries: Sequence[TunedEntry], workload: Workload) -> str:
        if not entries:
            same = workload.out_dtype == workload.operand_dtype
            out = "" if same else f" to {workload.out_dtype}"
            kind = f"{workload.dtype}{out} {workload.layout} {workload.conditions}"
            return f"nothing for {kind.rstrip()}"
        near = nearest_to(entries, workload)
        listed = "; ".join(
            f"{brief_text(ChosenConfig(entry.kernel, entry.config, ''))}, "
            f"{_figure(entry, self.gpu.arch > 0)}"
            for entry in near
        )
        place = near[0].workload
        if place == workload:
            return listed
        apart = distance(place, workload)
        nearest = f"the nearest tuned shape is {to_text(place.shape)}, {apart:.2f} doublings away"
        if apart > REACH:
            return f"{nearest}, and only shapes within {REACH} count"
        return f"{nearest}: {listed}"


def _layer(workload: Workload) -> tuple[object, ...]:
    """Returns what workloads have in common that differ in M alone, and in their weights."""
    w = workload
    return w.N, w.K, w.dtype, w.out_dtype, w.layout, w.epilogue


def _rows_apart(entry: TunedEntry, problem: GroupedProblem) -> float:
    """Returns how far apart the numbers of rows are, in binary orders of magnitude; infinity for
    results that say nothing about this problem.
    """
    workload = entry.workload.grouped
    if entry.kernel != HOPPER_GROUPED.name or workload is None:
        return math.inf
    is_rows = problem.form == "ragged_m"
    rows = problem.expected_rows if is_rows else problem.K
    depth = problem.K if is_rows else problem.M
    same = (
        (workload.form == "rows") == is_rows
        and (workload.experts, workload.N, workload.K) == (problem.groups, problem.N, depth)
        and (problem.out_dtype.itemsize == 4) == (entry.workload.out_dtype == "float32")
        and entry.workload.operand_dtype in ("bfloat16", "float16")
        and problem.dtype.itemsize == 2
    )
    return abs(math.log2(workload.rows / rows)) if same and rows else math.inf


def _runs(problem: GroupedProblem, text: str) -> bool:
    module = HOPPER_GROUPED.load()
    try:
        return module.unsupported(problem, from_text(module.Config, text)) is None
    except ValueError as error:
        fallback.warn_once(f"a tuned config of {HOPPER_GROUPED.name} is not used: {error}")
        return False


def mode(argument: str | None, environment: str | None) -> Mode:
    """Returns the mode of an argument, or else that of OUTBLAS_TUNE; "lookup" by default.

    Raises ValueError for any other value.
    """
    name, value = ("tune", argument) if argument else ("OUTBLAS_TUNE", environment)
    for allowed in MODES:
        if (value or "lookup") == allowed:
            return allowed
    raise ValueError(f"{name} is '{shown(value)}', expected one of {', '.join(MODES)}")


@functools.cache
def tuning_index(device: int) -> TuningIndex:
    """Returns the index of the GPU with this number, which is read once per process.

    Stores and tables that cannot be read are left out.
    """
    from outblas.autotune.search.gpu import current

    return TuningIndex(current(device))


def packed_index(device: int, workload: Workload, *, fp8: bool = False) -> TuningIndex | None:
    """Returns the index that chooses for a GEMM by the tables of a pack: of the first loaded one
    that was built for it and for this model of GPU. None where there is no such pack. `fp8`: the
    workload stands for a GEMM of fp8 operands.
    """
    return _first_index(
        device, (p for p in pack.loaded() if packed_tables.covers(p, workload, fp8=fp8))
    )


def packed_indexes(device: int) -> list[TuningIndex]:
    """Returns the indexes of all packs that were built for a GPU's model."""
    return [index for p in pack.loaded() if (index := _index_of(device, p)) is not None]


def _first_index(device: int, packs: Iterable[pack.Pack]) -> TuningIndex | None:
    indexes = (_index_of(device, loaded) for loaded in packs)
    return next((index for index in indexes if index is not None), None)


@functools.cache
def _index_of(device: int, loaded: pack.Pack) -> TuningIndex | None:
    from outblas.autotune.search.gpu import current

    gpu = current(device)
    try:
        entries = packed_tables.entries_of(loaded, gpu)
    except ValueError as error:  # PackError is one
        pack.warn_once(f"{error}; the tables here choose the kernels instead")
        return None
    return None if entries is None else TuningIndex(gpu, packed=entries)


def grouped_config(problem: GroupedProblem) -> str:
    """Returns `TuningIndex.grouped_config` of a problem, by the tables of a pack that was built for
    it or else by what is known of its GPU. It never raises.
    """
    device = problem.device.index
    try:
        if device is None or mode(None, os.environ.get("OUTBLAS_TUNE")) == "off":
            return ""
        packs = (p for p in pack.loaded() if packed_tables.covers_groups(p, problem))
        index = _first_index(device, packs) or tuning_index(device)
        return index.grouped_config(problem)
    except Exception as error:  # costs only speed: the caller has a rule
        fallback.warn_once(f"no tuning result of groups is used: {error}")
        return ""


def clear_cache() -> None:
    """Makes the next lookup read stores and tables again."""
    tuning_index.cache_clear()
    _index_of.cache_clear()
