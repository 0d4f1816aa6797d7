"""Which levels of autograd and of torch.func's transforms a call is on: what torch has no public
name for.
"""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

# Kernels of the Autograd key call the operator anew below this guard, where the other keys see it.
# torch's own library code uses it too.
below_autograd: Callable[[], AbstractContextManager[Any]] = torch._C._AutoDispatchBelowAutograd
# A base class whose `apply` records at one level of torch.func's transforms, in a context that
# allows it. Without them torch.autograd.Function serves all but torch.func, which then raises
# torch's own error.
_ONE_LEVEL: Any = getattr(torch.autograd.function, "_SingleLevelFunction", torch.autograd.Function)
_functorch: Any = getattr(torch._functorch, "utils", None)
_allow_one_level = getattr(
    _functorch, "enable_single_level_autograd_function", contextlib.nullcontext
)
# How many dispatch modes are on. Without the name, calls do not take the short ways.
_dispatch_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
_tracing_state: Callable[[], Any] = getattr(torch._C, "_get_tracing_state", lambda: True)
# The level of torch.func's transforms, or None. Without the name no level counts, as if the
# transforms were not there.
_level: Callable[[], int | None] = getattr(torch._C._functorch, "maybe_current_level", lambda: None)


def within_forward() -> AbstractContextManager[Any]:
    """Where the forward of an autograd.Function calls its operator.

    Gradients of both modes are off there, but not on the other levels of torch.func's transforms.
    """
    if _level() is None:
        return below_autograd()
    stack = contextlib.ExitStack()
    for each in (torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True), below_autograd()):
        stack.enter_context(each)
    return stack


def recorder(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """What calls an autograd.Function from the Autograd kernel of an operator.

    Under torch.func's transforms it records one level; the dispatcher sees to the others.
    `function` needs no `setup_context`.
    """
    parts = {name: vars(function)[name] for name in ("forward", "backward")}
    one_level: Any = type(function.__name__, (_ONE_LEVEL,), parts)
    plain = direct_apply(function)

    def record(*given: Any) -> Any:
        if _level() is None:
            return plain(*given)
        with _allow_one_level():
            return one_level.apply(*given)

    return record


def direct_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` without the look for torch.func's transforms, which up to torch 2.14 costs 1
    µs of a call.
    """
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
    return forward_ad._current_level >= 0 and any(
        t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors
    )
