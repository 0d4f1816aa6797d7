"""Claims on the CUDA cores that timings settle: what each change of the climb is worth, by one run
beside another, and shares of cuBLAS and of the roofline.
"""

from outblas.core.machines import MACHINES
from outblas.report.evidence import Evidence
from outblas.report.seed_figures import of_rung

from ..claim import CONFIRMED, DIFFERS, NOT_MEASURED, Claim, Finding
from ..compare import GPU, POINT, Comparison, Run, Span, campaign, in_range, timed
from .simt_runs import (
    COALESCED,
    CUBLAS,
    K6,
    NAIVE,
    PADDED_TILE,
    REGISTER,
    SHARED,
    SMALL_N,
    STRIP,
    SWAPPED,
    UNPADDED,
    V01,
    V02,
    V03,
    V04,
    V05,
    V06,
    V06_DEEP,
    VECTORIZED,
)


def _stated(gpu: str, faster: Run, slower: Run) -> tuple[Run, Run, tuple[float, float]]:
    """Both runs, and the TFLOP/s that the document of a GPU states for their rungs: the middle
    where it gives a range.
    """
    spans = [
        next(f.tflops for f in of_rung(run.provider) if f.gpu == gpu and f.tflops)
        for run in (faster, slower)
    ]
    first, second = (sum(span) / 2 for span in spans)
    return faster, slower, (first, second)


COMPARISONS: tuple[Comparison, ...] = (
    Comparison(
        "002 coalescing",
        "coalescing gains nearly 12 times: 6352 GFLOP/s after 502.5",
        *_stated("GH200", COALESCED, NAIVE),
    ),
    Comparison(
        "002 shared memory",
        "32×32 tiles in shared memory gain 1.5 times: 9174 GFLOP/s after 6352",
        *_stated("GH200", SHARED, COALESCED),
    ),
    Comparison(
        "002 1D tile",
        "a strip of outputs a thread gains 1.85 times: 17041 GFLOP/s after 9174",
        *_stated("GH200", STRIP, SHARED),
    ),
    Comparison(
        "002 2D tile",
        "an outer product a thread gains 1.52 times: 25933 GFLOP/s after 17041",
        *_stated("GH200", REGISTER, STRIP),
    ),
    Comparison(
        "002 float4",
        "128-bit loads, conflicts and all, gain 1.21 times: 31421 GFLOP/s after 25933",
        *_stated("GH200", VECTORIZED, REGISTER),
    ),
    Comparison(
        "002 warp tile",
        "warp tiles, unpadded, gain 1.32 times: 41496 GFLOP/s after 31421",
        *_stated("GH200", UNPADDED, VECTORIZED),
    ),
    Comparison(
        "003 v01", "with the indices swapped throughput drops 32 times", V01, SWAPPED, (32.0, 1.0)
    ),
    Comparison(
        "003 v02",
        "32×32 tiles in shared memory take 465 GFLOP/s to 900 to 1200: 2.3 times",
        *_stated("T4", V02, V01),
    ),
    Comparison(
        "003 v03",
        "a strip of 8 outputs a thread takes them to 1500 to 1800: 1.6 times",
        *_stated("T4", V03, V02),
    ),
    Comparison(
        "003 v04",
        "8×8 outputs a thread take them to 2100 to 2700: 1.5 times",
        *_stated("T4", V04, V03),
    ),
    Comparison(
        "003 v05",
        "128-bit loads, BK = 16 and no bank conflicts take them to 3200 to 3400: 1.4 times",
        *_stated("T4", V05, V04),
    ),
    Comparison(
        "003 v06",
        "warp tiles of 64×64×8 lose to v05 2.1 times: 1568 GFLOP/s after 3200 to 3400",
        *_stated("T4", V05, V06),
    ),
)


def _times_slower(source: str, run: Run, words: str, claimed: Span) -> Claim:
    text = f"{run.provider} is {words} slower than cuBLAS"
    return timed(
        source, text, run, lambda m: 1 / m.ratio if m.ratio else None, claimed, "{:.1f} times"
    )


