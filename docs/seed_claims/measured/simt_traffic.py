"""Claims on the CUDA cores about traffic by level of memory, and FMAs executed, by ncu."""

from dataclasses import dataclass

from outblas.report.evidence import Evidence
from outblas.report.profiles import Profile

from ..claim import CONFIRMED, DIFFERS, NOT_MEASURED, Claim, Finding
from ..compare import Run, Span, counted
from .simt_profiles import ahead, both, times
from .simt_runs import (
    CUBLAS_SMALL,
    K7,
    PADDED_TILE,
    SMALL_N,
    SWAPPED,
    UNPADDED,
    V01,
    V02,
    V03,
    V04,
    V05,
    V06,
)

FFMA_WITHIN = 0.01


_FLOP = 2 * SMALL_N**3


def _ffma(evidence: Evidence) -> Finding:
    """Whether every version that was profiled executes an FFMA for each term of the product."""
    found = [run.profiled(evidence.profiles) for run in (V01, V02, V03, V04, V05, V06)]
    counts = [p.ffma for p in found if p is not None and p.ffma is not None]
    if not counts:
        return NOT_MEASURED
    furthest = max(counts, key=lambda count: abs(count - SMALL_N**3))
    agrees = abs(furthest / SMALL_N**3 - 1) <= FFMA_WITHIN
    ours = f"{min(counts):.3e} to {max(counts):.3e} in {len(counts)} of 6"
    return Finding(ours, CONFIRMED if agrees else DIFFERS, furthest)


def _dram(profile: Profile) -> float | None:
    """The GB read from DRAM."""
    return _giga(profile.dram_read_bytes)


def _l1(profile: Profile) -> float | None:
    """The GB that global loads request from L1."""
    return _giga(profile.l1_load_bytes)


def _l2(profile: Profile) -> float | None:
    """The GB that the SMs receive from L2."""
    return _giga(profile.l2_to_sm_bytes)


def _giga(value: float | None) -> float | None:
    return None if value is None else value / 1e9


def _intensity(profile: Profile) -> float | None:
    """The FLOP per byte read from DRAM."""
    return _FLOP / profile.dram_read_bytes if profile.dram_read_bytes else None


def _transactions(profile: Profile) -> float | None:
    """The 128-byte transactions of a request for A to global memory."""
    found = [
        t
        for t in profile.memory or ()
        if (t.operand, t.space, t.operation) == ("A", "global", "load")
    ]
    requests = sum(total.requests or 0.0 for total in found)
    return sum(total.transactions or 0.0 for total in found) / requests if requests else None


@dataclass(frozen=True)
class Version:
    """A row of 003's tables, each figure a number or the lowest and the highest.

    `warps` is the share of warps that are active, `dram` the GB read from DRAM, `loads` the GB of
    global loads, `intensity` the FLOP per byte of DRAM that the document makes of them.
    """

    name: str
    run: Run
    warps: Span
    dram: Span
    loads: float
    intensity: float

    def claims(self) -> tuple[Claim, ...]:
        """A claim for each figure of the row."""
        source, name = f"003 {self.name}", self.name
        warps, dram = _range(self.warps), _range(self.dram)
        return (
            counted(
                source,
                f"{name}: {warps} of the warps are active",
                self.run,
                lambda p: p.occupancy,
                self.warps,
                "{:.3f}",
            ),
            counted(
                source, f"{name} reads {dram} GB of DRAM", self.run, _dram, self.dram, "{:.3f} GB"
            ),
            counted(
                source,
                f"{name}'s global loads are {self.loads:.3g} GB",
                self.run,
                _l1,
                self.loads,
                "{:.2f} GB",
            ),
            counted(
                source,
                f"{name} does {self.intensity:g} FLOP per byte of DRAM",
                self.run,
                _intensity,
                self.intensity,
                "{:.0f}",
            ),
        )


def _range(span: Span) -> str:
    """A number, or "0.3 to 0.4"."""
    values = span if isinstance(span, tuple) else (span,)
    return " to ".join(f"{value:.3g}" for value in values)


VERSIONS = (
    Version("v01", V01, warps=(0.06, 0.10), dram=4.3, loads=4.3, intensity=0.25),
    Version("v02", V02, warps=(0.30, 0.40), dram=(0.27, 0.32), loads=0.27, intensity=57),
    Version("v03", V03, warps=(0.50, 0.60), dram=(0.27, 0.30), loads=0.27, intensity=59),
    Version("v04", V04, warps=(0.60, 0.70), dram=0.27, loads=0.27, intensity=64),
    Version("v05", V05, warps=(0.75, 0.85), dram=0.276, loads=0.276, intensity=62),
    Version("v06", V06, warps=0.495, dram=0.485, loads=1.11, intensity=35.4),
)

CLAIMS: tuple[Claim, ...] = (
    *(claim for version in VERSIONS for claim in version.claims()),
    counted(
        "003 v01",
        "a request for A takes 1 transaction if a warp walks along a row of C",
        V01,
        _transactions,
        1,
        "{:.0f}",
    ),
    counted("003 v01", "and 32 if it walks down a column", SWAPPED, _transactions, 32, "{:.0f}"),
    counted(
        K7, "unpadded, DRAM moves 372 GB/s", UNPADDED, lambda p: p.dram_gbs, 372, "{:.0f} GB/s"
    ),
    counted(
        K7,
        "padded, DRAM moves 394 to 396 GB/s",
        PADDED_TILE,
        lambda p: p.dram_gbs,
        (394, 396),
        "{:.0f} GB/s",
    ),
    counted(K7, "unpadded, L1 hits 4.3%", UNPADDED, lambda p: p.l1_hit_rate, 0.043, "{:.1%}"),
    counted(
        K7, "padded, L1 hits 7 to 9%", PADDED_TILE, lambda p: p.l1_hit_rate, (0.07, 0.09), "{:.1%}"
    ),
    both(
        K7,
        "padding raises what L1 hits",
        PADDED_TILE,
        UNPADDED,
        lambda p: p.l1_hit_rate,
        ahead,
        "{0:.1%}, unpadded {1:.1%}",
    ),
    Claim("003 v01 to v06", "every version executes 8.59e9 FMAs", f"ncu at {SMALL_N}", _ffma),
    both(
        "003 v01",
        "v01 reads 15 times the DRAM that cuBLAS reads",
        V01,
        CUBLAS_SMALL,
        _dram,
        times(15),
        "{2:.1f} times: {0:.3f} and {1:.3f} GB",
    ),
    both(
        "003 v05",
        "v05 reads as much DRAM as cuBLAS, 276 MB",
        V05,
        CUBLAS_SMALL,
        _dram,
        times(1),
        "{2:.2f} times: {0:.3f} and {1:.3f} GB",
    ),
    both(
        "003 v06",
        "v06 generates twice the DRAM traffic of v05",
        V06,
        V05,
        _dram,
        times(2),
        "{2:.2f} times: {0:.3f} and {1:.3f} GB",
    ),
    both(
        "003 v06",
        "the memory subsystem works twice as hard as for v05",
        V06,
        V05,
        _l2,
        times(2),
        "{2:.2f} times from L2 to the SMs: {0:.2f} and {1:.2f} GB",
    ),
)
