"""The counts of each memory instruction of a launch, from ncu's source page: requests,
transactions, sectors, wavefronts.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from . import lines, machine_code, sass
from .profiled import CUBLAS, Request

if TYPE_CHECKING:
    from ..core.artifact import Artifact

# Space and operation by mnemonic. A copy reads global memory and writes shared memory.
KINDS = {
    "LDG": ("global", "load"),
    "STG": ("global", "store"),
    "LDGSTS": ("global", "copy"),
    "RED": ("global", "atomic"),
    "REDG": ("global", "atomic"),
    "ATOM": ("global", "atomic"),
    "ATOMG": ("global", "atomic"),
    "LDS": ("shared", "load"),
    "LDSM": ("shared", "load"),
    "STS": ("shared", "store"),
    "STSM": ("shared", "store"),
    "ATOMS": ("shared", "atomic"),
}
GENERIC = {"LD": "load", "ST": "store"}  # of either space, depending on the address
TRANSACTION = 128  # bytes
COLUMNS = {
    "executed": "Instructions Executed",
    "threads": "Predicated-On Thread Instructions Executed",
    "transactions": "L1 Tag Requests Global",
    "sectors": "L2 Theoretical Sectors Global",
    "wavefronts": "L1 Wavefronts Shared",
    "ideal": "L1 Wavefronts Shared Ideal",
}
_SHARED_ALONE = ("wavefronts", "ideal")
_SASS, _BITS = "Source", "Access Size"
_MNEMONIC = re.compile(r"\s*(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")


@dataclass(frozen=True)
class Counts:
    """How often warps executed an access (requests, including those with every thread predicated
    off), the bytes that their threads requested, and the result: in global memory `transactions`
    (lines of 128 bytes, looked up in L1) and `sectors` (32 bytes), in shared memory `wavefronts`
    and their `ideal` number without bank conflicts.
    """

    executed: int
    requested: int
    transactions: int
    sectors: int
    wavefronts: int
    ideal: int

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            *(getattr(self, field.name) + getattr(other, field.name) for field in fields(Counts))
        )

    @property
    def excess(self) -> int:
        """Wavefronts that bank conflicts added."""
        return self.wavefronts - self.ideal

    @property
    def efficiency(self) -> float | None:
        """Bytes requested divided by bytes of the transactions. It is above 1 where threads request
        the same bytes; copies of zeros request none.
        """
        return _ratio(self.requested, TRANSACTION * self.transactions)

    def ratios(self) -> dict[str, float | None]:
        """Returns transactions and sectors of global memory per request."""
        return {
            "transactions_per_request": _ratio(self.transactions, self.executed),
            "sectors_per_request": _ratio(self.sectors, self.executed),
        }


@dataclass(frozen=True)
class Access:
    """One memory instruction: `index` in the code, `space` "global" or "shared", `operation`
    "load", "store", "copy" or "atomic", the `bytes` that a thread moves each time, and the operand
    of the product that it accesses (None: unknown).
    """

    index: int
    sass: str
    space: str
    operation: str
    bytes: int
    counts: Counts
    operand: str | None = None

    def record(self) -> dict[str, Any]:
        """Returns the access as JSON values; None for figures that do not apply to this kind of
        access.
        """
        named = {
            "sass": self.sass,
            "operand": self.operand,
            "space": self.space,
            "operation": self.operation,
        }
        counts = {"executed": self.counts.executed, **self.counts.ratios(), **_passes(self.counts)}
        return named | {"bytes": self.bytes} | _apply(self.space, self.operation, counts)


@dataclass(frozen=True)
class Code:
    """One launch: the kernel, the mnemonics of all its instructions, and the memory instructions
    that ran in at least one thread without being predicated off. `ffma_reuse` is the fraction of
    FFMAs in its hot loop that keep an operand (`.reuse`); ncu does not show it, so it is None
    without an artifact.
    """

    kernel: str
    mnemonics: tuple[str, ...]
    accesses: tuple[Access, ...]
    ffma_reuse: float | None = None

    def totals(self) -> dict[tuple[str | None, str, str], Counts]:
        """Returns sums by operand, space and operation, global memory first."""
        sums: dict[tuple[str | None, str, str], Counts] = {}
        for each in self.accesses:
            key = each.operand, each.space, each.operation
            sums[key] = sums[key] + each.counts if key in sums else each.counts
        return dict(sorted(sums.items(), key=lambda item: (*item[0][1:], item[0][0] or "~")))

    def with_artifact(self, artifact: Artifact) -> Code:
        """Returns the same launch with operands, found by source lines, and `ffma_reuse` from its
        artifact.
        """
        found = lines.operands(artifact.cubin, artifact.ptx, self.mnemonics)
        accesses = tuple(replace(each, operand=found[each.index]) for each in self.accesses)
        return replace(
            self, accesses=accesses, ffma_reuse=ffma_reuse(artifact.cubin, self.mnemonics)
        )


def ffma_reuse(cubin: bytes, mnemonics: Sequence[str]) -> float | None:
    """Returns `sass.ffma_reuse` of a cubin's hot loop; None if the cubin's code differs from the
    code that ran, which has `mnemonics`.
    """
    code = sass.parse(machine_code.read_cubin(cubin).sass)
    return (
        sass.ffma_reuse(sass.hot_loop(code))
        if [each.name for each in code] == list(mnemonics)
        else None
    )


def total_record(operand: str | None, space: str, operation: str, counts: Counts) -> dict[str, Any]:
    """Returns one of `totals` as JSON values; None for figures that do not apply to this kind of
    access.
    """
    named = {"operand": operand, "space": space, "operation": operation}
    sizes = {
        "requests": counts.executed,
        "transactions": counts.transactions,
        "sectors": counts.sectors,
    }
    figures = {**sizes, **counts.ratios(), "efficiency": counts.efficiency, **_passes(counts)}
    return named | _apply(space, operation, figures)


def _passes(counts: Counts) -> dict[str, int]:
    return {"wavefronts": counts.wavefronts, "ideal": counts.ideal, "excess": counts.excess}


_OF_GLOBAL = (
    "transactions",
    "sectors",
    "transactions_per_request",
    "sectors_per_request",
    "efficiency",
)
_OF_SHARED = ("wavefronts", "ideal", "excess")


def _apply(space: str, operation: str, figures: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the figures, with None for those that do not apply to such an access."""
    empty = _OF_GLOBAL if space == "shared" else _OF_SHARED if operation != "copy" else ()
    return {name: None if name in empty else value for name, value in figures.items()}


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def parse(text: str) -> list[Code]:
    """Returns the launches in the output of `ncu --import REPORT --csv --page source`, in order;
    other lines are skipped.

    The page of a kernel without shared memory lacks the columns for it. Raises ValueError if any
    other column is missing.
    """
    found: list[tuple[str, list[dict[str, str]]]] = []
    header: list[str] = []
    for row in csv.reader(line for line in text.splitlines() if line.startswith('"')):
        if row[0] == "Kernel Name":
            found.append((row[1], []))
            header = []
        elif found and not header:
            header = row
            missing = [name for name in (_SASS, _BITS, *COLUMNS.values()) if name not in header]
            if missing and missing != [COLUMNS[field] for field in _SHARED_ALONE]:
                raise ValueError(f"the source page lacks {', '.join(missing)}")
        elif found:
            found[-1][1].append(dict(zip(header, row, strict=False)))
    return [_code(kernel, rows) for kernel, rows in found]


