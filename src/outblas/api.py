"""The public calls: they take an eager plan, or go the slow path.

The slow path checks what it is given and reaches the operators, or hands it to torch. Gradients,
autocast and vmap are the operators' own, and so are torch.compile and torch.export. What overrides
functions of torch (`torch.overrides`) overrides these.
"""

from typing import Any

import torch

from .core.arguments import renamed, show_signature
from .core.compat.torch_private import function_mode_count as function_modes
from .core.compat.torch_private import overrides_enabled, without_overrides
from .core.epilogue import Activation, EpilogueArgs
from .core.errors import OperandError
from .runtime.default_kernel import Mode
from .torch_ops import autocast_vmap, autograd, slow_path
from .torch_ops.call import (
    OPERANDS,
    Arguments,
    Choice,
    GivenEpilogue,
    is_activation,
    is_plain_scalar,
    is_traced,
)
from .torch_ops.eager import overriding_mode, run

Tensor = torch.Tensor
Parameter = torch.nn.Parameter

_REGISTERED = autograd, autocast_vmap  # with the operators, when imported

# The keywords that stand for parameters.
_ALIASES = OPERANDS | {"linear": {"x": "input", "w": "weight"}}
_REQUIRED: Any = None  # the default of a parameter that may come under its other name


def matmul(
    input: Tensor = _REQUIRED,
    other: Tensor = _REQUIRED,
    *,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    aux: Tensor | None = None,
    kernel: str | None = None,
    config: Any = None,
    tune: Mode | None = None,
    batch_invariant: bool | None = None,
    **aliases: Tensor,
) -> Tensor:
    """The matrix product of two tensors, with the shapes, broadcasting and dtype rules of
    `torch.matmul`.

    Args:
        input: (K), (M, K) or (..., M, K); float16, bfloat16 or float32 on an NVIDIA GPU, any
            strides.
        other: (K), (K, N) or (..., K, N), of the dtype and device of input, any strides.
        out: where the product goes: of its exact shape and dtype, with any strides that keep
            elements apart, sharing no memory with input or other.
        out_dtype: dtype of the product: that of input (the default), or float32 for 16-bit
            operands.
        bias: added to the product; of its dtype, and a shape that broadcasts to it: (N) for a value
            of each column, (M, 1) for one of each row.
        activation: of the product and its bias: "relu", "gelu" (by erf), "gelu_tanh", "silu"; or of
            a gated pair "reglu", "geglu", "geglu_tanh", "swiglu": the activation of the first half
            of the columns times the second half, so that N/2 columns come out.
        residual: added after the activation; of the product's dtype, broadcasts to the output.
        aux: where the product and its bias go before the activation, for a backward pass; as `out`.
        kernel: a name from `outblas list`; by default the best kernel known. A named kernel runs or
            raises, it never falls back. "portable" takes CPU tensors too, by Triton's interpreter.
        config: of the named kernel, e.g. `outblas.hopper.config.HopperConfig(tile_m=128)`.
        tune: how the kernel is chosen where none is named: "off", by a fixed rule; "lookup", by
            what was tuned here and by the tables that come along; "on", as "lookup", after tuning
            shapes when they are first met (seconds to a minute each). By default what OUTBLAS_TUNE
            says, or "lookup".
        batch_invariant: whether the bits of a row of the product are to depend on no other row of
            input, on how many there are, and on no batch. By default what the context manager
            `outblas.batch_invariant` says, or no.

    Sums are accumulated, and what follows them is computed, in fp32, and rounded once. fp32
    products are IEEE unless torch's fp32 precision setting asks for tf32. What no kernel covers
    goes to `torch.matmul` with one `FallbackWarning` per cause (RuntimeError if OUTBLAS_STRICT=1).
    Gradients are products of ours too, by the best kernel known. Under autocast all tensors are
    cast, a fp32 residual too. A call that raises has written nothing.

    Raises:
        TypeError: an argument is of the wrong type.
        OperandError: operands do not fit together: a ValueError and, as torch's own error for them,
            a RuntimeError too.
        ValueError: the named kernel cannot take the operands, an argument is none of its choices,
            or what would take the call promises no batch-invariance.
        RuntimeError: a CUDA graph is being captured, and the call's kernel is not on the GPU yet:
            `outblas.warmup`, or the same call before the capture, puts it there.
    """
    if aliases:
        input, other = renamed("matmul", _ALIASES["matmul"], aliases, input=input, other=other)
    extra = None
    if bias is not None or activation is not None or residual is not None or aux is not None:
        extra = EpilogueArgs(activation or "", bias, residual, aux)
    plain = kernel is None and config is None and out_dtype is None and tune is None
    if plain and (activation is None or is_activation(activation)) and not is_traced():
        try:
            done = run(input, other, None, out, 1, 0, batch_invariant, extra)
        except OperandError as error:
            error.rename(OPERANDS["matmul"])
            raise
        if done is not None:
            return done
    given = GivenEpilogue(activation, bias, residual, aux)
    choice = Choice(kernel, config, tune, batch_invariant)
    arguments = Arguments("matmul", input, other, None, out, 1, 0, out_dtype, given, choice)
    return slow_path.run(arguments)


