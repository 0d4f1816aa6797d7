"""Shapes of products, M×N×K: the suite that every campaign can be compared on, and shapes
as text.
"""

Shape = tuple[int, int, int]
LAYOUTS = ("nt", "nn", "tn", "tt")  # A then B: n as stored row-major, t as stored transposed

SQUARES = (512, 1024, 2048, 4096, 8192, 16384)
SUITE: tuple[Shape, ...] = (
    *((n, n, n) for n in SQUARES),
    (16, 4096, 4096),
    (128, 4096, 4096),
    (4096, 14336, 4096),
    (8192, 8192, 1024),
    (4096, 4096, 16384),
)


def parse(text: str, option: str = "--shapes", *, least: int = 0) -> list[Shape]:
    """`4096,640x72x96` as (M, N, K), `suite` as `SUITE`. Raises ValueError that names the option.

    `least` is the smallest size allowed.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise ValueError(f"{option} is {text!r}, expected N, MxNxK or suite, comma-separated")
    found: list[Shape] = []
    for part in parts:
        if part == "suite":
            found += SUITE
            continue
        sizes = part.lower().split("x")
        if len(sizes) not in (1, 3) or not all(size.isdecimal() for size in sizes):
            raise ValueError(f"{option} is {part!r}, expected N, MxNxK or suite")
        M, N, K = (int(size) for size in (sizes * 3)[:3])
        if min(M, N, K) < least:
            raise ValueError(f"{option} has {part}, expected sizes of at least {least}")
        found.append((M, N, K))
    return found


def to_text(shape: Shape) -> str:
    """`4096`, `16x4096x4096`."""
    return str(shape[0]) if len(set(shape)) == 1 else "x".join(map(str, shape))


def flop(shape: Shape) -> int:
    """2 M N K."""
    return 2 * shape[0] * shape[1] * shape[2]
