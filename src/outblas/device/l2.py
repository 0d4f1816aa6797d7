"""A model of L2 for an order of tiles: the bytes of A and B that its CTAs request, and the bytes
that must be read from DRAM.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from outblas.call.problem import Problem, Strides
from outblas.call.tensor_memory import LINE
from outblas.device.raster import PAD

CHUNKS = 32  # maximum number of chunks into which K is cut
STEP_K = 64  # the length of a chunk is a multiple of this
ITEM = 2  # bytes of an element


def lines(problem: Problem) -> tuple[int, int]:
    """Returns how many cache lines loads of A, and of B, request per 128 bytes of a row: two where
    rows begin inside a line, else one.
    """

    def per_row(strides: Strides, shape: tuple[int, int], alignment: int) -> int:
        elements = LINE // problem.dtype.itemsize
        walked = [s for s, extent in zip(strides[-2:], shape, strict=True) if s != 1 and extent > 1]
        begin_inside = any(stride % elements for stride in (*strides[:-2], *walked))
        return 1 if alignment >= LINE and not begin_inside else 2

    M, N, K = problem.M, problem.N, problem.K
    return per_row(problem.a, (M, K), problem.alignment[0]), per_row(
        problem.b, (K, N), problem.alignment[1]
    )


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The bytes of A and B that CTAs requested from L2, and the bytes read from DRAM.

    `compulsory_bytes` is the size of A and B together, the minimum for any cache.
    `lookup_missed_bytes` counts bytes from DRAM once for each half of L2 in which a lookup missed.
    """

    requested_bytes: int
    compulsory_bytes: int
    missed_bytes: int
    lookup_missed_bytes: int

    @property
    def hit_rate(self) -> float:
        """The fraction of the requested bytes that were found in L2."""
        return 1 - self.lookup_missed_bytes / self.requested_bytes


def grid(
    shape: tuple[int, int, int], tile: tuple[int, int], cluster: tuple[int, int] = (1, 1)
) -> tuple[int, int]:
    """Returns the rows and columns of cluster tiles that cover C. Raises ValueError for sizes below
    1.
    """
    for name, sizes in (("shape", shape), ("tile", tile), ("cluster", cluster)):
        if min(sizes) < 1:
            raise ValueError(f"{name} is {sizes}, expected sizes of at least 1")
    M, N, _ = shape
    return _ceil(M, tile[0] * cluster[0]), _ceil(N, tile[1] * cluster[1])


def simulate(
    steps: Sequence[Sequence[int]],
    shape: tuple[int, int, int],
    tile: tuple[int, int],
    cluster: tuple[int, int] = (1, 1),
    *,
    capacity: float,
    halves: int = 1,
    multicast: bool = True,
) -> Traffic:
    """Simulates the traffic of C[M, N] = A[M, K] B[K, N] for `steps`, which `raster.schedule` makes
    for `grid(...)`.

    `shape` is (M, N, K). An entry of `steps` is a cluster of `cluster` CTAs along M and N, and each
    CTA computes a `tile` of C. All clusters of a step (a wave) advance through K together, chunk by
    chunk. Every CTA requests its slice of A and its slice of B; with `multicast` a cluster requests
    a slice once for all its CTAs that need it. Each of the `halves` of L2 holds the same slices,
    `capacity` bytes in total (`math.inf`: everything), and evicts the least recently used. A slice
    that several clusters of a wave need misses once in each half; one that a single cluster needs
    misses in one half.

    The model omits effects that change measured rates: CTAs drift apart; tiles of the next wave
    start while the last tiles of a wave end; sets are hashed and the policy is not LRU; writes of C
    take space and count as accesses.

    Raises ValueError for sizes below 1, and for a tile outside the grid.
    """
    rows, columns = grid(shape, tile, cluster)
    M, N, K = shape
    for name, value in (("capacity", capacity), ("halves", halves)):
        if value <= 0:
            raise ValueError(f"{name} is {value}, expected more than 0")
    # The rows of every panel of A, and the columns of every panel of B.
    heights, widths = (
        [min(edge, size - first) for first in range(0, size, edge)]
        for size, edge in zip((M, N), tile, strict=True)
    )
    chunk = _ceil(_ceil(K, CHUNKS), STEP_K) * STEP_K
    cache: OrderedDict[tuple[int, int], int] = OrderedDict()  # sizes, the least recently used first
    free = capacity
    requested = missed = looked_up = 0
    for step in steps:
        # Panels of A have the keys 0, 1, ...; panels of B have -1, -2, ...
        panels: dict[int, int] = {}
        users: Counter[int] = Counter()
        for entry in step:
            if entry == PAD:
                continue
            if not 0 <= entry < rows * columns:
                raise ValueError(
                    f"steps have tile {entry}, expected one below {rows * columns}, or {PAD}"
                )
            of_a, of_b = (
                range(index * count, min((index + 1) * count, len(sizes)))
                for index, count, sizes in zip(
                    divmod(entry, columns), cluster, (heights, widths), strict=True
                )
            )
            of_cluster = {m: heights[m] for m in of_a} | {-1 - n: widths[n] for n in of_b}
            panels |= of_cluster
            users.update(of_cluster.keys())
            times_a, times_b = (1, 1) if multicast else (len(of_b), len(of_a))
            loaded = times_a * sum(heights[m] for m in of_a) + times_b * sum(
                widths[n] for n in of_b
            )
            requested += loaded * K * ITEM
        for first in range(0, K, chunk):
            for panel, size in panels.items():
                if (panel, first) in cache:
                    cache.move_to_end((panel, first))
                    continue
                cache[panel, first] = absent = size * min(chunk, K - first) * ITEM
                free -= absent
                while free < 0:
                    free += cache.popitem(last=False)[1]
                missed += absent
                looked_up += absent * min(halves, users[panel])
    return Traffic(
        requested_bytes=requested,
        compulsory_bytes=(M + N) * K * ITEM,
        missed_bytes=missed,
        lookup_missed_bytes=looked_up,
    )


def _ceil(size: int, part: int) -> int:
    return -(-size // part)
