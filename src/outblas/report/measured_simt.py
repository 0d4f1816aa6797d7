"""Claims of documents 000, 002, 003 (to v06) and 004 on the CUDA cores that a measurement settles:
by one timing beside another what each change of the climb is worth, and by ncu bank conflicts, what
keeps the schedulers waiting, traffic by level of memory.

Their own forms of a kernel are presets of its rung: theirs of simt.vectorized has bank conflicts,
and simt.warptile is unpadded in 002 and in the first half of 000, and prefetches nothing in any of
them.
"""

from collections.abc import Callable
from math import inf

from ..bench.record import BASE
from ..bench.statistics import BURST_TOLERANCE
from ..kernels.simt_config import PRESETS
from ..machines import MACHINES
from .claims import CONFIRMED, DIFFERS, NOT_MEASURED, REFUTED, Claim, Finding
from .compare import GPU, POINT, WITHIN, N, Run, Span, against, campaign, counted, in_range, timed
from .evidence import Evidence
from .profiles import Passes, Profile
from .seed_figures import of_rung

SMALL = 2048  # 003's size; 002's is compare.N, and 000, which states none, is tested there
K6, K7 = "000 kernel 6", "000 kernel 7"


def rung(name: str, config: str = "", n: int = N) -> Run:
    """A rung in a config of brief form, as `outblas bench` writes it: no field that the rung has
    anyway.
    """
    return Run(f"simt.{name}", config, n, "simt")


def _preset(name: str, n: int = N) -> Run:
    kernel, config = PRESETS[name]
    return Run(kernel, config, n, "simt")


NAIVE, COALESCED, SHARED, STRIP, REGISTER = map(
    rung, ("naive", "coalesced", "shared", "strip", "register")
)
VECTORIZED, PADDED = _preset("002 float4, 000 kernel 6"), _preset("000 kernel 6, padded")
SPLIT = rung("vectorized", "pad=0")
UNPADDED, PADDED_TILE = _preset("002 warp tile, 000 kernel 7"), _preset("000 kernel 7, padded")
SWAPPED, V01, V02, V03, V04 = (
    rung(name, n=SMALL) for name in ("naive", "coalesced", "shared", "strip", "register")
)
V05, V06 = _preset("003 v05", SMALL), _preset("003 v06", SMALL)
V06_DEEP = Run(
    V06.provider, V06.config.replace("block_k=8,", ""), SMALL, "simt"
)  # with the rung's BK = 16
CUBLAS, CUBLAS_SMALL = Run(BASE, ladder="simt"), Run(BASE, "", SMALL, "simt")


def _stated(gpu: str, faster: Run, slower: Run) -> tuple[Run, Run, tuple[float, float]]:
    """Both with the TFLOP/s of their rungs on the document's GPU: the middle where it gives a
    range.
    """
    spans = [
        next(f.tflops for f in of_rung(run.provider) if f.gpu == gpu and f.tflops)
        for run in (faster, slower)
    ]
    first, second = (sum(span) / 2 for span in spans)
    return faster, slower, (first, second)


