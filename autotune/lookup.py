"""Which kernel and config a call takes: what was tuned here, what a table says, what the model
predicts.
"""

import functools
import math
import statistics
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from ..core.ownership import shown
from ..core.problem import Problem
from ..core.shapes import to_text
from ..core.space import Footprint, Space
from ..core.steps import GATED
from ..runtime import default_kernel
from ..runtime.default_kernel import MODES, PRODUCTION, Mode
from .search import cost_model
from .search.gpu import machine as machine_of
from .search.target import registered
from .store.records import WEIGHTS, Gpu, Workload, base_name
from .store.store import Store
from .store.tables import TABLES, read_table

# The farthest tuned shape that speaks for another, in binary orders of magnitude.
REACH = 1.5
NEIGHBOURS = 12  # winners, at most, that are weighed for a shape
# Predictions that differ by less than this factor decide nothing: the production kernel is taken,
# whose calls cost the host less.
TIE = 1.06
SHORTLIST = 3  # alternatives that a choice keeps for calls which the first cannot take

HERE = "tuned on this GPU"
MODEL = "tuned on this GPU model, other versions"
SHIPPED = "shipped table of this GPU model"
COUSIN = "shipped table of the nearest GPU model"
_ORIGINS = (HERE, MODEL, SHIPPED, COUSIN)


@dataclass(frozen=True)
class TunedEntry:
    """A config that won at a workload.

    Attributes:
        origin: where that is known from, one of `_ORIGINS`.
        gpu: the name of the GPU.
        us: the time of a call.
        ratio: cuBLAS's time over it.
        when: the date of the measurement.
    """

    origin: str
    gpu: str
    workload: Workload
    kernel: str
    config: str
    us: float
    ratio: float
    when: str


@dataclass(frozen=True)
class Choice:
    """A kernel with its config as text ("": the kernel's own), and why it was chosen."""

    kernel: str
    config: str
    why: str


