"""A linear layer with fp8 weights and activations, with scales of rows and columns.

Quantizes both operands to float8_e4m3fn, multiplies them with `outblas.scaled_mm`, and says how
far the result is from the layer in float32, and how much of that is the quantization's. Without a
GPU of sm_90 torch multiplies the same fp8 numbers in float32.

    python examples/fp8_linear.py
"""

import torch
from torch.nn.functional import ScalingType

import outblas

LARGEST = torch.finfo(torch.float8_e4m3fn).max  # 448


# [quantize]
def by_rows(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix in fp8, and the scale of each row, whose largest value becomes 448."""
    scale = t.abs().amax(dim=1, keepdim=True).float() / LARGEST
    return (t / scale).to(torch.float8_e4m3fn), scale


# [end]


def main() -> None:
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    rows, inputs, outputs = (2048, 4096, 4096) if on_gpu else (32, 64, 48)
    torch.manual_seed(0)
    x = torch.randn(rows, inputs, device=device)
    weight = torch.randn(outputs, inputs, device=device) / inputs**0.5
    bias = torch.randn(outputs, device=device).bfloat16()

    # [multiply]
    x8, scale_x = by_rows(x)  # scales (rows, 1)
    w8, scale_w = by_rows(weight)  # once, when the model is loaded
    of_rows = ScalingType.RowWise
    operands = x8, w8.T, scale_x, of_rows, scale_w.T, of_rows
    y = outblas.scaled_mm(*operands, bias=bias, activation="gelu")
    # [end]
    fast = outblas.scaled_mm(*operands, bias=bias, activation="gelu", use_fast_accum=True)

    def layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x.double() @ weight.double().T + bias.double())

    exact = layer(x, weight)
    of_quantized = layer(x8.double() * scale_x.double(), w8.double() * scale_w.double())
    print(f"{tuple(y.shape)} {y.dtype}; relative error beside the layer in full precision:")
    print(f"  quantization alone              {distance(of_quantized, exact):.1e}")
    print(f"  scaled_mm                       {distance(y, exact):.1e}")
    print("and beside the exact product of the fp8 numbers:")
    print(f"  scaled_mm                       {distance(y, of_quantized):.1e}")
    print(f"  scaled_mm, use_fast_accum=True  {distance(fast, of_quantized):.1e}")
    assert distance(y, of_quantized) < 5e-3
    assert distance(y, exact) < 0.1


def distance(found: torch.Tensor, truth: torch.Tensor) -> float:
    """The error in the Frobenius norm, relative to the truth's."""
    return float((found.double() - truth).norm() / truth.norm())


if __name__ == "__main__":
    main()
