"""The products of a pack: from a file, from the layers of a model, or from a model's configuration
as Hugging Face has it.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.products import Products, parse_line, parse_rows
from ..core.shapes import HEADS, LAYERS


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
    """Returns the products of a model's layers and of its head. `name`: that of a model of
    `LAYERS`, or the path of a `config.json` as Hugging Face has it, or of its folder.
    `tensor_parallel` processes share each layer.

    Raises ValueError, and OSError for a file that cannot be read.
    """
    ranges = parse_rows(rows, "--rows")
    if name.lower() in LAYERS:
        if tensor_parallel != 1:
            raise ValueError(
                f"--tensor-parallel is {tensor_parallel} with {name}, expected 1, or the path of a "
                "config.json, which says what is divided"
            )
        sizes: Iterable[tuple[int, int]] = (*LAYERS[name.lower()], HEADS[name.lower()])
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