COMPARISONS: tuple[tuple[str, str, Run, Run, tuple[float, float]], ...] = (
    (
        "002 coalescing",
        "coalescing gains nearly 12 times: 6352 GFLOP/s after 502.5",
        *_stated("GH200", COALESCED, NAIVE),
    ),
    (
        "002 shared memory",
        "32×32 tiles in shared memory gain 1.5 times: 9174 GFLOP/s after 6352",
        *_stated("GH200", SHARED, COALESCED),
    ),
    (
        "002 1D tile",
        "a strip of outputs a thread gains 1.85 times: 17041 GFLOP/s after 9174",
        *_stated("GH200", STRIP, SHARED),
    ),
    (
        "002 2D tile",
        "an outer product a thread gains 1.52 times: 25933 GFLOP/s after 17041",
        *_stated("GH200", REGISTER, STRIP),
    ),
    (
        "002 float4",
        "128-bit loads, conflicts and all, gain 1.21 times: 31421 GFLOP/s after 25933",
        *_stated("GH200", VECTORIZED, REGISTER),
    ),
    (
        "002 warp tile",
        "warp tiles, unpadded, gain 1.32 times: 41496 GFLOP/s after 31421",
        *_stated("GH200", UNPADDED, VECTORIZED),
    ),
    ("003 v01", "with the indices swapped throughput drops 32 times", V01, SWAPPED, (32.0, 1.0)),
    (
        "003 v02",
        "32×32 tiles in shared memory take 465 GFLOP/s to 900 to 1200: 2.3 times",
        *_stated("T4", V02, V01),
    ),
    (
        "003 v03",
        "a strip of 8 outputs a thread takes them to 1500 to 1800: 1.6 times",
        *_stated("T4", V03, V02),
    ),
    (
        "003 v04",
        "8×8 outputs a thread take them to 2100 to 2700: 1.5 times",
        *_stated("T4", V04, V03),
    ),
    (
        "003 v05",
        "128-bit loads, BK = 16 and no bank conflicts take them to 3200 to 3400: 1.4 times",
        *_stated("T4", V05, V04),
    ),
    (
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
    says = "{:.0%} at the clock it ran at"
    return timed(
        f"003 {version}",
        text,
        run,
        lambda m: 1 - m.utilisation if m.utilisation else None,
        share,
        says,
    )


def _uncached(evidence: Evidence) -> Finding:
    """TFLOP/s at 4096 over what DRAM allows at 0.25 FLOP per byte."""
    ours = COALESCED.find(evidence.measurements)
    limit = MACHINES[GPU].dram_gbs * 0.25 / 1e3
    value = ours.tflops / limit if ours and ours.tflops else None
    return in_range(
        value, (0.0, 1.0), f"{{:.1f}} times the {limit:.2f} TFLOP/s that DRAM allows on an {GPU}"
    )


def _deep(evidence: Evidence) -> Finding:
    """How much of the way from v06 to v05 BK = 16 goes."""
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
        f"burst at {SMALL}, in one campaign",
        _deep,
    ),
)


FREE = 0.02  # of the wavefronts of an operation: fewer that conflicts added count as none
FFMA_WITHIN = 0.01
ISSUES = 4  # of an SM in a cycle
_FLOP = 2 * SMALL**3


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
    """That bank conflicts add nothing to the wavefronts of a kind: by its instructions, for the
    counters of L1 show "conflicts" of stores that have none.
    """

    def test(evidence: Evidence) -> Finding:
        profile = run.profiled(evidence.profiles)
        added = kind(profile).added if profile else None
        if added is None:
            return NOT_MEASURED
        ours = f"{added:.1%} of the wavefronts are conflicts"
        return Finding(ours, CONFIRMED if added <= FREE else DIFFERS, added)

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
    """A claim on one number of two profiles; `says` has {0:} and {1:} for them, {2:} for their
    ratio.
    """

    def test(evidence: Evidence) -> Finding:
        first, second = (
            read(p) if p else None
            for p in (run.profiled(evidence.profiles) for run in (one, other))
        )
        if first is None or second is None:
            return NOT_MEASURED
        ratio = first / second if second else inf
        return Finding(
            says.format(first, second, ratio), judge(first, second), ratio if second else None
        )

    return Claim(source, text, f"ncu at {one.n}, both", test)


def _ahead(one: float, other: float) -> str:
    """Not by so little that two profiles of one kernel could differ by it."""
    tie = abs(one - other) <= BURST_TOLERANCE * other
    return DIFFERS if tie else CONFIRMED if one > other else REFUTED


def _as_bad(one: float, other: float) -> str:
    return CONFIRMED if one >= other * (1 - WITHIN) and other > FREE else DIFFERS


def _times(stated: float) -> Callable[[float, float], str]:
    return lambda one, other: in_range(one / other if other else inf, stated, "{}").verdict


def _ffma(evidence: Evidence) -> Finding:
    """Of all versions that were profiled."""
    found = [run.profiled(evidence.profiles) for run in (V01, V02, V03, V04, V05, V06)]
    counts = [p.ffma for p in found if p is not None and p.ffma is not None]
    if not counts:
        return NOT_MEASURED
    furthest = max(counts, key=lambda count: abs(count - SMALL**3))
    agrees = abs(furthest / SMALL**3 - 1) <= FFMA_WITHIN
    ours = f"{min(counts):.3e} to {max(counts):.3e} in {len(counts)} of 6"
    return Finding(ours, CONFIRMED if agrees else DIFFERS, furthest)


