"""Snapshots of machine code: they record in a file what kernels compile to, and show how the
current code differs.

A snapshot is indented JSON. `variants` maps names to `compile`, the fields of a `KernelVariant`,
and `code`, those of a `CodeSummary`; `compilers` holds the versions that made the code. An entry
written by hand needs only `compile`; `outblas inspect --against FILE --update` adds the rest.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any

from ..core import registry
from . import machine_code
from .inspection import Inspection, compilable
from .machine_code import MachineCode
from .variant import KernelVariant, compile_variant, from_record

FORMAT = 1
TOTAL_TOLERANCE = 0.01  # fraction of the total number of instructions

# Operations whose instructions a snapshot counts, each by its full mnemonic.
MMA = ("HGMMA", "QGMMA", "IGMMA", "HMMA", "QMMA", "IMMA", "DMMA", "WARPGROUP")
TMA = (
    "UTMALDG",
    "UTMASTG",
    "UTMAREDG",
    "UTMAPF",
    "UTMACCTL",
    "UTMACMDFLUSH",
    "UBLKCP",
    "UBLKRED",
    "UBLKPF",
)
BARRIERS = (
    "BAR",
    "SYNCS",
    "UCGABAR_ARV",
    "UCGABAR_WAIT",
    "DEPBAR",
    "LDGDEPBAR",
    "ARRIVES",
    "MEMBAR",
    "ERRBAR",
    "CGAERRBAR",
    "CCTL",
    "FENCE",
    "WARPSYNC",
    "NANOSLEEP",
    "ACQBULK",
    "PREEXIT",
    "ATOM",
    "ATOMG",
    "ATOMS",
    "RED",
    "REDG",
    "REDAS",
)
MEMORY = ("LDG", "STG", "LDGSTS", "LDS", "STS", "LDSM", "STSM", "STAS", "LDL", "STL")
COUNTED = frozenset((*MMA, *TMA, *BARRIERS, *MEMORY, "USETMAXREG", "SHFL"))


@dataclass(frozen=True, kw_only=True)
class CodeSummary:
    """The figures of one compiled kernel that are compared.

    `registers` and `stack` (bytes) are per thread, and so are `spill_stores` and `spill_loads`
    (bytes); `smem_bytes` and `threads` are per CTA. `instructions` is the total number, `counts`
    the numbers of `COUNTED` instructions by mnemonic.
    """

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    smem_bytes: int
    threads: int
    instructions: int
    counts: Mapping[str, int]


@dataclass(frozen=True)
class Entry:
    """A variant, and its code if it was compiled."""

    variant: KernelVariant
    code: CodeSummary | None = None


@dataclass(frozen=True)
class Snapshot:
    """Entries by name, and the versions of the compilers that made their code."""

    compilers: Mapping[str, str]
    entries: Mapping[str, Entry]


@dataclass(frozen=True)
class Difference:
    """A figure of a variant that has changed, with its text `before` and `now`."""

    name: str
    what: str
    before: str
    now: str


# ---- code
def summarize(variant: KernelVariant) -> CodeSummary:
    """Compiles a variant, without a GPU. Raises the errors of `compile_variant`."""
    artifact = compile_variant(variant)
    code = machine_code.read_cubin(artifact.cubin)
    return summary(code, smem_bytes=artifact.smem_bytes, threads=artifact.threads)


def summary(code: MachineCode | Inspection, *, smem_bytes: int, threads: int) -> CodeSummary:
    """Returns what a snapshot keeps of a kernel's machine code. `smem_bytes` and `threads` are per
    CTA.
    """
    counts = {name: n for name, n in code.instructions.items() if name.split(".")[0] in COUNTED}
    return CodeSummary(
        registers=code.registers,
        stack=code.stack,
        spill_stores=code.spill_stores,
        spill_loads=code.spill_loads,
        smem_bytes=smem_bytes,
        threads=threads,
        instructions=sum(code.instructions.values()),
        counts=dict(sorted(counts.items())),
    )


def compilers() -> dict[str, str]:
    """Returns the versions of the programs that make machine code here: the DSLs, and the
    assemblers that Triton calls.
    """
    found = {}
    for name in ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-cu13", "triton"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    if found["triton"] != "not installed":
        found |= {f"ptxas for sm_{arch}": _ptxas_version(arch) for arch in (80, 90)}
    return found


def _ptxas_version(arch: int) -> str:
    from ..core.compat.triton_private import ptxas

    told = subprocess.run(
        [ptxas(arch), "--version"], capture_output=True, text=True, check=True
    ).stdout
    found = re.search(r"\bV(\d[\d.]*)", told)
    return found[1] if found else told.strip()


# ---- comparison
def differences(name: str, before: CodeSummary, now: CodeSummary) -> list[Difference]:
    """Returns how a variant's code has changed. The total number of instructions may change by
    `TOTAL_TOLERANCE`.
    """
    found = []
    for field in fields(CodeSummary):
        if field.name in ("instructions", "counts"):
            continue
        was, is_now = getattr(before, field.name), getattr(now, field.name)
        if was != is_now:
            found.append(Difference(name, field.name, str(was), str(is_now)))
    for mnemonic in sorted(before.counts.keys() | now.counts.keys()):
        was, is_now = before.counts.get(mnemonic, 0), now.counts.get(mnemonic, 0)
        if was != is_now:
            found.append(Difference(name, mnemonic, str(was), str(is_now)))
    change = now.instructions - before.instructions
    if abs(change) > TOTAL_TOLERANCE * before.instructions:
        share = f"{now.instructions} ({change / before.instructions:+.1%})"
        found.append(Difference(name, "instructions", str(before.instructions), share))
    return found


def compare(name: str, entry: Entry) -> list[Difference]:
    """Compiles an entry's variant, and returns how its code has changed; missing code counts as
    changed.
    """
    if entry.code is None:
        return [Difference(name, "code", "missing", "run outblas inspect --against FILE --update")]
    try:
        now = summarize(entry.variant)
    except ImportError:  # a DSL is not installed, which is not the variant's fault
        raise
    except Exception as error:  # compilers raise errors of any kind
        return [Difference(name, "compile", "compiled", f"{type(error).__name__}: {error}")]
    return differences(name, entry.code, now)


def uncovered(snapshot: Snapshot) -> list[Difference]:
    """Returns the kernels of the registry, and the architectures they compile for, that a snapshot
    has no variant of.
    """
    covered = {(entry.variant.kernel, entry.variant.arch) for entry in snapshot.entries.values()}
    return [
        Difference(kernel.name, f"sm_{arch}", "no variant", "in the registry")
        for kernel in registry.ladder()
        for arch in compilable(kernel)
        if (kernel.name, arch) not in covered
    ]


def other_compilers(snapshot: Snapshot) -> list[str]:
    """Returns how the installed compilers differ from the snapshot's. Their code may differ too, so
    no code is compared then.
    """
    here = compilers()
    return [
        f"{name} is {here.get(name, 'not installed')}, "
        f"the snapshot was made with {snapshot.compilers.get(name, 'none')}"
        for name in sorted(here.keys() | snapshot.compilers.keys())
        if here.get(name) != snapshot.compilers.get(name)
    ]


# ---- files
def load(path: Path) -> Snapshot:
    """Reads a snapshot. Raises ValueError that names the file, and the entry if one is
    malformed.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: it cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path}: it is not JSON: {error}") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError(
            f"{path}: it is not a snapshot of format {FORMAT}, which outblas inspect --snapshot "
            "writes"
        )
    compilers, variants = found.get("compilers"), found.get("variants")
    if not isinstance(compilers, dict) or not isinstance(variants, dict):
        raise ValueError(f"{path}: expected the objects compilers and variants")
    return Snapshot(compilers, dict(_entries(path, variants)))


