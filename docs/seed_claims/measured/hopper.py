"""Claims of documents 001 and 004 that one measurement beside another settles: what each change of
the climb is worth, where power binds, what the L2 cache serves.
"""

from itertools import pairwise

from outblas.bench.record import BASE
from outblas.report import rungs, seed_figures
from outblas.report.evidence import Evidence

from ..claim import CONFIRMED, DIFFERS, NOT_MEASURED, REFUTED, Claim, Finding
from ..compare import GPU, POINT, WITHIN, Comparison, N, Run, against, counted, together

LARGE = 8192
AT_LIMIT = 0.97  # from this share of its power limit on, the board holds the clock down


def _steps() -> tuple[Claim, ...]:
    """The claims that each rung is faster than the one below it, as the document's figures say."""
    # Reversed, so that a rung's first figure is the one that stays.
    figures = {f.rung: f for f in reversed(seed_figures.FIGURES) if f.tflops and f.n == N}
    found = []
    for below, rung in pairwise(name for name in rungs.names("hopper") if name in figures):
        new, old = figures[rung], figures[below]
        assert new.tflops
        assert old.tflops
        pair = new.tflops[0], old.tflops[0]
        gain = pair[0] / pair[1] - 1
        text = (
            f"{rung} gains {gain:.1%} on {below.partition('.')[2]}: {pair[0]:g} TFLOP/s after "
            f"{pair[1]:g}"
        )
        found.append(against(new.source, text, Run(rung), Run(below), pair))
    return tuple(found)


def _rung(name: str, config: str = "") -> Run:
    return Run(f"hopper.{name}", config)


_K3, _K5, _K6, _K8, _STORE = (
    "001 kernel 3",
    "001 kernel 5",
    "001 kernel 6",
    "001 kernel 8",
    "004 store path",
)
_GROUPS = "004 L2-aware scheduling"
_LARGE, _TWO, _PERSISTENT, _CLUSTER = map(
    _rung, ("large_tile", "two_consumers", "persistent", "cluster_multicast")
)
_SPECIALIZED = _rung("warp_specialized")
_COMPILED = _rung("two_consumers", "producer_registers=0,consumer_registers=0")  # no setmaxnreg
_SPILLING = _rung("two_consumers", "consumers=1,producer_registers=0,consumer_registers=0")
_CONSECUTIVE = _rung("persistent", "order=consecutive,sms=0")
_ALL_SMS = _rung("persistent", "sms=0")
_REORDERED = _rung("store_tuning", "write_through=False,accumulate_flag=False")
_WRITTEN_THROUGH = _rung("store_tuning", "reorder_stores=False,accumulate_flag=False")
_FLAGGED = _rung("store_tuning", "reorder_stores=False,write_through=False")

# Configs in brief form, as `outblas bench` writes them: a field that the rung has anyway is not
# named.
COMPARISONS: tuple[Comparison, ...] = (
    Comparison(
        _K3,
        "one wgmma of n = 128 is faster than two of 64",
        _LARGE,
        _rung("large_tile", "mma_n=64"),
    ),
    Comparison(
        _K3,
        "one wgmma of n = 128 is faster than four of 32",
        _LARGE,
        _rung("large_tile", "mma_n=32"),
    ),
    Comparison(
        _K5,
        "one consumer at 128×256 spills: 123 TFLOP/s, at 128×128 498",
        _SPECIALIZED,
        _SPILLING,
        (498, 123),
    ),
    Comparison(
        _K5,
        "two consumers of 128×256 beat one, before setmaxnreg: 610",
        _COMPILED,
        _SPECIALIZED,
        (610, 498),
    ),
    Comparison(
        f"{_K5}, 004 kernel C",
        "setmaxnreg 24/240 takes 610 TFLOP/s to 631",
        _TWO,
        _COMPILED,
        (631, 610),
    ),
    Comparison(
        _K6,
        "persistent CTAs on consecutive tiles lose to their parent: 400 TFLOP/s",
        _TWO,
        _CONSECUTIVE,
        (631, 400),
    ),
    Comparison(
        _K6,
        "groups of 16×8 beat consecutive tiles: 660 TFLOP/s to 400",
        _PERSISTENT,
        _CONSECUTIVE,
        (660, 400),
    ),
    Comparison(
        f"{_K6}, {_GROUPS}",
        "128 SMs beat all 132: 660 TFLOP/s to 655",
        _PERSISTENT,
        _ALL_SMS,
        (660, 655),
    ),
    Comparison(
        _GROUPS,
        "groups of 16×8 beat 2×2",
        _PERSISTENT,
        _rung("persistent", "group_m=2,group_n=2"),
    ),
    Comparison(
        _GROUPS,
        "groups of 16×8 beat 4×4",
        _PERSISTENT,
        _rung("persistent", "group_m=4,group_n=4"),
    ),
    Comparison(_GROUPS, "groups of 16×8 beat 8×8", _PERSISTENT, _rung("persistent", "group_m=8")),
    Comparison(
        _K8,
        "clusters of 2×1 beat 1×2",
        _CLUSTER,
        _rung("cluster_multicast", "cluster_m=1,cluster_n=2"),
    ),
    Comparison(
        _K8, "clusters of 2×1 beat 2×2", _CLUSTER, _rung("cluster_multicast", "cluster_n=2")
    ),
    Comparison(
        _K8, "clusters of 2×1 beat 4×1", _CLUSTER, _rung("cluster_multicast", "cluster_m=4")
    ),
    Comparison(_STORE, "reordered stores alone gain 5 TFLOP/s", _REORDERED, _CLUSTER, (739, 734)),
    Comparison(
        _STORE, "write-through stores alone gain 5 TFLOP/s", _WRITTEN_THROUGH, _CLUSTER, (739, 734)
    ),
    Comparison(_STORE, "the accumulate flag alone gains 3 TFLOP/s", _FLAGGED, _CLUSTER, (737, 734)),
)


