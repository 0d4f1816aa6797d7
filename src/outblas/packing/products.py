"""The products of a pack: from a file, from the layers of a model, or from a model's configuration
as Hugging Face has it.
"""

import json
from pathlib import Path

from outblas.base import ownership
from outblas.base.shapes import HEADS, LAYERS
from outblas.core.products import Products, parse_line, parse_rows
from outblas.packing import model_config

LARGEST = 16 << 20  # bytes of a list of products, and of a configuration


def parse_file(path: Path) -> list[Products]:
    """Reads products, one to a line; `#` begins a comment. Raises ValueError, which names the line,
    and OSError.
    """
    found = []
    for number, line in enumerate(_text_of(path).splitlines(), 1):
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
        sizes = dict.fromkeys((*LAYERS[name.lower()], HEADS[name.lower()]))
        return [Products(ranges, N, K) for N, K in sizes]
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.exists():
        known = ", ".join(LAYERS)
        raise ValueError(f"--model is {name!r}, expected {known} or the path of a config.json")
    text = _text_of(path)
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not the JSON of a model's configuration: {error}") from None
    if type(config) is not dict:
        kind = type(config).__name__
        raise ValueError(f"{path} has a JSON {kind}, expected the object of a configuration")
    return model_config.products_of(config, ranges, tensor_parallel, str(path))


def _text_of(path: Path) -> str:
    """Returns what a file of at most `LARGEST` bytes has. Raises ValueError and OSError."""
    try:
        return ownership.read_regular(path, LARGEST).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from None
