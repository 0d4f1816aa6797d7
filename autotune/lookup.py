"""Chooses the kernel and config of a call: from results tuned on this GPU, from shipped tables, or
from the model's predictions.
"""

import functools
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path

from ..core import pack
from ..core.grouped import GroupedProblem
from ..core.ownership import shown
from ..core.problem import Problem
from ..core.shapes import to_text
from ..runtime import default_kernel
from ..runtime.default_kernel import MODES, PRODUCTION, Mode
from . import packed_tables
from .choice_reasons import ByEntry, ByModel, ByRule, figure
from .named_configs import Choice, brief_text
from .predictions import GpuModel, Predictions
from .store.records import WEIGHTS, Gpu, Workload
from .store.tables import TABLES
from .tuned_entries import (
    COUSIN,
    HERE,
    MODEL,
    ORIGINS,
    SHIPPED,
    NearEntries,
    TunedEntry,
    bare_of,
    best_by_kernel,
    distance,
    from_store,
    from_tables,
    is_akin,
    nearest_to,
    width_of,
)

# The largest distance at which a tuned shape is used for another, in binary orders of magnitude.
REACH = 1.5
_REACHED = REACH + 1e-9  # with the rounding of a distance
NEIGHBOURS = 12  # maximum number of winners that are compared for a shape, twins beside them
# Predictions that differ by less than this factor count as equal. Then the production kernel is
# taken, whose calls cost the host less, and a measurement rather than a rule.
TIE = 1.06
# A config that another layout was measured with at this shape counts as measured here where the
# model predicts at most this factor of its time there.
ALIKE = 1.02
SHORTLIST = 3  # alternatives that a choice keeps, for calls that the first one does not support


