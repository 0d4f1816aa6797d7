"""Triton's interpreter: its lock, and kernels for it. The interpreter patches triton.language for
every thread, so the process may neither compile nor fork meanwhile.
"""

import functools
from types import FunctionType
from typing import Any

from triton import JITFunction

from outblas.base import forks
from outblas.base.compat.triton_private import interpreted_function

lock = forks.Lock(held=True)


def interpreted(kernel: Any) -> Any:
    """Returns a version of a kernel, and of all jitted functions that it calls, for the
    interpreter. The kernel itself can still be compiled.
    """
    source = kernel.fn
    called = {name: source.__globals__.get(name) for name in source.__code__.co_names}
    names = {
        name: interpreted(value) for name, value in called.items() if isinstance(value, JITFunction)
    }
    copy = FunctionType(
        source.__code__, source.__globals__ | names, source.__name__, source.__defaults__
    )
    return interpreted_function(functools.update_wrapper(copy, source))
