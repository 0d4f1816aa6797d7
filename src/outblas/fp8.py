"""`FP8Linear`: a linear layer whose weight is fp8 with a scale for each block of 128 by 128 values,
as checkpoints of DeepSeek and Qwen store it. Its input is quantized as it comes.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import ScalingType

from outblas.call.errors import OperandError
from outblas.call.problem import DTYPES, check_tensor
from outblas.call.quantization import FORMATS, blocks, spread
from outblas.torch_ops import ops
from outblas.torch_ops.autograd_levels import has_tangent, is_transformed, requires_grad
from outblas.torch_ops.call import is_autocast
from outblas.torch_ops.quantize import quantize
from outblas.torch_ops.scaled_mm import scaled_mm

__all__ = ["FP8Linear"]

Tensor = torch.Tensor
Parameter = torch.nn.Parameter

_RECIPE = "128x128"
_OF_ROWS, _OF_WEIGHT = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128


class FP8Linear(torch.nn.Module):
    """A linear layer with an fp8 weight, for inference and for training what is around it.

    A call quantizes its input with a scale for 128 columns of each row (`quantize`, "1x128") and
    multiplies by `scaled_mm`. On sm_90 that is a kernel for fp8; elsewhere torch multiplies the
    same numbers in float32.

    Parameters have the names and shapes of checkpoints: `weight` (out_features, in_features) in
    fp8, `weight_scale_inv` (ceil(out_features/128), ceil(in_features/128)) in float32, by which the
    weight is multiplied, and `bias`. The weight and its scales are frozen. Gradients of the input
    and the bias are those of the product with the dequantized weight, as if the input had not been
    rounded.

    A new layer has zeros for a weight: load a state dict, or make it by `from_fp8` or
    `from_linear`. Move it by `to(device)`: a dtype would be that of the weight and the scales too.

    Args:
        in_features: The size K of an input row.
        out_features: The size N of an output row.
        bias: Whether the layer has a bias of shape (out_features).
        device: The device of the parameters, as in `torch.nn.Linear`.
        dtype: The dtype of the bias; torch's default where it is None.

    Example:
        >>> import torch, outblas
        >>> layer = outblas.FP8Linear.from_linear(torch.nn.Linear(256, 512))
        >>> layer.weight.dtype, layer.weight_scale_inv.shape
        (torch.float8_e4m3fn, torch.Size([4, 2]))
        >>> layer(torch.randn(8, 256)).shape
        torch.Size([8, 512])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        weight = torch.zeros(out_features, in_features, device=device).to(torch.float8_e4m3fn)
        scale = torch.ones(
            blocks(out_features), blocks(in_features), dtype=torch.float32, device=device
        )
        self.weight = Parameter(weight, requires_grad=False)
        self.weight_scale_inv = Parameter(scale, requires_grad=False)
        self.bias: Parameter | None
        zeros = Parameter(torch.zeros(out_features, device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", zeros)

    @classmethod
    def from_fp8(
        cls, weight: Tensor, weight_scale_inv: Tensor, bias: Tensor | None = None
    ) -> "FP8Linear":
        """Make a layer of the tensors of a checkpoint, without a copy.

        Args:
            weight: (N, K), float8_e4m3fn or float8_e5m2.
            weight_scale_inv: (ceil(N/128), ceil(K/128)), float32, of any strides: what the weight
                is multiplied by.
            bias: (N), bfloat16, float16 or float32.

        Returns:
            A layer, whose bias needs a gradient if that of the arguments does.

        Raises:
            TypeError: An argument is no tensor.
            OperandError: The tensors do not fit together.

        Example:
            >>> import torch, outblas
            >>> weight, scale = outblas.quantize(torch.randn(512, 256), "128x128")
            >>> outblas.FP8Linear.from_fp8(weight, scale)
            FP8Linear(in_features=256, out_features=512, bias=False, dtype=torch.float8_e4m3fn)
        """
        check(weight, weight_scale_inv, bias)
        N, K = weight.shape
        layer = cls(K, N, bias=False, device="meta")
        layer.weight = Parameter(weight.detach(), requires_grad=False)
        layer.weight_scale_inv = Parameter(weight_scale_inv.detach(), requires_grad=False)
        if bias is not None:
            layer.bias = Parameter(bias.detach(), requires_grad=bias.requires_grad)
        return layer

    @classmethod
    def from_linear(
        cls, linear: torch.nn.Linear, *, dtype: torch.dtype = torch.float8_e4m3fn
    ) -> "FP8Linear":
        """Make a layer of a linear one, whose weight is quantized.

        Args:
            linear: A layer with a weight in bfloat16, float16 or float32. It is not changed.
            dtype: The dtype of the new weight: float8_e4m3fn or float8_e5m2.

        Returns:
            A layer, which shares the memory of the bias.

        Raises:
            TypeError: `linear` is no `torch.nn.Linear`.
            OperandError: The dtype of its weight is another, or `dtype` is not fp8.

        Example:
            >>> import torch, outblas
            >>> linear, x = torch.nn.Linear(256, 512), torch.randn(8, 256)
            >>> layer = outblas.FP8Linear.from_linear(linear)
            >>> bool((layer(x) - linear(x)).norm() < 0.06 * linear(x).norm())
            True
        """
        if not isinstance(linear, torch.nn.Linear):
            raise TypeError(f"linear is {type(linear).__name__}, expected a torch.nn.Linear")
        weight, scale = quantize(linear.weight.detach(), _RECIPE, dtype=dtype)
        return cls.from_fp8(weight, scale, linear.bias)

    def forward(self, input: Tensor) -> Tensor:
        """Compute input @ (weight * weight_scale_inv).T + bias, with the input rounded to fp8.

        Args:
            input: (..., in_features), bfloat16, float16 or float32, on the device of the weight.

        Returns:
            (..., out_features), of the dtype of the input; under autocast of autocast's, to which
            the input is rounded first.

        Raises:
            OperandError: The input does not fit the weight.
        """
        if is_autocast(input):
            input = input.to(torch.get_autocast_dtype(input.device.type))
        return product(input, self.weight, self.weight_scale_inv, self.bias)

    def extra_repr(self) -> str:
        """Describe the layer's sizes and its dtype, for `repr`.

        Returns:
            What stands between the parentheses of `repr`.
        """
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, dtype={self.weight.dtype}"
        )


def check(weight: Any, scale: Any, bias: Any) -> None:
    """Raises TypeError or OperandError for tensors that are not those of a layer."""
    tensors = {"weight": weight, "weight_scale_inv": scale}
    tensors |= {} if bias is None else {"bias": bias}
    for name, t in tensors.items():
        check_tensor(name, t)
        if t.device != weight.device:
            raise OperandError(f"{name} is on {t.device} but weight is on {weight.device}")
    if weight.dim() != 2:
        raise OperandError(f"weight has {weight.dim()} dimensions, expected 2")
    N, K = weight.shape
    for name, dtypes, shape in (
        ("weight", FORMATS, (N, K)),
        ("weight_scale_inv", (torch.float32,), (blocks(N), blocks(K))),
        ("bias", DTYPES, (N,)),
    ):
        t = tensors.get(name)
        if t is None:
            continue
        if t.dtype not in dtypes:
            raise OperandError(
                f"{name}.dtype is {t.dtype}, expected one of {', '.join(map(str, dtypes))}"
            )
        if tuple(t.shape) != shape:
            raise OperandError(f"{name}.shape is {tuple(t.shape)}, expected {shape}")


def product(input: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Computes what `FP8Linear.forward` does of checked parameters, which may be marked as needing
    gradients: there are none of the weight and its scales. Raises OperandError.
    """
    if input.dtype not in DTYPES:
        raise OperandError(
            f"input.dtype is {input.dtype}, expected one of {', '.join(map(str, DTYPES))}"
        )
    if input.dim() == 0 or input.shape[-1] != weight.shape[1]:
        raise OperandError(
            f"input.shape is {tuple(input.shape)}, expected (..., {weight.shape[1]})"
        )
    if input.device != weight.device:
        raise OperandError(f"input is on {input.device}, expected {weight.device}, as the weight")
    rows = input.reshape(-1, input.shape[-1])
    operands = rows, weight.detach(), scale.detach(), bias
    is_recorded = requires_grad(input, bias) or has_tangent(input, bias) or is_transformed()
    out = (_with_gradients if is_recorded else _computed)(*operands)
    return out.view(*input.shape[:-1], weight.shape[0])


def _computed(rows: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    values, scales = quantize(rows, "1x128")
    if bias is not None:
        bias = bias.detach().to(rows.dtype)  # the warm calls of `scaled_mm` need no gradients
    return scaled_mm(
        *(values, weight.t(), scales, _OF_ROWS, scale.t(), _OF_WEIGHT),
        bias=bias,
        output_dtype=rows.dtype,
    )


class _WithGradients(torch.autograd.Function):
    """The product with a frozen weight. Its gradient passes through the dequantized weight."""

    generate_vmap_rule = True

    @staticmethod
    def forward(rows: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        return _computed(rows, weight, scale, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, weight, scale, bias = inputs
        ctx.save_for_backward(weight, scale)
        ctx.bias_dtype = None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, scale = ctx.saved_tensors
        of_rows = of_bias = None
        if ctx.needs_input_grad[0]:
            wide = weight.float() * spread(scale, _RECIPE, weight.shape)
            of_rows = ops.matmul(grad, wide.to(grad.dtype))
        if ctx.needs_input_grad[3]:
            of_bias = grad.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return of_rows, None, None, of_bias


_with_gradients: Callable[..., Tensor] = _WithGradients.apply