def addmm(
    input: Tensor = _REQUIRED,
    mat1: Tensor = _REQUIRED,
    mat2: Tensor = _REQUIRED,
    *,
    alpha: float | complex | Tensor = 1,
    beta: float | complex | Tensor = 1,
    out: Tensor | None = None,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    aux: Tensor | None = None,
    kernel: str | None = None,
    config: Any = None,
    tune: Mode | None = None,
    batch_invariant: bool | None = None,
    **aliases: Tensor,
) -> Tensor:
    """beta * input + alpha * (mat1 @ mat2), as `torch.addmm`, scaled and added in fp32 and rounded
    once.

    Args:
        input: broadcasts to (M, N); of the dtype and device of mat1. Not read when beta is 0, NaN
            and all.
        mat1: (M, K); float16, bfloat16 or float32 on an NVIDIA GPU, any strides.
        mat2: (K, N), of the dtype and device of mat1, any strides.
        alpha, beta: numbers of Python or NumPy, or tensors of no dimensions that need no gradient,
            whose value is fetched (from a GPU, with a synchronization); complex ones with complex
            operands only.
        out: as in `matmul`; may be `input` itself, where no bias, activation, residual or aux is
            given.
        bias, activation, residual, aux: as in `matmul`, the activation of
            beta * input + alpha * (mat1 @ mat2) + bias.
        kernel, config, tune, batch_invariant: as in `matmul`.

    The keywords `c`, `a` and `b` stand for `input`, `mat1` and `mat2`.

    Raises TypeError, OperandError, ValueError and RuntimeError as `matmul`; nothing is written
    then.
    """
    if aliases:
        input, mat1, mat2 = renamed(
            "addmm", _ALIASES["addmm"], aliases, input=input, mat1=mat1, mat2=mat2
        )
    extra = None
    if bias is not None or activation is not None or residual is not None or aux is not None:
        extra = EpilogueArgs(activation or "", bias, residual, aux)
    plain = kernel is None and config is None and tune is None and input is not None
    plain = plain and is_plain_scalar(alpha) and is_plain_scalar(beta)
    if plain and (activation is None or is_activation(activation)) and not is_traced():
        try:
            done = run(mat1, mat2, input, out, alpha, beta, batch_invariant, extra)
        except OperandError as error:
            error.rename(OPERANDS["addmm"])
            raise
        if done is not None:
            return done
    given = GivenEpilogue(activation, bias, residual, aux)
    choice = Choice(kernel, config, tune, batch_invariant)
    arguments = Arguments("addmm", mat1, mat2, input, out, alpha, beta, None, given, choice)
    return slow_path.run(arguments)


def linear(
    input: Tensor = _REQUIRED,
    weight: Tensor = _REQUIRED,
    bias: Tensor | None = None,
    *,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    kernel: str | None = None,
    config: Any = None,
    tune: Mode | None = None,
    batch_invariant: bool | None = None,
    **aliases: Tensor,
) -> Tensor:
    """activation(input @ weight.T + bias) + residual, as `torch.nn.functional.linear` and what
    often follows it.

    Args:
        input: (..., K); float16, bfloat16 or float32 on an NVIDIA GPU, any strides.
        weight: (N, K), or (K) for an output without columns; of the dtype and device of input. Of a
            gated pair the rows of the gate come first, then those of what it multiplies.
        bias: (N), of the dtype of input; any shape that broadcasts to (..., N) will do.
        activation, residual, out, kernel, config, tune, batch_invariant: as in `matmul`.

    A weight of another type (quantized, distributed, traced) reaches `torch.nn.functional.linear`
    as it is, unless that type overrides this function. The keywords `x` and `w` stand for `input`
    and `weight`.

    Raises TypeError, OperandError, ValueError and RuntimeError as `matmul`; nothing is written
    then.
    """
    if aliases:
        input, weight = renamed("linear", _ALIASES["linear"], aliases, input=input, weight=weight)
    plain = (
        kernel is None
        and config is None
        and tune is None
        and (type(weight) is Parameter or type(weight) is Tensor)
    )
    if plain and (activation is None or is_activation(activation)) and not is_traced():
        extra = None
        if bias is not None or activation is not None or residual is not None:
            extra = EpilogueArgs(activation or "", bias, residual, None)
        try:
            done = _eager_linear(input, weight, out, batch_invariant, extra)
        except OperandError as error:
            error.rename(OPERANDS["linear"])
            raise
        if done is not None:
            return done
    given = GivenEpilogue(activation, bias, residual, None)
    choice = Choice(kernel, config, tune, batch_invariant)
    arguments = Arguments("linear", input, weight, None, out, 1, 0, None, given, choice)
    return slow_path.run(arguments)


def _eager_linear(
    input: Tensor,
    weight: Tensor,
    out: Tensor | None,
    batch_invariant: bool | None,
    extra: EpilogueArgs | None,
) -> Tensor | None:
    """As `eager.run`."""
    if function_modes() and overrides_enabled():
        if without_overrides is None or overriding_mode():
            return None
        with without_overrides():
            return _eager_linear(input, weight, out, batch_invariant, extra)
    try:
        transposed = weight.t()
    except RuntimeError:  # of more dimensions, or nested
        return None
    return run(input, transposed, None, out, 1, 0, batch_invariant, extra)


for _function in (matmul, addmm, linear):
    show_signature(_function, OPERANDS[_function.__name__].values())
    slow_path.public_functions[_function.__name__] = _function
