"""Gluon as the ladders use it: what differs between Triton's versions or is private in them, and layouts from maps.

Nothing else imports Gluon's private modules, nor names that changed between Triton 3.6 and 3.9.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from . import language
from .mapping import Mapping


def compile(
    kernel: Any,
    signature: dict[str, str],
    constants: dict[tuple[int, ...], Any],
    attributes: dict[tuple[int, ...], list[list[Any]]],
    arch: int,
    options: dict[str, Any],
) -> CompiledKernel:
    """A Gluon kernel compiled for an architecture (90 is sm_90); needs no GPU."""
    source = GluonASTSource(kernel, signature, constants, attributes)
    with language.lock:
        return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def registers(mapping: Mapping) -> Any:
    """The map as the layout of a tensor in registers."""
    parts = ([list(basis) for basis in bases] for bases in (mapping.registers, mapping.lanes, mapping.warps))
    return gl.DistributedLinearLayout(*parts, [], list(mapping.shape))


def shared(rows: int, columns: int, pad: int) -> Any:
    """The layout of a tile in shared memory: row after row, each padded by `pad` elements.

    Without padding it is written as padding that comes after the tile: into a plain layout Triton would move words with
    ldmatrix and stmatrix, which are made for tensor cores.
    """
    interval = columns if pad else rows * columns
    return gl.PaddedSharedLayout.with_identity_for([[interval, pad or 4]], [rows, columns], [1, 0])
