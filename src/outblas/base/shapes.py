"""Shapes of products, M×N×K: the suite that all campaigns share, the layers of language models, and
the conversion of shapes to and from text.
"""

from itertools import product
from types import MappingProxyType

Shape = tuple[int, int, int]
LAYOUTS = ("nt", "nn", "tn", "tt")  # A then B: n is stored row-major, t transposed

SQUARES = (512, 1024, 2048, 4096, 8192, 16384)
SUITE: tuple[Shape, ...] = (
    *((n, n, n) for n in SQUARES),
    (16, 4096, 4096),
    (128, 4096, 4096),
    (4096, 14336, 4096),
    (8192, 8192, 1024),
    (4096, 4096, 16384),
)

# From few rows to thousands, from one wave of tiles to many, and from a short K to a long one.
GRID: tuple[Shape, ...] = tuple(
    product((128, 512, 1024, 2048, 4096), (1024, 2048, 4096, 8192), (1024, 4096, 8192))
)

# The shapes for which DeepGEMM publishes figures: layers of DeepSeek-V3 as its servers divide them
# among GPUs, with many tokens and with few.
DEEPGEMM: tuple[Shape, ...] = (
    *(
        (4096, N, K)
        for N, K in ((7168, 16384), (4096, 7168), (2112, 7168), (24576, 1536), (32768, 512))
    ),
    *(
        (M, N, K)
        for M in (64, 128)
        for N, K in (
            (2112, 7168),
            (24576, 1536),
            (32768, 512),
            (7168, 16384),
            (4096, 7168),
            (7168, 2048),
        )
    ),
)

# N and K of the products of one layer at full width (tensor parallelism of 1): queries, keys and
# values in one product; the attention's output; gate and up projection in one product; down
# projection. Taken from the models' published configurations (hidden and intermediate size, number
# of heads and of key/value heads, head width).
LAYERS = MappingProxyType(
    {
        "llama-3-8b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
        "llama-3-70b": ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)),
        "qwen3-32b": ((10240, 5120), (5120, 8192), (51200, 5120), (5120, 25600)),
    }
)
# N and K of the product that makes a token's logits, after the last layer: one column for each word
# of the vocabulary.
HEADS = MappingProxyType(
    {
        "llama-3-8b": (128256, 4096),
        "llama-3-70b": (128256, 8192),
        "qwen3-32b": (151936, 5120),
    }
)
DECODE_ROWS = (1, 2, 4, 8, 16, 32, 64)  # rows of a decode step: one token of each sequence
PREFILL_ROWS = (512, 2048, 8192)  # rows of a prefill step: the tokens of prompts


def of_layers(rows: tuple[int, ...], models: tuple[str, ...] = tuple(LAYERS)) -> tuple[Shape, ...]:
    """Returns the products of the models' layers for each number of rows, without duplicates."""
    return tuple(
        dict.fromkeys((M, N, K) for model in models for N, K in LAYERS[model] for M in rows)
    )


# The sets of shapes that a user may name.
NAMED = MappingProxyType(
    {
        "suite": SUITE,
        "grid": GRID,
        "decode": of_layers(DECODE_ROWS),
        "prefill": of_layers(PREFILL_ROWS),
    }
    | {f"decode:{model}": of_layers(DECODE_ROWS, (model,)) for model in LAYERS}
    | {f"prefill:{model}": of_layers(PREFILL_ROWS, (model,)) for model in LAYERS}
    | {"deepgemm": DEEPGEMM}
)

_EXPECTED = "N, MxNxK or one of " + ", ".join(NAMED)


def parse(text: str, option: str = "--shapes", *, least: int = 0) -> list[Shape]:
    """Parses `4096,640x72x96` into (M, N, K) triples, and the names of `NAMED` into their shapes.
    `least` is the smallest size allowed.

    Raises ValueError, which names the option.
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
    """Returns the short text of a shape: `4096` or `16x4096x4096`."""
    return str(shape[0]) if len(set(shape)) == 1 else "x".join(map(str, shape))


def flop(shape: Shape) -> int:
    """Returns the floating-point operations of a product, 2 M N K."""
    return 2 * shape[0] * shape[1] * shape[2]


def backward(shape: Shape, layout: str) -> tuple[tuple[str, Shape, str], ...]:
    """Returns the two products of a backward pass, each with its name, shape and layout: `dA`, the
    gradient of A, and `dB`, that of B.

    Each gradient has the storage order of its operand, as in autograd's formulas for `mm`: the
    gradient of an operand stored by columns is computed as its transpose.
    """
    M, N, K = shape
    a, b = layout[0], layout[1]
    flipped = {"n": "t", "t": "n"}
    of_a = ((M, K, N), "n" + flipped[b]) if a == "n" else ((K, M, N), b + "t")
    of_b = ((K, N, M), flipped[a] + "n") if b == "n" else ((N, K, M), "t" + a)
    return ("dA", *of_a), ("dB", *of_b)