def _entries(path: Path, variants: Mapping[str, Any]) -> Iterator[tuple[str, Entry]]:
    for name, record in variants.items():
        try:
            yield name, _entry(record)
        except ValueError as error:
            raise ValueError(f"{path}: variant {name!r} {error}") from None


def _entry(record: Any) -> Entry:
    if (
        not isinstance(record, dict)
        or not isinstance(record.get("compile"), dict)
        or record.keys() - {"compile", "code"}
    ):
        raise ValueError("is malformed, expected the object compile, and code once it was compiled")
    variant, code = from_record(record["compile"]), record.get("code")
    if code is None:
        return Entry(variant)
    names = {field.name for field in fields(CodeSummary)}
    if not isinstance(code, dict) or code.keys() != names or not isinstance(code["counts"], dict):
        raise ValueError(f"has malformed code, expected the fields {', '.join(sorted(names))}")
    figures = [
        *code["counts"].values(),
        *(figure for name, figure in code.items() if name != "counts"),
    ]
    if not all(type(figure) is int for figure in figures):
        raise ValueError("has code with a figure that is no whole number")
    return Entry(variant, CodeSummary(**code))


def save(path: Path, snapshot: Snapshot) -> None:
    """Replaces the file atomically, with entries in the order of their names."""
    variants = {
        name: {"compile": entry.variant.record()}
        | ({"code": asdict(entry.code)} if entry.code else {})
        for name, entry in sorted(snapshot.entries.items())
    }
    whole = {
        "format": FORMAT,
        "compilers": dict(sorted(snapshot.compilers.items())),
        "variants": variants,
    }
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
    scratch.replace(path)