class TuningIndex:
    """All that is known of one GPU: the winners in the store, and those in shipped tables.

    A call does not say whether its weights are in L2. What was measured with warm weights decides,
    as for calls that are repeated; what won with cold ones stands in at a workload that was not
    tuned with warm ones, before what won at neighbours.

    A call with an epilogue takes what won with that epilogue at its workload (with its activation,
    and with a bias and a residual where it has them), and else what the bare product takes. Nothing
    else is carried from one epilogue to another.
    """

    def __init__(self, gpu: Gpu, store: Path | None = None, tables: Path | None = None) -> None:
        self.gpu = gpu
        self.machine = machine_of(gpu)
        self.entries = tuple(_from_store(gpu, store)) + tuple(
            _from_tables(gpu, TABLES if tables is None else tables)
        )
        self._plain = [entry for entry in self.entries if entry.workload.is_plain]
        self._own: dict[Workload, list[TunedEntry]] = {}  # of this model of GPU
        for entry in self.entries:
            if entry.origin != COUSIN:
                self._own.setdefault(entry.workload, []).append(entry)
        self._choices: dict[Workload, tuple[Choice, ...]] = {}

    def choices(self, workload: Workload) -> tuple[Choice, ...]:
        """The kernels and configs for a workload, the best first; empty where nothing is known."""
        found = self._choices.get(workload)
        if found is None:
            found = self._choices[workload] = tuple(self._ranked(workload))
        return found

    def pruned_reason(self, kernel: str, workload: Workload, problem: Problem) -> str | None:
        """Why a kernel that can run a product of this workload had better not; None if it may.

        Where the workload was tuned, its packed operands have decided, if they are copied too.
        """
        from .search import prune

        reason = default_kernel.pruned_reason(kernel, problem)
        if reason and any(_bare(e.workload) == _bare(workload) for e in self.entries):
            packed = prune.problem(workload)
            return reason if default_kernel.pruned_reason(kernel, packed) is None else None
        return reason

    def steps(self, workload: Workload) -> list[tuple[str, str]]:
        """The way to the choice, for people: every place that was looked in, and what is there."""
        bare = _bare(workload)
        steps = self._places(workload) if workload.epilogue else []
        for origin in _ORIGINS:
            there = [entry for entry in self._of_kind(bare) if entry.origin == origin]
            steps.append((origin, self._describe_place(there, bare)))
        cold = replace(bare, weights="cold")
        steps += self._places(cold) if self._of_kind(cold) else []

        ranked = self._by_model(bare)
        if ranked:
            message = (
                f"of {len(ranked)} configs that won at some shape, {_brief(ranked[0])} is "
                "predicted to be the fastest here"
            )
        else:
            message = "no config that won at some shape runs here"
        return [*steps, ("model", message)]

    def _places(self, workload: Workload) -> list[tuple[str, str]]:
        """What is known of calls under a workload's conditions, a step for each place that has
        something.
        """
        steps = []
        for origin in _ORIGINS:
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
            yield from self._by_model(_bare(workload))[:SHORTLIST]

    def _found(self, workload: Workload) -> Iterator[Choice]:
        """What was tuned, and so may be found twice."""
        if workload.epilogue:
            yield from self._measured(workload)
            workload = _bare(workload)
        yield from self._measured(workload)
        if not self._exact(workload):
            yield from self._carried(workload)

    def _measured(self, workload: Workload) -> Iterator[Choice]:
        """What won at the workload with warm weights, or else with cold ones."""
        for weights in WEIGHTS:
            asked = replace(workload, weights=weights)
            if exact := self._exact(asked):
                yield from self._tuned(exact, asked)
                return

    def _exact(self, workload: Workload) -> list[TunedEntry]:
        """What won at the workload itself.

        Whoever tuned one kernel has measured nothing of the others: all that is known of a workload
        competes.
        """
        return _best_by_kernel(self._own.get(workload, ()))

    def _tuned(self, exact: Sequence[TunedEntry], workload: Workload) -> Iterator[Choice]:
        """What was tuned for the workload itself and, should that fail, the nearest of
        each origin.
        """
        same_kind = self._of_kind(workload)
        found = list(exact)
        for origins in ((HERE, MODEL), (SHIPPED,), (COUSIN,)):
            there = [entry for entry in same_kind if entry.origin in origins]
            found += _nearest(there, workload)
        for entry in found:
            if distance(entry.workload, workload) <= REACH:
                yield Choice(entry.kernel, entry.config, self._why(entry, workload))

    def _carried(self, workload: Workload) -> list[Choice]:
        """What won at neighbours, the fastest here first.

        The time here is the time that the neighbour took, times the model's ratio of both. Where
        the model predicts nothing, the nearest come first. Other models of GPU come last.
        """
        near = [
            entry
            for entry in self._plain
            if _is_akin(entry, workload) and distance(entry.workload, workload) <= REACH
        ]
        near.sort(
            key=lambda entry: (distance(entry.workload, workload), entry.workload, -entry.ratio)
        )
        own = [entry for entry in near if entry.origin != COUSIN]
        cousins = [entry for entry in near if entry.origin == COUSIN]
        return self._weighed(own[:NEIGHBOURS], workload) + self._weighed(
            cousins[:NEIGHBOURS], workload
        )

    def _weighed(self, near: Sequence[TunedEntry], workload: Workload) -> list[Choice]:
        """The choices that neighbours make, by the time that each is expected to take here."""
        found: list[tuple[float, Choice]] = []
        shares = []  # the production kernel's times over the model's
        for entry in near:
            here = self._predicted(entry.kernel, entry.config, workload)
            there = self._predicted(entry.kernel, entry.config, entry.workload)
            us, why = math.inf, self._why(entry, workload)
            if here is not None and there is not None:
                us = entry.us * here / there
                why += f", {us:.1f} µs expected here"
                if entry.kernel == PRODUCTION:
                    shares.append(entry.us / there)
            found.append((us, Choice(entry.kernel, entry.config, why)))

        by_rule = self._predicted(PRODUCTION, "", workload) if shares else None
        if by_rule is not None:
            us = by_rule * statistics.median(shares)
            why = f"its own heuristic, {us:.1f} µs expected from the times of neighbouring shapes"
            found.append((us, Choice(PRODUCTION, "", why)))
        return [choice for _, choice in sorted(found, key=lambda pair: pair[0])]

    def _predicted(self, kernel: str, config: str, workload: Workload) -> float | None:
        """µs by the model; None where it predicts nothing, or the config does not run."""
        if self.machine is None:
            return None
        footprint = _footprint(kernel, config, workload, self.gpu)
        if isinstance(footprint, str):
            return None
        return cost_model.predict(footprint, workload, self.machine).us

    def _by_model(self, workload: Workload) -> list[Choice]:
        """By the analytic model: what won at some workload with operands of this width, and the
        production kernel's own rule, which is first in a tie.
        """
        width = _width(workload)
        won = [(e.kernel, e.config) for e in self._plain if _width(e.workload) == width]
        rules = [(kernel, "") for kernel, _ in won if kernel == PRODUCTION]
        found: list[tuple[float, Choice]] = []
        for kernel, config in dict.fromkeys(won + rules):
            us = self._predicted(kernel, config, workload)
            if us is not None:
                weight = us if kernel == PRODUCTION else TIE * us
                why = f"analytic model, {us:.1f} µs expected"
                found.append((weight, Choice(kernel, config, why)))
        return [choice for _, choice in sorted(found, key=lambda pair: pair[0])]

    def _describe_place(self, entries: Sequence[TunedEntry], workload: Workload) -> str:
        """What the entries of one origin say of a workload, for people."""
        exact = _best_by_kernel(entry for entry in entries if entry.workload == workload)
        if exact:
            return "; ".join(map(self._describe, exact))
        if not entries:
            same = workload.out_dtype == workload.operand_dtype
            out = "" if same else f" to {workload.out_dtype}"
            kind = f"{workload.dtype}{out} {workload.layout} {workload.conditions}"
            return f"nothing for {kind.rstrip()}"

        near = _nearest(entries, workload)
        place = near[0].workload
        away = distance(place, workload)
        nearest = f"the nearest tuned shape is {to_text(place.shape)}, {away:.2f} doublings away"
        if away > REACH:
            return f"{nearest}, and only shapes within {REACH} count"
        return f"{nearest}: " + "; ".join(map(self._describe, near))

    def _describe(self, entry: TunedEntry) -> str:
        return f"{_brief(Choice(entry.kernel, entry.config, ''))}, {self._figure(entry)}"

    def _why(self, entry: TunedEntry, workload: Workload) -> str:
        exact = entry.workload.plain == workload.plain
        place = str(entry.workload) if exact else f"neighbour {entry.workload}"
        return f"{entry.origin}, {place}, {self._figure(entry)} there"

    def _figure(self, entry: TunedEntry) -> str:
        """The ratio of a winner, or its time where there is nothing to compare it with."""
        base = base_name(entry.workload, on_gpu=self.gpu.arch > 0)
        return f"{entry.ratio:.3f} × {base}" if base else f"{entry.us:.1f} µs"


