"""Which kernel and config a call takes: what was tuned here, what a table says, what the model thinks."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..choice import MODES, Mode
from ..shapes import to_text
from ..space import Footprint
from . import model, transfer
from .gpu import machine as machine_of
from .records import Gpu, Workload
from .store import Store
from .subjects import registered
from .transfer import TABLES

REACH = 1.5  # the farthest tuned shape that speaks for another, in binary orders of magnitude
SHORTLIST = 3  # alternatives that a choice keeps for calls which the first cannot take

HERE = "tuned on this GPU"
MODEL = "tuned on this GPU model, other versions"
SHIPPED = "shipped table of this GPU model"
COUSIN = "shipped table of the nearest GPU model"
_ORIGINS = (HERE, MODEL, SHIPPED, COUSIN)


@dataclass(frozen=True)
class Known:
    """A config that won at a workload, where that is known from, and how fast it was: cuBLAS's time over its own."""

    origin: str
    gpu: str
    workload: Workload
    kernel: str
    config: str
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
        self.known = tuple(_from_store(gpu, store)) + tuple(_from_tables(gpu, TABLES if tables is None else tables))
        self._choices: dict[Workload, tuple[Choice, ...]] = {}

    def choices(self, workload: Workload) -> tuple[Choice, ...]:
        """The best first; empty where nothing is known."""
        found = self._choices.get(workload)
        if found is None:
            found = self._choices[workload] = tuple(self._ranked(workload))
        return found

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
                place = f"{distance(near[0].workload, workload):.2f} from {to_text(near[0].workload.shape)}"
                said.append((origin, f"{place}: " + "; ".join(_describe(known) for known in near)))
            else:
                away = distance(near[0].workload, workload)
                said.append((origin, f"nearest is {near[0].workload}, {away:.2f} away, expected at most {REACH}"))
        ranked = self._by_model(workload)
        if ranked:
            said.append(("model", f"{_brief(ranked[0])} is the fastest of {len(ranked)} configs that won somewhere"))
        else:
            said.append(("model", "no config that won somewhere runs here"))
        return said

    def _ranked(self, workload: Workload) -> Iterator[Choice]:
        alike = [known for known in self.known if known.workload.kind == workload.kind]
        seen = set()
        for origins in ((HERE, MODEL, SHIPPED), (HERE, MODEL), (SHIPPED,), (COUSIN,)):
            there = [known for known in alike if known.origin in origins]
            exact = _best_by_kernel(known for known in there if known.workload == workload)
            near = [k for k in _nearest(there, workload) if distance(k.workload, workload) <= REACH]
            # Who tuned one kernel has said nothing of the others: of one workload, all that is known competes.
            for known in exact if len(origins) == 3 else near:
                key = known.kernel, known.config
                if key not in seen:
                    seen.add(key)
                    yield Choice(*key, f"{known.origin}, {_place(known, workload)}, {known.ratio:.3f} of cuBLAS there")
        if not seen:
            yield from self._by_model(workload)[:SHORTLIST]

    def _by_model(self, workload: Workload) -> list[Choice]:
        """Configs that won at some workload with operands of this width, by the analytic model."""
        if self.machine is None:
            return []
        alike = (known for known in self.known if _width(known.workload) == _width(workload))
        found: list[tuple[float, Choice]] = []
        for kernel, config in dict.fromkeys((known.kernel, known.config) for known in alike):
            footprint = _footprint(kernel, config, workload, self.gpu)
            if not isinstance(footprint, str):
                us = model.predict(footprint, workload, self.machine).us
                found.append((us, Choice(kernel, config, f"analytic model, {us:.1f} µs expected")))
        return [choice for _, choice in sorted(found, key=lambda pair: pair[0])]


def distance(one: Workload, other: Workload) -> float:
    """Between shapes, in binary orders of magnitude: doubling one of M, N, K is 1."""
    return math.sqrt(sum(math.log2(x / y) ** 2 for x, y in zip(one.shape, other.shape, strict=True)))


def mode(given: str | None, environment: str | None) -> Mode:
    """From an argument, or else OUTBLAS_TUNE; "lookup" by default. Raises ValueError for another word."""
    name, value = ("tune", given) if given else ("OUTBLAS_TUNE", environment)
    for known in MODES:
        if (value or "lookup") == known:
            return known
    raise ValueError(f"{name} is {value!r}, expected one of {', '.join(MODES)}")


