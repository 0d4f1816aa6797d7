"""Triton's interpreter: the lock on triton.language, which it patches for every thread, so that nothing may compile
meanwhile; and kernels for it."""

import functools
import threading
from types import FunctionType
from typing import Any

from triton import JITFunction
from triton.runtime.interpreter import InterpretedFunction

lock = threading.Lock()


def interpreted(kernel: Any) -> InterpretedFunction[Any]:
    """A kernel, and all jitted functions that it calls, for the interpreter; the kernel itself still compiles."""
    source = kernel.fn
    called = {name: source.__globals__.get(name) for name in source.__code__.co_names}
    names = {name: interpreted(value) for name, value in called.items() if isinstance(value, JITFunction)}
    copy = FunctionType(source.__code__, source.__globals__ | names, source.__name__, source.__defaults__)
    return InterpretedFunction(functools.update_wrapper(copy, source))
