"""The memory cost of the layouts of CUDA-core rungs: the predictions of `kernels.simt_access`
beside ncu's counts.

Shared memory: wavefronts of a launch, and the excess that bank conflicts add. Global memory:
transactions of 128 bytes per request of a warp, and efficiency as document 003 defines it: bytes
that lanes request divided by bytes of the transactions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from outblas.base import configs, registry
from outblas.base.shapes import to_text
from outblas.call.artifact import example
from outblas.call.problem import Problem
from outblas.device.access import Shared
from outblas.kernels import simt_access
from outblas.kernels.simt_config import SimtConfig
from tools.pages.results import Profile, Results
from tools.pages.tables import NONE, devices, table

WITHIN = 0.02  # counts agree if they differ by at most this fraction of the prediction
OPERATIONS = ("load", "store")

CONFLICT_COLUMNS = (
    "kernel",
    "config",
    "at",
    "shared",
    "an instruction: ideal+excess",
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
    f"within {WITHIN:.0%} of our wavefronts: the difference of ncu's excess and ours"
)
COALESCING_NOTE = (
    "a transaction has 128 bytes; efficiency: the bytes that the lanes of a warp request, divided "
    "by the bytes of the transactions (as in 003, a word that all lanes request counts 32 times); "
    f"within {WITHIN:.0%}: whether ncu's transactions and ours agree"
)


@dataclass(frozen=True)
class Case:
    """A kernel in the config in which it was profiled, with `memory`."""

    config: SimtConfig
    profile: Profile

    @property
    def kernel(self) -> str:
        """The kernel's name."""
        return self.profile.provider

    @property
    def problem(self) -> Problem:
        """The GEMM, on tensors without data."""
        p = self.profile
        return example(getattr(torch, p.dtype), None, p.layout, p.shape)

    def cells(self) -> tuple[str, str, str]:
        """The kernel, its config, and the shape; dtype and layout only where they are not the usual
        ones.
        """
        p = self.profile
        other = [value for value in (p.dtype, p.layout) if value not in ("float32", "nn")]
        place = ", ".join([to_text(p.shape), *other, p.gpu])
        return self.kernel, configs.brief(self.config) or NONE, place

    def counted(self, space: str, operation: str, operand: str | None = None) -> dict[str, Any]:
        """ncu's counts for the accesses of an operand; shared memory has no operands."""
        key = space, operation, operand
        memory = self.profile.memory
        return next(m for m in memory if (m["space"], m["operation"], m.get("operand")) == key)


@dataclass(frozen=True)
class Conflicts:
    """The loads, or the stores, of shared memory: of a warp and k tile by operand, and of a launch
    as predicted and as ncu counted.
    """

    case: Case
    operation: str
    of_warp: dict[str, Shared]
    predicted: Shared
    measured: Shared

    @property
    def within(self) -> str:
        """Whether the measured excess agrees with the predicted one."""
        difference = abs(self.measured.excess - self.predicted.excess)
        return "yes" if difference <= WITHIN * self.predicted.wavefronts else "no"

    def cells(self) -> tuple[str, ...]:
        """The cells of the row, in the order of CONFLICT_COLUMNS."""
        one = ", ".join(
            f"{operand} {of.ideal / of.instructions:g}+{of.excess / of.instructions:g}"
            for operand, of in self.of_warp.items()
        )
        return (
            *self.case.cells(),
            f"{self.operation}s",
            one,
            self.beside(lambda of: _mega(of.wavefronts)),
            self.beside(lambda of: _mega(of.excess)),
        )

    def beside(self, show: Callable[[Shared], str]) -> str:
        """A figure as predicted and as measured."""
        return f"{show(self.predicted)} / {show(self.measured)}"


def conflict_table(results: Results, _: str) -> str:
    """The table of bank conflicts."""
    rows = list(conflicts(results.profiles))
    lines = table(CONFLICT_COLUMNS, [row.cells() for row in rows])
    within = " or ".join(dict.fromkeys(row.within for row in rows))
    return _closed(lines, f"{CONFLICTS_NOTE}; in every row: {within}", results)


def conflicts(profiles: Sequence[Profile]) -> Iterator[Conflicts]:
    """Two rows for each profiled config that stages its operands."""
    for case in _cases(profiles):
        accesses = simt_access.in_shared(case.config, case.problem)
        for operation in OPERATIONS if accesses else ():
            of_warp = {operand: accesses[f"{operand} {operation}"] for operand in "AB"}
            row = case.counted("shared", operation)
            measured = Shared(row["requests"], row["wavefronts"], row["ideal"])
            predicted = _launch(case, operation, of_warp.values())
            yield Conflicts(case, operation, of_warp, predicted, measured)


def coalescing_table(results: Results, _: str) -> str:
    """The accesses to global memory by kernels that do not stage their operands."""
    cells = []
    for case in _cases(results.profiles):
        if case.config.block_k > 1:
            continue
        for access, ours in simt_access.in_global(case.config, case.problem).items():
            operand, operation = access.split()
            ncu = case.counted("global", operation, operand)
            transactions = ncu["transactions"] / ncu["requests"]
            within = abs(transactions - ours.transactions) <= WITHIN * ours.transactions
            cells.append(
                (
                    *case.cells(),
                    access,
                    str(ours.bytes),
                    f"{ours.transactions:.3g} / {transactions:.3g}",
                    f"{ours.efficiency:.1%} / {ncu['efficiency']:.1%}",
                    "yes" if within else "no",
                )
            )
    return _closed(table(COALESCING_COLUMNS, cells), COALESCING_NOTE, results)


def _closed(lines: Sequence[str], note: str, results: Results) -> str:
    gpus = devices(case.profile for case in _cases(results.profiles))
    return "\n".join([*lines, "", f"{note}. {gpus}, ncu."]) + "\n"


def _cases(profiles: Sequence[Profile]) -> list[Case]:
    """The CUDA-core kernels whose memory instructions were profiled; the profiles of one config
    follow one another.
    """
    cases: dict[tuple[str, SimtConfig], list[Case]] = {}
    for p in profiles:
        if p.memory and p.provider.startswith("simt.") and not p.addend:
            config = configs.from_text(registry.load(p.provider).Config, p.resolved)
            # Fields that only decide when memory is accessed leave the addresses as they are.
            same = replace(config, prefetch=False, store_at=0, group_m=1, ctas=1)
            cases.setdefault((p.provider, same), []).append(Case(config, p))
    return [case for group in cases.values() for case in group]


def _launch(case: Case, operation: str, of_warp: Iterable[Shared]) -> Shared:
    """The accesses of all warps and CTAs to both operands."""
    (m, n, k), c = case.profile.shape, case.config
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


def _mega(value: int) -> str:
    """A count in millions."""
    return f"{value / 1e6:,.1f}" if value >= 1e7 else f"{value / 1e6:.3g}"
