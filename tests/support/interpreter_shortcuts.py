"""Shortcuts through Triton's interpreter, which spends most of its time on other things than sums.

- It computes every integer sum, difference and product once more in 64 bits, compares that with the
  limits of its type, and drops the answer unless its option `debug` is set, which it is not.
- For every call of a function in a kernel it asks each member of `triton.language` whether it is a
  builtin function. Which are does not change.
- It makes a table of numpy's types to look up one.
- It asks whatever it is given whether it is one of four kinds of containers. A type knows.
- It reduces element by element where it does not know the function that combines two: Python calls
  that once for each. All elements of a slice can be combined at once, in the same order, by a
  function without branches.

What kernels compute stays the same. Where a version of Triton lacks a name, its shortcut is left
out.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np


def take() -> None:
    """Takes the shortcuts from now on, in this process."""
    from triton.runtime import interpreter

    for shortcut in SHORTCUTS:
        try:
            shortcut(interpreter)
        except AttributeError:
            continue


def no_dropped_checks(interpreter: Any) -> None:
    """Integers are not checked for overflow where the answer is dropped."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def known_builtins(interpreter: Any) -> None:
    """`inspect.getmembers`, as the interpreter calls it, returns builtin functions alone."""
    language = interpreter.tl
    parts = language, language.core, language.math, language.tensor
    is_builtin = language.core.is_builtin
    names = {
        part: [name for name, member in inspect.getmembers(part) if is_builtin(member)]
        for part in (*parts, language.core.tensor_descriptor_base)
    }

    def members(part: Any) -> list[tuple[str, Any]]:
        if part not in names:
            return inspect.getmembers(part)
        return [(name, getattr(part, name)) for name in names[part]]

    interpreter.inspect = SimpleNamespace(**vars(inspect) | {"getmembers": members})


def known_dtypes(interpreter: Any) -> None:
    """numpy's type of one of Triton's is found once."""
    find: Callable[[Any], Any] = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    @functools.wraps(find)
    def found(dtype: Any) -> Any:
        name = dtype.name
        if name not in known:
            known[name] = find(dtype)
        return known[name]

    interpreter._get_np_dtype = found


def known_containers(interpreter: Any) -> None:
    """What is neither a container nor a constexpr is returned as it is."""
    core = interpreter.tl.core
    unwrap: Callable[[Any], Any] = core._unwrap_if_constexpr
    wrapped = list, tuple, core.tuple, core.constexpr
    plain: dict[type, bool] = {}

    @functools.wraps(unwrap)
    def unwrapped(given: Any) -> Any:
        kind = type(given)
        if kind not in plain:
            plain[kind] = not issubclass(kind, wrapped)
        return given if plain[kind] else unwrap(given)

    core._unwrap_if_constexpr = unwrapped


def reduced_slices(interpreter: Any) -> None:
    """Functions of two elements combine slices along the axis that is reduced."""
    reduce = interpreter.ReduceOps
    by_elements: Callable[[Any, Any], Any] = reduce.generic_reduce

    @functools.wraps(by_elements)
    def by_slices(self: Any, given: Any) -> Any:
        if len(given) > 1 or self.axis is None or self.keep_dims:
            return by_elements(self, given)
        (operand,) = given
        first, *others = np.moveaxis(operand.handle.data, self.axis, 0)
        total = self.to_tensor(first, operand.dtype)
        for other in others:
            total = self.combine_fn.fn(total, self.to_tensor(other, operand.dtype))
        return [self.to_tensor(total.handle.data.reshape(first.shape), operand.dtype)]

    reduce.generic_reduce = by_slices


SHORTCUTS = no_dropped_checks, known_builtins, known_dtypes, known_containers, reduced_slices
