"""`outblas.load_pack`: serves kernels from a pack."""

import os
from pathlib import Path

from outblas.base import pack
from outblas.runtime import dispatch


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
