"""Which kernel and config a call takes: what was tuned here, what a table says, what the model
thinks.
"""

import functools
import math
import statistics
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ..core.ownership import shown
from ..core.problem import Problem
from ..core.shapes import to_text
from ..core.space import Footprint, Space
from ..runtime.default_kernel import MODES, PRODUCTION, Mode, pruned_reason
from .search import cost_model
from .search.gpu import machine as machine_of
from .search.target import registered
from .store.records import Gpu, Workload
from .store.store import Store
from .store.tables import TABLES, read_table

REACH = 1.5  # the farthest tuned shape that speaks for another, in binary orders of magnitude
NEIGHBOURS = 12  # winners, at most, that are weighed for a shape
TIE = 1.06  # model's times so near decide nothing: the production kernel's calls cost the host less
SHORTLIST = 3  # alternatives that a choice keeps for calls which the first cannot take

HERE = "tuned on this GPU"
MODEL = "tuned on this GPU model, other versions"
SHIPPED = "shipped table of this GPU model"
COUSIN = "shipped table of the nearest GPU model"
_ORIGINS = (HERE, MODEL, SHIPPED, COUSIN)


@dataclass(frozen=True)
class Known:
    """A config that won at a workload, where that is known from, its µs, and cuBLAS's time over its
    own.
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


class Knowledge:
    """All that is known of one GPU: from the store, and from shipped tables."""

    def __init__(self, gpu: Gpu, store: Path | None = None, tables: Path | None = None) -> None:
        self.gpu = gpu
        self.machine = machine_of(gpu)
        self.known = tuple(_from_store(gpu, store)) + tuple(
            _from_tables(gpu, TABLES if tables is None else tables)
        )
        self._choices: dict[Workload, tuple[Choice, ...]] = {}

    def choices(self, workload: Workload) -> tuple[Choice, ...]:
        """The best first; empty where nothing is known."""
        found = self._choices.get(workload)
        if found is None:
            found = self._choices[workload] = tuple(self._ranked(workload))
        return found

    def objection(self, kernel: str, workload: Workload, problem: Problem) -> str | None:
        """Why a kernel had better not take a product of this workload, or None, by
        `default_kernel.pruned_reason`. Where the workload was tuned, its packed operands have
        decided, if they are copied too.
        """
        from .search import prune

        reason = pruned_reason(kernel, problem)
        if reason and any(known.workload == workload for known in self.known):
            return reason if pruned_reason(kernel, prune.problem(workload)) is None else None
        return reason

    def steps(self, workload: Workload) -> list[tuple[str, str]]:
        """The path to the choice, for people: every place that was looked in, and what it said."""
        said = []
        alike = [known for known in self.known if known.workload.kind == workload.kind]
        for origin in _ORIGINS:
            there = [known for known in alike if known.origin == origin]
            exact = _best_by_kernel(known for known in there if known.workload == workload)
            if exact:
                said.append((origin, "; ".join(_describe(known) for known in exact)))
                continue
            near = _nearest(there, workload)
            if not there:
                said.append((origin, f"nothing for {' '.join(workload.kind)}"))
            elif distance(near[0].workload, workload) <= REACH:
                place = (
                    f"{distance(near[0].workload, workload):.2f} from "
                    f"{to_text(near[0].workload.shape)}"
                )
                said.append((origin, f"{place}: " + "; ".join(_describe(known) for known in near)))
            else:
                away = distance(near[0].workload, workload)
                said.append(
                    (
                        origin,
                        f"nearest is {near[0].workload}, {away:.2f} away, expected at most {REACH}",
                    )
                )
        ranked = self._by_model(workload)
        if ranked:
            said.append(
                (
                    "model",
                    f"{_brief(ranked[0])} is the fastest of {len(ranked)} configs that won "
                    "somewhere",
                )
            )
        else:
            said.append(("model", "no config that won somewhere runs here"))
        return said

    def _ranked(self, workload: Workload) -> Iterator[Choice]:
        # Who tuned one kernel has said nothing of the others: of one workload, all that is known
        # competes.
        own = [known for known in self.known if known.origin != COUSIN]
        exact = _best_by_kernel(known for known in own if known.workload == workload)
        seen = set()
        for choice in self._tuned(exact, workload) if exact else self._carried(workload):
            key = choice.kernel, choice.config
            if key not in seen:
                seen.add(key)
                yield choice
        if not seen:
            yield from self._by_model(workload)[:SHORTLIST]

    def _tuned(self, exact: Sequence[Known], workload: Workload) -> Iterator[Choice]:
        """What was tuned for the workload itself and, should that fail, the nearest of
        each origin.
        """
        alike = [known for known in self.known if known.workload.kind == workload.kind]
        found = list(exact)
        for origins in ((HERE, MODEL), (SHIPPED,), (COUSIN,)):
            found += _nearest([known for known in alike if known.origin in origins], workload)
        for known in found:
            if distance(known.workload, workload) <= REACH:
                yield Choice(known.kernel, known.config, _why(known, workload))

    def _carried(self, workload: Workload) -> list[Choice]:
        """What won at neighbours, the fastest here first: by the time it took there, and by the
        model's opinion of how much longer it takes here. Where the model has none, the nearest
        first. Other models of GPU come last.
        """
        near = [
            k for k in self.known if _akin(k, workload) and distance(k.workload, workload) <= REACH
        ]
        near.sort(key=lambda k: (distance(k.workload, workload), k.workload, -k.ratio))
        own = [known for known in near if known.origin != COUSIN]
        cousins = [known for known in near if known.origin == COUSIN]
        return self._weighed(own[:NEIGHBOURS], workload) + self._weighed(
            cousins[:NEIGHBOURS], workload
        )

    def _weighed(self, near: Sequence[Known], workload: Workload) -> list[Choice]:
        found = list[tuple[float, Choice]]()
        shares = []  # of the model's time that the production kernel took
        for known in near:
            here, then = (
                self._predicted(known.kernel, known.config, w) for w in (workload, known.workload)
            )
            us, why = math.inf, _why(known, workload)
            if here is not None and then is not None:
                us = known.us * here / then
                why += f", {us:.1f} µs expected here"
                shares += [known.us / then] if known.kernel == PRODUCTION else []
            found.append((us, Choice(known.kernel, known.config, why)))
        ruled = self._predicted(PRODUCTION, "", workload) if shares else None
        if ruled is not None:
            us = ruled * statistics.median(shares)
            found.append(
                (
                    us,
                    Choice(
                        PRODUCTION,
                        "",
                        f"its own rule, {us:.1f} µs expected by what neighbours took",
                    ),
                )
            )
        return [choice for _, choice in sorted(found, key=lambda pair: pair[0])]

    def _predicted(self, kernel: str, config: str, workload: Workload) -> float | None:
        """µs by the model; None where it has no opinion, or the config does not run."""
        if self.machine is None:
            return None
        footprint = _footprint(kernel, config, workload, self.gpu)
        return (
            None
            if isinstance(footprint, str)
            else cost_model.predict(footprint, workload, self.machine).us
        )

    def _by_model(self, workload: Workload) -> list[Choice]:
        """By the analytic model: what won at some workload with operands of this width, and the
        production kernel's own rule, which is first in a tie.
        """
        won = [(k.kernel, k.config) for k in self.known if _width(k.workload) == _width(workload)]
        found: list[tuple[float, Choice]] = []
        for kernel, config in dict.fromkeys(
            won + [(kernel, "") for kernel, _ in won if kernel == PRODUCTION]
        ):
            us = self._predicted(kernel, config, workload)
            if us is not None:
                rank = us if kernel == PRODUCTION else TIE * us
                found.append(
                    (rank, Choice(kernel, config, f"analytic model, {us:.1f} µs expected"))
                )
        return [choice for _, choice in sorted(found, key=lambda pair: pair[0])]


def distance(one: Workload, other: Workload) -> float:
    """Between shapes, in binary orders of magnitude: doubling one of M, N, K is 1."""
    return math.sqrt(
        sum(math.log2(x / y) ** 2 for x, y in zip(one.shape, other.shape, strict=True))
    )


def mode(given: str | None, environment: str | None) -> Mode:
    """From an argument, or else OUTBLAS_TUNE; "lookup" by default. Raises ValueError for another
    word.
    """
    name, value = ("tune", given) if given else ("OUTBLAS_TUNE", environment)
    for known in MODES:
        if (value or "lookup") == known:
            return known
    raise ValueError(f"{name} is '{shown(value)}', expected one of {', '.join(MODES)}")


@functools.cache
def knowledge(index: int) -> Knowledge:
    """Of the GPU of this index, read once in a process. Whatever is wrong with the store or a
    table, it is left out.
    """
    from .search.gpu import current

    return Knowledge(current(index))


def forget() -> None:
    """Reads stores and tables anew from now on."""
    knowledge.cache_clear()


def _from_store(gpu: Gpu, path: Path | None) -> Iterator[Known]:
    try:
        with Store(path, read_only=True) as store:
            found = store.tuned(gpu)
    except Exception as error:  # a caller of matmul must not hear of it as an exception
        warnings.warn(f"outblas reads no tuning store: {error}", stacklevel=2)
        return
    here = {kernel for kernel in {each.kernel for each in found} if registered(kernel)}
    for each in reversed(found):
        if each.kernel in here:
            origin = HERE if each.gpu == gpu else MODEL
            yield Known(
                origin,
                gpu.name,
                each.workload,
                each.kernel,
                each.config,
                each.us,
                each.ratio,
                each.when,
            )


def _from_tables(gpu: Gpu, folder: Path) -> Iterator[Known]:
    tables = []
    for path in sorted(folder.glob("*.json")):
        try:
            tables.append(read_table(path))
        except (ValueError, OSError) as error:
            warnings.warn(f"outblas leaves out the tuning table {path.name}: {error}", stacklevel=2)
    own = [table for table in tables if table.gpu.model == gpu.model]
    cousins = [
        table for table in tables if table.gpu.arch == gpu.arch and table.gpu.model != gpu.model
    ]
    nearest = sorted(cousins, key=lambda table: (abs(table.gpu.sms - gpu.sms), table.gpu.name))[:1]
    for origin, chosen in ((SHIPPED, own), (COUSIN, nearest)):
        for table in chosen:
            for e in table.entries:
                yield Known(
                    origin, table.gpu.name, e.workload, e.kernel, e.config, e.us, e.ratio, e.when
                )


def _width(workload: Workload) -> tuple[int, bool]:
    """Bytes of an operand's element, and whether it may be rounded to tf32."""
    return (2 if workload.dtype in ("bfloat16", "float16") else 4), workload.dtype == "tf32"


