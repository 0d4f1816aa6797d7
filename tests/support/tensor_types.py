"""Operands of integers, and types of tensors as other libraries have them: what each knows of
torch's functions and of ours.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from outblas import linear

Tensor = torch.Tensor

X, W, BIAS = (torch.randint(-8, 9, shape).float() for shape in ((6, 5), (4, 5), (4,)))
C = torch.randint(-8, 9, (6, 4)).float()
PRODUCT = F.linear(X, W, BIAS)
EPILOGUE = F.gelu(PRODUCT) + C


def sevens(*shape: int, **how: Any) -> Tensor:
    """An output that is full of sevens, so that a test sees whether it was written; of the shape
    of the product unless another is given.
    """
    return torch.full(shape or (6, 4), 7.0, **how)


class Plain(torch.Tensor):
    """A subclass with torch's own `__torch_function__`."""


class Sealed(Plain):
    """It knows products and copies. Who asks about its traits is told that there is no such
    function.
    """

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (F.linear, torch.Tensor.copy_):
            return super().__torch_function__(func, types, args, kwargs)
        return NotImplemented


class Wrapper(torch.Tensor):
    """A tensor that holds another, of which operators of torch see but the traits. It knows no
    operator.
    """

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "Wrapper":
        return torch.Tensor._make_wrapper_subclass(
            cls, held.shape, dtype=held.dtype, device=held.device
        )

    def __init__(self, held: Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func, types, args=(), kwargs=None
    ) -> None:
        raise NotImplementedError(f"{cls.__name__} has no {func}")


class Quantized(Wrapper):
    """As torchao's weights: it knows `F.linear`, by which it counts half of what it holds, and has
    other functions run as if it overrode none.
    """

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            x, w, bias = (*args, None)[:3]
            return F.linear(x, w.held / 2, bias)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Refusing(Quantized):
    """It says of functions other than `F.linear` that it has none."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            return super().__torch_function__(func, types, args, kwargs)
        return NotImplemented


class Packed(Quantized):
    """As a packed weight, whose shape and dtype are not those of the matrix."""

    @staticmethod
    def __new__(cls, held: Tensor) -> "Packed":
        return torch.Tensor._make_wrapper_subclass(cls, (20,), dtype=torch.uint8)


class Unwrapping(Wrapper):
    """It answers `F.linear` by our own function, of the tensor that it holds."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            return linear(args[0], args[1].held)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Overriding(Wrapper):
    """It overrides our own `linear`, and shows what it was called with."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is linear:
            return "ours", args, kwargs
        return NotImplemented


class Dispatched(Wrapper):
    """It knows operators, by unwrapping, and no functions."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        def unwrapped(t: Any) -> Any:
            return t.held if isinstance(t, cls) else t

        args, kwargs = torch.utils._pytree.tree_map(unwrapped, (args, kwargs or {}))
        result = func(*args, **kwargs)
        return cls(result) if func is torch.ops.aten.t.default else result


class Duck:
    """No tensor at all; it answers the functions that it knows by showing the call."""

    def __init__(self, known: Sequence[Callable[..., Any]] = ()) -> None:
        self.known = known

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        duck = next(t for t in args if isinstance(t, cls))
        return (func, args, kwargs) if func in duck.known else NotImplemented
