"""Gradients of the operators, by operators: a backward pass has a backward pass of its own.

    g = gradient of x = alpha · A B + beta · C + bias, through the activation dA = alpha · g Bᵀ
    dB = alpha · Aᵀ g    dC = beta · g    dbias = g    dresidual = gradient of the output

each summed over the dimensions along which its operand was repeated. Transposed operands are views.
Where A or B is stored by columns, as the transposed weight of a linear layer is, its gradient is
computed transposed, dB = (gᵀ A)ᵀ, and so lies in memory as the operand does: autograd keeps it as
`.grad` without a copy. Products run on the best kernel known, whatever kernel the forward pass
named, batch-invariant ones where it was. (On the CPU a batch-invariant product has to name its
kernel: that of a gradient is the portable one.) Where 16-bit operands have a fp32 product, g is
rounded to 16 bits for dA and dB, which are 16-bit themselves; bias and residual get fp32 ones.

These formulas are those of real numbers. Where complex operands need gradients, and where
forward-mode gradients are on their way, torch computes the call under its own autograd.
"""

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd import forward_ad

from ..core.epilogue import ACTIVATIONS, FUNCTIONS, GATED, EpilogueArgs, apply, glu_split
from ..core.errors import OperandError
from ..core.invariance import asked, refusal, wanted
from ..core.problem import DTYPES, dtype_name
from ..runtime import fallback
from ..runtime.dispatch import Plan
from . import eager, ops

Tensor = torch.Tensor

# ---- what torch has no public name for Kernels of the Autograd key go on to the other keys below
# this guard, which torch's own library code uses too.
below: Callable[[], AbstractContextManager[Any]] = torch._C._AutoDispatchBelowAutograd
# A base class whose `apply` records at one level of torch.func's transforms, in a context that
# allows it. Without them torch.autograd.Function serves all but torch.func, which then raises
# torch's own error.
_ONE_LEVEL: Any = getattr(torch.autograd.function, "_SingleLevelFunction", torch.autograd.Function)
_functorch: Any = getattr(torch._functorch, "utils", None)
_allowed = getattr(_functorch, "enable_single_level_autograd_function", contextlib.nullcontext)
# How many dispatch modes are on. Without the name, the short ways below are not taken.
_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
_tracing: Callable[[], Any] = getattr(torch._C, "_get_tracing_state", lambda: True)
# The level of torch.func's transforms, or None. Without the name no level counts, as if the
# transforms were not there.
_level: Callable[[], int | None] = getattr(torch._C._functorch, "maybe_current_level", lambda: None)


def beneath() -> AbstractContextManager[Any]:
    """Where an autograd.Function's forward calls its operator: gradients of both modes are off
    there, but not on the other levels of torch.func's transforms.
    """
    if _level() is None:
        return below()
    stack = contextlib.ExitStack()
    for each in (torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True), below()):
        stack.enter_context(each)
    return stack