def _clock_falls(evidence: Evidence) -> Finding:
    """Whether the SM clock at 8192 is lower than at 1024, in our last rung or else in cuBLAS."""
    for name in ("hopper.hilbert", BASE):
        both = together(evidence.measurements, Run(name, n=LARGE), Run(name, n=1024))
        if both and both[0].clock_mhz and both[1].clock_mhz:
            share = both[0].clock_mhz / both[1].clock_mhz
            ours = f"{both[0].clock_mhz:.0f} MHz, at 1024 {both[1].clock_mhz:.0f} ({name})"
            return Finding(ours, CONFIRMED if share < 1 - POINT else REFUTED, share)
    return NOT_MEASURED


def _power(evidence: Evidence, n: int) -> tuple[float, str] | None:
    """The share of the board's power limit that calls without pause draw, with a text on it."""
    for name in ("hopper.hilbert", BASE):
        ours = Run(name, n=n).find(evidence.measurements, "sustained")
        limit = ours.environment.get("power_limit_w") if ours else None
        if ours and ours.watts and isinstance(limit, int | float) and limit > 0:
            clock = f", {ours.clock_mhz:.0f} MHz" if ours.clock_mhz else ""
            return (
                ours.watts / limit,
                f"{ours.watts:.0f} of {limit:.0f} W{clock}, called without pause ({name})",
            )
    return None


def _at_limit(evidence: Evidence) -> Finding:
    """Whether the product at 8192 draws the board's power limit."""
    found = _power(evidence, LARGE)
    return (
        Finding(found[1], CONFIRMED if found[0] >= AT_LIMIT else REFUTED, found[0])
        if found
        else NOT_MEASURED
    )


def _below_limit(evidence: Evidence) -> Finding:
    """Whether the product at 2048 draws less than the board's power limit."""
    found = _power(evidence, 2048)
    return (
        Finding(found[1], CONFIRMED if found[0] < AT_LIMIT else DIFFERS, found[0])
        if found
        else NOT_MEASURED
    )


def hits(provider: str, words: str, stated: float) -> Claim:
    """The claim that L2 serves a share of the requests, which ncu counts."""
    text = f"{words} hits L2 {stated:.0%} of the time"
    return counted(f"{_K6}, 004", text, Run(provider), lambda p: p.l2_hit_rate, stated, "{:.1%}")


def _grouped_hits_more(evidence: Evidence) -> Finding:
    """Whether the order in groups has a higher hit rate in L2 than cuBLAS."""
    found = [run.profiled(evidence.profiles) for run in (_PERSISTENT, Run(BASE))]
    ours, theirs = (p.l2_hit_rate if p else None for p in found)
    if ours is None or theirs is None:
        return NOT_MEASURED
    return Finding(
        f"{ours:.1%}, cuBLAS {theirs:.1%}", CONFIRMED if ours > theirs else REFUTED, ours - theirs
    )


def _cycles(phase: str, stated: float) -> Claim:
    """The claim that a phase of 001's kernel 3 takes so many cycles."""
    rung = _LARGE.provider

    def test(evidence: Evidence) -> Finding:
        ours = [
            c
            for c in evidence.phases
            if (c.provider, c.config, c.shape, c.gpu) == (rung, "", (N, N, N), GPU)
        ]
        if not ours:
            return NOT_MEASURED
        cycles = ours[-1].roles[0].cycles[phase]
        agrees = abs(cycles - stated) <= WITHIN * stated
        return Finding(f"{cycles:,.0f} cycles", CONFIRMED if agrees else DIFFERS, cycles)

    what = "storing a tile" if phase == "store" else f"the {phase} phase of a k tile"
    return Claim(_K3, f"{what} takes {stated:g} cycles", f"clock64 at {N}", test)


CLAIMS: tuple[Claim, ...] = (
    *_steps(),
    *(
        _cycles(phase, stated)
        for phase, stated in seed_figures.PHASES["hopper.large_tile"][1].items()
    ),
    *(comparison.claim() for comparison in COMPARISONS),
    hits(_PERSISTENT.provider, "the order in groups of 16×8", 0.83),
    hits(BASE, "cuBLAS", 0.70),
    Claim(
        f"{_K6}, 004",
        "groups of 16×8 hit L2 more often than cuBLAS",
        f"ncu at {N}",
        _grouped_hits_more,
    ),
    Claim(
        "001 conclusion",
        "power bounds large products: at 8192 the clock falls",
        "burst",
        _clock_falls,
    ),
    Claim("001 conclusion", "the 700 W limit is what binds at 8192", "sustained", _at_limit),
    Claim(
        "004 last note",
        "the power wall stands past 4096: not yet at 2048",
        "sustained",
        _below_limit,
    ),
)
