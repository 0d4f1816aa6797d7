"""The memory cost of the layouts of CUDA-core rungs: the predictions of `kernels.simt_access` next
to ncu's counts.

Shared memory: wavefronts of a launch, and the excess that bank conflicts add. Global memory:
transactions of 128 bytes per request of a warp, and efficiency as document 003 defines it: bytes
that lanes request divided by bytes of the transactions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from ..core import configs, progress, registry
from ..core.shapes import Shape
from ..device.access import LINE, Shared
from .access_cases import Case, cases, problem_of, same_addresses
from .profiles import Profile, Total
from .text import NONE

if TYPE_CHECKING:
    from ..kernels.simt_access import Request
    from ..kernels.simt_config import SimtConfig

WITHIN = 0.02  # counts agree if they differ by at most this fraction of the prediction
VECTORIZED = "simt.vectorized"
# Configs of simt.vectorized with conflicts in stores and loads, in loads only, in stores only, in
# neither.
SQUARE = ("pad=0,piece_n=8", "piece_n=8", "pad=0", "")
STAGED = (
    *((VECTORIZED, config) for config in SQUARE),
    ("simt.warptile", "pad=0"),
    ("simt.warptile", ""),
    ("simt.pipelined", ""),
)
DIRECT = (("simt.naive", ""), ("simt.coalesced", ""))
OPERATIONS = ("load", "store")

_VERDICT = f"within\n{WITHIN:.0%}"
SQUARE_COLUMNS = (VECTORIZED, "at", *(f"{op}s: excess,\nours / ncu" for op in OPERATIONS))
CONFLICT_COLUMNS = (
    "kernel",
    "config",
    "at",
    "shared",
    "an instruction:\nideal+excess",
    "gl.bank_\nconflicts",
    "wavefronts, M:\nours / ncu",
    "excess, M:\nours / ncu",
    _VERDICT,
)
COALESCING_COLUMNS = (
    "kernel",
    "config",
    "at",
    "global",
    "bytes\na lane",
    "transactions a request:\nours / ncu",
    "efficiency:\nours / ncu",
    _VERDICT,
)
CONFLICTS_NOTE = (
    "an instruction of a warp takes its ideal wavefronts and an excess that bank conflicts add; "
    "gl.bank_conflicts: "
    "further passes for each ideal one, which it cannot count where rows are padded; "
    f"within {WITHIN:.0%} of our wavefronts: the difference of ncu's excess and ours"
)
COALESCING_NOTE = (
    "a transaction has 128 bytes; efficiency: the bytes that the lanes of a warp request, divided "
    "by the bytes of the transactions (as in 003, a word that all lanes request counts 32 times); "
    f"within {WITHIN:.0%}: whether ncu's transactions and ours agree"
)


@dataclass(frozen=True)
class Conflicts:
    """The loads, or the stores, of shared memory: per warp and k tile by operand, and for a whole
    launch.

    `triton` has the counts of `gl.bank_conflicts` by operand; None where it cannot count.
    """

    case: Case
    operation: str
    of_warp: Mapping[str, Shared]
    predicted: Shared
    measured: Shared | None
    triton: Mapping[str, int] | None

    @property
    def within(self) -> bool | None:
        """Whether the measured excess agrees with the predicted one; None if not measured."""
        if self.measured is None:
            return None
        return (
            abs(self.measured.excess - self.predicted.excess) <= WITHIN * self.predicted.wavefronts
        )

    @property
    def triton_agrees(self) -> bool | None:
        """Whether `gl.bank_conflicts` counts the same excess; None where it cannot count."""
        if self.triton is None:
            return None
        return all(
            each.excess == self.triton[operand] * each.ideal
            for operand, each in self.of_warp.items()
        )

    def shares(self) -> str:
        """Returns the excess as a fraction of all wavefronts: ours / ncu."""
        return _beside(self, lambda of: f"{of.excess / max(of.wavefronts, 1):.1%}")

    def cells(self) -> tuple[str, ...]:
        """The cells of the row, in the order of CONFLICT_COLUMNS."""
        one = ", ".join(
            f"{operand} {each.ideal / each.instructions:g}+{each.excess / each.instructions:g}"
            for operand, each in self.of_warp.items()
        )
        return (
            *self.case.cells(),
            f"{self.operation}s",
            one,
            self._triton(),
            _beside(self, lambda of: _mega(of.wavefronts)),
            _beside(self, lambda of: _mega(of.excess)),
            _yes_or_no(self.within),
        )

    def _triton(self) -> str:
        if self.triton is None:
            return "cannot count"
        passes = ", ".join(f"{operand} {count}" for operand, count in self.triton.items())
        return passes if self.triton_agrees else f"{passes}: disagrees"

    def record(self) -> dict[str, Any]:
        """Returns the row as a JSON object. Counts by operand are per warp and k tile, the others
        per launch.
        """
        return {
            **self.case.record(),
            "operation": self.operation,
            "operands": {operand: _counts(each) for operand, each in self.of_warp.items()},
            "bank_conflicts": None if self.triton is None else dict(self.triton),
            "bank_conflicts_agree": self.triton_agrees,
            "predicted": _counts(self.predicted),
            "measured": None if self.measured is None else _counts(self.measured),
            "within": self.within,
        }


@dataclass(frozen=True)
class Lines:
    """ncu's counts for a warp's request to global memory: transactions of 128 bytes, sectors of 32
    bytes, and the efficiency.
    """

    transactions: float
    sectors: float
    efficiency: float


@dataclass(frozen=True)
class Coalescing:
    """One kind of access to global memory: "A load", "B load" or "out store"."""

    case: Case
    access: str
    predicted: Request
    measured: Lines | None

    @property
    def within(self) -> bool | None:
        """Whether a request takes the predicted transactions; None if it was not measured."""
        if self.measured is None:
            return None
        return (
            abs(self.measured.transactions - self.predicted.transactions)
            <= WITHIN * self.predicted.transactions
        )

    def cells(self) -> tuple[str, ...]:
        """The cells of the row, in the order of COALESCING_COLUMNS."""
        return (
            *self.case.cells(),
            self.access,
            str(self.predicted.bytes),
            _beside(self, lambda of: f"{of.transactions:.3g}"),
            _beside(self, lambda of: f"{of.efficiency:.1%}"),
            _yes_or_no(self.within),
        )

    def record(self) -> dict[str, Any]:
        """The row as a JSON object."""
        return {
            **self.case.record(),
            "access": self.access,
            "predicted": {**asdict(self.predicted), "efficiency": self.predicted.efficiency},
            "measured": None if self.measured is None else asdict(self.measured),
            "within": self.within,
        }


def conflicts(profiles: Iterable[Profile]) -> list[Conflicts]:
    """Two rows for each configuration that stages its operands: the configurations of STAGED, then
    the others that were profiled.

    Raises ValueError for a profile of a configuration that no longer exists.
    """
    from ..kernels import simt_access

    found = []
    for case in progress.counted(cases(profiles, STAGED), _named("conflicts")):
        accesses = simt_access.in_shared(case.config, case.problem)
        if not accesses:
            continue
        counted = _bank_conflicts(case.config, case.dtype, case.layout, case.shape)
        for operation in OPERATIONS:
            names = {operand: f"{operand} {operation}" for operand in "AB"}
            of_warp = {operand: accesses[name] for operand, name in names.items()}
            triton = (
                {operand: counted[name] for operand, name in names.items()} if counted else None
            )
            predicted = _launch(case, operation, of_warp.values())
            found.append(
                Conflicts(
                    case, operation, of_warp, predicted, _passes(case.memory, operation), triton
                )
            )
    return found


def square(rows: Iterable[Conflicts]) -> list[tuple[str, ...]]:
    """A row for each config of SQUARE, in the order of SQUARE_COLUMNS."""
    forms = [
        same_addresses(configs.from_text(registry.load(VECTORIZED).Config, form)) for form in SQUARE
    ]
    shares: dict[Case, list[str]] = {}
    for row in rows:
        if row.case.kernel == VECTORIZED and same_addresses(row.case.config) in forms:
            shares.setdefault(row.case, []).append(row.shares())
    return [
        (f"pad={case.config.pad},piece_n={case.config.piece_n}", case.cells()[-1], *of)
        for case, of in shares.items()
    ]


def coalescing(profiles: Iterable[Profile]) -> list[Coalescing]:
    """Three rows for each configuration: the configurations of DIRECT, then the others that were
    profiled.

    Raises ValueError for a profile of a configuration that no longer exists.
    """
    from ..kernels import simt_access

    return [
        Coalescing(case, access, predicted, _lines(case.memory, access))
        for case in progress.counted(cases(profiles, DIRECT), _named("coalescing"))
        for access, predicted in simt_access.in_global(case.config, case.problem).items()
    ]


def _named(what: str) -> Callable[[Case], str]:
    """Returns a function that names a case for progress: "simt.vectorized, conflicts"."""
    return lambda case: f"{case.kernel}, {what}"


def _launch(case: Case, operation: str, of_warp: Iterable[Shared]) -> Shared:
    """Returns the accesses of all warps and CTAs to both operands."""
    (m, n, k), c = case.shape, case.config
    k_tiles: float = -(-k // c.block_k)
    if case.kernel == "simt.pipelined":
        # Its loop processes k tiles in pairs. Before it, one tile is stored, and one term of K is
        # read.
        pairs = -(-k // (2 * c.block_k))
        k_tiles = 1 + 2 * pairs if operation == "store" else 2 * pairs + 1 / c.block_k
    times = k_tiles * c.num_warps * -(-m // c.block_m) * -(-n // c.block_n)
    total = sum(of_warp, Shared(0, 0, 0))
    return Shared(
        *(round(times * each) for each in (total.instructions, total.wavefronts, total.ideal))
    )


def _passes(memory: Sequence[Total] | None, operation: str) -> Shared | None:
    """Returns ncu's counts in shared memory for all operands; None if it did not count."""
    if memory is None:
        return None
    found = [t for t in memory if (t.space, t.operation) == ("shared", operation)]
    requests, wavefronts, ideal = (
        _sum(getattr(t, name) for t in found) for name in ("requests", "wavefronts", "ideal")
    )
    if requests is None or wavefronts is None or ideal is None:
        return None
    return Shared(round(requests), round(wavefronts), round(ideal))