class TuningIndex:
    """The winners known for one GPU, from the store and from shipped tables. Those of groups are
    in `grouped`, which `lookup_grouped` reads, and take no part in what follows.

    A call does not tell whether its weights are in L2. Results measured with warm weights take
    precedence, because they represent repeated calls. A result with cold weights is used for a
    workload that was not tuned with warm ones; it takes precedence over neighbours. It is used for
    neighbouring shapes where L2 holds the weights of neither, because calls are then alike with
    warm and with cold weights.

    A call with an epilogue uses the winner with that epilogue at its workload (with the same
    activation, bias and residual), and otherwise the choice for the bare product. No other result
    is transferred from one epilogue to another.
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
        self.machine, self._on_gpu = self._model.machine, gpu.arch > 0
        if packed is None:
            packed = from_tables(gpu, TABLES if tables is None else tables)
        known = (*from_store(gpu, store), *packed)
        self.entries = tuple(entry for entry in known if not entry.workload.grouping)
        self.grouped = tuple(entry for entry in known if entry.workload.grouping)
        self._bare = [entry for entry in self.entries if not entry.workload.epilogue]
        self._own: dict[Workload, list[TunedEntry]] = {}  # from this GPU model
        for entry in self.entries:
            if entry.origin != COUSIN:
                self._own.setdefault(entry.workload, []).append(entry)
        self._shapes = {known.shape for known in self._own}
        self._bare_own = {bare_of(entry.workload) for entry in self.entries}
        self._choices: dict[Workload, tuple[Choice, ...]] = {}
        # What depends on the kind of a workload alone, and whether L2 can hold its weights.
        self._near: dict[tuple[object, ...], tuple[NearEntries, NearEntries]] = {}
        self._won: dict[tuple[object, ...], list[tuple[str, str]]] = {}
        # By the identity of an entry: what the model predicts for it at its own workload.
        self._predictions: dict[int, float | None] = {}
        self._dram_bound: dict[int, bool] = {}

    def choices(self, workload: Workload) -> tuple[Choice, ...]:
        """Returns the kernels and configs for a workload, the best first; empty where nothing is
        known.
        """
        found = self._choices.get(workload)
        if found is None:
            found = self._choices[workload] = tuple(self._ranked(workload))
        return found

    def measured_gain(self, workload: Workload) -> float | None:
        """Returns cuBLAS's time over that of the fastest winner at the workload itself; None where
        it was not measured on this GPU model.
        """
        for weights in WEIGHTS:
            if exact := self._exact(replace(workload, weights=weights)):
                return exact[0].ratio
        return None

    def measured_gains(self, workload: Workload) -> dict[int, float]:
        """Returns `measured_gain` of workloads that differ from this plain one in M only, by M."""
        alike = {
            known.M
            for known in self._own
            if replace(known, M=workload.M, weights="warm") == workload
        }
        gains = {M: self.measured_gain(replace(workload, M=M)) for M in sorted(alike)}
        return {M: gain for M, gain in gains.items() if gain is not None}

    def pruned_reason(self, kernel: str, workload: Workload, problem: Problem) -> str | None:
        """Returns why a kernel that supports a product of this workload is likely slow for it; None
        if it is not.

        Where the workload itself was tuned with packed operands that are copied as well, the
        measurement has decided, so the kernel is not excluded.
        """
        from .search import prune

        reason = default_kernel.pruned_reason(kernel, problem)
        if reason and bare_of(workload) in self._bare_own:
            packed = prune.problem(workload)
            return reason if default_kernel.pruned_reason(kernel, packed) is None else None
        return reason

    def steps(self, workload: Workload) -> list[tuple[str, str]]:
        """Returns the steps of the choice for the user: every place that was searched, and what it
        contains.
        """
        bare = bare_of(workload)
        steps = self._places(workload) if workload.epilogue else []
        for origin in ORIGINS:
            there = [entry for entry in self._of_kind(bare) if entry.origin == origin]
            steps.append((origin, self._describe_place(there, bare)))
        cold = replace(bare, weights="cold")
        steps += self._places(cold) if self._of_kind(cold) else []

        ranked = self._by_model(bare)
        if ranked:
            message = (
                f"of {len(ranked)} configs that won at some shape, {brief_text(ranked[0])} is "
                "predicted to be the fastest here"
            )
        else:
            message = "no config that won at some shape runs here"
        return [*steps, ("model", message)]

    def _places(self, workload: Workload) -> list[tuple[str, str]]:
        """Returns what is known about calls under a workload's conditions, one step for each place
        that contains something.
        """
        steps = []
        for origin in ORIGINS:
            there = [entry for entry in self._of_kind(workload) if entry.origin == origin]
            if there:
                place = f"{origin}, {workload.conditions}"
                steps.append((place, self._describe_place(there, workload)))
        return steps or [(f"tuned, {workload.conditions}", self._describe_place([], workload))]

    def _of_kind(self, workload: Workload) -> list[TunedEntry]:
        return [entry for entry in self.entries if entry.workload.kind == workload.kind]

    def _ranked(self, workload: Workload) -> Iterator[Choice]:
        seen = set()
        for choice in self._found(workload):
            key = choice.kernel, choice.config
            if key not in seen:
                seen.add(key)
                yield choice
        if not seen:
            yield from self._by_model(bare_of(workload))[:SHORTLIST]

    def _found(self, workload: Workload) -> Iterator[Choice]:
        """Yields the tuned choices, possibly with duplicates."""
        if workload.epilogue:
            yield from self._measured(workload)
            workload = bare_of(workload)
        yield from self._measured(workload)
        if not self._exact(workload):
            yield from self._carried(workload)

    def _measured(self, workload: Workload) -> Iterator[Choice]:
        """Yields the winners at the workload with warm weights, or otherwise with cold ones."""
        if workload.shape not in self._shapes:
            return
        for weights in WEIGHTS:
            asked = replace(workload, weights=weights)
            if exact := self._exact(asked):
                yield from self._tuned(exact, asked)
                return

    def _exact(self, workload: Workload) -> list[TunedEntry]:
        """Returns the winners at the workload itself.

        A sweep of one kernel measures nothing of the others, so all winners known for a workload
        compete.
        """
        return best_by_kernel(self._own.get(workload, ()))

    def _tuned(self, exact: Sequence[TunedEntry], workload: Workload) -> Iterator[Choice]:
        """Yields the winners for the workload itself; as alternatives, the nearest of each
        origin.
        """
        same_kind = self._of_kind(workload)
        found = list(exact)
        for origins in ((HERE, MODEL), (SHIPPED,), (COUSIN,)):
            there = [entry for entry in same_kind if entry.origin in origins]
            found += nearest_to(there, workload)
        for entry in found:
            if distance(entry.workload, workload) <= REACH:
                yield Choice(entry.kernel, entry.config, self._why(entry, workload))

    def _carried(self, workload: Workload) -> list[Choice]:
        """Returns the winners at neighbouring shapes, the fastest for this shape first.

        The estimated time is the neighbour's time multiplied by the ratio that the model predicts
        between the two shapes. Where the model predicts nothing, the nearest come first. Other GPU
        models come last, except where one with as many SMs was tuned for this shape and layout and
        this GPU was not.
        """
        ours, others = self._akin(workload)
        own = ours.within(_REACHED, workload, NEIGHBOURS)
        twins = [entry for entry in others.at(workload) if entry.sms == self.gpu.sms]
        before = twins if own and not ours.at(workload) else []
        # Where some of ours are near, the others would only be alternatives to alternatives.
        left = NEIGHBOURS - len(own) if len(own) < SHORTLIST else 0
        cousins = others.within(_REACHED, workload, left) if left else []
        here = self._model.at(workload)
        return [
            choice
            for near in (before, own, cousins)
            if near
            for choice in self._weighed(near, workload, here)
        ]

    def _akin(self, workload: Workload) -> tuple[NearEntries, NearEntries]:
        """Returns the winners that apply to a plain workload, however far their shapes are: those
        of this GPU model, and those of the other one.
        """
        key = (*workload.kind, self._exceeds_l2(workload))
        found = self._near.get(key)
        if found is None:
            width = width_of(workload)
            akin = [e for e in self._representing(workload) if is_akin(e, workload, width)]
            found = self._near[key] = (
                NearEntries([e for e in akin if e.origin != COUSIN]),
                NearEntries([e for e in akin if e.origin == COUSIN]),
            )
        return found

    def _representing(self, workload: Workload) -> list[TunedEntry]:
        """Returns the winners at bare products that were measured as a call of this workload runs:
        with warm weights, or with cold ones where L2 can hold the weights of neither.
        """
        beyond_l2 = self._exceeds_l2(workload)
        return [
            entry
            for entry in self._bare
            if entry.workload.is_plain or (beyond_l2 and self._exceeds_l2(entry.workload))
        ]

    def _exceeds_l2(self, workload: Workload) -> bool:
        """Returns whether the weights are larger than the L2 cache of this GPU, as far as known."""
        bytes_of_b = width_of(workload)[0] * workload.N * workload.K
        return self.machine is not None and bytes_of_b > self.machine.l2_bytes

    def _waits_for_dram(self, workload: Workload) -> bool:
        """Returns whether weights that are larger than L2 take longer to load than products take,
        as far as known.
        """
        machine, dtype = self.machine, workload.dtype
        if machine is None or dtype not in machine.flops_per_sm_clock:
            return False
        loads = width_of(workload)[0] * workload.N * workload.K / (1e9 * machine.dram_gbs)
        products = 2 * math.prod(workload.shape) / (1e12 * machine.peak_tflops(dtype))
        return self._exceeds_l2(workload) and loads > products

    def _weighed(
        self, near: Sequence[TunedEntry], workload: Workload, at: Predictions
    ) -> list[Choice]:
        """Returns the choices that neighbours suggest, ordered by their estimated time for this
        workload.

        Where a neighbour has the same shape, it was measured with another layout, 16-bit dtype or
        model of GPU. If the model sees no difference to this call, that says more than the rule or
        than another shape, which have to promise less time by the factor `TIE`. Another shape has
        to promise less once more where one of the two waits for DRAM and the other does not, and
        where the workload waits for DRAM, of which the rule of the production kernel knows more.
        """
        waits_for_dram, shape = self._waits_for_dram(workload), workload.shape
        predictions, shares = [], []
        any_same = False
        for entry in near:
            here, there = at.us(entry.kernel, entry.config), self._predicted_there(entry)
            us, is_same = math.inf, False
            if here is not None:
                is_same = entry.shape == shape and (there is None or here <= ALIKE * there)
                if there is not None:
                    us = entry.us * here / there
            any_same = any_same or is_same
            predictions.append((entry, us, is_same))
            if there is not None and entry.kernel == PRODUCTION:
                shares.append(entry.us / there)  # of the kernel's time to the model's

        elsewhere = TIE if any_same else 1.0
        found: list[tuple[float, Choice]] = []
        for entry, us, is_same in predictions:
            weight = us if is_same else us * elsewhere
            if waits_for_dram and not is_same:
                weight *= TIE
            if self._waited_for_dram(entry) != waits_for_dram:
                weight *= TIE
            why = self._why(entry, workload, us)
            found.append((weight, Choice(entry.kernel, entry.config, why)))

        by_rule = at.us(PRODUCTION, "") if shares else None
        if by_rule is not None:
            us = by_rule * statistics.median(shares)
            found.append((us * elsewhere, Choice(PRODUCTION, "", ByRule(us))))
        found.sort(key=itemgetter(0))
        return [choice for _, choice in found]

    def _predicted_there(self, entry: TunedEntry) -> float | None:
        """Returns what the model predicts for a winner where it won; None where it predicts
        nothing, or the config does not run.
        """
        if id(entry) not in self._predictions:
            at = self._model.at(entry.workload)
            self._predictions[id(entry)] = at.us(entry.kernel, entry.config)
        return self._predictions[id(entry)]

    def _waited_for_dram(self, entry: TunedEntry) -> bool:
        """Returns `_waits_for_dram` for a winner where it won."""
        if id(entry) not in self._dram_bound:
            self._dram_bound[id(entry)] = self._waits_for_dram(entry.workload)
        return self._dram_bound[id(entry)]

    def _by_model(self, workload: Workload) -> list[Choice]:
        """Returns the choices by the analytic model: the winners at any workload with operands of
        this width, and the production kernel's default, which comes first in a tie.
        """
        at = self._model.at(workload)
        found: list[tuple[float, Choice]] = []
        for kernel, config in self._winners(workload):
            us = at.us(kernel, config)
            if us is not None:
                weight = us if kernel == PRODUCTION else TIE * us
                found.append((weight, Choice(kernel, config, ByModel(us))))
        found.sort(key=itemgetter(0))
        return [choice for _, choice in found]

    def _winners(self, workload: Workload) -> list[tuple[str, str]]:
        """Returns the kernels and configs that won at any workload with operands of this width, and
        the production kernel's default.
        """
        width = width_of(workload)
        key = width, self._exceeds_l2(workload)
        found = self._won.get(key)
        if found is None:
            won = [(e.kernel, e.config) for e in self._representing(workload) if e.width == width]
            rules = [(kernel, "") for kernel, _ in won if kernel == PRODUCTION]
            found = self._won[key] = list(dict.fromkeys(won + rules))
        return found

    def _describe_place(self, entries: Sequence[TunedEntry], workload: Workload) -> str:
        """Describes for the user what the entries of one origin contain for a workload."""
        exact = best_by_kernel(entry for entry in entries if entry.workload == workload)
        if exact:
            return "; ".join(map(self._describe, exact))
        if not entries:
            same = workload.out_dtype == workload.operand_dtype
            out = "" if same else f" to {workload.out_dtype}"
            kind = f"{workload.dtype}{out} {workload.layout} {workload.conditions}"
            return f"nothing for {kind.rstrip()}"

        near = nearest_to(entries, workload)
        place = near[0].workload
        away = distance(place, workload)
        nearest = f"the nearest tuned shape is {to_text(place.shape)}, {away:.2f} doublings away"
        if away > REACH:
            return f"{nearest}, and only shapes within {REACH} count"
        return f"{nearest}: " + "; ".join(map(self._describe, near))

    def _describe(self, entry: TunedEntry) -> str:
        return (
            f"{brief_text(Choice(entry.kernel, entry.config, ''))}, {figure(entry, self._on_gpu)}"
        )

    def _why(self, entry: TunedEntry, workload: Workload, us: float = math.inf) -> ByEntry:
        return ByEntry(entry, workload, us, self._on_gpu)


def mode(given: str | None, environment: str | None) -> Mode:
    """Returns the mode of an argument, or else that of OUTBLAS_TUNE; "lookup" by default.

    Raises ValueError for any other value.
    """
    name, value = ("tune", given) if given else ("OUTBLAS_TUNE", environment)
    for allowed in MODES:
        if (value or "lookup") == allowed:
            return allowed
    raise ValueError(f"{name} is '{shown(value)}', expected one of {', '.join(MODES)}")


@functools.cache
def tuning_index(device: int) -> TuningIndex:
    """Returns the index of the GPU with this number, which is read once per process.

    Stores and tables that cannot be read are left out.
    """
    from .search.gpu import current

    return TuningIndex(current(device))


def packed_index(device: int, workload: Workload, *, fp8: bool = False) -> TuningIndex | None:
    """Returns the index that chooses for a product by the tables of a pack: of the first loaded one
    that was built for the product and for this model of GPU. None where there is no such pack.
    `fp8`: the workload stands for a product of fp8 operands.
    """
    for each in pack.loaded():
        if packed_tables.covers(each, workload, fp8=fp8):
            index = _index_of(device, each)
            if index is not None:
                return index
    return None


def packed_index_of_groups(device: int, problem: GroupedProblem) -> TuningIndex | None:
    """Returns `packed_index` for a product that groups divide."""
    for each in pack.loaded():
        if packed_tables.covers_groups(each, problem):
            index = _index_of(device, each)
            if index is not None:
                return index
    return None


@functools.cache
def _index_of(device: int, given: pack.Pack) -> TuningIndex | None:
    from .search.gpu import current

    gpu = current(device)
    try:
        known = packed_tables.entries_of(given, gpu)
    except ValueError as error:  # PackError is one
        pack.warn_once(f"{error}; the tables here choose the kernels instead")
        return None
    return None if known is None else TuningIndex(gpu, packed=known)


def clear_cache() -> None:
    """Makes the next lookup read stores and tables again."""
    tuning_index.cache_clear()
    _index_of.cache_clear()
