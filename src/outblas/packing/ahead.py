"""`outblas.precompile`: compiles the kernels of a list of products into the cache."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from ..core import machines
from ..core.ownership import shown
from ..core.products import Products, parse_line
from . import build
from .products import parse_file


def precompile(products: str | os.PathLike[str] | Sequence[str], *, jobs: int | None = None) -> int:
    """Compile the kernels of a list of products into the cache, several at a time.

    Calls of these products then find their kernels on disk. Processes that start together on one
    empty cache compile each kernel once between them. Products that another kernel than
    `hopper.gemm` computes are skipped: Triton compiles them when they are called.

    A script that calls it needs `if __name__ == "__main__":`, because it starts processes.

    Args:
        products: The path of a file as `outblas pack build --shapes` reads it, or its lines, such
            as "1-512x4096x4096 bfloat16 nt bias".
        jobs: How many processes compile; by default one per core.

    Returns:
        The number of kernels, those that were there already included.

    Raises:
        TypeError: `products` is neither a path nor a sequence of lines.
        ValueError: A line says something else, `jobs` is not positive, or the GPU is not of sm_90.
        OSError: The file cannot be read, or the cache cannot be written.
        ImportError: The CuTe DSL is not installed.

    Example:
        >>> import outblas
        >>> outblas.precompile([])
        0
    """
    if jobs is not None and (not isinstance(jobs, int) or jobs < 1):
        raise ValueError(f"jobs is {jobs!r}, expected a positive number")
    return build.compile_ahead(_parsed(products), _machine(), jobs)


def _parsed(products: object) -> list[Products]:
    if isinstance(products, str | os.PathLike):
        return parse_file(Path(products))
    if not isinstance(products, Sequence) or not all(isinstance(line, str) for line in products):
        raise TypeError(f"products is {type(products).__name__}, expected a path or lines of text")
    return [parse_line(line) for line in products]


def _machine() -> machines.Machine:
    """Returns the GPU of this process, or an H100 without one. Raises ValueError for a GPU that no
    kernel of `hopper.gemm` runs on.
    """
    if not torch.cuda.is_available():
        return machines.find("H100")
    name = torch.cuda.get_device_name()
    arch = torch.cuda.get_device_capability()
    if arch != (9, 0):
        raise ValueError(f"the GPU is {shown(name)}, of sm_{arch[0]}{arch[1]}, expected sm_90")
    return machines.of_device(name) or machines.find("H100")
