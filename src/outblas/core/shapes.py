"""Shapes of products, M×N×K: the suite that every campaign can be compared on, the layers of
language models, and shapes as text.
"""

from types import MappingProxyType

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

# N and K of the products of one layer, at full width (tensor parallelism of 1): queries, keys and
# values together; the attention's output; gate and up projection together; down projection. From
# the models' published configurations (hidden and intermediate size, heads, heads of keys and
# values, width of a head).
LAYERS = MappingProxyType(
    {
        "llama-3-8b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
        "llama-3-70b": ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)),
        "qwen3-32b": ((10240, 5120), (5120, 8192), (51200, 5120), (5120, 25600)),
    }
)
DECODE_ROWS = (1, 2, 4, 8, 16, 32, 64)  # tokens of a step, one of each sequence
PREFILL_ROWS = (512, 2048, 8192)  # tokens of prompts


def of_layers(rows: tuple[int, ...], models: tuple[str, ...] = tuple(LAYERS)) -> tuple[Shape, ...]:
    """The products of models' layers on so many rows, without repetition."""
    return tuple(
        dict.fromkeys((M, N, K) for model in models for N, K in LAYERS[model] for M in rows)
    )


# Sets of shapes that a user may name.
NAMED = MappingProxyType(
    {"suite": SUITE, "decode": of_layers(DECODE_ROWS), "prefill": of_layers(PREFILL_ROWS)}
    | {f"decode:{model}": of_layers(DECODE_ROWS, (model,)) for model in LAYERS}
    | {f"prefill:{model}": of_layers(PREFILL_ROWS, (model,)) for model in LAYERS}
)

_EXPECTED = "N, MxNxK or one of " + ", ".join(NAMED)


def parse(text: str, option: str = "--shapes", *, least: int = 0) -> list[Shape]:
    """`4096,640x72x96` as (M, N, K), and the names of `NAMED` as their shapes. Raises ValueError
    that names the option.

    `least` is the smallest size allowed.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise ValueError(f"{option} is {text!r}, expected {_EXPECTED}, comma-separated")
    found: list[Shape] = []
    for part in parts:
        if part.lower() in NAMED:
            found += NAMED[part.lower()]
            continue
        sizes = part.lower().split("x")
        if len(sizes) not in (1, 3) or not all(size.isdecimal() for size in sizes):
            raise ValueError(f"{option} is {part!r}, expected {_EXPECTED}")
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


def backward(shape: Shape, layout: str) -> tuple[tuple[str, Shape, str], ...]:
    """The two products that a backward pass makes, as it makes them, each with its shape and
    layout: the gradient of A, `dA`, and that of B, `dB`.

    A gradient is written as its operand is stored, as autograd's formulas of `mm` do: that of an
    operand stored by columns is computed as its transpose.
    """
    M, N, K = shape
    a, b = layout[0], layout[1]
    flipped = {"n": "t", "t": "n"}
    of_a = ((M, K, N), "n" + flipped[b]) if a == "n" else ((K, M, N), b + "t")
    of_b = ((K, N, M), flipped[a] + "n") if b == "n" else ((N, K, M), "t" + a)
    return ("dA", *of_a), ("dB", *of_b)