def distance(one: Workload, other: Workload) -> float:
    """The distance of two shapes in binary orders of magnitude: doubling one of M, N, K is 1."""
    return math.sqrt(
        sum(math.log2(x / y) ** 2 for x, y in zip(one.shape, other.shape, strict=True))
    )


def mode(given: str | None, environment: str | None) -> Mode:
    """The mode of an argument, or else of OUTBLAS_TUNE; "lookup" by default.

    Raises ValueError for another word.
    """
    name, value = ("tune", given) if given else ("OUTBLAS_TUNE", environment)
    for allowed in MODES:
        if (value or "lookup") == allowed:
            return allowed
    raise ValueError(f"{name} is '{shown(value)}', expected one of {', '.join(MODES)}")


@functools.cache
def tuning_index(device: int) -> TuningIndex:
    """What is known of the GPU of this index, read once in a process.

    A store or a table that cannot be read is left out.
    """
    from .search.gpu import current

    return TuningIndex(current(device))


def clear_cache() -> None:
    """Has stores and tables read anew from now on."""
    tuning_index.cache_clear()


def _from_store(gpu: Gpu, path: Path | None) -> Iterator[TunedEntry]:
    try:
        with Store(path, read_only=True) as store:
            found = store.tuned(gpu)
    except Exception as error:  # a caller of matmul must not hear of it as an exception
        warnings.warn(f"outblas cannot read its tuning store: {error}", stacklevel=2)
        return
    kernels_here = {kernel for kernel in {each.kernel for each in found} if registered(kernel)}
    for each in reversed(found):
        if each.kernel in kernels_here:
            yield TunedEntry(
                HERE if each.gpu == gpu else MODEL,
                gpu.name,
                each.workload,
                each.kernel,
                each.config,
                each.us,
                each.ratio,
                each.when,
            )


def _from_tables(gpu: Gpu, folder: Path) -> Iterator[TunedEntry]:
    tables = []
    for path in sorted(folder.glob("*.json")):
        try:
            tables.append(read_table(path))
        except (ValueError, OSError) as error:
            warnings.warn(f"outblas ignores the tuning table {path.name}: {error}", stacklevel=2)
    own = [table for table in tables if table.gpu.model == gpu.model]
    cousins = [
        table for table in tables if table.gpu.arch == gpu.arch and table.gpu.model != gpu.model
    ]
    nearest = sorted(cousins, key=lambda table: (abs(table.gpu.sms - gpu.sms), table.gpu.name))[:1]
    for origin, chosen in ((SHIPPED, own), (COUSIN, nearest)):
        for table in chosen:
            for each in table.entries:
                yield TunedEntry(
                    origin,
                    table.gpu.name,
                    each.workload,
                    each.kernel,
                    each.config,
                    each.us,
                    each.ratio,
                    each.when,
                )


def _width(workload: Workload) -> tuple[int, bool]:
    """Bytes of an operand's element, and whether it may be rounded to tf32."""
    return (2 if workload.dtype in ("bfloat16", "float16") else 4), workload.dtype == "tf32"


