"""What a reader can try with each rung: a sentence that says what to look for, and a command.

Written by hand. Figures of variants stand in the page's own table, from `results/`.
"""

from __future__ import annotations

from dataclasses import dataclass

# How `tests/support/pages.py` tests a command: on a GPU, or by its options alone.
_GPU = "gpu"
_COMPILES = "shown: it compiles for some seconds"
_NCU = "shown: the driver must allow ncu its counters"


@dataclass(frozen=True)
class Experiment:
    """A command, and what to look for in what it prints. `tested` says how tests take it."""

    text: str
    command: str
    tested: str


def _inspect(text: str, arguments: str) -> Experiment:
    return Experiment(text, f"outblas inspect {arguments}", _COMPILES)


def _bench(text: str, *kernels: str, also: str = "") -> Experiment:
    names = ",".join(kernels)
    quoted = f"'{names}'" if "[" in names else names
    return Experiment(text, f"outblas bench --kernels {quoted} --shapes 4096{also}", _GPU)


def _simt(text: str, *kernels: str) -> Experiment:
    return _bench(text, *kernels, also=" --dtype float32 --layout nn")


def _turing(text: str, *kernels: str) -> Experiment:
    return _bench(text, *kernels, also=" --dtype float16")


def _phases(text: str, kernel: str, also: str = "") -> Experiment:
    return Experiment(text, f"outblas profile {kernel} --phases{also}", _GPU)


def _profile(text: str, arguments: str) -> Experiment:
    return Experiment(text, f"outblas profile {arguments}", _NCU)