def _akin(known: Known, workload: Workload) -> bool:
    """Whether a winner tells of a workload's dtype and layout: to the production kernel all of 16
    bits are alike.
    """
    if known.workload.kind == workload.kind:
        return True
    wide = [w.out_dtype == "float32" for w in (known.workload, workload)]
    return (
        known.kernel == PRODUCTION
        and _width(known.workload) == _width(workload)
        and wide[0] == wide[1]
    )


def _best_by_kernel(known: Iterable[Known]) -> list[Known]:
    """Of each kernel what is known from nearest by, the fastest kernel first."""
    found: dict[str, Known] = {}
    for each in sorted(known, key=lambda k: _ORIGINS.index(k.origin)):
        found.setdefault(each.kernel, each)
    return sorted(found.values(), key=lambda k: -k.ratio)


def _nearest(known: Sequence[Known], workload: Workload) -> list[Known]:
    """What won at the nearest workload, the fastest kernel first."""
    if not known:
        return []
    place = min((k.workload for k in known), key=lambda w: (distance(w, workload), w))
    return _best_by_kernel(k for k in known if k.workload == place)


def refusal(kernel: str, config: str, workload: Workload, gpu: Gpu) -> str | None:
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

    subject = target.of(kernel)
    prune.check(subject, workload, gpu)
    module = subject.load()
    return module, module.space(prune.problem(workload), machine_of(gpu))


