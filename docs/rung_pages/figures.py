"""What was measured of a rung: its rows of the ladder's table, counters, cycles, machine code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from outblas.core import registry
from outblas.core.configs import items
from outblas.core.registry import dtype_of
from outblas.core.shapes import Shape
from outblas.hopper.core.config import HopperConfig
from outblas.report import evidence, ladder
from outblas.report.ladder import MIXED_OPERANDS, OWN, Row
from outblas.report.lookup import profiled
from outblas.report.page import environment_notes
from outblas.report.profiles import Profile
from outblas.report.rungs import MIXED, OLDER
from outblas.report.seed_figures import Figure
from outblas.report.text import NONE, number, percent, ratio, share, span

from .source import ROOT

Cells = tuple[str, ...]
# The files that each ladder's table is made from, here as on the ladder's own page.
FILES = {
    "simt": ("simt", "simt_sizes", "simt_mixed", "simt_counters"),
    "turing": ("turing", "turing_counters"),
    "hopper": ("hopper", "hopper_8192", "gemm", "simt_mixed", "counters", "phases"),
}
_SNAPSHOT = ROOT / "tests" / "data" / "machine_code.json"

# What instructions do, by how their names begin; the first that fits counts.
MEANINGS = (
    ("HGMMA", "`wgmma`: a warpgroup's product, operands in shared memory"),
    ("HMMA", "`mma.sync`: a warp's product, operands in registers"),
    ("FFMA", "one fp32 multiply-add"),
    ("WARPGROUP.ARRIVE", "`wgmma.fence`"),
    ("WARPGROUP.DEPBAR", "waits for `wgmma` groups"),
    ("UTMALDG.2D.MULTICAST", "TMA load to several CTAs of a cluster"),
    ("UTMALDG", "TMA load from global to shared memory"),
    ("UTMASTG", "TMA store from shared to global memory"),
    ("UTMACCTL", "prefetches a tensor map"),
    ("UTMACMDFLUSH", "closes a group of TMA stores"),
    ("LDGSTS", "`cp.async`: copies from global to shared memory"),
    ("LDGDEPBAR", "closes a group of `cp.async`"),
    ("DEPBAR", "waits for `cp.async` or for TMA stores"),
    ("LDG", "load from global memory"),
    ("STG", "store to global memory"),
    ("LDSM", "`ldmatrix`: loads 8×8 matrices from shared memory"),
    ("STSM", "`stmatrix`: stores 8×8 matrices to shared memory"),
    ("LDS", "load from shared memory"),
    ("STS", "store to shared memory"),
    ("SHFL", "exchanges registers between lanes"),
    ("SYNCS.ARRIVE.TRANS64.RED", "arrives at an mbarrier, also of another CTA"),
    ("SYNCS.ARRIVE", "arrives at an mbarrier"),
    ("SYNCS.EXCH", "initialises an mbarrier"),
    ("SYNCS.PHASECHK", "asks for, or waits for, a phase of an mbarrier"),
    ("NANOSLEEP", "waits in the loop around an mbarrier"),
    ("BAR", "`bar.sync`: a barrier of the CTA, or of some of its warps"),
    ("UCGABAR", "the barrier of a cluster"),
    ("USETMAXREG", "`setmaxnreg`: gives up or takes registers"),
    ("FENCE.VIEW.ASYNC", "orders writes before reads by TMA and `wgmma`"),
    ("MEMBAR", "memory fence"),
    ("ERRBAR", "part of a memory fence"),
    ("CGAERRBAR", "part of a memory fence of a cluster"),
    ("CCTL", "invalidates lines of L1, part of a fence"),
)


@dataclass(frozen=True)
class Code:
    """What a kernel compiles to."""

    registers: int
    spill_bytes: int
    smem_bytes: int
    threads: int
    instructions: int
    counts: dict[str, int]


def meaning(instruction: str) -> str:
    """What an instruction does. Raises ValueError for one that no row of MEANINGS fits."""
    for prefix, text in MEANINGS:
        if instruction.startswith(prefix):
            return text
    raise ValueError(f"{instruction} is in the snapshot of machine code and not in MEANINGS")


def architecture(kernel: registry.Kernel) -> str:
    """The architecture for which a page shows the machine code of a kernel: on the tensor-core
    ladder the oldest that it runs on, else that of the GPU on which it was measured.
    """
    return f"sm_{kernel.min_arch}" if kernel.ladder == "turing" else "sm_90"


def code(kernel: str, arch: str) -> Code:
    """The machine code of a kernel's own config, from the snapshot that the tests hold."""
    variants = _snapshot()["variants"]
    entry = variants[kernel if kernel in variants else f"{kernel} {arch}"]["code"]
    return Code(
        entry["registers"],
        entry["spill_stores"] + entry["spill_loads"],
        entry["smem_bytes"],
        entry["threads"],
        entry["instructions"],
        entry["counts"],
    )


