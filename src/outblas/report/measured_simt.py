"""Claims of documents 000, 002, 003 (to v06) and 004 on the CUDA cores that one measurement beside another, or ncu,
settles: what each change of the climb is worth, bank conflicts, traffic, occupancy.

The documents' own forms of a kernel are configs of its rung: theirs of simt.vectorized has bank conflicts, and
simt.warptile is unpadded in 002 and in the first half of 000, and prefetches nothing in either.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from ..bench.record import BASE
from ..machines import MACHINES
from .claims import CONFIRMED, DIFFERS, NOT_MEASURED, REFUTED, Claim, Evidence, Finding
from .compare import GPU, POINT, WITHIN, Run, against, campaign, counted, in_range, timed
from .profiles import Passes, Profile
from .seeds import of_rung

SMALL = 2048  # 003's size; 002's is compare.N, and 000, which states none, is tested there
FREE = 0.05  # of the wavefronts through shared memory: fewer that conflicts added count as none
FFMA_WITHIN = 0.01


def _rung(name: str, config: str = "") -> Run:
    return Run(f"simt.{name}", config, ladder="simt")


def _small(name: str, config: str = "") -> Run:
    return Run(f"simt.{name}", config, SMALL, "simt")


# Configs in brief form, as `outblas bench` writes them: a field that the rung has anyway is not named.
_NAIVE, _COALESCED, _SHARED, _STRIP, _REGISTER = map(_rung, ("naive", "coalesced", "shared", "strip", "register"))
_VECTORIZED = _rung("vectorized", "pad=0,piece_n=8")  # 002's and 000's first
_PADDED, _SPLIT = _rung("vectorized", "piece_n=8"), _rung("vectorized", "pad=0")
_UNPADDED, _PADDED_TILE = _rung("warptile", "pad=0,prefetch=False"), _rung("warptile", "prefetch=False")  # 000's
_WARPTILE = _rung("warptile")
_V01, _V02, _V03, _V04 = map(_small, ("coalesced", "shared", "strip", "register"))
_V05 = _small("vectorized", "block_k=16")
_TILES_64 = "block_m=64,block_n=64,warp_m=32,warp_n=16,thread_m=4,thread_n=4,piece_m=4,prefetch=False"
_V06, _V06_DEEP = _small("warptile", f"{_TILES_64},block_k=8"), _small("warptile", _TILES_64)
_SWAPPED = _small("naive")
_CUBLAS, _CUBLAS_SMALL = Run(BASE, ladder="simt"), Run(BASE, "", SMALL, "simt")

_K6, _K7 = "000 kernel 6", "000 kernel 7"


def _stated(gpu: str, faster: Run, slower: Run) -> tuple[Run, Run, tuple[float, float]]:
    """Both with the TFLOP/s of their rungs on the document's GPU: the middle where it gives a range."""
    spans = [next(f.tflops for f in of_rung(run.provider) if f.gpu == gpu and f.tflops) for run in (faster, slower)]
    first, second = (sum(span) / 2 for span in spans)
    return faster, slower, (first, second)


COMPARISONS: tuple[tuple[str, str, Run, Run, tuple[float, float]], ...] = (
    ("002 coalescing", "coalescing gains nearly 12 times: 6352 GFLOP/s after 502.5",
     *_stated("GH200", _COALESCED, _NAIVE)),
    ("002 shared memory", "32×32 tiles in shared memory gain 1.5 times: 9174 GFLOP/s after 6352",
     *_stated("GH200", _SHARED, _COALESCED)),
    ("002 1D tile", "a strip of outputs a thread gains 1.85 times: 17041 GFLOP/s after 9174",
     *_stated("GH200", _STRIP, _SHARED)),
    ("002 2D tile", "an outer product a thread gains 1.52 times: 25933 GFLOP/s after 17041",
     *_stated("GH200", _REGISTER, _STRIP)),
    ("002 float4", "128-bit loads, conflicts and all, gain 1.21 times: 31421 GFLOP/s after 25933",
     *_stated("GH200", _VECTORIZED, _REGISTER)),
    ("002 warp tile", "warp tiles, unpadded, gain 1.32 times: 41496 GFLOP/s after 31421",
     *_stated("GH200", _UNPADDED, _VECTORIZED)),
    ("003 v01", "with the indices swapped throughput drops 32 times", _V01, _SWAPPED, (32.0, 1.0)),
    ("003 v02", "32×32 tiles in shared memory take 465 GFLOP/s to 900 to 1200", *_stated("T4", _V02, _V01)),
    ("003 v03", "a strip of 8 outputs a thread takes them to 1500 to 1800", *_stated("T4", _V03, _V02)),
    ("003 v04", "8×8 outputs a thread take them to 2100 to 2700", *_stated("T4", _V04, _V03)),
    ("003 v05", "128-bit loads, BK = 16 and no bank conflicts take them to 3200 to 3400", *_stated("T4", _V05, _V04)),
    ("003 v06", "warp tiles of 64×64×8 lose to v05: 1568 GFLOP/s after 3200 to 3400", *_stated("T4", _V05, _V06)),
)  # fmt: skip