EXPERIMENTS: dict[str, tuple[Experiment, ...]] = {
    "simt.naive": (
        _inspect(
            "Read the inner loop in SASS. Each term of K takes two `LDG` and one `FFMA`, and "
            "nothing else of weight.",
            "simt.naive --arch 90 --sass",
        ),
        _profile(
            "Count what one load of A costs: 32 transactions of 128 bytes for each request of a "
            "warp, 4 bytes of each in use.",
            "simt.naive --shapes 2048 --instructions",
        ),
    ),
    "simt.coalesced": (
        _simt("Time both directions of the walk side by side.", "simt.naive", "simt.coalesced"),
        _profile(
            "Ask for the transactions of each load: one for each request now, for A and for B.",
            "simt.coalesced --shapes 2048 --instructions",
        ),
    ),
    "simt.shared": (
        _inspect(
            "Find the 32 products of a k-block between two `BAR.SYNC`. Each `FFMA` still needs a "
            "word of B from an `LDS`.",
            "simt.shared --arch 90 --sass",
        ),
        _simt(
            "A k-block of 16 terms has half as many products between two barriers.",
            "simt.shared",
            "simt.shared[block_k=16]",
        ),
    ),
    "simt.strip": (
        _inspect(
            "Take the padding away and look at the spills, 20 bytes a thread: from rows of 8 words "
            "the assembler reads four terms at once.",
            "simt.strip --config pad=0 --arch 90",
        ),
        _simt(
            "Strips of 4 outputs take a load of B for every 4 products, not for every 8.",
            "simt.strip",
            "simt.strip[warp_m=4,thread_m=4,piece_m=4]",
        ),
    ),
    "simt.register": (
        _inspect(
            "Double the k-block, to the documents' 8 terms, and look at the spills, 16 bytes: two "
            "CTAs share the registers of an SM, which leaves a thread 128.",
            "simt.register --config block_k=8 --arch 90",
        ),
        _simt(
            "Let one CTA have the registers, so that the k-block of 8 need not spill, and see "
            "what half the warps cost.",
            "simt.register",
            "simt.register[block_k=8,ctas=1]",
        ),
    ),
    "simt.vectorized": (
        Experiment(
            "Predict the bank conflicts of all four forms (with and without padding, with and "
            "without split columns) from their layouts, without a GPU, with ncu's counts.",
            "outblas report accesses",
            "",
        ),
        _simt(
            "Time the four forms. Padding removes the conflicts of stores, splitting those of "
            "loads.",
            "simt.vectorized",
            "simt.vectorized[pad=0]",
            "simt.vectorized[piece_n=8]",
            "simt.vectorized[pad=0,piece_n=8]",
        ),
    ),
    "simt.warptile": (
        _simt(
            "Without the load ahead of time the rung loses to its parent.",
            "simt.vectorized",
            "simt.warptile",
            "simt.warptile[prefetch=False]",
        ),
        _inspect(
            "See the price of 8×16 outputs a thread: more than 230 registers, one CTA an SM.",
            "simt.warptile --arch 90",
        ),
    ),
    "simt.pipelined": (
        _inspect(
            "Count `.reuse` among the FFMAs of the loop: nine in ten keep an operand of the one "
            "before.",
            "simt.pipelined --arch 90 --sass",
        ),
        _simt(
            "Move the store of the next k-block to another term, and undo the alternating lanes.",
            "simt.pipelined",
            "simt.pipelined[store_at=0]",
            "simt.pipelined[interleave=False]",
        ),
    ),
    "portable": (
        Experiment(
            "Check it without a GPU: Triton's interpreter runs it element by element, and the "
            "result has to be exact.",
            "outblas verify portable --shapes 33x65x129",
            "shown: the interpreter takes some seconds",
        ),
        _inspect(
            "Compare what `tl.dot` becomes: FFMA below sm_80, `HMMA` on sm_80, `HGMMA` on sm_90.",
            "portable --arch 75,80,90",
        ),
        _bench("Compare its time with the production kernel's.", "portable", "hopper.gemm"),
    ),
    "turing.wmma": (
        _inspect(
            "Look at a T4's own code: two `HMMA.1688` for 16×8 outputs and 16 terms, fed by 32-bit "
            "loads.",
            "turing.wmma --arch 75 --sass",
        ),
        _turing(
            "Code for sm_75 and for sm_90 takes the same time here, since L1 bounds both.",
            "turing.wmma",
            "turing.wmma[arch=75]",
        ),
    ),
    "turing.shared": (
        _profile(
            "Compare with the parent what L1 looks up: a fifth of the sectors.",
            "turing.shared --instructions",
        ),
        _turing(
            "Without the padding, fragments are read through bank conflicts.",
            "turing.shared",
            "turing.shared[pad=0]",
        ),
    ),
    "turing.double_buffer": (
        _turing(
            "Load a k-block ahead of its store, so that products and loads overlap.",
            "turing.shared",
            "turing.double_buffer",
            "turing.double_buffer[ahead=True]",
        ),
        _inspect(
            "Count the barriers: the loop is unrolled by two, and has one for each k-block.",
            "turing.double_buffer --arch 75 --sass",
        ),
    ),
    "turing.vectorized": (
        _inspect(
            "Compare the loads with the parent's: 128-bit ones in place of 16-bit ones.",
            "turing.double_buffer turing.vectorized --arch 75",
        ),
        _turing(
            "Give every thread something to load, with a larger tile.",
            "turing.vectorized",
            "turing.vectorized[block_m=64,block_n=128]",
        ),
    ),
    "turing.ldmatrix": (
        _inspect(
            "Find the four 8×8 matrices that one `LDSM` brings, and the `HMMA` that read them.",
            "turing.ldmatrix --arch 75 --sass",
        ),
        _turing(
            "Code for sm_75 multiplies 8 terms with an instruction, code for sm_90 16.",
            "turing.ldmatrix",
            "turing.ldmatrix[arch=75]",
        ),
    ),
    "turing.cp_async": (
        _turing(
            "Fewer stages leave less time for a copy to arrive; smaller tiles ask more of L2.",
            "turing.cp_async",
            "turing.cp_async[stages=2]",
            "turing.cp_async[block_n=128,warps_n=2,ctas=2]",
        ),
        _inspect(
            "Compare `LDGSTS` here with `LDG` and `STS` in the parent: the copy takes no register.",
            "turing.ldmatrix turing.cp_async --arch 80",
        ),
    ),
    "hopper.tma_wgmma": (
        _inspect(
            "Look for the whole main loop: two `UTMALDG`, four `HGMMA`, a wait for each.",
            "hopper.tma_wgmma --sass",
        ),
        _phases(
            "Count the cycles of a step along K: most of them are loading.", "hopper.tma_wgmma"
        ),
        _bench(
            "Stages without specialised warps do not help: fewer CTAs fit on an SM.",
            "hopper.tma_wgmma",
            "hopper.tma_wgmma[tile_k=128]",
        ),
    ),
    "hopper.large_tile": (
        _bench(
            "Span the tile with narrower instructions: A is read from shared memory for each.",
            "hopper.large_tile",
            "hopper.large_tile[mma_n=64]",
            "hopper.large_tile[mma_n=32]",
        ),
        _phases("Compare loading and multiplying with the parent's.", "hopper.large_tile"),
    ),
    "hopper.warp_specialized": (
        _bench(
            "Let one group of `wgmma` run on while the next stage is awaited.",
            "hopper.warp_specialized",
            "hopper.warp_specialized[in_flight=1]",
        ),
        _phases(
            "See who waits for whom. The producer waits for an empty stage, the consumer for a "
            "full one.",
            "hopper.warp_specialized",
        ),
        _profile(
            "At 8192 look at the hit rate of L2 and at what DRAM reads.",
            "hopper.warp_specialized --shapes 8192",
        ),
    ),
    "hopper.two_consumers": (
        _inspect(
            "Hold the whole tile in one consumer, and read what the assembler says about spills.",
            "hopper.two_consumers --config consumers=1,producer_registers=0,consumer_registers=0",
        ),
        _bench(
            "Leave registers as they were compiled: `setmaxnreg` is worth little here.",
            "hopper.two_consumers",
            "hopper.two_consumers[producer_registers=0,consumer_registers=0]",
        ),
    ),
    "hopper.persistent": (
        Experiment(
            "Rank orders of tiles by the model of L2, without a GPU, and compare ncu's counts.",
            "outblas report raster --shapes 8192",
            "shown: the model takes some seconds at this size",
        ),
        _bench(
            "Take other orders: neighbouring tiles to one CTA, all SMs, small groups.",
            "hopper.persistent",
            "hopper.persistent[order=consecutive,sms=0]",
            "hopper.persistent[sms=0]",
            "hopper.persistent[group_m=2,group_n=2]",
        ),
    ),
    "hopper.lean_barriers": (
        _phases(
            "Compare a step's `tensor` cycles with the parent's: the wait of one consumer for the "
            "other was in them.",
            "hopper.lean_barriers",
        ),
        _inspect(
            "Compare the arrivals at barriers with the parent's.",
            "hopper.persistent hopper.lean_barriers",
        ),
    ),
    "hopper.cluster_multicast": (
        _bench(
            "Share A in place of B, share both, or let four CTAs share B.",
            "hopper.cluster_multicast",
            "hopper.cluster_multicast[cluster_m=1,cluster_n=2]",
            "hopper.cluster_multicast[cluster_n=2]",
            "hopper.cluster_multicast[cluster_m=4]",
        ),
        _inspect(
            "Find the one load of two that has become `UTMALDG.2D.MULTICAST`.",
            "hopper.cluster_multicast --sass",
        ),
    ),
    "hopper.store_tuning": (
        _bench(
            "Turn each of the three changes on by itself.",
            "hopper.cluster_multicast",
            "hopper.store_tuning[write_through=False,accumulate_flag=False]",
            "hopper.store_tuning[reorder_stores=False,accumulate_flag=False]",
            "hopper.store_tuning[reorder_stores=False,write_through=False]",
        ),
        _phases("See what is left of the cycles that stores took.", "hopper.store_tuning"),
    ),
    "hopper.tma_store": (
        _bench(
            "Turn the staged store off: this is the parent. One subtile in place of four makes a "
            "consumer wait for its own stores.",
            "hopper.tma_store",
            "hopper.tma_store[epilogue_stages=0]",
            "hopper.tma_store[epilogue_stages=1]",
        ),
        _inspect(
            "Find `STSM`, the fence, the barrier and `UTMASTG`, in this order.",
            "hopper.tma_store --sass",
        ),
    ),
    "hopper.hilbert": (
        Experiment(
            "Compare the curve with groups of tiles by the model of L2, without a GPU.",
            "outblas report raster --shapes 4096",
            "",
        ),
        _bench(
            "Four stages and a group in flight, all SMs, tiles in serpentine bands.",
            "hopper.hilbert",
            "hopper.hilbert[stages=4,epilogue_stages=2,in_flight=1]",
            "hopper.hilbert[sms=0]",
            "hopper.hilbert[stages=4,in_flight=1,order=serpentine,group_m=8,epilogue_stages=2]",
        ),
    ),
    "hopper.gemm": (
        Experiment(
            "Ask which config `matmul` takes for a shape, and where it was looked up.",
            "outblas tune --explain 4096x5000x4096",
            "shown: which kernel is best depends on the GPU at hand",
        ),
        _bench(
            "Take single levers away: the walk of K backwards, the group in flight.",
            "hopper.gemm",
            "hopper.gemm[k_serpentine=False]",
            "hopper.gemm[in_flight=0]",
        ),
        _inspect(
            "Compile it for a few rows, with operands swapped.", "hopper.gemm --shapes 16x4096x4096"
        ),
    ),
}
