"""The memory cost of the layouts of CUDA-core rungs: the predictions of `kernels.simt_access`
beside ncu's counts.

Shared memory: wavefronts of a launch, and the excess that bank conflicts add. Global memory:
transactions of 128 bytes per request of a warp, and efficiency as document 003 defines it: bytes
that lanes request divided by bytes of the transactions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from outblas.base import configs, registry
from outblas.base.shapes import Shape, to_text
from outblas.core.artifact import example
from outblas.core.problem import Problem
from outblas.device.access import LINE, Shared
from outblas.kernels.simt_config import SimtConfig
from tools.pages.results import Profile, Results
from tools.pages.tables import NONE, devices, table

WITHIN = 0.02  # counts agree if they differ by at most this fraction of the prediction
N, DTYPE, LAYOUT = 4096, "float32", "nn"  # for a prediction without a profile
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

SQUARE_COLUMNS = (VECTORIZED, "at", *(f"{op}s: excess, ours / ncu" for op in OPERATIONS))
CONFLICT_COLUMNS = (
    "kernel",
    "config",
    "at",
    "shared",
    "an instruction: ideal+excess",
    "gl.bank_conflicts",
    "wavefronts, M: ours / ncu",
    "excess, M: ours / ncu",
)
COALESCING_COLUMNS = (
    "kernel",
    "config",
    "at",
    "global",
    "bytes a lane",
    "transactions a request: ours / ncu",
    "efficiency: ours / ncu",
    f"within {WITHIN:.0%}",
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
class Case:
    """A kernel in one config at one shape, and its profile with `memory` (None: only predicted)."""

    kernel: str
    config: SimtConfig
    shape: Shape = (N, N, N)
    dtype: str = DTYPE
    layout: str = LAYOUT
    profile: Profile | None = None

    @property
    def problem(self) -> Problem:
        """The GEMM, on tensors without data."""
        return _problem(self.dtype, self.layout, self.shape)

    def cells(self) -> tuple[str, str, str]:
        """The kernel, its config, and the shape; dtype and layout only where they are not the usual
        ones.
        """
        usual = ((self.dtype, DTYPE), (self.layout, LAYOUT))
        other = [value for value, default in usual if value != default]
        gpu = [self.profile.gpu] if self.profile else []
        place = ", ".join([to_text(self.shape), *other, *gpu])
        return self.kernel, configs.brief(self.config) or NONE, place


@dataclass(frozen=True)
class Conflicts:
    """The loads, or the stores, of shared memory: of a warp and k tile by operand, of a launch as
    predicted and as ncu counted, and what `gl.bank_conflicts` counts (None: it cannot).
    """

    case: Case
    operation: str
    of_warp: dict[str, Shared]
    predicted: Shared
    measured: Shared | None
    triton: dict[str, int] | None

    @property
    def within(self) -> str:
        """Whether the measured excess agrees with the predicted one."""
        if self.measured is None:
            return NONE
        difference = abs(self.measured.excess - self.predicted.excess)
        return "yes" if difference <= WITHIN * self.predicted.wavefronts else "no"

    def cells(self) -> tuple[str, ...]:
        """The cells of the row, in the order of CONFLICT_COLUMNS."""
        one = ", ".join(
            f"{operand} {of.ideal / of.instructions:g}+{of.excess / of.instructions:g}"
            for operand, of in self.of_warp.items()
        )
        passes = "cannot count"
        if self.triton is not None:
            passes = ", ".join(f"{operand} {count}" for operand, count in self.triton.items())
            if any(of.excess != self.triton[x] * of.ideal for x, of in self.of_warp.items()):
                passes += ": disagrees"
        return (
            *self.case.cells(),
            f"{self.operation}s",
            one,
            passes,
            self.beside(lambda of: _mega(of.wavefronts)),
            self.beside(lambda of: _mega(of.excess)),
        )

    def beside(self, show: Callable[[Shared], str]) -> str:
        """A figure as predicted and as measured."""
        return _beside(self.predicted, self.measured, show)


def conflict_tables(results: Results, _: str) -> str:
    """The tables of bank conflicts: of the configs of SQUARE, then of all."""
    rows = list(conflicts(results.profiles))
    square: dict[Case, list[str]] = {}
    forms = [_same(configs.from_text(registry.load(VECTORIZED).Config, form)) for form in SQUARE]
    for row in rows:
        if row.case.kernel == VECTORIZED and _same(row.case.config) in forms:
            share = row.beside(lambda of: f"{of.excess / max(of.wavefronts, 1):.1%}")
            square.setdefault(row.case, []).append(share)
    cells = [
        (f"pad={case.config.pad},piece_n={case.config.piece_n}", case.cells()[-1], *shares)
        for case, shares in square.items()
    ]
    lines = [*table(SQUARE_COLUMNS, cells), ""]
    within = {row.within for row in rows}
    if len(within) == 1:
        lines += table(CONFLICT_COLUMNS, [row.cells() for row in rows])
        note = f"{CONFLICTS_NOTE}; in every row: {within.pop()}"
    else:
        columns = (*CONFLICT_COLUMNS, f"within {WITHIN:.0%}")
        lines += table(columns, [(*row.cells(), row.within) for row in rows])
        note = CONFLICTS_NOTE
    return "\n".join([*lines, "", f"{note}. {devices(_profiled(results.profiles))}, ncu."]) + "\n"


def conflicts(profiles: Sequence[Profile]) -> Iterator[Conflicts]:
    """Two rows for each config that stages its operands: the configs of STAGED, then the others
    that were profiled.
    """
    from outblas.kernels import simt_access

    for case in _cases(profiles, STAGED):
        accesses = simt_access.in_shared(case.config, case.problem)
        counted = _bank_conflicts(case.config, case.dtype, case.layout, case.shape)
        for operation in OPERATIONS if accesses else ():
            names = {operand: f"{operand} {operation}" for operand in "AB"}
            of_warp = {operand: accesses[name] for operand, name in names.items()}
            triton = {x: counted[name] for x, name in names.items()} if counted else None
            predicted = _launch(case, operation, of_warp.values())
            yield Conflicts(case, operation, of_warp, predicted, _shared(case, operation), triton)


def coalescing_table(results: Results, _: str) -> str:
    """The accesses to global memory by kernels that do not stage their operands."""
    from outblas.kernels import simt_access

    cells = []
    for case in _cases(results.profiles, DIRECT):
        if (case.kernel, "") not in DIRECT:
            continue
        for access, predicted in simt_access.in_global(case.config, case.problem).items():
            measured = _global(case, access)
            difference = abs(measured.transactions - predicted.transactions) if measured else None
            within = difference is not None and difference <= WITHIN * predicted.transactions
            cells.append(
                (
                    *case.cells(),
                    access,
                    str(predicted.bytes),
                    _beside(predicted, measured, lambda of: f"{of.transactions:.3g}"),
                    _beside(predicted, measured, lambda of: f"{of.efficiency:.1%}"),
                    NONE if measured is None else "yes" if within else "no",
                )
            )
    lines = [*table(COALESCING_COLUMNS, cells), ""]
    gpus = devices(_profiled(results.profiles))
    return "\n".join([*lines, f"{COALESCING_NOTE}. {gpus}, ncu."]) + "\n"


def _profiled(profiles: Iterable[Profile]) -> list[Profile]:
    """The profiles that have memory instructions of CUDA-core kernels."""
    return [p for p in profiles if p.memory and p.provider.startswith("simt.") and not p.addend]


def _cases(profiles: Sequence[Profile], usual: Sequence[tuple[str, str]]) -> list[Case]:
    """The usual kernels and configs, as they were profiled if they were, then the others that were.
    Of several profiles of a case the last one counts.
    """
    profiled: dict[tuple[Case, str], Case] = {}
    for p in _profiled(profiles):
        config = configs.from_text(registry.load(p.provider).Config, p.resolved or p.config)
        case = Case(p.provider, config, p.shape, p.dtype, p.layout)
        profiled[case, p.gpu] = replace(case, profile=p)
    cases: list[Case] = []
    for kernel, text in usual:
        config = configs.from_text(registry.load(kernel).Config, text)
        key = kernel, _same(config)
        same = [case for case in profiled.values() if (case.kernel, _same(case.config)) == key]
        cases += same or [Case(kernel, config)]
    return list(dict.fromkeys([*cases, *profiled.values()]))


def _same(config: SimtConfig) -> SimtConfig:
    """The config with defaults in the fields that only decide when memory is accessed: two configs
    with the same result access the same addresses.
    """
    return replace(config, prefetch=False, store_at=0, group_m=1, ctas=1)


@cache
def _problem(dtype: str, layout: str, shape: Shape) -> Problem:
    import torch

    return example(getattr(torch, dtype), None, layout, shape)


def _launch(case: Case, operation: str, of_warp: Iterable[Shared]) -> Shared:
    """The accesses of all warps and CTAs to both operands."""
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
        *(round(times * count) for count in (total.instructions, total.wavefronts, total.ideal))
    )


def _shared(case: Case, operation: str) -> Shared | None:
    """ncu's counts in shared memory for all operands; None if it did not count."""
    memory = case.profile.memory if case.profile else ()
    totals = [t for t in memory if (t["space"], t["operation"]) == ("shared", operation)]
    if case.profile is None:
        return None
    names = ("requests", "wavefronts", "ideal")
    return Shared(*(round(sum(t[name] for t in totals)) for name in names))