def _kind(mnemonic: str, transactions: int) -> tuple[str, str] | None:
    name = mnemonic.split(".")[0]
    if name in GENERIC:
        return "global" if transactions else "shared", GENERIC[name]
    return KINDS.get(name)


def _code(kernel: str, rows: Iterable[Mapping[str, str]]) -> Code:
    mnemonics, accesses = [], []
    for index, row in enumerate(rows):
        found = _MNEMONIC.match(row[_SASS])
        mnemonics.append(found[1] if found else "")
        values = {
            name: int(row.get(column, "").replace(",", "") or 0) for name, column in COLUMNS.items()
        }
        kind = _kind(mnemonics[-1], values["transactions"])
        if kind is None or not values["threads"]:
            continue
        size = int(row[_BITS]) // 8 if row[_BITS].isdigit() else sass.width(mnemonics[-1])
        counts = Counts(requested=size * values.pop("threads"), **values)
        accesses.append(Access(index, " ".join(row[_SASS].split()), *kind, size, counts))
    return Code(kernel, tuple(mnemonics), tuple(accesses))


def artifact(request: Request, arch: int) -> Artifact | None:
    """Returns the artifact that a kernel's call runs on sm_`arch`; None for cuBLAS, and for a
    kernel without artifacts.
    """
    import torch

    from ..core import registry

    if request.kernel == CUBLAS:
        return None
    module = registry.load(request.kernel)
    if not hasattr(module, "artifact"):
        return None
    dtype = getattr(torch, request.dtype)
    try:
        found: Artifact = module.artifact(
            request.chosen(),
            arch=arch,
            dtype=dtype,
            out_dtype=None,
            layout=request.layout,
            shape=request.shape,
        )
    except ValueError:  # an architecture for which artifacts cannot be made
        return None
    return found