def totals(own: Code, before: Code | None) -> list[Cells]:
    """Rows of a total for the parent (a dash without one) and for the kernel."""

    def cells(of: Code) -> list[str]:
        numbers = of.registers, of.spill_bytes, of.smem_bytes, of.threads, of.instructions
        return [f"{each:,}" for each in numbers]

    names = (
        "registers a thread",
        "bytes spilled",
        "shared memory, bytes",
        "threads of a CTA",
        "instructions",
    )
    were = cells(before) if before else [NONE] * len(names)
    return list(zip(names, were, cells(own), strict=True))


def counts(own: Code, before: Code | None) -> tuple[list[Cells], int]:
    """Rows of an instruction, what it does, and how often it stands in the parent's code and in the
    kernel's, where that differs; and how many kinds do not differ.
    """
    rows: list[Cells] = []
    names = sorted(own.counts | (before.counts if before else {}))
    for name in names:
        now = own.counts.get(name, 0)
        was = before.counts.get(name, 0) if before else None
        if was != now:
            rows.append((f"`{name}`", meaning(name), NONE if was is None else str(was), str(now)))
    return rows, len(names) - len(rows)


def compilers(dsl: str) -> str:
    """The compilers of the snapshot that made the code of a DSL's kernels."""
    versions = _snapshot()["compilers"]
    if dsl == "cute":
        return f"CuTe DSL {versions['nvidia-cutlass-dsl']} and ptxas {versions['ptxas for sm_90']}"
    return f"Triton {versions['triton']} and the ptxas that comes with it"


def row(kernel: registry.Kernel) -> Row:
    """The row of a kernel in its ladder's table."""
    return next(each for each in _rows(kernel.ladder) if each.rung.name == kernel.name)


def measured(kernel: registry.Kernel) -> tuple[list[Cells], str]:
    """Rows of N, operands, TFLOP/s, ratio to cuBLAS and gain on the parent, and where they were
    measured; no rows where nothing was.
    """
    dtype = dtype_of(kernel.name)
    operands = {OWN: dtype, MIXED_OPERANDS: MIXED.get(kernel.ladder, "")}
    cells: list[Cells] = []
    found = row(kernel)
    for at in found.at:
        for variant, m in at.timed.items():
            gain = at.gains.get(variant)
            mixed = variant == MIXED_OPERANDS
            cells.append(
                (
                    str(at.n),
                    operands.get(variant, f"{dtype}, code for {variant}"),
                    number(m.tflops),
                    NONE if mixed else ratio(m),
                    NONE if gain is None else f"{gain:.3f}",
                )
            )
    return cells, "; ".join(environment_notes(m.environment for m in found.measured))


def checks(kernel: registry.Kernel) -> str:
    """What the oracle said of the results that were timed."""
    return " and ".join(dict.fromkeys(m.check for m in row(kernel).measured))


def layouts(kernel: registry.Kernel) -> str:
    """The layouts in which a kernel was measured."""
    return " and ".join(dict.fromkeys(m.layout for m in row(kernel).measured))


def documents(kernel: registry.Kernel) -> list[Cells]:
    """Rows of source, GPU, N, dtype, TFLOP/s and share of its cuBLAS: what the documents report."""
    return [_document(figure) for figure in row(kernel).rung.figures]


def _document(figure: Figure) -> Cells:
    return (
        figure.source,
        figure.gpu,
        str(figure.n) if figure.n else "not stated",
        figure.dtype,
        span(figure.tflops, number),
        span(figure.ratio, share),
    )


