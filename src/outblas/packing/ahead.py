"""`outblas.precompile`: compiles the kernels of a list of products into the cache."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from outblas.base import machines
from outblas.base.ownership import shown
from outblas.core.products import Products, parse_line
from outblas.packing import build
from outblas.packing.products import parse_file

if TYPE_CHECKING:
    from outblas.autotune.lookup import TuningIndex


def precompile(products: str | os.PathLike[str] | Sequence[str], *, jobs: int | None = None) -> int:
    """Compile the kernels of a list of products into the cache, several at a time.

    Calls of these products then find their kernels on disk. Processes that start together on one
    empty cache compile each kernel once between them. Products that another kernel than
    `hopper.gemm` or `hopper.grouped` computes are skipped: Triton compiles them when they are
    called. What was tuned on this GPU is used, and without a GPU the shipped tables for an H100.

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
    is_number = isinstance(jobs, int) and not isinstance(jobs, bool)
    if jobs is not None and (not is_number or jobs < 1):
        raise ValueError(f"jobs is {jobs!r}, expected a positive number")
    wanted, machine = _parsed(products), _machine()
    return build.compile_ahead(wanted, machine, jobs, _index())


def _parsed(products: object) -> list[Products]:
    if isinstance(products, str | os.PathLike):
        return parse_file(Path(products))
    if not isinstance(products, Sequence) or not all(isinstance(line, str) for line in products):
        raise TypeError(f"products is {type(products).__name__}, expected a path or lines of text")
    return [parse_line(line) for line in products]


def _index() -> "TuningIndex | None":
    """Returns what was tuned for the GPU of this process; None without one."""
    if not torch.cuda.is_available():
        return None
    from outblas.autotune import lookup

    return lookup.tuning_index(torch.cuda.current_device())


def _machine() -> machines.Machine:
    """Returns the GPU of this process, or an H100 without one. A GPU that no table lists counts as
    an H100 with its own SMs. Raises ValueError for a GPU that `hopper.gemm` does not run on.
    """
    if not torch.cuda.is_available():
        return machines.find("H100")
    name = torch.cuda.get_device_name()
    arch = torch.cuda.get_device_capability()
    if arch != (9, 0):
        raise ValueError(f"the GPU is {shown(name)}, of sm_{arch[0]}{arch[1]}, expected sm_90")
    listed = machines.of_device(name)
    if listed is not None:
        return listed
    sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    return replace(machines.find("H100"), sms=sms)