_CONFLICTS: tuple[Claim, ...] = (
    counted(
        K6,
        "loads from shared memory conflict 5-way",
        VECTORIZED,
        lambda p: p.loads.ways,
        5,
        "{:.1f} wavefronts a request",
    ),
    counted(
        K6,
        "stores to shared memory conflict 2.6-way",
        VECTORIZED,
        lambda p: p.stores.ways,
        2.6,
        "{:.1f} wavefronts a request",
    ),
    counted(
        K6,
        "over 40% of the wavefronts through shared memory are wasted",
        VECTORIZED,
        _wasted,
        (0.40, 0.50),
        "{:.1%}",
    ),
    _free(K6, "padding eliminates the conflicts of stores", PADDED, _stores),
    _both(
        K6,
        "padding does not mend the conflicts of loads",
        PADDED,
        VECTORIZED,
        lambda p: p.loads.added,
        _as_bad,
        "{0:.1%} of the wavefronts, unpadded {1:.1%}",
    ),
    _free(K7, "four columns side by side mend them, padded or not", SPLIT, _loads),
    counted(
        K7,
        "unpadded, stores to shared memory conflict 4-way",
        UNPADDED,
        lambda p: p.stores.ways,
        4,
        "{:.1f} wavefronts a request",
    ),
    counted(
        K7,
        "padding lowers that to 2.5-way",
        PADDED_TILE,
        lambda p: p.stores.ways,
        2.5,
        "{:.1f} wavefronts a request",
    ),
    _free(K7, "unpadded, loads show no conflicts", UNPADDED, _loads),
    _free(K7, "padded, loads show no conflicts", PADDED_TILE, _loads),
)


def _busy(profile: Profile) -> float | None:
    """The share of all issue slots that issue."""
    return None if profile.ipc is None else profile.ipc / ISSUES


_ISSUE: tuple[Claim, ...] = (
    counted(K6, "SMs are 66% busy", VECTORIZED, _busy, 0.66, "{:.1%} of the issue slots"),
    counted(
        K7, "unpadded, a thread takes 165 registers", UNPADDED, lambda p: p.registers, 165, "{:.0f}"
    ),
    counted(
        K7,
        "padded, a thread takes 167 registers",
        PADDED_TILE,
        lambda p: p.registers,
        167,
        "{:.0f}",
    ),
    counted(
        K7, "unpadded, achieved occupancy is 18%", UNPADDED, lambda p: p.occupancy, 0.18, "{:.1%}"
    ),
    counted(
        K7,
        "padded, achieved occupancy is 18% still",
        PADDED_TILE,
        lambda p: p.occupancy,
        0.18,
        "{:.1%}",
    ),
    counted(K7, "unpadded, SMs are 74% busy", UNPADDED, _busy, 0.74, "{:.1%} of the issue slots"),
    counted(
        K7,
        "padded, SMs are 75 to 76% busy",
        PADDED_TILE,
        _busy,
        (0.75, 0.76),
        "{:.1%} of the issue slots",
    ),
    counted(K7, "unpadded, 2.97 instructions a cycle", UNPADDED, lambda p: p.ipc, 2.97, "{:.2f}"),
    counted(K7, "padded, 3.03 instructions a cycle", PADDED_TILE, lambda p: p.ipc, 3.03, "{:.2f}"),
    _both(
        K7,
        "padding raises the instructions a cycle",
        PADDED_TILE,
        UNPADDED,
        lambda p: p.ipc,
        _ahead,
        "{0:.2f}, unpadded {1:.2f}",
    ),
    counted(
        K7, "unpadded, the FMA pipe is 64% active", UNPADDED, lambda p: p.fma_active, 0.64, "{:.1%}"
    ),
    counted(
        "004 introduction",
        "the warptile kernel's FMA pipe is 57% active",
        PADDED_TILE,
        lambda p: p.fma_active,
        0.57,
        "{:.1%}",
    ),
    counted(
        K7,
        "unpadded, 33% of the time between issues is not selected",
        UNPADDED,
        lambda p: p.not_selected,
        0.33,
        "{:.1%}",
    ),
    counted(
        K7,
        "padded, 31% of the time between issues is not selected",
        PADDED_TILE,
        lambda p: p.not_selected,
        0.31,
        "{:.1%}",
    ),
    _both(
        K7,
        "warp tiles raise the chance that an operand is kept for the next FMA",
        UNPADDED,
        VECTORIZED,
        lambda p: p.ffma_reuse,
        _ahead,
        "{0:.1%} of the FFMAs flag one (.reuse), {1:.1%} in kernel 6",
    ),
    counted(
        "003 v04",
        "with 8×8 outputs a thread takes 80 registers",
        V04,
        lambda p: p.registers,
        80,
        "{:.0f}",
    ),
)


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