@dataclass(frozen=True)
class _Lines:
    """ncu's transactions of 128 bytes a request to global memory, and their efficiency."""

    transactions: float
    efficiency: float


def _global(case: Case, access: str) -> _Lines | None:
    """ncu's counts for an operand in global memory; None if it did not count, or if operands are
    not known.
    """
    operand, operation = access.split()
    totals = [
        t
        for t in (case.profile.memory if case.profile else ())
        if (t.get("operand"), t["space"], t["operation"]) == (operand, "global", operation)
    ]
    requests, transactions = (sum(t[name] for t in totals) for name in ("requests", "transactions"))
    if not requests or not transactions:
        return None
    requested = sum(t["efficiency"] * t["transactions"] * LINE for t in totals)
    return _Lines(transactions / requests, requested / (transactions * LINE))


@cache
def _bank_conflicts(
    config: SimtConfig, dtype: str, layout: str, shape: Shape
) -> dict[str, int] | None:
    """Gluon's counts for the same maps to plain rows in shared memory, by access as in
    `simt_access.in_shared`; None where rows are padded.
    """
    if config.pad:
        return None
    import torch
    from triton.experimental.gluon import language as gl

    from outblas.device.access import k_block_reads
    from outblas.device.gluon import registers
    from outblas.device.triton_artifact import bank_conflicts
    from outblas.kernels.simt_maps import maps

    held = maps(config, _problem(dtype, layout, shape))
    # terms × rows, terms × columns
    read, columns = (k_block_reads(held.outputs, config.block_k, axis) for axis in (0, 1))
    of = {"A store": held.a.transposed(), "B store": held.b, "A load": read, "B load": columns}
    if not config.transpose_a:
        of |= {"A store": held.a, "A load": read.transposed()}
    rows = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return {
        name: bank_conflicts(registers(layout_of), rows, layout_of.shape, torch.float32)
        for name, layout_of in of.items()
    }


def _beside(predicted: Any, measured: Any, show: Callable[[Any], str]) -> str:
    return " / ".join(NONE if of is None else show(of) for of in (predicted, measured))


def _mega(value: int) -> str:
    """A count in millions."""
    return f"{value / 1e6:,.1f}" if value >= 1e7 else f"{value / 1e6:.3g}"
