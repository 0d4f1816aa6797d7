"""The kernels and fake implementations of the operators `matmul`, `addmm` and `gemm`, which is both
with an epilogue.

They are registered by `torch.library.Library`, which costs less than half per call of what the
`custom_op` decorator costs.
"""

from collections.abc import Callable
from typing import Any

import torch

from outblas.call import problem
from outblas.call.dispatch import Call, run
from outblas.call.epilogue import ACTIVATIONS, EpilogueArgs
from outblas.call.errors import OperandError
from outblas.call.invariance import wanted
from outblas.torch_ops.call import is_plain_scalar, scalar
from outblas.torch_ops.schema import ARGUMENTS, fake, implement

Tensor = torch.Tensor


# Parameters are listed one by one, because collecting them with * costs 0.2 µs per call.
def _matmul(
    a: Tensor,
    b: Tensor,
    out_dtype: torch.dtype | None = None,
    kernel: str = "",
    config: str = "",
    tune: str = "",
    batch_invariant: bool | None = None,
) -> Tensor:
    return run(
        Call(a, b, None, None, out_dtype, 1, 0, kernel, config, tune, wanted(batch_invariant))
    )


def _matmul_out(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    out_dtype: torch.dtype | None = None,
    kernel: str = "",
    config: str = "",
    tune: str = "",
    batch_invariant: bool | None = None,
) -> None:
    run(Call(a, b, None, out, out_dtype, 1, 0, kernel, config, tune, wanted(batch_invariant)))
    mark_written(out)


def _addmm(
    c: Tensor,
    a: Tensor,
    b: Tensor,
    alpha: Any = 1,
    beta: Any = 1,
    kernel: str = "",
    config: str = "",
    tune: str = "",
    batch_invariant: bool | None = None,
) -> Tensor:
    alpha, beta = _scalars(alpha, beta, a.dtype)
    return run(
        Call(a, b, c, None, None, alpha, beta, kernel, config, tune, wanted(batch_invariant))
    )


def _addmm_out(
    c: Tensor,
    a: Tensor,
    b: Tensor,
    out: Tensor,
    alpha: Any = 1,
    beta: Any = 1,
    kernel: str = "",
    config: str = "",
    tune: str = "",
    batch_invariant: bool | None = None,
) -> None:
    alpha, beta = _scalars(alpha, beta, a.dtype)
    run(Call(a, b, c, out, None, alpha, beta, kernel, config, tune, wanted(batch_invariant)))
    mark_written(out)