def _bare(workload: Workload) -> Workload:
    """The product that a call with an epilogue is taken for where nothing was tuned with that
    epilogue: warm, and of as many columns as the call stores.
    """
    plain = workload.plain
    return replace(plain, N=plain.N // 2) if workload.steps.activation in GATED else plain


def _is_akin(entry: TunedEntry, workload: Workload) -> bool:
    """Whether a winner at a plain product tells something of a workload's dtype and layout.

    To the production kernel all layouts and dtypes of 16 bits are alike.
    """
    if entry.workload.kind == workload.kind:
        return True
    return (
        entry.kernel == PRODUCTION
        and _width(entry.workload) == _width(workload)
        and (entry.workload.out_dtype == "float32") == (workload.out_dtype == "float32")
    )


def _best_by_kernel(entries: Iterable[TunedEntry]) -> list[TunedEntry]:
    """The entry of the nearest origin for each kernel, the fastest kernel first."""
    found: dict[str, TunedEntry] = {}
    for entry in sorted(entries, key=lambda entry: _ORIGINS.index(entry.origin)):
        found.setdefault(entry.kernel, entry)
    return sorted(found.values(), key=lambda entry: -entry.ratio)


def _nearest(entries: Sequence[TunedEntry], workload: Workload) -> list[TunedEntry]:
    """What won at the nearest workload, the fastest kernel first."""
    if not entries:
        return []
    place = min((e.workload for e in entries), key=lambda w: (distance(w, workload), w))
    return _best_by_kernel(entry for entry in entries if entry.workload == place)


def unsupported_reason(kernel: str, config: str, workload: Workload, gpu: Gpu) -> str | None:
    """Why a kernel does not take a workload of packed operands with a config on a GPU; None if it
    does.
    """
    found = _footprint(kernel, config, workload, gpu)
    return found if isinstance(found, str) else None


def _footprint(kernel: str, config: str, workload: Workload, gpu: Gpu) -> Footprint | str:
    """What a config asks of a GPU, or why it cannot run there."""
    from ..core.configs import from_text

    try:
        module, space = _space(kernel, workload, gpu)
        chosen = from_text(module.Config, config) if config else space.own
    except (ValueError, ImportError) as error:
        return str(error)
    reason: str | None = space.invalid_reason(chosen)
    return space.footprint(chosen) if reason is None else reason


@functools.lru_cache(maxsize=64)
def _space(kernel: str, workload: Workload, gpu: Gpu) -> tuple[ModuleType, Space[Any]]:
    """A kernel's module and its space there. Raises ValueError where it does not run, ImportError
    without its DSL.
    """
    from .search import prune, target

    found = target.of(kernel)
    prune.check(found, workload, gpu)
    module = found.load()
    return module, module.space(prune.problem(workload), machine_of(gpu))


def remarks(kernel: str, workload: Workload) -> list[str]:
    """What a kernel does for a workload beside the product, in words; empty where it does
    nothing else.
    """
    from .search import prune, target

    try:
        found = getattr(target.of(kernel).load(), "remarks", None)
    except (ValueError, ImportError):
        return []
    return found(prune.problem(workload)) if found else []


def suited(choice: Choice, workload: Workload, problem: Problem) -> str:
    """The config of a choice as it suits the operands of a call.

    The config was measured with packed operands. Where rows of the call's operands begin inside of
    cache lines and those of packed ones do not, or the other way, it is "": the production kernel's
    own rule, which goes by these lines.
    """
    if choice.kernel != PRODUCTION:
        return choice.config
    from .search import prune

    try:
        from ..hopper.gemm.operand_copies import cache_lines_per_row
    except ImportError:  # whoever loads the kernel says so
        return choice.config
    packed = prune.problem(workload)
    return choice.config if cache_lines_per_row(problem) == cache_lines_per_row(packed) else ""


def limits(kernel: str, config: str, workload: Workload, gpu: Gpu) -> str:
    """What the model says bounds a config; empty where it predicts nothing."""
    footprint, machine = _footprint(kernel, config, workload, gpu), machine_of(gpu)
    if isinstance(footprint, str) or machine is None:
        return ""
    return cost_model.predict(footprint, workload, machine).limits


def _brief(choice: Choice) -> str:
    """A kernel with the fields of its config that differ from its own."""
    config = short(choice.kernel, choice.config) if choice.config else ""
    return f"{choice.kernel}[{config}]" if config else choice.kernel


def short(kernel: str, config: str) -> str:
    """The fields of a config that differ from the kernel's own; the whole text where the kernel is
    not at hand.
    """
    from ..core.configs import brief, from_text
    from .search import target

    try:
        return brief(from_text(target.of(kernel).load().Config, config))
    except (ValueError, ImportError):
        return config
