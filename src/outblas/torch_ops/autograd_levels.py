"""Which levels of autograd and of torch.func's transforms a call is on."""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..core.compat.torch_private import (
    OneLevelFunction,
    allow_one_level,
    below_autograd,
    forward_gradients,
    forward_levels,
    knows_transforms,
)
from ..core.compat.torch_private import dispatch_mode_count as _dispatch_modes
from ..core.compat.torch_private import tracing_state as _tracing_state
from ..core.compat.torch_private import transform_level as _level


def within_forward() -> AbstractContextManager[Any]:
    """Where the forward of an autograd.Function calls its operator.

    Gradients of both modes are off there, but not on the other levels of torch.func's transforms.
    """
    if _level() is None:
        return below_autograd()
    stack = contextlib.ExitStack()
    for each in (below_autograd(), torch.enable_grad(), forward_gradients(True)):
        stack.enter_context(each)
    return stack


def recorder(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """What calls an autograd.Function from the Autograd kernel of an operator.

    Under torch.func's transforms it records one level; the dispatcher sees to the others.
    `function` needs no `setup_context`.
    """
    parts = {name: vars(function)[name] for name in ("forward", "backward")}
    one_level: Any = type(function.__name__, (OneLevelFunction,), parts)
    plain = direct_apply(function)

    def record(*given: Any) -> Any:
        if _level() is None:
            return plain(*given)
        with allow_one_level():
            return one_level.apply(*given)

    return record


def direct_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` without the look for torch.func's transforms, which up to torch 2.14 costs 1
    µs of a call; with it where we do not know of them ourselves.
    """
    if not knows_transforms:
        return function.apply
    apply: Callable[..., Any] = getattr(
        super(torch.autograd.Function, function), "apply", function.apply
    )
    return apply


def unobserved() -> bool:
    """Whether nobody behind autograd sees operators.

    The guards of `eager` do not say so: they know tensors that have not come that far.
    """
    return _dispatch_modes() == 0 and _tracing_state() is None and _level() is None


def requires_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd is to record what becomes of any of them."""
    if torch.is_grad_enabled():
        for t in tensors:
            if t is not None and t.requires_grad:
                return True
    return False


def has_tangent(*tensors: Tensor | None) -> bool:
    """Whether any carries a forward-mode gradient."""
    return forward_levels._current_level >= 0 and any(
        t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors
    )
