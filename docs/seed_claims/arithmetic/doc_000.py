"""Document 000: bank conflicts and occupancy of two SGEMM kernels on the CUDA cores of an H100."""

from outblas.inspect.occupancy import occupancy

from ..claim import DIFFERS, Claim, number
from .formulas import FP32, H100, LANES, conflict_ways, exact, stage_bytes

_K6, _K7 = "000 kernel 6", "000 kernel 7"
_REQUEST = "wavefronts of a 128-bit request over those it needs: 8 lanes a time"
_COLUMNS = [lane % 16 for lane in range(LANES)]  # kernel 6: half a warp goes along N
_TILED = [divmod(lane, 4) for lane in range(LANES)]  # kernel 7: row and column of a lane


def warptile_share() -> float:
    """The share of an H100's warps that kernel 7 keeps resident, with 165 registers, four warps a
    CTA and 128×16 tiles of A and B in fp32.
    """
    return occupancy(H100, 165, stage_bytes(128, 128, 16, FP32), 128).share


def transposed_ways(block_k: int, stride: int) -> float:
    """The n-way bank conflict of kernels 6 and 7 that store A's tile transposed, in rows `stride`
    words apart. A lane has four values along K, and adjacent lanes fill a row of the tile.
    """
    across = block_k // 4
    return conflict_ways((lane % across) * 4 * stride + lane // across for lane in range(LANES))


def store_ways(block_k: int, stride: int) -> float:
    """The wavefronts a request of storing both 128-wide tiles.

    A's stores are those of `transposed_ways`, word by word. B's are requests of 128 bits, a quarter
    as many, of four wavefronts each.
    """
    return (4 * transposed_ways(block_k, stride) + 4) / 5


CLAIMS: tuple[Claim, ...] = (
    exact(
        _K6,
        "transposing stores meet in pairs on a bank: rows of 128 words are a multiple of 32 banks",
        "banks of a warp's 32 words of A",
        2,
        lambda: transposed_ways(8, 128),
        "{:.0f} words a bank",
    ),
    exact(
        _K6,
        "rows padded to 132 words take the stores' conflicts away",
        "banks of a warp's 32 words of A",
        1,
        lambda: transposed_ways(8, 132),
        "{:.0f} word a bank",
    ),
    number(
        _K6,
        "all its stores to shared memory average 2.6 ways",
        "A's word by word, B's 128 bits at a time",
        2.6,
        lambda: store_ways(8, 128),
        "{:.1f} wavefronts a request, 1.6 of them without a conflict",
        otherwise=DIFFERS,
    ),
    exact(
        _K6,
        "loads of B, eight columns a thread, conflict 4-way: 4 lanes of 16 want the same banks",
        _REQUEST,
        4,
        lambda: conflict_ways((8 * column for column in _COLUMNS), 4),
        "{:.0f} for each it needs: 128-bit reads go 8 lanes at a time, conflicts or none",
        otherwise=DIFFERS,
    ),
    exact(
        _K6,
        "padding B's rows to 132 words does not mend its loads",
        "the same in row 1 of 132 words over that in rows of 128",
        1,
        lambda: (
            conflict_ways((132 + 8 * each for each in _COLUMNS), 4)
            / conflict_ways((128 + 8 * each for each in _COLUMNS), 4)
        ),
        "as many wavefronts: {:.0f} times",
    ),
    number(
        _K7,
        "165 registers a thread hold achieved occupancy at 18%",
        "occupancy of 128 threads on an H100",
        0.18,
        warptile_share,
        "{:.1%} at most: 3 CTAs of 4 warps; 18% achieved agrees",
        within=0.05,
    ),
    number(
        _K7,
        "unpadded, its stores to shared memory average 4 ways",
        "A's word by word, B's 128 bits at a time",
        4,
        lambda: store_ways(16, 128),
        "{:.1f} wavefronts a request",
    ),
    number(
        _K7,
        "padding lowers that to 2.5",
        "the same in rows of 132 words",
        2.5,
        lambda: store_ways(16, 132),
        "{:.1f}: pairs still meet on a bank",
        within=0.05,
    ),
    exact(
        _K7,
        "four columns a thread keep loads of B free of conflicts",
        _REQUEST,
        1,
        lambda: conflict_ways((4 * column for _, column in _TILED), 4),
        "{:.0f} for each it needs",
    ),
    exact(
        _K7,
        "loads of A show no conflicts either",
        _REQUEST,
        1,
        lambda: conflict_ways((8 * row for row, _ in _TILED), 4),
        "{:.0f} for each it needs: lanes of a row read the same",
    ),
)
