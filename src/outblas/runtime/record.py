"""`outblas.record_shapes`: what a program multiplies, for a pack."""

import contextlib
from collections.abc import Iterator

from outblas.runtime import dispatch, recorded_shapes
from outblas.runtime.recorded_shapes import RecordedShapes


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
    with recorded_shapes.recorded() as shapes:
        dispatch.clear_cache()
        yield shapes
