"""`outblas.record_shapes`, which tells what a pack is to be built for, and `outblas.load_pack`,
which serves kernels from one.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from outblas.base import pack
from outblas.call import dispatch, recorded_shapes
from outblas.call.shape_recorder import RecordedShapes


def load_pack(path: str | os.PathLike[str]) -> None:
    """Serve kernels from a pack: calls whose kernels it has compile nothing.

    Packs are asked in the order in which they were loaded, before the cache on disk. Kernels that
    they lack are compiled as ever, or with OUTBLAS_COMPILE=never computed by torch. The tables of a
    pack choose configs for the products that it lists, on the model of GPU that it was built for.
    The pack that the environment variable OUTBLAS_PACK names is loaded by itself. Calls are planned
    again, so that those which torch computed for want of a kernel find it.

    Args:
        path: A file that `outblas pack build` made. Keep it until the process ends: it may be
            replaced by renaming another, and must not be overwritten.

    Raises:
        ValueError: The file is no pack, was altered, or may have been written by another user.
        OSError: It cannot be read.

    Example:
        >>> import outblas
        >>> outblas.load_pack("/nonexistent/model.outblas")
        Traceback (most recent call last):
        FileNotFoundError: [Errno 2] No such file or directory: '/nonexistent/model.outblas'
    """
    pack.load(Path(path))
    dispatch.clear_cache()


@contextlib.contextmanager
def record_shapes() -> Iterator[RecordedShapes]:
    """Record the products that are called meanwhile, by any thread, on any device.

    Save them to build a pack: `outblas pack build --shapes FILE`. A run on a CPU records the same
    products as one on a GPU, and computes them by torch. Products of fp8 operands and of groups are
    among them.

    All plans are forgotten first, so that products that were called before are seen again.

    Returns:
        A context manager that gives a `RecordedShapes`.

    Example:
        >>> import torch, outblas
        >>> model = torch.nn.Linear(8, 4).bfloat16()
        >>> _ = outblas.patch(model)
        >>> with torch.no_grad(), outblas.record_shapes() as recorded:
        ...     for rows in (1, 2, 3, 8):
        ...         _ = model(torch.ones(rows, 8).bfloat16())
        >>> recorded.lines
        ['1-3,8x4x8 bfloat16 nt bias']
    """
    shapes = RecordedShapes()
    with recorded_shapes.recorded_by(shapes):
        dispatch.clear_cache()
        yield shapes