def recorder(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """What calls an autograd.Function from the Autograd kernel of an operator: also under
    torch.func's transforms, of which it records one level; the dispatcher sees to the others.
    `function` needs no `setup_context`.
    """
    parts = {name: vars(function)[name] for name in ("forward", "backward")}
    one_level: Any = type(function.__name__, (_ONE_LEVEL,), parts)
    plain = direct(function)

    def record(*given: Any) -> Any:
        if _level() is None:
            return plain(*given)
        with _allowed():
            return one_level.apply(*given)

    return record


def direct(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` without the look for torch.func's transforms, which up to torch 2.14 costs 1
    µs of a call.
    """
    found: Callable[..., Any] = getattr(
        super(torch.autograd.Function, function), "apply", function.apply
    )
    return found


class Product(torch.autograd.Function):
    """All products. `apply` takes a plan, or None to go by the operators; the tensors of
    `ops.gemm`, and what else it takes; whether x is wanted, or its shape where the plan writes it.
    It returns the output, and x if there is one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan | None,
        a: Tensor,
        b: Tensor,
        c: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        how: tuple[Any, ...],
        aux: bool | Sequence[int] | None,
    ) -> Any:
        alpha, beta, activation, out_dtype, kernel, config, tune, batch_invariant = how
        _, needs_a, needs_b, needs_c, needs_bias, *_ = ctx.needs_input_grad
        x = None
        if plan is not None:
            x = None if aux is None else a.new_empty(aux)
            extra = () if x is None and bias is None and residual is None else (bias, residual, x)
            y = plan(a, b, c, None, alpha, beta, *extra)
        else:
            choice = kernel, config, tune, batch_invariant
            needed = needs_a or needs_b or needs_c or needs_bias
            with beneath():
                if aux or (activation and needed):
                    y, x = ops.gemm_aux(a, b, c, bias, residual, *how)
                elif activation or bias is not None or residual is not None:
                    y = ops.gemm(a, b, c, bias, residual, *how)
                elif c is not None:
                    y = ops.addmm(c, a, b, alpha, beta, *choice)
                else:
                    y = ops.matmul(a, b, out_dtype, *choice)
            if x is not None and not needed:
                ctx.mark_non_differentiable(x)
        ctx.save_for_backward(
            a if needs_b else None, b if needs_a else None, x if activation else None
        )
        ctx.set_materialize_grads(False)
        if (
            batch_invariant is None and asked()
        ):  # by the caller's context: autograd's threads have another
            batch_invariant = True
        shapes = a.shape, b.shape, c if c is None else c.shape, bias if bias is None else bias.shape
        strides = a.stride() if needs_a else (), b.stride() if needs_b else ()
        epilogue = (
            residual if residual is None else residual.shape,
            alpha,
            beta,
            activation,
            a.dtype,
        )
        ctx.given = *shapes, *strides, *epilogue
        # What runs on the CPU and is batch-invariant was named, and products of gradients have to
        # name theirs too.
        named = "portable" if batch_invariant and kernel and a.is_cpu else ""
        ctx.how = named, "", tune, batch_invariant
        return y if x is None else (y, x)

    @staticmethod
    def backward(
        ctx: Any, g_out: Tensor | None, g: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        _, needs_a, needs_b, needs_c, needs_bias, needs_residual, *_ = ctx.needs_input_grad
        a, b, x = ctx.saved_tensors
        shape_a, shape_b, shape_c, shape_bias, strides_a, strides_b, *others = ctx.given
        shape_residual, alpha, beta, activation, dtype = others
        d_a = d_b = d_c = d_bias = d_residual = None
        if g_out is not None:
            if needs_residual:
                d_residual = summed(g_out, shape_residual)
            if not activation:
                g = g_out if g is None else g + g_out
            elif x is not None:
                short = type(x) is Tensor and _unwatched()
                through = (_activation_backward if short else ops.activation_backward)(
                    g_out, x, activation
                )
                g = through if g is None else g + through
        if g is not None:
            if needs_bias:
                d_bias = summed(g, shape_bias)
            if needs_c:
                d_c = summed(g if beta == 1 else g * beta, shape_c).to(dtype)
            if g.dtype is not dtype:
                g = g.to(dtype)
            if len(shape_b) == 1:
                g = g.unsqueeze(-1)
            if len(shape_a) == 1:
                g = g.unsqueeze(-2)
            if needs_a:
                d_a = _of_a(g, b, shape_a, strides_a, alpha, ctx.how)
            if needs_b:
                d_b = _of_b(g, a, shape_b, strides_b, alpha, ctx.how)
        return None, d_a, d_b, d_c, d_bias, d_residual, None, None


def _by_columns(strides: Sequence[int]) -> bool:
    """Whether the columns of matrices are contiguous, and the rows are not. Nothing is asked of a
    symbolic stride, for which a compiled program would need a guard.
    """
    if len(strides) < 2:
        return False
    row, column = strides[-2:]
    return type(row) is int and row == 1 and (type(column) is not int or column > 1)


def _of_a(
    g: Tensor,
    b: Tensor,
    shape: Sequence[int],
    strides: Sequence[int],
    alpha: Any,
    how: tuple[Any, ...],
) -> Tensor:
    """Where the operands have 16 bits, the batch of a shared A becomes terms of the sums: one
    product, whose sums stay in fp32. Wider parts are products of their own, added up afterwards as
    torch adds them: their sums are shorter, and so are their errors.
    """
    if b.dim() == 1:
        b = b.unsqueeze(-1)
    columns = _by_columns(strides)
    shared = b.element_size() == 2 and b.dim() > 2 and all(size == 1 for size in shape[:-2])
    if shared:
        b, g = b.movedim(-2, 0).flatten(1), g.movedim(-2, 0).flatten(1)
    found = _product(b, g.mT, alpha, how) if columns else _product(g, b.mT, alpha, how)
    stored = _turned(shape) if columns else shape
    if len(shape) == 1:
        found = found.squeeze(-2)
    found = found.reshape(stored) if shared else summed(found, stored)
    return found.mT if columns else found


def _of_b(
    g: Tensor,
    a: Tensor,
    shape: Sequence[int],
    strides: Sequence[int],
    alpha: Any,
    how: tuple[Any, ...],
) -> Tensor:
    """The batch of a shared B becomes rows: one product, whose sums stay in fp32."""
    columns = _by_columns(strides)
    if a.dim() == 1:
        a = a.unsqueeze(0)
    batched = len(shape) > 2 and any(size != 1 for size in shape[:-2])
    if g.dim() > 2 and not batched:
        a, g = a.flatten(0, -2), g.flatten(0, -2)
    found = _product(g.mT, a, alpha, how) if columns else _product(a.mT, g, alpha, how)
    stored = _turned(shape) if columns else shape
    if batched:
        found = summed(found, stored)
    elif len(shape) != 2:
        found = found.reshape(stored)
    return found.mT if columns else found


def _turned(shape: Sequence[int]) -> Sequence[int]:
    """The shape of the transposed matrices."""
    return (*shape[:-2], shape[-1], shape[-2])


def summed(t: Tensor, shape: Sequence[int]) -> Tensor:
    """The gradient of a tensor of `shape` that was repeated to t's."""
    if t.shape == shape:
        return t
    lead = t.dim() - len(shape)
    return t.sum(tuple(range(lead))) if t.shape[lead:] == shape else t.sum_to_size(shape)


def _product(a: Tensor, b: Tensor, alpha: Any, how: tuple[Any, ...]) -> Tensor:
    """alpha · A B, differentiable."""
    if alpha != 1:
        scaled: Tensor = ops.addmm(a.new_empty(()), a, b, alpha, 0, *how)
        return scaled
    kernel, _, tune, batch_invariant = how
    short = not (kernel or tune) and not torch.compiler.is_compiling()
    found = eager.run(a, b, None, None, 1, 0, batch_invariant) if short else None
    return ops.matmul(a, b, None, *how) if found is None else found


# ---- the activation's derivative
def formula(grad: Tensor, x: Tensor, activation: str) -> Tensor:
    """As the operator, by torch: differentiable. 16-bit gradients are rounded once."""
    dtype = x.dtype
    if dtype in (torch.float16, torch.bfloat16):
        grad, x = grad.float(), x.float()
    if activation not in GATED:
        return _slope(grad, x, activation).to(dtype)
    gate, other = x.chunk(2, -1)
    function = GATED[activation]
    return torch.cat(
        (_slope(grad * other, gate, function), grad * FUNCTIONS[function](gate)), -1
    ).to(dtype)


def _slope(grad: Tensor, x: Tensor, function: str) -> Tensor:
    if function == "silu":  # aten's has no derivative
        s = torch.sigmoid(x)
        return grad * s * (1 + x * (1 - s))
    if function == "relu":
        found: Tensor = torch.ops.aten.threshold_backward(grad, x, 0)
        return found
    found = torch.ops.aten.gelu_backward(
        grad, x, approximate="none" if function == "gelu" else "tanh"
    )
    return found


def check_derivative(grad: Tensor, x: Tensor, activation: str) -> None:
    """Raises ValueError where the arguments of `activation_backward` do not fit together, and
    NotImplementedError for sparse and nested ones, as torch's dispatcher does for operators.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}, expected one of {', '.join(ACTIVATIONS)}")
    for name, t in (("grad", grad), ("x", x)):
        if t.is_nested or t.layout is not torch.strided:
            layout = "nested" if t.is_nested else t.layout
            raise NotImplementedError(f"{name} has layout {layout}, expected {torch.strided}")
    if activation in GATED and (not x.dim() or x.shape[-1] % 2):
        raise OperandError(
            f"x.shape is {tuple(x.shape)}, expected an even number of columns, which activation "
            f"{activation!r} pairs"
        )
    shape = (*x.shape[:-1], x.shape[-1] // glu_split(activation)) if x.dim() else ()
    given, expected = (tuple(grad.shape), grad.dtype, grad.device), (shape, x.dtype, x.device)
    if given != expected:
        raise OperandError(
            f"grad is {given}, expected {expected}, as x is {tuple(x.shape)} before {activation!r}"
        )


def _derivative(grad: Tensor, x: Tensor, activation: str) -> Tensor:
    check_derivative(grad, x, activation)
    if x.is_cuda and x.dtype in DTYPES and x.numel():
        try:
            from ..kernels import activation as kernel
        except ImportError as error:
            fallback.complain(str(error))
        else:
            found: Tensor = kernel.backward(grad, x, activation)
            return found
    return formula(grad, x, activation).contiguous()


# ---- what autograd does with each operator Calls without gradients, of compiled programs say, go
# from here to their plans: the rest of torch's dispatcher costs as much again.
_apply = direct(Product)
_record = recorder(Product)


def recorded(plan: Plan, a: Tensor, b: Tensor, c: Tensor | None, *how: Any) -> Tensor:
    """A call that has a plan, and needs gradients."""
    alpha, beta, batch_invariant, extra, shape_of_x = how
    activation, bias, residual, _ = extra or _NOTHING
    how = alpha, beta, activation, None, "", "", "", batch_invariant
    found = _apply(plan, a, b, c, bias, residual, how, shape_of_x)
    result: Tensor = found if shape_of_x is None else found[0]
    return result


def _unwatched() -> bool:
    """Whether nobody behind autograd sees operators: `eager`'s guards are of tensors that have not
    come that far.
    """
    return _modes() == 0 and _tracing() is None and _level() is None


_NOTHING = EpilogueArgs()


def _split_gemm(*given: Any) -> tuple[Any, ...]:
    given = ops.completed(given)
    return *given[:5], given[5:]


# The arguments of an operator as `Product` takes them.
_SPLIT: dict[str, Callable[..., tuple[Any, ...]]] = {
    "matmul": lambda a, b, dtype=None, *how: _split_gemm(
        a, b, None, None, None, 1, 0, "", dtype, *how
    ),
    "addmm": lambda c, a, b, s=1, t=1, *how: _split_gemm(a, b, c, None, None, s, t, "", None, *how),
    "gemm": _split_gemm,
    "gemm_aux": _split_gemm,
}


def grows(*tensors: Tensor | None) -> bool:
    """Whether autograd is to record what becomes of any of them."""
    if torch.is_grad_enabled():
        for t in tensors:
            if t is not None and t.requires_grad:
                return True
    return False


def pushed(*tensors: Tensor | None) -> bool:
    """Whether any carries a forward-mode gradient."""
    return forward_ad._current_level >= 0 and any(
        t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors
    )


def _autograd(name: str) -> Callable[..., Any]:
    operator, split, aux = getattr(ops, name), _SPLIT[name], name == "gemm_aux" or None

    def run(*given: Any) -> Any:
        a, b, c, bias, residual, how = split(*given)
        if forward_ad._current_level >= 0 and pushed(a, b, c, bias, residual):
            return _by_torch("forward-mode gradients", a, b, c, bias, residual, how, aux)
        if grows(a, b, c, bias, residual):
            if a.is_complex():
                return _by_torch(
                    f"gradients of {dtype_name(a.dtype)} tensors", a, b, c, bias, residual, how, aux
                )
            found = _record(None, a, b, c, bias, residual, how, aux)
            return found[0] if isinstance(found, tuple) and not aux else found
        alpha, beta, activation = how[:3]
        if (
            not aux
            and how[3:] == ops.DEFAULTS[8:]
            and (c is not None or alpha == 1)
            and _unwatched()
        ):
            extra = EpilogueArgs(activation, bias, residual) if name == "gemm" else None
            done = eager.run(a, b, c, None, alpha, 0 if c is None else beta, None, extra)
            if done is not None:
                return done
        with below():
            return operator(*given)

    return run


def _by_torch(
    cause: str,
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    how: tuple[Any, ...],
    aux: bool | None,
) -> Any:
    """A call by torch's own functions, which autograd sees one by one."""
    alpha, beta, activation, out_dtype, kernel, _, _, batch_invariant = how
    ops.check(a, b, c, bias, residual, *how)
    if kernel:
        raise ValueError(f"kernel {kernel!r} takes no {cause}")
    if wanted(batch_invariant):
        raise refusal(cause)
    fallback.notice(cause)
    x = fallback.fused(a, b, c, None, alpha, beta, out_dtype, EpilogueArgs(bias=bias))
    y = apply(x, activation, residual)
    return (x.clone() if y is x else y, x) if aux else y


def _activation_backward(grad: Tensor, x: Tensor, activation: str) -> Any:
    if grows(grad, x) or pushed(grad, x):
        check_derivative(grad, x, activation)
        return formula(grad, x, activation)
    # The dispatcher gives kernels no view that negates when read; here such a one has to be sent by
    # it.
    plain = type(x) is Tensor and (x.is_cuda or x.is_cpu) and not (grad.is_neg() or x.is_neg())
    if plain and _unwatched():
        return _derivative(grad, x, activation)
    with below():
        return ops.activation_backward(grad, x, activation)


def _without(operator: Any) -> Callable[..., None]:
    """An operator that writes to its arguments has no gradients."""
    places = [i for i, argument in enumerate(operator._schema.arguments) if argument.is_write]

    def run(*given: Any) -> None:
        tensors = [t for t in given if isinstance(t, Tensor)]
        if grows(*tensors):
            raise OperandError(
                "out is given with inputs that need gradients, expected no out (or torch.no_grad())"
            )
        if pushed(*tensors):
            raise OperandError(
                "out is given with inputs that carry forward-mode gradients, expected no out"
            )
        written = [t for t in (given[i] for i in places) if t is not None and not t.is_inference()]
        versions = [t._version for t in written]
        with below():
            operator(*given)
        for t, version in zip(written, versions, strict=True):
            if t._version == version:  # a subclass, of which the operator wrote to what it holds
                torch.autograd.graph.increment_version(t)

    return run


@ops.fake("activation_backward")
def _(grad: Tensor, x: Tensor, activation: str) -> Tensor:
    check_derivative(grad, x, activation)
    return x.new_empty(x.shape)


for _key, _function in {
    "CPU": _derivative,
    "CUDA": _derivative,
    "Autograd": _activation_backward,
}.items():
    ops.library.impl("activation_backward", _function, _key)
for _name in _SPLIT:
    ops.library.impl(_name, _autograd(_name), "Autograd")
for _name in ("matmul_out", "addmm_out", "gemm_out"):
    ops.library.impl(_name, _without(getattr(ops, _name)), "Autograd")