def _times_slower(source: str, run: Run, words: str, claimed: tuple[float, float]) -> Claim:
    text = f"{run.provider} is {words} slower than cuBLAS"
    return timed(source, text, run, lambda m: 1 / m.ratio if m.ratio else None, claimed, "{:.1f} times")


def _of_cublas(source: str, run: Run, share: float, words: str) -> Claim:
    return timed(source, f"{words} {share:.3g} of cuBLAS", run, lambda m: m.ratio, (share, share), "{:.3f}")


def _of_roofline(source: str, run: Run, share: float, words: str) -> Claim:
    text = f"{words} reaches {share:.0%} of the fp32 roofline"
    return timed(source, text, run, lambda m: m.utilisation, (share, share), "{:.1%} at the clock it ran at")


def _uncached(evidence: Evidence) -> Finding:
    """TFLOP/s at 4096 over what DRAM allows at 0.25 FLOP per byte."""
    ours = _COALESCED.find(evidence.measurements)
    limit = MACHINES[GPU].dram_gbs * 0.25 / 1e3
    value = ours.tflops / limit if ours and ours.tflops else None
    return in_range(value, (0.0, 1.0), f"{{:.1f}} times the {limit:.2f} TFLOP/s that DRAM allows on an {GPU}")


def _deep(evidence: Evidence) -> Finding:
    """How much of the way from v06 to v05 BK = 16 goes."""
    found = campaign(evidence.measurements, _V05, _V06, _V06_DEEP)
    if found is None:
        return NOT_MEASURED
    large, small, deep = (m.ratio or 0.0 for m in found)
    if large <= small * (1 + POINT):
        return Finding(f"v06 is not slower: {small:.3f} against {large:.3f} × cuBLAS", DIFFERS)
    closed = (deep - small) / (large - small)
    ours = f"BK = 16 goes {closed:.0%} of the way to v05 ({small:.3f}, {deep:.3f}, {large:.3f} × cuBLAS)"
    return Finding(ours, CONFIRMED if closed >= 0.5 else DIFFERS, closed)


_TIMED: tuple[Claim, ...] = (
    _times_slower("002 baseline", _NAIVE, "nearly 100 times", (90.0, 100.0)),
    _times_slower("002 coalescing", _COALESCED, "8 times", (8.0, 8.0)),
    _times_slower("002 shared memory", _SHARED, "more than 5 times", (5.0, 6.0)),
    _times_slower("002 1D tile", _STRIP, "nearly 3 times", (2.8, 3.0)),
    _of_cublas("002 2D tile", _REGISTER, 0.5, "simt.register gets halfway:"),
    _of_cublas("002 warp tile", _UNPADDED, 0.84, "simt.warptile, unpadded, achieves nearly"),
    _of_cublas("004 introduction", _WARPTILE, 0.937, "the warptile kernel reached"),
    _of_cublas("003 introduction", _V05, 0.9, "the fp32 path closes at v05 with"),
    _of_roofline(_K6, _VECTORIZED, 0.56, "simt.vectorized, conflicts and all,"),
    _of_roofline(_K6, _CUBLAS, 0.85, "cuBLAS"),
    Claim("003 v01", "what caches add to v01 vanishes at 4096", "burst over bandwidth times intensity", _uncached),
    Claim("003 v06", "BK = 8 is the root cause of its loss to v05", f"burst at {SMALL}, in one campaign", _deep),
)  # fmt: skip


def _number(
    source: str, text: str, run: Run, read: Callable[[Profile], float | None], stated: float, says: str
) -> Claim:
    return counted(source, text, run, read, (stated, stated), says)