def _of_cublas(source: str, run: Run, share: float, words: str) -> Claim:
    return timed(source, f"{words} {share:.3g} of cuBLAS", run, lambda m: m.ratio, share, "{:.3f}")


def _of_roofline(source: str, run: Run, share: float, words: str) -> Claim:
    text = f"{words} reaches {share:.0%} of the fp32 roofline"
    return timed(source, text, run, lambda m: m.utilisation, share, "{:.1%} at the clock it ran at")


def _unused(version: str, run: Run, share: float) -> Claim:
    text = f"{version} leaves {share:.0%} of the fp32 peak unused"
    wording = "{:.0%} at the clock it ran at"
    return timed(
        f"003 {version}",
        text,
        run,
        lambda m: 1 - m.utilisation if m.utilisation else None,
        share,
        wording,
    )


def _uncached(evidence: Evidence) -> Finding:
    """Whether TFLOP/s at 4096 stay below what DRAM allows at 0.25 FLOP per byte."""
    ours = COALESCED.find(evidence.measurements)
    limit = MACHINES[GPU].dram_gbs * 0.25 / 1e3
    value = ours.tflops / limit if ours and ours.tflops else None
    return in_range(
        value, (0.0, 1.0), f"{{:.1f}} times the {limit:.2f} TFLOP/s that DRAM allows on an {GPU}"
    )


def _deep(evidence: Evidence) -> Finding:
    """Whether BK = 16 closes at least half of the gap between v06 and v05."""
    found = campaign(evidence.measurements, V05, V06, V06_DEEP)
    if found is None:
        return NOT_MEASURED
    large, small, deep = (m.ratio or 0.0 for m in found)
    if large <= small * (1 + POINT):
        return Finding(f"v06 is not slower: {small:.3f} against {large:.3f} × cuBLAS", DIFFERS)
    closed = (deep - small) / (large - small)
    ours = (
        f"BK = 16 goes {closed:.0%} of the way to v05 ({small:.3f}, {deep:.3f}, {large:.3f} × "
        "cuBLAS)"
    )
    return Finding(ours, CONFIRMED if closed >= 0.5 else DIFFERS, closed)


_TIMED: tuple[Claim, ...] = (
    _times_slower("002 baseline", NAIVE, "nearly 100 times", (90.0, 100.0)),
    _times_slower("002 coalescing", COALESCED, "8 times", 8.0),
    _times_slower("002 shared memory", SHARED, "more than 5 times", (5.0, 6.0)),
    _times_slower("002 1D tile", STRIP, "nearly 3 times", (2.8, 3.0)),
    _of_cublas("002 2D tile", REGISTER, 0.5, "simt.register gets halfway:"),
    _of_cublas("002 warp tile", UNPADDED, 0.84, "simt.warptile, unpadded, achieves nearly"),
    _of_cublas("004 introduction", PADDED_TILE, 0.937, "the warptile kernel reached"),
    _of_cublas("003 introduction", V05, 0.9, "the fp32 path closes at v05 with"),
    _of_roofline(K6, VECTORIZED, 0.56, "simt.vectorized, conflicts and all,"),
    _of_roofline(K6, CUBLAS, 0.85, "cuBLAS"),
    _unused("v02", V02, 0.85),
    _unused("v03", V03, 0.78),
    _unused("v04", V04, 0.67),
    _unused("v05", V05, 0.58),
    _unused("v06", V06, 0.806),
    Claim(
        "003 v01",
        "what caches add to v01 vanishes at 4096",
        "burst over bandwidth times intensity",
        _uncached,
    ),
    Claim(
        "003 v06",
        "BK = 8 is the root cause of its loss to v05",
        f"burst at {SMALL_N}, in one campaign",
        _deep,
    ),
)

CLAIMS: tuple[Claim, ...] = (*(comparison.claim() for comparison in COMPARISONS), *_TIMED)