def _intensity(profile: Profile) -> float | None:
    """FLOP per byte read from DRAM."""
    return _FLOP / profile.dram_read_bytes if profile.dram_read_bytes else None


def _transactions(profile: Profile) -> float | None:
    """A request of A's to global memory: lines of 128 bytes."""
    found = [
        t
        for t in profile.memory or ()
        if (t.operand, t.space, t.operation) == ("A", "global", "load")
    ]
    requests = sum(total.requests or 0.0 for total in found)
    return sum(total.transactions or 0.0 for total in found) / requests if requests else None


def _of_version(
    version: str,
    run: Run,
    warps: tuple[float, float],
    dram: tuple[float, float],
    loads: float,
    intensity: float,
) -> tuple[Claim, ...]:
    """A row of 003's tables: the share of warps that are active, GB of DRAM read, GB of global
    loads, and the FLOP per byte of DRAM that it makes of them.
    """
    source = f"003 {version}"
    active, read = (
        " to ".join(f"{value:.3g}" for value in dict.fromkeys(span)) for span in (warps, dram)
    )
    return (
        counted(
            source,
            f"{version}: {active} of the warps are active",
            run,
            lambda p: p.occupancy,
            warps,
            "{:.3f}",
        ),
        counted(source, f"{version} reads {read} GB of DRAM", run, _dram, dram, "{:.3f} GB"),
        counted(
            source, f"{version}'s global loads are {loads:.3g} GB", run, _l1, loads, "{:.2f} GB"
        ),
        counted(
            source,
            f"{version} does {intensity:g} FLOP per byte of DRAM",
            run,
            _intensity,
            intensity,
            "{:.0f}",
        ),
    )


# Version, run, warps active, GB of DRAM, GB of global loads, FLOP per byte of DRAM.
_VERSIONS: tuple[tuple[str, Run, tuple[float, float], tuple[float, float], float, float], ...] = (
    ("v01", V01, (0.06, 0.10), (4.3, 4.3), 4.3, 0.25),
    ("v02", V02, (0.30, 0.40), (0.27, 0.32), 0.27, 57),
    ("v03", V03, (0.50, 0.60), (0.27, 0.30), 0.27, 59),
    ("v04", V04, (0.60, 0.70), (0.27, 0.27), 0.27, 64),
    ("v05", V05, (0.75, 0.85), (0.276, 0.276), 0.276, 62),
    ("v06", V06, (0.495, 0.495), (0.485, 0.485), 1.11, 35.4),
)

_TRAFFIC: tuple[Claim, ...] = (
    *(claim for row in _VERSIONS for claim in _of_version(*row)),
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
    _both(
        K7,
        "padding raises what L1 hits",
        PADDED_TILE,
        UNPADDED,
        lambda p: p.l1_hit_rate,
        _ahead,
        "{0:.1%}, unpadded {1:.1%}",
    ),
    Claim("003 v01 to v06", "every version executes 8.59e9 FMAs", f"ncu at {SMALL}", _ffma),
    _both(
        "003 v01",
        "v01 reads 15 times the DRAM that cuBLAS reads",
        V01,
        CUBLAS_SMALL,
        _dram,
        _times(15),
        "{2:.1f} times: {0:.3f} and {1:.3f} GB",
    ),
    _both(
        "003 v05",
        "v05 reads as much DRAM as cuBLAS, 276 MB",
        V05,
        CUBLAS_SMALL,
        _dram,
        _times(1),
        "{2:.2f} times: {0:.3f} and {1:.3f} GB",
    ),
    _both(
        "003 v06",
        "v06 generates twice the DRAM traffic of v05",
        V06,
        V05,
        _dram,
        _times(2),
        "{2:.2f} times: {0:.3f} and {1:.3f} GB",
    ),
    _both(
        "003 v06",
        "the memory subsystem works twice as hard as for v05",
        V06,
        V05,
        _l2,
        _times(2),
        "{2:.2f} times from L2 to the SMs: {0:.2f} and {1:.2f} GB",
    ),
)


CLAIMS: tuple[Claim, ...] = (
    *(against(*comparison) for comparison in COMPARISONS),
    *_TIMED,
    *_CONFLICTS,
    *_ISSUE,
    *_TRAFFIC,
)