def _lines(memory: Sequence[Total] | None, access: str) -> Lines | None:
    """Returns ncu's counts for an operand in global memory; None if it did not count, or if
    operands are not known.
    """
    operand, operation = access.split()
    found = [
        t
        for t in memory or ()
        if (t.operand, t.space, t.operation) == (operand, "global", operation)
    ]
    requests, transactions, sectors = (
        _sum(getattr(t, name) for t in found) for name in ("requests", "transactions", "sectors")
    )
    if (
        not requests
        or not transactions
        or sectors is None
        or any(t.efficiency is None for t in found)
    ):
        return None
    requested = sum((t.efficiency or 0.0) * (t.transactions or 0.0) * LINE for t in found)
    return Lines(transactions / requests, sectors / requests, requested / (transactions * LINE))


def _sum(values: Iterable[float | None]) -> float | None:
    """Returns the sum of the values; None if any of them is None."""
    total = 0.0
    for value in values:
        if value is None:
            return None
        total += value
    return total


@cache
def _bank_conflicts(
    config: SimtConfig, dtype: str, layout: str, shape: Shape
) -> dict[str, int] | None:
    """Returns Gluon's counts for the same maps to plain rows in shared memory, by access as in
    `simt_access.in_shared`; None where rows are padded.
    """
    if config.pad:
        return None
    import torch
    from triton.experimental.gluon import language as gl

    from ..device.access import k_block_reads
    from ..device.gluon import registers
    from ..device.triton_artifact import bank_conflicts
    from ..kernels.simt_maps import maps

    held = maps(config, problem_of(dtype, layout, shape))
    read, columns = (
        k_block_reads(held.outputs, config.block_k, axis) for axis in (0, 1)
    )  # terms × rows, terms × columns
    of = {"A store": held.a.transposed(), "B store": held.b, "A load": read, "B load": columns}
    if not config.transpose_a:
        of |= {"A store": held.a, "A load": read.transposed()}
    rows = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return {
        name: bank_conflicts(registers(each), rows, each.shape, torch.float32)
        for name, each in of.items()
    }


def _counts(of: Shared) -> dict[str, int]:
    return {**asdict(of), "excess": of.excess}


def _beside(row: Conflicts | Coalescing, say: Callable[[Any], str]) -> str:
    return " / ".join(NONE if of is None else say(of) for of in (row.predicted, row.measured))


def _mega(value: int) -> str:
    """Formats a count in millions."""
    return f"{value / 1e6:,.1f}" if value >= 1e7 else f"{value / 1e6:.3g}"


def _yes_or_no(within: bool | None) -> str:
    return NONE if within is None else "yes" if within else "no"
