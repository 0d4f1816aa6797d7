"""A first product, beside torch's own.

Shows `outblas.matmul`, `addmm` and `linear` with torch's shapes and dtypes, a kernel asked for by
its name, and what an error says. Without a GPU torch computes all but the named kernel, which
Triton's interpreter runs, and a `FallbackWarning` says so once.

    python examples/quickstart.py
    python examples/quickstart.py --size 8192
"""

import argparse
from collections.abc import Callable

import torch

import outblas


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description="A first product, beside torch's own.")
    parser.add_argument("--size", type=int, default=4096 if on_gpu else 256)
    size = parser.parse_args().size
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)

    torch.manual_seed(0)
    a = torch.randn(size, size, device=device, dtype=dtype)
    b = torch.randn(size, size, device=device, dtype=dtype)
    bias = torch.randn(size, device=device, dtype=dtype)

    # The functions take what torch's take.
    compare("matmul", outblas.matmul(a, b), torch.matmul(a, b))
    compare("addmm", outblas.addmm(bias, a, b, beta=0.5), torch.addmm(bias, a, b, beta=0.5))
    linear = torch.nn.functional.linear
    compare("linear", outblas.linear(a, b, bias), linear(a, b, bias))

    # Any kernel can be asked for by its name. It runs, or says why it cannot.
    small = a[:64, :64].contiguous()
    compare("portable", outblas.matmul(small, small, kernel="portable"), small @ small)

    # Operands that do not fit together are refused before anything runs.
    try:
        outblas.matmul(a, b[:-1])
    except outblas.OperandError as error:
        print(f"an error names the argument: {error}")

    if on_gpu:
        outblas.warmup(outblas.matmul, a, b)  # torch may have stood in while the kernel compiled
        print(f"\n{size}^3 {dtype}, milliseconds a call")
        print(f"  torch    {milliseconds(torch.matmul, a, b):.3f}")
        print(f"  outblas  {milliseconds(outblas.matmul, a, b):.3f}")
        print("`outblas bench` times with more care, and checks every element first.")


def compare(name: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Prints how far two results are apart, in parts of the largest value."""
    difference = (ours.float() - theirs.float()).abs().max() / theirs.float().abs().max()
    assert difference < 1e-2, name
    print(f"{name:8}  {tuple(ours.shape)} {ours.dtype}, largest difference {difference:.1e}")


def milliseconds(
    function: Callable[..., torch.Tensor], *operands: torch.Tensor, calls: int = 20
) -> float:
    """The time of a call on the GPU: the mean of a burst, after a call to warm up."""
    function(*operands)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        function(*operands)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / calls


if __name__ == "__main__":
    main()
