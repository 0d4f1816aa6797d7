"""The public calls. They run a cached plan, or take the slow path.

The slow path checks the arguments, and then calls the operators or torch. Gradients, autocast,
vmap, torch.compile and torch.export are implemented by the operators. Overrides of torch functions
(`torch.overrides`) also override these calls.
"""

from typing import Any

import torch

from outblas.call.default_kernel import Mode
from outblas.call.epilogue import Activation, EpilogueArgs
from outblas.call.errors import OperandError
from outblas.call.sm_carveout import limited
from outblas.torch_ops import autocast_vmap, autograd, slow_path
from outblas.torch_ops.call import (
    OPERANDS,
    Arguments,
    GivenEpilogue,
    KernelChoice,
    eager_choice,
    is_activation,
    is_plain_scalar,
    is_traced,
)
from outblas.torch_ops.eager import run
from outblas.torch_ops.linear import run as run_linear

Tensor = torch.Tensor
Parameter = torch.nn.Parameter

_REGISTERED = autograd, autocast_vmap  # they register themselves with the operators on import


def matmul(
    input: Tensor,
    other: Tensor,
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
    sms: int | None = None,
) -> Tensor:
    """Multiply two tensors, with the shapes, broadcasting and dtype rules of `torch.matmul`.

    Bias, activation and residual are applied by the kernel that multiplies. Sums are accumulated
    in float32, the epilogue is computed in float32, and the result is rounded once. Products of
    float32 operands are IEEE float32, unless torch's float32 precision setting allows TF32. Torch
    computes them, unless a sweep on this model of GPU measured a kernel to be faster at exactly
    this product, or the call names a kernel, is batch-invariant, or tunes.

    Calls that no kernel covers, such as those on CPU tensors or integer dtypes, are computed by
    `torch.matmul`, with one `FallbackWarning` per cause. Backward passes use the same kernels.
    Under autocast all tensors are cast to the autocast dtype, a float32 residual included. A call
    that raises has not written to `out` or `aux`.

    Args:
        input: The left operand A: (K), (M, K) or (..., M, K), with any strides; float16, bfloat16
            or float32 on an NVIDIA GPU.
        other: The right operand B: (K), (K, N) or (..., K, N), of the dtype and on the device of
            `input`, with any strides.
        out: The tensor to write the result to. It must have the exact shape and dtype of the
            result and share no memory with an operand; its strides may be any that keep its
            elements apart.
        out_dtype: The dtype of the result: that of `input` (the default), or float32 for 16-bit
            operands.
        bias: Added to the product. It has the dtype of the result and broadcasts to the product:
            (N) for one value per column, (M, 1) for one value per row.
        activation: Applied to product + bias: "relu", "gelu" (the exact one, with erf),
            "gelu_tanh" or "silu"; or a gated linear unit "reglu", "geglu", "geglu_tanh" or
            "swiglu", which multiplies the activation of the first N/2 columns by the other N/2 and
            returns N/2 columns.
        residual: Added after the activation. It has the dtype of the result and broadcasts to it.
        aux: The tensor to write product + bias to, before the activation, for a backward pass of
            your own. The requirements are those of `out`, with the shape of the product.
        kernel: The name of a kernel, as listed by `outblas.ladder`. By default the fastest kernel
            known for the call. A named kernel runs or raises; it never falls back to torch.
            "portable" also accepts CPU tensors, and runs them in Triton's interpreter.
        config: The config of the named kernel, for example
            `outblas.hopper.config.HopperConfig(tile_m=128)`. By default the kernel chooses.
        tune: How the kernel is chosen when none is named: "off", by a fixed rule; "lookup", from
            what was tuned on this machine and the tables that ship with outblas; "on", like
            "lookup", but a shape is tuned when it is first met, which takes up to a minute. By
            default the value of OUTBLAS_TUNE, or "lookup".
        batch_invariant: True promises that the bits of a row of the result depend on no other row,
            on M or on the batch. By default what the context manager `outblas.batch_invariant`
            says, or False.
        sms: The most SMs that the kernel may use, at least 1; by default all of them, but for those
            that `outblas.sm_carveout` leaves to others. As within that, torch computes what the
            kernels of Hopper GPUs do not, and has the limit as its own setting, that of the
            process, until it has launched the call. Gradients are not limited, and the graph of a
            compiled program breaks here.

    Returns:
        The product with its epilogue, of the shape that `torch.matmul` would give (with half as
        many columns for a gated linear unit). It is `out` where that was given.

    Raises:
        TypeError: An argument has the wrong type.
        OperandError: The operands do not fit together: shapes, dtypes, devices, overlapping
            memory. It is both a ValueError and a RuntimeError, which torch raises here.
        ValueError: The named kernel cannot take the operands, an argument is none of its choices,
            or `batch_invariant` is True and torch would compute the call.
        RuntimeError: A CUDA graph is being captured and the kernel is not loaded yet; call
            `outblas.warmup` first. Or the call would fall back to torch and OUTBLAS_STRICT is 1.

    Example:
        >>> import torch, outblas
        >>> a, b = torch.randn(2, 3, 4), torch.randn(4, 6)
        >>> outblas.matmul(a, b).shape
        torch.Size([2, 3, 6])
        >>> outblas.matmul(a, b, bias=torch.randn(6), activation="swiglu").shape
        torch.Size([2, 3, 3])
        >>> c = outblas.matmul(a, b, kernel="portable")  # on a CPU: Triton's interpreter
        >>> torch.allclose(c, a @ b, atol=1e-5)
        True
    """
    warm, slow = run, slow_path.run
    if sms is not None:
        warm, slow = limited(warm, sms, input, other), limited(slow, sms, input, other)
    extra = None
    if bias is not None or activation is not None or residual is not None or aux is not None:
        extra = EpilogueArgs(activation or "", bias, residual, aux)
    fast = (activation is None or is_activation(activation)) and not is_traced()
    chosen = None
    if fast and not (kernel is None and config is None and out_dtype is None and tune is None):
        chosen = eager_choice(out_dtype, kernel, config, tune)
        fast = chosen is not None
    if fast:
        try:
            done = warm(input, other, None, out, 1, 0, batch_invariant, extra, chosen)
        except OperandError as error:
            error.rename(OPERANDS["matmul"])
            raise
        if done is not None:
            return done
    given = GivenEpilogue(activation, bias, residual, aux)
    choice = KernelChoice(kernel, config, tune, batch_invariant)
    arguments = Arguments("matmul", input, other, None, out, 1, 0, out_dtype, given, choice)
    return slow(arguments)


