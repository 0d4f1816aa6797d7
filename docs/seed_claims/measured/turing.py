"""Claims of document 003 on its tensor-core kernels (v07 to v11) that a measurement settles: one
run against another, and ncu's counters.
"""

from outblas.report.evidence import Evidence
from outblas.report.profiles import Profile

from ..claim import CONFIRMED, DIFFERS, NOT_MEASURED, Claim, Finding
from ..compare import N, Run, against, campaign, counted, in_range

_SMALL = 2048
_LADDER = "turing"
_SCALE = (N / _SMALL) ** 3  # bytes of tiles at 4096 over those at 2048


def _rung(name: str, n: int = _SMALL, config: str = "", addend: bool = False) -> Run:
    return Run(f"turing.{name}", config, n, _LADDER, addend)


_V05 = Run("simt.vectorized", "", _SMALL, _LADDER)
_V07, _V08, _V09, _V10 = map(_rung, ("wmma", "shared", "double_buffer", "vectorized"))
_V10_LARGE, _V11 = _rung("vectorized", N), _rung("ldmatrix", N)


def _loaded(source: str, name: str, stated: float) -> Claim:
    """The claim that a rung's loads request so many GB of L1, counted at 4096, scaled to 2048."""
    run = _rung(name, N)
    text = f"its global loads at 2048 are {stated:.2f} GB"

    def read(profile: Profile) -> float | None:
        return profile.l1_load_bytes / _SCALE / 1e9 if profile.l1_load_bytes else None

    return counted(source, text, run, read, stated, "{:.2f} GB, an eighth of what 4096 takes")


def _ffma(evidence: Evidence) -> Finding:
    """Whether the epilogue executes an FFMA for each element of C, and the product none."""
    profile = _rung("double_buffer", addend=True).profiled(evidence.profiles)
    if profile is None or profile.ffma is None:
        return NOT_MEASURED
    exact = profile.ffma == _SMALL**2
    return Finding(f"{profile.ffma:,.0f}", CONFIRMED if exact else DIFFERS, profile.ffma)


def _no_overlap(evidence: Evidence) -> Finding:
    """Whether two buffers are no faster than one. Loads that run a k tile ahead gain next to
    nothing either: v09's loads do not overlap its products, and need not.
    """
    found = campaign(
        evidence.measurements,
        _rung("shared", N),
        _rung("double_buffer", N),
        _rung("double_buffer", N, "ahead=True"),
    )
    if found is None:
        return NOT_MEASURED
    single, double, ahead = (m.ratio or 0.0 for m in found)
    ours = f"{double:.3f} of cuBLAS after {single:.3f}; with its loads a k tile ahead {ahead:.3f}"
    return Finding(ours, CONFIRMED if double <= 1.03 * single else DIFFERS, double / single)


def _fewer_loads(evidence: Evidence) -> Finding:
    """How many times fewer requests to global memory v10 makes than v09."""
    runs = _rung("double_buffer", N), _rung("vectorized", N)
    counts = [
        p.global_load_requests if (p := run.profiled(evidence.profiles)) else None for run in runs
    ]
    many, few = counts
    return in_range(many / few if many and few else None, 8.0, "{:.1f} times fewer")


def _of_a_t4(profile: Profile) -> float | None:
    """The active warps over the warps that a T4's SM holds, which are half of an H100's."""
    return 2 * profile.occupancy if profile.occupancy is not None else None


CLAIMS: tuple[Claim, ...] = (
    against(
        "003 v08",
        "shared memory gains 1.7 times: 3230 GFLOP/s after 1870",
        _V08,
        _V07,
        (3.230, 1.870),
    ),
    against("003 v09", "two buffers lose 4%: 3105 GFLOP/s after 3230", _V08, _V09, (3.230, 3.105)),
    against(
        "003 v10",
        "a 32×64 tile loses 4% by 128-bit loads: 2984 GFLOP/s after 3105",
        _V09,
        _V10,
        (3.105, 2.984),
    ),
    against(
        "003 v11",
        "ldmatrix and 128×128 tiles gain 1.4 times: 17.06 TFLOP/s after 12.38",
        _V11,
        _V10_LARGE,
        (17.058, 12.380),
    ),
    against(
        "003 v10",
        "v05 on CUDA cores is faster than v07: 3304 GFLOP/s against 1870",
        _V05,
        _V07,
        (3.304, 1.870),
    ),
    against(
        "003 v10",
        "v05 on CUDA cores is faster than v08: 3304 GFLOP/s against 3230",
        _V05,
        _V08,
        (3.304, 3.230),
    ),
    _loaded("003 v07", "wmma", 4.29),
    _loaded("003 v08", "shared", 0.801),
    _loaded("003 v09", "double_buffer", 0.812),
    _loaded("003 v10", "vectorized", 0.780),
    Claim(
        "003 v09",
        "its epilogue executes exactly M·N FFMAs, 4,194,304",
        "ncu at 2048, with an addend",
        _ffma,
    ),
    Claim(
        "003 v09",
        "loads do not overlap products, so it is no faster than v08",
        "burst at 4096",
        _no_overlap,
    ),
    Claim(
        "003 v10",
        "128-bit loads are 8 times fewer instructions",
        "requests of warps, ncu at 4096",
        _fewer_loads,
    ),
    counted("003 v07", "no FFMA is executed", _rung("wmma", N), lambda p: p.ffma, 0.0, "{:.0f}"),
    counted(
        "003 v11",
        "49.4% of the warps are active: 2 CTAs an SM",
        _V11,
        _of_a_t4,
        0.494,
        "{:.1%} of the 32 warps that a T4's SM holds",
    ),
)