@functools.cache
def knowledge(index: int) -> Knowledge:
    """Of the GPU of this index, read once in a process. Whatever is wrong with the store or a table, it is left out."""
    from .gpu import current

    return Knowledge(current(index))


def forget() -> None:
    """Reads stores and tables anew from now on."""
    knowledge.cache_clear()


def _from_store(gpu: Gpu, path: Path | None) -> Iterator[Known]:
    try:
        with Store(path, read_only=True) as store:
            winners = store.winners(gpu_name=gpu.name)
    except Exception as error:  # a caller of matmul must not hear of it as an exception
        warnings.warn(f"outblas reads no tuning store: {error}", stacklevel=2)
        return
    for winner in reversed(winners):
        if winner.gpu.model == gpu.model and registered(winner.kernel):
            origin = HERE if winner.gpu == gpu else MODEL
            yield Known(origin, gpu.name, winner.workload, winner.kernel, winner.config, winner.ratio, winner.when)


def _from_tables(gpu: Gpu, folder: Path) -> Iterator[Known]:
    tables = []
    for path in sorted(folder.glob("*.json")):
        try:
            tables.append(transfer.read_table(path))
        except (ValueError, OSError) as error:
            warnings.warn(f"outblas leaves out the tuning table {path.name}: {error}", stacklevel=2)
    own = [table for table in tables if table.gpu.model == gpu.model]
    cousins = [table for table in tables if table.gpu.arch == gpu.arch and table.gpu.model != gpu.model]
    nearest = sorted(cousins, key=lambda table: (abs(table.gpu.sms - gpu.sms), table.gpu.name))[:1]
    for origin, chosen in ((SHIPPED, own), (COUSIN, nearest)):
        for table in chosen:
            for entry in table.entries:
                yield Known(origin, table.gpu.name, entry.workload, entry.kernel, entry.config, entry.ratio, entry.when)


def _width(workload: Workload) -> tuple[int, bool]:
    """Bytes of an operand's element, and whether it may be rounded to tf32."""
    return (2 if workload.dtype in ("bfloat16", "float16") else 4), workload.dtype == "tf32"


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
    """Why a kernel does not take a workload of packed operands with a config on a GPU; None if it does."""
    found = _footprint(kernel, config, workload, gpu)
    return found if isinstance(found, str) else None


def _footprint(kernel: str, config: str, workload: Workload, gpu: Gpu) -> Footprint | str:
    """What a config asks of a GPU, or why it cannot run there."""
    from ..configs import from_text
    from . import prune, subjects

    try:
        subject = subjects.of(kernel)
        prune.check(subject, workload, gpu)
        module = subject.load()
        space = module.space(prune.problem(workload), machine_of(gpu))
        chosen = from_text(module.Config, config)
    except (ValueError, ImportError) as error:
        return str(error)
    reason: str | None = space.invalid_reason(chosen)
    return space.footprint(chosen) if reason is None else reason


def remarks(kernel: str, workload: Workload) -> list[str]:
    """What a kernel does for a workload beside the product, in words; empty where it says nothing."""
    from . import prune, subjects

    try:
        said = getattr(subjects.of(kernel).load(), "remarks", None)
    except (ValueError, ImportError):
        return []
    return said(prune.problem(workload)) if said else []


def limits(kernel: str, config: str, workload: Workload, gpu: Gpu) -> str:
    """What the model says bounds a config; empty where it says nothing."""
    footprint, machine = _footprint(kernel, config, workload, gpu), machine_of(gpu)
    if isinstance(footprint, str) or machine is None:
        return ""
    return model.predict(footprint, workload, machine).limits


def _describe(known: Known) -> str:
    return f"{_brief(Choice(known.kernel, known.config, ''))} {known.ratio:.3f} of cuBLAS"


def _brief(choice: Choice) -> str:
    return f"{choice.kernel}[{short(choice.kernel, choice.config)}]"


def short(kernel: str, config: str) -> str:
    """The fields of a config that differ from the kernel's own; the whole text where the kernel is not at hand."""
    from ..configs import brief, from_text
    from . import subjects

    try:
        return brief(from_text(subjects.of(kernel).load().Config, config))
    except (ValueError, ImportError):
        return config


def _place(known: Known, workload: Workload) -> str:
    return str(workload) if known.workload == workload else f"nearest to it {known.workload}"