def addmm(
    input: Tensor,
    mat1: Tensor,
    mat2: Tensor,
    *,
    beta: float | complex | Tensor = 1,
    alpha: float | complex | Tensor = 1,
    out: Tensor | None = None,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    aux: Tensor | None = None,
    kernel: str | None = None,
    config: Any = None,
    tune: Mode | None = None,
    batch_invariant: bool | None = None,
    sms: int | None = None,
) -> Tensor:
    """Compute beta * input + alpha * (mat1 @ mat2), like `torch.addmm`, rounded once.

    The sum is computed in float32. What `matmul` says of accumulation, fallback, gradients and
    autocast holds here too.

    Args:
        input: The addend C, which broadcasts to (M, N), of the dtype and on the device of `mat1`.
            It is not read when `beta` is 0, so that NaN in it does not matter.
        mat1: The left operand A: (M, K), with any strides; float16, bfloat16 or float32 on an
            NVIDIA GPU.
        mat2: The right operand B: (K, N), of the dtype and on the device of `mat1`, with any
            strides.
        beta: The factor of `input`: a Python or NumPy number, or a tensor without dimensions that
            needs no gradient, whose value is fetched (which synchronizes with the GPU if it is
            there). A complex number is accepted with complex operands only.
        alpha: The factor of the product, of the same types as `beta`.
        out: The tensor to write the result to, as in `matmul`. It may be `input` itself, if there
            is no bias, activation, residual or aux.
        bias: Added to beta * input + alpha * (mat1 @ mat2), as in `matmul`.
        activation: Applied to that sum, as in `matmul`.
        residual: Added after the activation, as in `matmul`.
        aux: The tensor to write the sum to, before the activation, as in `matmul`.
        kernel: The name of a kernel, as in `matmul`.
        config: The config of the named kernel, as in `matmul`.
        tune: How the kernel is chosen, "off", "lookup" or "on", as in `matmul`.
        batch_invariant: Whether a row's bits must depend on no other row, as in `matmul`.
        sms: The most SMs that the kernel may use, as in `matmul`.

    Returns:
        The (M, N) result, or (M, N/2) for a gated linear unit. It is `out` where that was given.

    Raises:
        TypeError: An argument has the wrong type.
        OperandError: The operands do not fit together, as in `matmul`.
        ValueError: The named kernel cannot take the operands, an argument is none of its choices,
            or `batch_invariant` is True and torch would compute the call.
        RuntimeError: As in `matmul`, for CUDA graphs and OUTBLAS_STRICT.

    Example:
        >>> import torch, outblas
        >>> c, a, b = torch.ones(3, 5), torch.randn(3, 4), torch.randn(4, 5)
        >>> d = outblas.addmm(c, a, b, alpha=2.0, beta=0.5)
        >>> torch.allclose(d, 0.5 * c + 2.0 * (a @ b), atol=1e-5)
        True
        >>> outblas.addmm(c, a, b, out=c) is c
        True
    """
    warm, slow = run, slow_path.run
    if sms is not None:
        warm, slow = limited(warm, sms, input, mat1), limited(slow, sms, input, mat1)
    extra = None
    if bias is not None or activation is not None or residual is not None or aux is not None:
        extra = EpilogueArgs(activation or "", bias, residual, aux)
    fast = input is not None and is_plain_scalar(alpha) and is_plain_scalar(beta)
    fast = fast and (activation is None or is_activation(activation)) and not is_traced()
    chosen = None
    if fast and not (kernel is None and config is None and tune is None):
        chosen = eager_choice(None, kernel, config, tune)
        fast = chosen is not None
    if fast:
        try:
            done = warm(mat1, mat2, input, out, alpha, beta, batch_invariant, extra, chosen)
        except OperandError as error:
            error.rename(OPERANDS["addmm"])
            raise
        if done is not None:
            return done
    given = GivenEpilogue(activation, bias, residual, aux)
    choice = KernelChoice(kernel, config, tune, batch_invariant)
    arguments = Arguments("addmm", mat1, mat2, input, out, alpha, beta, None, given, choice)
    return slow(arguments)


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    kernel: str | None = None,
    config: Any = None,
    tune: Mode | None = None,
    batch_invariant: bool | None = None,
    sms: int | None = None,
) -> Tensor:
    """Compute activation(input @ weight.T + bias) + residual, the work of a linear layer.

    Without activation and residual this is `torch.nn.functional.linear`. What `matmul` says of
    accumulation, fallback, gradients and autocast holds here too. A weight whose type has a
    `__torch_dispatch__` of its own (quantized, sharded) is passed to `torch.nn.functional.linear`
    as it is, unless its type overrides this function. Kernels compute with weights of other types
    what those leave to torch when they are asked by `__torch_function__`.

    Args:
        input: (..., K), with any strides; float16, bfloat16 or float32 on an NVIDIA GPU.
        weight: (N, K), or (K) for an output without columns, of the dtype and on the device of
            `input`. For a gated linear unit the rows of the gate come first, then the rows of the
            values.
        bias: (N), of the dtype of `input`; any shape that broadcasts to (..., N) is accepted.
        activation: Applied to the biased product, as in `matmul`.
        residual: Added after the activation, as in `matmul`.
        out: The tensor to write the result to, as in `matmul`.
        kernel: The name of a kernel, as in `matmul`.
        config: The config of the named kernel, as in `matmul`.
        tune: How the kernel is chosen, "off", "lookup" or "on", as in `matmul`.
        batch_invariant: Whether a row's bits must depend on no other row, as in `matmul`.
        sms: The most SMs that the kernel may use, as in `matmul`.

    Returns:
        The (..., N) result, or (..., N/2) for a gated linear unit. It is `out` where that was
        given.

    Raises:
        TypeError: An argument has the wrong type.
        OperandError: The operands do not fit together, as in `matmul`.
        ValueError: The named kernel cannot take the operands, an argument is none of its choices,
            or `batch_invariant` is True and torch would compute the call.
        RuntimeError: As in `matmul`, for CUDA graphs and OUTBLAS_STRICT.

    Example:
        >>> import torch, outblas
        >>> x, weight, bias = torch.randn(8, 16), torch.randn(32, 16), torch.randn(32)
        >>> y = outblas.linear(x, weight, bias, activation="gelu")
        >>> expected = torch.nn.functional.gelu(torch.nn.functional.linear(x, weight, bias))
        >>> torch.allclose(y, expected, atol=1e-5)
        True
    """
    warm, slow = run_linear, slow_path.run
    if sms is not None:
        warm, slow = limited(warm, sms, input, weight), limited(slow, sms, input, weight)
    fast = (activation is None or is_activation(activation)) and not is_traced()
    chosen = None
    if fast and not (kernel is None and config is None and tune is None):
        chosen = eager_choice(None, kernel, config, tune)
        fast = chosen is not None
    if fast:
        try:
            done = warm(
                input, weight, bias, activation or "", residual, out, batch_invariant, chosen
            )
        except OperandError as error:
            error.rename(OPERANDS["linear"])
            raise
        if done is not None:
            return done
    given = GivenEpilogue(activation, bias, residual, None)
    choice = KernelChoice(kernel, config, tune, batch_invariant)
    arguments = Arguments("linear", input, weight, None, out, 1, 0, None, given, choice)
    return slow(arguments)


slow_path.public_functions.update(matmul=matmul, addmm=addmm, linear=linear)
