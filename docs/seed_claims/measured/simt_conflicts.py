"""Claims on the CUDA cores about bank conflicts, by ncu."""

from outblas.report.profiles import Passes, Profile

from ..claim import Claim
from ..compare import counted
from .simt_profiles import as_bad, both, free
from .simt_runs import K6, K7, PADDED, PADDED_TILE, SPLIT, UNPADDED, VECTORIZED


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


CLAIMS: tuple[Claim, ...] = (
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
    free(K6, "padding eliminates the conflicts of stores", PADDED, _stores),
    both(
        K6,
        "padding does not mend the conflicts of loads",
        PADDED,
        VECTORIZED,
        lambda p: p.loads.added,
        as_bad,
        "{0:.1%} of the wavefronts, unpadded {1:.1%}",
    ),
    free(K7, "four columns side by side mend them, padded or not", SPLIT, _loads),
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
    free(K7, "unpadded, loads show no conflicts", UNPADDED, _loads),
    free(K7, "padded, loads show no conflicts", PADDED_TILE, _loads),
)