def variants(kernel: registry.Kernel) -> list[Cells]:
    """Rows of config, N, TFLOP/s and ratio to cuBLAS, of configs that were measured beside the
    rung's own; code for an older GPU stands in the ladder's own table.
    """
    dtype = dtype_of(kernel.name)
    older = {config for _, config in OLDER.values()}
    found = [
        m
        for m in _evidence(kernel.ladder).measurements
        if (m.provider, m.dtype, m.mode) == (kernel.name, dtype, "burst")
        and m.config
        and m.config not in older
        and m.ratio is not None
        and m.is_plain
    ]
    found.sort(key=lambda m: m.shape)
    return [(f"`{_renamed(m.config)}`", str(m.shape[0]), number(m.tflops), ratio(m)) for m in found]


def _renamed(config: str) -> str:
    """A config as text, with today's names of fields."""
    names = HopperConfig.ALIASES
    return ", ".join(f"{names.get(name, name)}={value}" for name, value in items(config))


def counters(kernel: registry.Kernel, parent: registry.Kernel | None) -> tuple[list[Cells], str]:
    """Rows of a counter of ncu for the parent and the kernel, and the shape of the calls: one at
    which both were profiled, if there is one.
    """
    before = _profiles(parent) if parent is not None and parent.ladder == kernel.ladder else {}
    found = _profiles(kernel)
    shapes = [shape for shape in found if shape in before] or list(found)
    if not shapes:
        return [], ""
    own, former = found[shapes[0]], before.get(shapes[0])
    were = dict(_counters(former)) if former else {}
    cells: list[Cells] = [(name, were.get(name, NONE), now) for name, now in _counters(own)]
    shown = [cell for cell in cells if cell[1:] != (NONE, NONE)]
    return shown, "×".join(str(size) for size in shapes[0])


def _profiles(kernel: registry.Kernel) -> dict[Shape, Profile]:
    """The profiles of a kernel in its own config at the sizes of its ladder."""
    profiles = _evidence(kernel.ladder).profiles
    dtype = dtype_of(kernel.name)
    found = {
        (n, n, n): profiled(profiles, kernel.name, (n, n, n), dtype, ladder.GPUS[0])
        for n in ladder.default_sizes(kernel.ladder)
    }
    return {shape: profile for shape, profile in found.items() if profile is not None}


def _counters(p: Profile) -> list[tuple[str, str]]:
    def scaled(value: float | None, scale: float, unit: str) -> str:
        return NONE if value is None else f"{number(value * scale)} {unit}"

    return [
        ("registers a thread", NONE if p.registers is None else f"{p.registers:.0f}"),
        ("occupancy", percent(p.occupancy)),
        ("instructions a clock and SM", number(p.ipc)),
        ("FMA pipe busy", percent(p.fma_active)),
        ("tensor pipe busy", percent(p.tensor_active)),
        ("L1 hit rate", percent(p.l1_hit_rate)),
        ("L2 hit rate", percent(p.l2_hit_rate)),
        ("from L2 to the SMs", scaled(p.l2_to_sm_bytes, 1e-9, "GB")),
        ("read from DRAM", scaled(p.dram_read_bytes, 1e-6, "MB")),
    ]


def cycles(kernel: registry.Kernel) -> list[Cells]:
    """Rows of role, and cycles by phase, as `outblas profile --phases` counted them."""

    def cell(value: float) -> str:
        return f"{value:,.0f}" if value else NONE

    phases = ("wait", "load", "tensor", "store", "total")
    return [
        (role.name, *(cell(role.cycles[phase]) for phase in phases))
        for counted in _evidence(kernel.ladder).phases
        if counted.provider == kernel.name and not counted.config
        for role in counted.roles
    ]


@cache
def _evidence(of: str) -> evidence.Evidence:
    return evidence.load(ROOT / "results" / f"h100_{name}.json" for name in FILES[of])


@cache
def _rows(of: str) -> Sequence[Row]:
    found = _evidence(of)
    return ladder.rows(found.measurements, of, ladder.default_sizes(of), found.profiles)


@cache
def _snapshot() -> dict[str, Any]:
    snapshot: dict[str, Any] = json.loads(_SNAPSHOT.read_text(encoding="utf-8"))
    return snapshot