def _scalars(alpha: Any, beta: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    """Returns alpha and beta as numbers that products of a dtype can use. Raises OperandError.

    A kernel would take what float32 cannot hold for infinity.
    """
    if is_plain_scalar(alpha) and is_plain_scalar(beta):
        return alpha, beta
    return scalar("alpha", alpha, dtype), scalar("beta", beta, dtype)


def completed(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns all arguments of `gemm`, because the dispatcher leaves out trailing defaults."""
    return given + DEFAULTS[len(given) :]


def epilogue(
    activation: str, bias: Tensor | None, residual: Tensor | None, aux: Tensor | None = None
) -> EpilogueArgs | None:
    """Returns the epilogue of a product besides alpha and C, or None if there is none."""
    if not activation and bias is None and residual is None and aux is None:
        return None
    return EpilogueArgs(activation, bias, residual, aux)


def _gemm_call(out: Tensor | None, aux: Tensor | None, given: tuple[Any, ...]) -> Call:
    """Returns the call that the arguments of `gemm` describe. Raises ValueError or OperandError."""
    a, b, c, bias, residual, alpha, beta, activation, out_dtype, *choice = completed(given)
    check_activation(activation)
    if c is None:
        if alpha != 1:
            raise OperandError(f"alpha is {alpha} without c, expected 1 (or a c, and beta = 0)")
        beta = 0
    else:
        alpha, beta = _scalars(alpha, beta, a.dtype)
    extra = epilogue(activation, bias, residual, aux)
    kernel, config, tune, batch_invariant = choice
    return Call(
        a, b, c, out, out_dtype, alpha, beta, kernel, config, tune, wanted(batch_invariant), extra
    )


def check_activation(activation: str) -> None:
    """Checks the `activation` argument of an operator, where "" stands for none."""
    if activation and activation not in ACTIVATIONS:
        raise ValueError(
            f"activation is {activation!r}, expected '' or one of {', '.join(ACTIVATIONS)}"
        )


def _gemm(*given: Any) -> Tensor:
    return run(_gemm_call(None, None, given))


def _gemm_aux(*given: Any) -> tuple[Tensor, Tensor]:
    a, b, c, _, _, _, _, _, out_dtype, *_ = completed(given)
    aux = empty_x(a, b, c, out_dtype)
    return run(_gemm_call(None, aux, given)), aux


def _gemm_out(out: Tensor, aux: Tensor | None, *given: Any) -> None:
    run(_gemm_call(out, aux, given))
    mark_written(out)
    if aux is not None:
        mark_written(aux)


def empty_x(a: Tensor, b: Tensor, c: Tensor | None, out_dtype: torch.dtype | None = None) -> Tensor:
    """Allocates memory for x. Raises as `operands.check_product`."""
    return a.new_empty(
        problem.check_product(a, b, c), dtype=problem.check_out_dtype(out_dtype, a.dtype)
    )


def mark_written(out: Tensor) -> None:
    """Tells autograd that the values of `out` that it may have saved have changed."""
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)


# `autograd` registers these.
KERNELS: dict[str, Callable[..., Tensor]] = {"matmul": _matmul, "addmm": _addmm, "gemm": _gemm}
for _key in ("CPU", "CUDA"):
    for _function in (_matmul_out, _addmm_out, _gemm_aux, _gemm_out):
        implement(_function.__name__[1:], _key, _function)


def _strided(t: Tensor) -> bool:
    """Returns whether a tensor is strided; the operator itself refuses other tensors."""
    return t.layout is torch.strided and not t.is_nested


def resolving(name: str) -> Callable[..., Any]:
    """Returns the kernel of an operator that writes to its arguments, for lazily negated or
    conjugated arguments.

    torch's own fallback for such views supports only operators that return a tensor. This kernel
    writes to plain memory and then copies.
    """
    operator = getattr(torch.ops.outblas, name).default
    declared = [(each.name, each.is_written) for each in ARGUMENTS[name]]

    def run(*given: Any) -> Any:
        values, copies = list(given), []
        for i, ((written, is_write), t) in enumerate(zip(declared, given, strict=False)):
            if not isinstance(t, Tensor) or not (t.is_neg() or t.is_conj()):
                continue
            if not is_write:
                values[i] = t.resolve_conj().resolve_neg()
                continue
            problem.check_out(t, t.shape, t.dtype, t.device, written)
            pairs = zip(declared, given, strict=False)
            others = {
                other: x
                for (other, _), x in pairs
                if isinstance(x, Tensor) and x is not t and _strided(x)
            }
            problem.check_overlap(t, written, **others)
            values[i] = torch.empty(t.shape, dtype=t.dtype, device=t.device)
            copies.append((t, values[i]))
        result = operator(*values)
        for t, found in copies:
            t.copy_(found)
        return result

    return run


for _key in ("Negative", "Conjugate"):
    for _name in ("matmul_out", "addmm_out", "gemm_out"):
        implement(_name, _key, resolving(_name))


# `choice` holds what says how a kernel is chosen; the dispatcher leaves out trailing defaults.
@fake("matmul")
def _(a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None, *choice: Any) -> Tensor:
    return a.new_empty(problem.check_pair(a, b), dtype=problem.check_out_dtype(out_dtype, a.dtype))


@fake("matmul_out")
def _(
    a: Tensor, b: Tensor, out: Tensor, out_dtype: torch.dtype | None = None, *choice: Any
) -> None:
    problem.check_out(
        out, problem.check_pair(a, b), problem.check_out_dtype(out_dtype, a.dtype), a.device
    )
    mark_written(out)


@fake("addmm")
def _(c: Tensor, a: Tensor, b: Tensor, alpha: Any = 1, beta: Any = 1, *choice: Any) -> Tensor:
    return a.new_empty(problem.check_addend(c, a, b))


@fake("addmm_out")
def _(
    c: Tensor, a: Tensor, b: Tensor, out: Tensor, alpha: Any = 1, beta: Any = 1, *choice: Any
) -> None:
    problem.check_out(out, problem.check_addend(c, a, b), a.dtype, a.device)
    mark_written(out)


def check(*given: Any) -> None:
    """Raises OperandError or ValueError where the arguments of `gemm` do not fit together."""
    _shapes(_gemm_call(None, None, given))


def _shapes(call: Call) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    """Returns the shapes of the output and of x, and their dtype. Raises the errors of `check`."""
    a = call.a
    shape = problem.check_product(a, call.b, call.c)
    dtype = problem.check_out_dtype(call.out_dtype, a.dtype)
    if call.c is not None and dtype != a.dtype:
        raise OperandError(
            f"out_dtype is {dtype}, expected {a.dtype}, the dtype of a, for a product with "
            "an addend"
        )
    extra = call.extra or EpilogueArgs()
    return problem.check_epilogue_args(extra, shape, dtype, a.device), shape, dtype


def _checked(
    out: Tensor | None, aux: Tensor | None, given: tuple[Any, ...]
) -> tuple[Tensor, Tensor]:
    """Returns new tensors like the output and like x."""
    call = _gemm_call(out, aux, given)
    result, shape, dtype = _shapes(call)
    if out is not None:
        problem.check_out(out, result, dtype, call.a.device)
    return call.a.new_empty(result, dtype=dtype), call.a.new_empty(shape, dtype=dtype)


@fake("gemm")
def _(*given: Any) -> Tensor:
    return _checked(None, None, given)[0]


@fake("gemm_aux")
def _(*given: Any) -> tuple[Tensor, Tensor]:
    return _checked(None, None, given)


@fake("gemm_out")
def _(out: Tensor, aux: Tensor | None, *given: Any) -> None:
    _checked(out, aux, given)
    mark_written(out)
    if aux is not None:
        mark_written(aux)


_ops: Any = torch.ops.outblas
matmul = _ops.matmul.default
matmul_out = _ops.matmul_out.default
addmm = _ops.addmm.default
addmm_out = _ops.addmm_out.default
gemm = _ops.gemm.default
gemm_aux = _ops.gemm_aux.default
gemm_out = _ops.gemm_out.default
grouped_mm = _ops.grouped_mm.default
grouped_gemm = _ops.grouped_gemm.default
grouped_gemm_aux = _ops.grouped_gemm_aux.default
grouped_gemm_to_aux = _ops.grouped_gemm_to_aux.default
scaled_grouped_mm = _ops.scaled_grouped_mm.default
activation_backward = _ops.activation_backward.default
DEFAULTS: tuple[Any, ...] = tuple(each.default for each in ARGUMENTS["gemm"])
