"""Two linear layers in a CUDA graph, captured once and replayed.

A capture can neither compile a kernel nor tune a shape, so `outblas.warmup` runs the calls before
it. The example needs an NVIDIA GPU; without one it says so and ends.

    python examples/cuda_graph.py
"""

import sys

import torch
from torch import Tensor

import outblas


def main() -> None:
    if not torch.cuda.is_available():
        print("this example needs an NVIDIA GPU: CUDA graphs are a matter of CUDA")
        sys.exit(0)

    torch.manual_seed(0)
    rows, width = 16, 4096
    weights = [torch.randn(width, width, device="cuda").bfloat16() / 64 for _ in range(2)]
    x = torch.randn(rows, width, device="cuda").bfloat16()

    # [capture]
    def block(x: Tensor) -> Tensor:
        hidden = outblas.linear(x, weights[0], activation="silu")
        return outblas.linear(hidden, weights[1], residual=x)

    with torch.no_grad():
        outblas.warmup(block, x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = block(x)
    # [end]

    # A replay reads x and writes y where they lay while the graph was captured.
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        with torch.no_grad():
            assert torch.equal(y, block(x))
    print("three replays gave the bits of eager calls")

    # A call whose kernel is not ready is refused, and the capture goes on without it.
    fewer, other = x[:7].contiguous(), weights[0][:1000].contiguous()
    with torch.no_grad(), torch.cuda.graph(torch.cuda.CUDAGraph()):
        try:
            outblas.linear(fewer, other, activation="gelu")
        except RuntimeError as error:
            print(f"without warmup: {error}")
        x.add_(1)


if __name__ == "__main__":
    main()