def _wasted(profile: Profile) -> float | None:
    """The share of all wavefronts of loads and stores that bank conflicts added."""
    kinds = profile.loads, profile.stores
    total = sum(kind.wavefronts or 0.0 for kind in kinds)
    added = sum((kind.wavefronts or 0.0) * (kind.excess or 0.0) for kind in kinds)
    return added / total if total else None


def _loads(profile: Profile) -> Passes:
    return profile.loads


def _stores(profile: Profile) -> Passes:
    return profile.stores


def _free(source: str, text: str, run: Run, kind: Callable[[Profile], Passes]) -> Claim:
    """That bank conflicts add nothing to the wavefronts of a kind."""

    def test(evidence: Evidence) -> Finding:
        profile = run.profiled(evidence.profiles)
        excess = kind(profile).excess if profile else None
        if excess is None:
            return NOT_MEASURED
        ours = f"{excess:.1%} of the wavefronts are conflicts"
        return Finding(ours, CONFIRMED if excess <= FREE else DIFFERS, excess)

    return Claim(source, text, f"ncu at {run.n}", test)


def _both(
    source: str,
    text: str,
    one: Run,
    other: Run,
    read: Callable[[Profile], float | None],
    judge: Callable[[float, float], str],
    says: str,
) -> Claim:
    """A claim on one number of two profiles; `says` has {0:} and {1:} for them, {2:} for their ratio."""

    def test(evidence: Evidence) -> Finding:
        first, second = (read(p) if p else None for p in (run.profiled(evidence.profiles) for run in (one, other)))
        if first is None or second is None:
            return NOT_MEASURED
        ratio = first / second if second else inf
        return Finding(says.format(first, second, ratio), judge(first, second), ratio if second else None)

    return Claim(source, text, f"ncu at {one.n}, both", test)


def _ahead(one: float, other: float) -> str:
    return CONFIRMED if one > other else REFUTED if one < other else DIFFERS


def _as_bad(one: float, other: float) -> str:
    return CONFIRMED if one >= other * (1 - WITHIN) and other > FREE else DIFFERS


def _times(stated: float) -> Callable[[float, float], str]:
    return lambda one, other: in_range(one / other if other else inf, (stated, stated), "{}").verdict


def _ffma(evidence: Evidence) -> Finding:
    """Of all versions that were profiled."""
    found = [run.profiled(evidence.profiles) for run in (_V01, _V02, _V03, _V04, _V05, _V06)]
    counts = [p.ffma for p in found if p is not None and p.ffma is not None]
    if not counts:
        return NOT_MEASURED
    furthest = max(counts, key=lambda count: abs(count - SMALL**3))
    agrees = abs(furthest / SMALL**3 - 1) <= FFMA_WITHIN
    ours = f"{min(counts):.3e} to {max(counts):.3e} in {len(counts)} of 6"
    return Finding(ours, CONFIRMED if agrees else DIFFERS, furthest)


_CONFLICTS: tuple[Claim, ...] = (
    _number(_K6, "loads from shared memory conflict 5-way", _VECTORIZED, lambda p: p.loads.ways, 5,
            "{:.1f} wavefronts a request"),
    _number(_K6, "stores to shared memory conflict 2.6-way", _VECTORIZED, lambda p: p.stores.ways, 2.6,
            "{:.1f} wavefronts a request"),
    counted(_K6, "over 40% of the wavefronts through shared memory are wasted", _VECTORIZED, _wasted, (0.40, 0.50),
            "{:.1%}"),
    _free(_K6, "padding eliminates the conflicts of stores", _PADDED, _stores),
    _both(_K6, "padding does not mend the conflicts of loads", _PADDED, _VECTORIZED, lambda p: p.loads.excess, _as_bad,
          "{0:.1%} of the wavefronts, unpadded {1:.1%}"),
    _free(_K7, "four columns side by side mend them, padded or not", _SPLIT, _loads),
    _number(_K7, "unpadded, stores to shared memory conflict 4-way", _UNPADDED, lambda p: p.stores.ways, 4,
            "{:.1f} wavefronts a request"),
    _number(_K7, "padding lowers that to 2.5-way", _PADDED_TILE, lambda p: p.stores.ways, 2.5,
            "{:.1f} wavefronts a request"),
    _free(_K7, "unpadded, loads show no conflicts", _UNPADDED, _loads),
    _free(_K7, "padded, loads show no conflicts", _PADDED_TILE, _loads),
)  # fmt: skip

