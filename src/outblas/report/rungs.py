"""Every rung of the planned ladders in order of the climb, built or not, with what the seeds measured on it."""

from __future__ import annotations

from dataclasses import dataclass

from .. import registry
from .seeds import Figure, of_rung

LADDERS = ("simt", "portable", "turing", "hopper")
MIXED = {"simt": "bfloat16"}  # operands of a second climb on the same rungs, fp32 accumulators
OLDER = {"turing": ("sm_75", "arch=75")}  # a second climb on code for an older GPU: its name, the config of each rung


@dataclass(frozen=True)
class Rung:
    """A rung: its kernel's own idea and parent once it is built, the plan's before. `figures` are the seeds'."""

    name: str
    idea: str
    parent: str | None
    built: bool
    figures: tuple[Figure, ...]

    @property
    def ladder(self) -> str:
        return self.name.partition(".")[0]


# Ladder → (rung, idea); the parent of a planned rung is the rung above it.
_PLAN: dict[str, tuple[tuple[str, str], ...]] = {
    "simt": (
        ("naive", "one output per thread; a warp walks down a column of C, so A and C are uncoalesced"),
        ("coalesced", "the same with the index swap: a warp walks along a row of C"),
        ("shared", "32×32 block tiles staged in shared memory"),
        ("strip", "a strip of outputs per thread"),
        ("register", "an outer product of outputs per thread"),
        ("vectorized", "128-bit loads, A transposed in shared memory, bank conflicts removed"),
        ("warptile", "a tile of outputs per warp between those of block and thread"),
        ("pipelined", "copies in several stages, registers double-buffered, grouped raster"),
    ),
    "portable": (("", "plain tl.dot, masks, any strides"),),
    "turing": (
        ("wmma", "tensor-core fragments straight from global memory"),
        ("shared", "operands staged in shared memory"),
        ("double_buffer", "two buffers; the epilogue goes through shared memory"),
        ("vectorized", "128-bit loads with a 32×64 tile: fewer instructions, idle threads"),
        ("ldmatrix", "128×128×32, one buffer, ldmatrix, every thread loads twice"),
        ("cp_async", "asynchronous copies in several stages (sm_80 and newer)"),
    ),
    "hopper": (
        ("tma_wgmma", "TMA loads, one warpgroup, m64n64k16"),
        ("large_tile", "128×128×64 tiles, m64n128k16"),
        ("warp_specialized", "a producer and a consumer warpgroup over a ring of five slots"),
        ("two_consumers", "128×256 tiles over two consumers, three slots, setmaxnreg 24/240"),
        ("persistent", "persistent CTAs in groups of 16×8 tiles"),
        ("lean_barriers", "one phase-tracked arrival per warpgroup in place of one per thread"),
        ("cluster_multicast", "clusters of 2×1 CTAs share an operand by multicast"),
        ("store_tuning", "reordered, write-through stores; the accumulate flag in place of zeroing"),
        ("tma_store", "C staged in shared memory, asynchronous TMA store"),
        ("hilbert", "tiles scheduled along a Hilbert curve"),
        ("gemm", "the production kernel: every shape and layout, tuned"),
    ),
}


def planned(ladder: str | None = None) -> tuple[str, ...]:
    """Names of all rungs, or of one ladder's. Raises ValueError for no ladder."""
    if ladder is not None and ladder not in LADDERS:
        raise ValueError(f"--ladder is {ladder!r}, expected one of {', '.join(LADDERS)}")
    return tuple(_name(own, rung) for own in LADDERS if ladder in (None, own) for rung, _ in _PLAN[own])


def climb(ladder: str | None = None) -> tuple[Rung, ...]:
    """All rungs, or those of one ladder, from the ground up. Raises ValueError for no ladder."""
    wanted = planned(ladder)
    built = {kernel.name: kernel for kernel in registry.ladder()}
    found = []
    for own in LADDERS:
        above = None
        for rung, idea in _PLAN[own]:
            name = _name(own, rung)
            kernel = built.get(name)
            parent = kernel.parent if kernel else above
            if name in wanted:
                found.append(Rung(name, kernel.idea if kernel else idea, parent, kernel is not None, of_rung(name)))
            above = name
    return tuple(found)


def _name(ladder: str, rung: str) -> str:
    return f"{ladder}.{rung}" if rung else ladder
