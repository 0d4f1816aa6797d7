"""The short way of an eager call: straight to its plan, where nobody would see, record or transform
the operator.

A call through torch's dispatcher costs the host more than all else but the launch. So does looking
at every trait of every tensor from Python: Dynamo's guard compares them in one call, and the state
of the dispatcher with them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from ..core import invariance
from ..core.epilogue import EpilogueArgs
from ..core.tensor_memory import LINE, read_address
from ..runtime import dispatch
from ..runtime.dispatch import Call, Plan, fp32_precision, tf32_requested
from . import ops

Tensor = torch.Tensor
Parameter = torch.nn.Parameter

# As torch's public functions answer, in one call each.
function_modes = torch._C._len_torch_function_stack
_modes_disabled = torch._C._is_torch_function_all_disabled
_dispatch_modes = (
    torch._C._len_torch_dispatch_stack
)  # guards pass over those of tracers and of fake tensors
_profiled = torch._C._autograd._profiler_enabled
_gradients = torch.is_grad_enabled
_address = read_address
_increment_version = torch._C._increment_version  # passes over inference tensors

_ways = dispatch.ways
_IN_LINE = LINE - 1
# ways remembered of calls with the same shapes: layouts, dtypes, devices, with and without
# inference mode
_ALIKE = 16


# From a call to its plan. The first says of a call's tensors whether their types, sizes, strides,
# dtypes, devices, need of gradients, and what torch's dispatcher would do with them, are those
# remembered. The last is None, or: whether gradients are on (None where no tensor needs them),
# whether fp32 becomes tf32 (None for other operands), the shape of x where gradients need it, and
# who runs the plan for autograd.
Way = tuple[Callable[..., bool], Plan, tuple[Any, Any, Any, Plan | None] | None]


def overriding_mode() -> bool:
    """Whether there is a function mode, on this thread, that may change what a product does. A
    default device does not: it is the mode that `torch.set_default_device` and `with
    torch.device(...)` leave, and it concerns functions that make tensors from none.
    """
    return any(
        type(torch._C._get_function_stack_at(i)) is not DeviceContext
        for i in range(function_modes())
    )


def run(
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    out: Tensor | None,
    alpha: Any,
    beta: Any,
    batch_invariant: bool | None,
    extra: EpilogueArgs | None = None,
) -> Tensor | None:
    """The product of a call that names no kernel, config, mode or dtype; None where it has to go
    through an operator.

    Arguments may be of any type. Dynamo must not trace this: it is to see the operator.
    """
    if function_modes() and not _modes_disabled():
        if overriding_mode():
            return None
        with (
            torch._C.DisableTorchFunction()
        ):  # or the mode would be asked about every attribute that is read here
            return run(a, b, c, out, alpha, beta, batch_invariant, extra)
    if (
        _dispatch_modes()
        or forward_ad._current_level >= 0
        or _profiled()
        or (type(a) is not Tensor and type(a) is not Parameter)
        or (type(b) is not Tensor and type(b) is not Parameter)
        or (c is not None and type(c) is not Tensor and type(c) is not Parameter)
        or (out is not None and type(out) is not Tensor and type(out) is not Parameter)
    ):
        return None
    if batch_invariant is None:
        batch_invariant = invariance._ever and invariance.asked()
    elif batch_invariant is not True and batch_invariant is not False:
        return None
    tensors: tuple[Tensor, ...] = (a, b)
    try:
        key: tuple[Any, ...] = (
            a.shape,
            b.shape,
            _address(a) & _IN_LINE,
            _address(b) & _IN_LINE,
            batch_invariant,
        )
        if out is not None:
            tensors = (a, b, out)
            key = (key, _address(out) & 15)
        if c is not None:
            tensors = (*tensors, c)
            key = (key, _address(c) & 15, alpha == 1, alpha == 0, beta == 0)
        if extra is not None:
            for t in extra[1:]:
                if t is None:
                    key = (key, None)
                    continue
                if type(t) is not Tensor and type(t) is not Parameter:
                    return None
                tensors = (*tensors, t)
                key = (key, _address(t) & 15)
            key = (key, extra[0])
    except RuntimeError:  # no address: sparse, wrapped
        return None
    ways: tuple[Way, ...] = _ways.get(key, ())
    for matches, plan, more in ways:
        if not matches(*tensors):
            continue
        if more is not None:
            grows, tf32, aux, recorded = more
            if grows is not None and grows is not _gradients():
                continue
            if tf32 is not None and tf32 is not (fp32_precision("cuda", "matmul") == "tf32"):
                continue
            if recorded is not None:
                return recorded(plan, a, b, c, alpha, beta, batch_invariant, extra, aux)
        if extra is None:
            result: Tensor = plan(a, b, c, out, alpha, beta)
        else:
            result = plan(a, b, c, out, alpha, beta, *extra[1:])
            if extra[3] is not None:
                _increment_version((extra[3],))
        if out is not None:
            _increment_version((out,))
        return result
    if len(ways) < _ALIKE:
        call = Call(a, b, c, out, None, alpha, beta, "", "", "", batch_invariant, extra)
        _remember(key, ways, tensors, call)
    return None


def _remember(
    key: tuple[Any, ...], ways: tuple[Way, ...], tensors: tuple[Tensor, ...], call: Call
) -> None:
    """Remembers the way of a call that has a plan, if now is a moment when operators would do
    nothing else.
    """
    grows = _gradients() if any(t.requires_grad for t in tensors) else None
    if grows and (call.out is not None or (call.extra is not None and call.extra.aux is not None)):
        return
    if grows and call.a.is_complex():  # torch takes it, under its own autograd
        return
    watched = (
        torch._C._functorch.maybe_current_level() is not None
        or torch._C._get_tracing_state() is not None
        or torch._C._is_any_autocast_enabled()
    )
    plain = all(_address(t) and not (t.is_nested or t.is_neg() or t.is_conj()) for t in tensors)
    if watched or not plain:
        return
    shape = None
    if grows and call.extra is not None and call.extra.activation:
        x = ops.empty_x(call.a, call.b, call.c)
        call, shape = call._replace(extra=call.extra._replace(aux=x)), tuple(x.shape)
    plan = dispatch.planned(call)
    if plan is None:
        return
    sizes: Any = [list(t.shape) for t in tensors]
    strides: Any = [list(t.stride()) for t in tensors]
    guards = torch._C._dynamo.guards.TensorGuards(
        *tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
    )
    tf32 = tf32_requested() if tensors[0].dtype is torch.float32 else None
    from .autograd import recorded

    more = (
        None
        if grows is None and tf32 is None
        else (grows, tf32, shape, recorded if grows else None)
    )
    _ways[key] = (*ways, (guards.check, plan, more))