def remarks(kernel: str, workload: Workload) -> list[str]:
    """What a kernel does for a workload beside the product, in words; empty where it says
    nothing.
    """
    from .search import prune, target

    try:
        said = getattr(target.of(kernel).load(), "remarks", None)
    except (ValueError, ImportError):
        return []
    return said(prune.problem(workload)) if said else []


def suited(choice: Choice, workload: Workload, problem: Problem) -> str:
    """The config of a choice or, where rows of the operands begin inside of lines of L2 and those
    of packed ones do not, or the other way, "": the production kernel's rule, which goes by them.
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
    """What the model says bounds a config; empty where it says nothing."""
    footprint, machine = _footprint(kernel, config, workload, gpu), machine_of(gpu)
    if isinstance(footprint, str) or machine is None:
        return ""
    return cost_model.predict(footprint, workload, machine).limits


def _describe(known: Known) -> str:
    return f"{_brief(Choice(known.kernel, known.config, ''))} {known.ratio:.3f} of cuBLAS"


def _brief(choice: Choice) -> str:
    return f"{choice.kernel}[{short(choice.kernel, choice.config)}]"


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


def _why(known: Known, workload: Workload) -> str:
    place = str(workload) if known.workload == workload else f"neighbour {known.workload}"
    return f"{known.origin}, {place}, {known.ratio:.3f} of cuBLAS there"
