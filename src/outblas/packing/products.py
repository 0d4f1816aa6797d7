"""The products of a pack: from lines of text, from the layers of a model, or from a model's
configuration as Hugging Face has it.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.shapes import LAYERS, LAYOUTS
from ..core.steps import NO_STEPS, Steps

DTYPES = ("bfloat16", "float16")
_LINE = "M or FIRST-LAST, then xNxK, a dtype, a layout, and an epilogue or batch-invariant"


@dataclass(frozen=True)
class Products:
    """Products that differ in the number of rows only.

    Attributes:
        rows: Ranges of M, first and last.
        N, K: The other sizes. With a gated activation N counts the columns of B, two for each
            column of the result.
        dtype: bfloat16 or float16.
        layout: How A and B are stored.
        steps: The epilogue.
        batch_invariant: Whether the calls have batch_invariant=True.
    """

    rows: tuple[tuple[int, int], ...]
    N: int
    K: int
    dtype: str = "bfloat16"
    layout: str = "nt"
    steps: Steps = NO_STEPS
    batch_invariant: bool = False

    def each_M(self) -> Iterator[int]:
        """Yields every number of rows once, in order."""
        yield from sorted({M for first, last in self.rows for M in range(first, last + 1)})

    def __str__(self) -> str:
        rows = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in self.rows)
        parts = [f"{rows}x{self.N}x{self.K}", self.dtype, self.layout, str(self.steps)]
        parts += ["batch-invariant"] * self.batch_invariant
        return " ".join(part for part in parts if part)


def parse_rows(text: str, name: str = "rows") -> tuple[tuple[int, int], ...]:
    """Parses `1-512,1024`. Raises ValueError, which names the option."""
    found = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        ends = (first, last if dash else first)
        if not all(end.isdecimal() for end in ends) or not 1 <= int(ends[0]) <= int(ends[1]):
            raise ValueError(f"{name} is {text!r}, expected numbers and ranges such as 1-512,1024")
        found.append((int(ends[0]), int(ends[1])))
    return tuple(found)


def parse_line(line: str) -> Products:
    """Parses `1-512x4096x4096 bfloat16 nt bias+gelu`; all after the sizes may be left out. Raises
    ValueError.
    """
    sizes, *rest = line.split()
    rows, *extents = sizes.lower().split("x")
    if len(extents) != 2 or not all(size.isdecimal() and int(size) for size in extents):
        raise ValueError(f"the line is {line!r}, expected {_LINE}")
    given: dict[str, Any] = {}
    for word in rest:
        field, value = _field(word, line)
        if field in given:
            raise ValueError(f"the line is {line!r}, expected one {field}")
        given[field] = value
    N, K = map(int, extents)
    return Products(parse_rows(rows, f"the line {line!r}"), N, K, **given)


def _field(word: str, line: str) -> tuple[str, Any]:
    if word in DTYPES:
        return "dtype", word
    if word in LAYOUTS:
        return "layout", word
    if word == "batch-invariant":
        return "batch_invariant", True
    try:
        return "steps", Steps.parse(word)
    except ValueError as error:
        raise ValueError(f"the line is {line!r}, expected {_LINE}: {error}") from None


def parse_file(path: Path) -> list[Products]:
    """Reads products, one to a line; `#` begins a comment. Raises ValueError, which names the line,
    and OSError.
    """
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if text := line.partition("#")[0].strip():
            try:
                found.append(parse_line(text))
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from None
    if not found:
        raise ValueError(f"{path} has no products, expected lines such as 1-512x4096x4096")
    return found


def of_model(name: str, rows: str, tensor_parallel: int = 1) -> list[Products]:
    """Returns the products of a model's layers. `name`: that of a model of `LAYERS`, or the path of
    a `config.json` as Hugging Face has it, or of its folder. `tensor_parallel` processes share each
    layer.

    Raises ValueError, and OSError for a file that cannot be read.
    """
    ranges = parse_rows(rows, "--rows")
    if name.lower() in LAYERS:
        if tensor_parallel != 1:
            raise ValueError(
                f"--tensor-parallel is {tensor_parallel} with {name}, expected 1, or the path of a "
                "config.json, which says what is divided"
            )
        sizes: Iterable[tuple[int, int]] = LAYERS[name.lower()]
    else:
        path = Path(name)
        path = path / "config.json" if path.is_dir() else path
        if not path.exists():
            known = ", ".join(LAYERS)
            raise ValueError(f"--model is {name!r}, expected {known} or the path of a config.json")
        sizes = of_config(json.loads(path.read_text(encoding="utf-8")), tensor_parallel, str(path))
    return [Products(ranges, N, K) for N, K in dict.fromkeys(sizes)]


def of_config(config: Mapping[str, Any], parallel: int, where: str) -> Sequence[tuple[int, int]]:
    """Returns N and K of the linear layers of a decoder, alone and joined as servers join them:
    queries with keys and values, gate with up. Raises ValueError for a configuration that lacks a
    size, or whose sizes are no multiples of `parallel`.
    """

    def size(*names: str) -> int:
        for name in names:
            if isinstance(value := config.get(name), int) and value > 0:
                return value
        raise ValueError(f"{where} lacks {names[0]}, expected the configuration of a decoder")

    def share(value: int, name: str) -> int:
        if value % parallel:
            raise ValueError(
                f"{name} is {value} in {where}, expected a multiple of --tensor-parallel {parallel}"
            )
        return value // parallel

    hidden, heads = size("hidden_size", "n_embd"), size("num_attention_heads", "n_head")
    head = config.get("head_dim") or hidden // heads
    key_heads = config.get("num_key_value_heads") or heads
    queries = share(heads, "num_attention_heads") * head
    # Where there are fewer key heads than processes, each keeps a copy of one.
    keys = max(1, key_heads // parallel) * head
    inner = share(size("intermediate_size", "n_inner"), "intermediate_size")
    vocabulary = share(size("vocab_size"), "vocab_size")
    return (
        (queries + 2 * keys, hidden),
        (queries, hidden),
        (keys, hidden),
        (hidden, queries),
        (2 * inner, hidden),
        (inner, hidden),
        (hidden, inner),
        (vocabulary, hidden),
    )
