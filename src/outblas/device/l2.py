"""A model of L2 for an order of tiles: the bytes of A and B that its CTAs request, and the bytes
that must be read from DRAM.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from outblas.core.problem import Problem, Strides
from outblas.core.tensor_memory import LINE
from outblas.device.raster import PAD

CHUNKS = 32  # maximum number of chunks into which K is cut
STEP_K = 64  # the length of a chunk is a multiple of this


def lines(problem: Problem) -> tuple[int, int]:
    """Returns how many cache lines loads of A, and of B, request per 128 bytes of a row: two where
    rows begin inside a line, else one.
    """

    def per_row(strides: Strides, shape: tuple[int, int], alignment: int) -> int:
        walked = [
            stride
            for stride, extent in zip(strides[-2:], shape, strict=True)
            if stride != 1 and extent > 1
        ]
        elements = LINE // problem.dtype.itemsize
        return (
            1
            if alignment >= LINE
            and not any(stride % elements for stride in (*strides[:-2], *walked))
            else 2
        )

    M, N, K = problem.M, problem.N, problem.K
    return per_row(problem.a, (M, K), problem.alignment[0]), per_row(
        problem.b, (K, N), problem.alignment[1]
    )


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The bytes of A and B that CTAs requested from L2, and the bytes read from DRAM, per wave.

    `compulsory_bytes` is the size of A and B together, the minimum for any cache.
    `lookup_missed_bytes` counts bytes from DRAM once for each half of L2 in which a lookup missed.
    """

    requested_bytes: int
    compulsory_bytes: int
    wave_missed_bytes: tuple[int, ...]
    lookup_missed_bytes: int

    @property
    def missed_bytes(self) -> int:
        """The bytes read from DRAM."""
        return sum(self.wave_missed_bytes)

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
    element_bytes: int = 2,
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
    for name, value in (
        ("element_bytes", element_bytes),
        ("capacity", capacity),
        ("halves", halves),
    ):
        if value <= 0:
            raise ValueError(f"{name} is {value}, expected more than 0")
    heights, widths = _panels(M, tile[0]), _panels(N, tile[1])
    cache = _Cache(capacity)
    requested = looked_up = 0
    missed = []
    for step in steps:
        # Panels of A have the keys 0, 1, ...; panels of B have -1, -2, ...
        panels: dict[int, int] = {}
        users: Counter[int] = Counter()
        wanted = 0
        for entry in step:
            if entry == PAD:
                continue
            if not 0 <= entry < rows * columns:
                raise ValueError(
                    f"steps have tile {entry}, expected one below {rows * columns}, or {PAD}"
                )
            of_a = _part(heights, entry // columns, cluster[0])
            of_b = _part(widths, entry % columns, cluster[1])
            own = {m: heights[m] for m in of_a} | {-1 - n: widths[n] for n in of_b}
            panels |= own
            users.update(own.keys())
            shared_a, shared_b = (1, 1) if multicast else (len(of_b), len(of_a))
            wanted += shared_a * sum(heights[m] for m in of_a) + shared_b * sum(
                widths[n] for n in of_b
            )
        requested += wanted * K * element_bytes
        brought = 0
        for chunk, depth in enumerate(_depths(K)):
            for panel, size in panels.items():
                absent = cache.fetch((panel, chunk), size * depth * element_bytes)
                brought += absent
                looked_up += absent * min(halves, users[panel])
        missed.append(brought)
    return Traffic(
        requested_bytes=requested,
        compulsory_bytes=(M + N) * K * element_bytes,
        wave_missed_bytes=tuple(missed),
        lookup_missed_bytes=looked_up,
    )


class _Cache:
    """Slices ordered by their last use, the least recent first."""

    def __init__(self, capacity: float) -> None:
        self._slices: OrderedDict[tuple[int, int], int] = OrderedDict()
        self._free = capacity

    def fetch(self, key: tuple[int, int], size: int) -> int:
        """Returns the bytes that must be read from DRAM for this slice of `size` bytes: all of them
        or none.
        """
        if key in self._slices:
            self._slices.move_to_end(key)
            return 0
        self._slices[key] = size
        self._free -= size
        while self._free < 0:
            self._free += self._slices.popitem(last=False)[1]
        return size


def _panels(size: int, tile: int) -> list[int]:
    """Returns the number of rows in every panel; the last panel may be smaller."""
    return [min(tile, size - first) for first in range(0, size, tile)]


def _part(panels: Sequence[int], index: int, count: int) -> range:
    """Returns the panels of a cluster that lie inside the grid."""
    return range(index * count, min((index + 1) * count, len(panels)))


def _depths(K: int) -> Iterator[int]:
    chunk = _ceil(_ceil(K, CHUNKS), STEP_K) * STEP_K
    return (min(chunk, K - first) for first in range(0, K, chunk))


def _ceil(size: int, part: int) -> int:
    return -(-size // part)
