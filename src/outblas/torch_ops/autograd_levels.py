"""Determines on which levels of autograd and of torch.func's transforms a call runs."""

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from outblas.base.compat.torch_private import (
    OneLevelFunction,
    allow_one_level,
    as_plain,
    below_autograd,
    forward_gradients,
    forward_levels,
    from_below,
    knows_transforms,
)
from outblas.base.compat.torch_private import dispatch_mode_count as _dispatch_modes
from outblas.base.compat.torch_private import tracing_state as _tracing_state
from outblas.base.compat.torch_private import transform_level as _level
from outblas.call.errors import OperandError
from outblas.torch_ops.schema import ARGUMENTS, implement


def within_forward() -> AbstractContextManager[Any]:
    """Returns the context in which the forward of an autograd.Function calls its operator.

    Gradients of both modes are off in it, but stay on for the other levels of torch.func's
    transforms.
    """
    if _level() is None:
        return below_autograd()
    stack = contextlib.ExitStack()
    for each in (below_autograd(), torch.enable_grad(), forward_gradients(True)):
        stack.enter_context(each)
    return stack


def unseen_by_types(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a backward pass that types which override functions of torch do not see, as they do
    not see torch's own. It gets the saved tensors in their types.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *gradients: Tensor | None) -> Any:
        return as_plain(backward, ctx, *gradients)

    return run


def recorder(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Returns a function that applies an autograd.Function from the Autograd kernel of an operator.

    Under torch.func's transforms it records one level; the dispatcher handles the others.
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
    """Returns `function.apply` without its check for torch.func's transforms, which costs 1 µs per
    call up to torch 2.14. Keeps the check where outblas cannot detect transforms itself.
    """
    if not knows_transforms:
        return function.apply
    apply: Callable[..., Any] = getattr(
        super(torch.autograd.Function, function), "apply", function.apply
    )
    return apply


def unobserved() -> bool:
    """Returns whether nothing below autograd observes operators.

    The guards of `eager` cannot tell, because they are made for tensors that have not passed
    autograd yet.
    """
    return _dispatch_modes() == 0 and _tracing_state() is None and _level() is None


def is_transformed() -> bool:
    """Returns whether a call is inside torch.func's transforms, of which outer levels may need
    gradients though the call's own tensors need none. Dynamo traces such a call at all levels.
    """
    return not torch.compiler.is_dynamo_compiling() and _level() is not None


def requires_grad(*tensors: Tensor | None) -> bool:
    """Returns whether autograd must record operations on any of these tensors."""
    if torch.is_grad_enabled():
        for t in tensors:
            if t is not None and t.requires_grad:
                return True
    return False


def has_tangent(*tensors: Tensor | None) -> bool:
    """Returns whether any of these tensors carries a forward-mode gradient."""
    return forward_levels._current_level >= 0 and any(
        t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors
    )


def record_gradients(
    name: str,
    function: type[torch.autograd.Function],
    arrange: Callable[..., tuple[Any, ...]] | None = None,
) -> None:
    """Registers the Autograd kernel of an operator of outblas that has no forward-mode gradients.

    The kernel records `function` where a tensor needs a gradient, and refuses a tensor that carries
    a forward-mode gradient with an OperandError. `arrange`: returns the arguments of `function`
    from those of the operator, where they differ. Of a tuple that `function` returns to an operator
    with one result, this is the first element.
    """
    operator = getattr(torch.ops.outblas, name).default
    defaults = {argument.name: argument.default for argument in ARGUMENTS[name]}
    record, rest = recorder(function), tuple(defaults.values())
    is_single = len(operator._schema.returns) == 1

    def kernel(*given: Any) -> Any:
        tensors = {n: t for n, t in zip(defaults, given, strict=False) if isinstance(t, Tensor)}
        for argument, t in tensors.items():
            if has_tangent(t):
                raise OperandError(
                    f"{argument} carries a forward-mode gradient, which {name} does not support"
                )
        if requires_grad(*tensors.values()):
            given += rest[len(given) :]
            outputs = record(*(given if arrange is None else arrange(*given)))
            return outputs[0] if is_single and isinstance(outputs, tuple) else outputs
        with below_autograd():
            outputs = operator(*given)
        return from_below(outputs)

    implement(name, "Autograd", kernel)


def refuse_gradients(name: str, function: str) -> None:
    """Registers the Autograd kernel of an operator without gradients: the forward pass runs, and a
    backward pass that needs one raises NotImplementedError.

    `function`: the public function, as messages name it.
    """
    operator = getattr(torch.ops.outblas, name).default
    names = [argument.name for argument in ARGUMENTS[name]]

    class NoGradients(torch.autograd.Function):
        """Stands for the gradients of the arguments, so that asking for one raises."""

        @staticmethod
        def forward(ctx: Any, *given: Any) -> Any:
            with within_forward():
                return operator(*given)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            needed = zip(names, ctx.needs_input_grad, strict=True)
            needing = [argument for argument, is_needed in needed if is_needed]
            raise NotImplementedError(
                f"{', '.join(needing)} requires grad, but {function} has no gradients: expected "
                "tensors that do not require grad"
            )

    record_gradients(name, NoGradients)
