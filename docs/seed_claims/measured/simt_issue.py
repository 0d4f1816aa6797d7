"""Claims on the CUDA cores about registers, occupancy and what keeps the schedulers waiting, by
ncu.
"""

from outblas.report.profiles import Profile

from ..claim import Claim
from ..compare import counted
from .simt_profiles import ahead, both
from .simt_runs import K6, K7, PADDED_TILE, UNPADDED, V04, VECTORIZED

ISSUES = 4  # instructions that an SM can issue in a cycle


def _busy(profile: Profile) -> float | None:
    """The share of all issue slots that issue."""
    return None if profile.ipc is None else profile.ipc / ISSUES


CLAIMS: tuple[Claim, ...] = (
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
    both(
        K7,
        "padding raises the instructions a cycle",
        PADDED_TILE,
        UNPADDED,
        lambda p: p.ipc,
        ahead,
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
    both(
        K7,
        "warp tiles raise the chance that an operand is kept for the next FMA",
        UNPADDED,
        VECTORIZED,
        lambda p: p.ffma_reuse,
        ahead,
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