_ISSUE: tuple[Claim, ...] = (
    _number(_K7, "unpadded, a thread takes 165 registers", _UNPADDED, lambda p: p.registers, 165, "{:.0f}"),
    _number(_K7, "achieved occupancy is 18%", _UNPADDED, lambda p: p.occupancy, 0.18, "{:.1%}"),
    _number(_K7, "unpadded, 2.97 instructions a cycle", _UNPADDED, lambda p: p.ipc, 2.97, "{:.2f}"),
    _number(_K7, "padded, 3.03 instructions a cycle", _PADDED_TILE, lambda p: p.ipc, 3.03, "{:.2f}"),
    _both(_K7, "padding raises the instructions a cycle", _PADDED_TILE, _UNPADDED, lambda p: p.ipc, _ahead,
          "{0:.2f}, unpadded {1:.2f}"),
    _number(_K7, "unpadded, the FMA pipe is 64% active", _UNPADDED, lambda p: p.fma_active, 0.64, "{:.1%}"),
    _number("004 introduction", "the warptile kernel's FMA pipe is 57% active", _WARPTILE, lambda p: p.fma_active, 0.57,
            "{:.1%}"),
    _number(_K7, "unpadded, 33% of the time between issues is not selected", _UNPADDED, lambda p: p.not_selected, 0.33,
            "{:.1%}"),
    _number(_K7, "padded, 31% of the time between issues is not selected", _PADDED_TILE, lambda p: p.not_selected, 0.31,
            "{:.1%}"),
    _number("003 v04", "with 8×8 outputs a thread takes 80 registers", _V04, lambda p: p.registers, 80, "{:.0f}"),
)  # fmt: skip


def _dram(profile: Profile) -> float | None:
    """GB read."""
    return _giga(profile.dram_read_bytes)


def _l1(profile: Profile) -> float | None:
    """GB that global loads ask of L1."""
    return _giga(profile.l1_load_bytes)


def _l2(profile: Profile) -> float | None:
    """GB that the SMs receive from L2."""
    return _giga(profile.l2_to_sm_bytes)


def _giga(value: float | None) -> float | None:
    return None if value is None else value / 1e9


_TRAFFIC: tuple[Claim, ...] = (
    Claim("003 v01 to v06", "every version executes 8.59e9 FMAs", f"ncu at {SMALL}", _ffma),
    _number("003 v01", "v01 reads 4.3 GB of DRAM", _V01, _dram, 4.3, "{:.3f} GB"),
    _both("003 v01", "that is 15 times what cuBLAS reads", _V01, _CUBLAS_SMALL, _dram,
          _times(15), "{2:.1f} times: {0:.3f} and {1:.3f} GB"),
    counted("003 v02", "v02 reads 270 to 320 MB of DRAM", _V02, _dram, (0.270, 0.320),
            "{:.3f} GB"),
    _number("003 v02", "and its global loads are about 270 MB", _V02, _l1, 0.270,
            "{:.2f} GB"),
    _both("003 v05", "v05 reads as much DRAM as cuBLAS, 276 MB", _V05, _CUBLAS_SMALL, _dram,
          _times(1), "{2:.2f} times: {0:.3f} and {1:.3f} GB"),
    _number("003 v05", "and its global loads are 276 MB", _V05, _l1, 0.276, "{:.2f} GB"),
    _number("003 v06", "v06's global loads are 1.11 GB", _V06, _l1, 1.11, "{:.2f} GB"),
    _both("003 v06", "v06 generates twice the DRAM traffic of v05", _V06, _V05, _dram,
          _times(2), "{2:.2f} times: {0:.3f} and {1:.3f} GB"),
    _both("003 v06", "the memory subsystem works twice as hard as for v05", _V06, _V05, _l2,
          _times(2), "{2:.2f} times from L2 to the SMs: {0:.2f} and {1:.2f} GB"),
)  # fmt: skip


CLAIMS: tuple[Claim, ...] = (
    *(against(*comparison) for comparison in COMPARISONS),
    *_TIMED,
    *_CONFLICTS,
    *_ISSUE,
    *_TRAFFIC,
)
