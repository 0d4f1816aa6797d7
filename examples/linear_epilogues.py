"""What may follow a product in the same kernel: a bias, an activation, a residual.

Each row is one call of outblas and the operators of torch that it replaces. On a GPU the row ends
with the time of torch's operators over ours.

    python examples/linear_epilogues.py
    python examples/linear_epilogues.py --rows 8192
"""

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F

import outblas

Tensor = torch.Tensor
Call = Callable[[], Tensor]


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description="Linear layers and what follows them.")
    parser.add_argument("--rows", type=int, default=4096 if on_gpu else 32)
    parser.add_argument("--features", type=int, default=4096 if on_gpu else 64)
    given = parser.parse_args()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    torch.manual_seed(0)
    rows, features = given.rows, given.features
    x, residual = normal(rows, features), normal(rows, features)
    weight, bias = normal(features, features) / features**0.5, normal(features)
    gate_and_up = normal(2 * features, features) / features**0.5

    def swiglu() -> Tensor:
        gate, up = F.linear(x, gate_and_up).chunk(2, -1)
        return F.silu(gate) * up

    pairs: dict[str, tuple[Call, Call]] = {
        "bias": (lambda: outblas.linear(x, weight, bias), lambda: F.linear(x, weight, bias)),
        "bias, gelu": (
            lambda: outblas.linear(x, weight, bias, activation="gelu"),
            lambda: F.gelu(F.linear(x, weight, bias)),
        ),
        "bias, gelu, residual": (
            lambda: outblas.linear(x, weight, bias, activation="gelu", residual=residual),
            lambda: F.gelu(F.linear(x, weight, bias)) + residual,
        ),
        "swiglu": (lambda: outblas.linear(x, gate_and_up, activation="swiglu"), swiglu),
        "alpha, beta, C": (
            lambda: outblas.addmm(residual, x, weight, alpha=0.5, beta=2),
            lambda: torch.addmm(residual, x, weight, alpha=0.5, beta=2),
        ),
    }
    with torch.no_grad():
        for name, (ours, theirs) in pairs.items():
            outblas.warmup(ours)  # waits for the kernel
            difference = (ours().float() - theirs().float()).abs().max() / theirs().abs().max()
            assert difference < 2e-2, name
            row = f"{name:22}largest difference {difference:.1e} of the largest value"
            print(f"{row}, {time_of(theirs) / time_of(ours):.2f} times as fast" if on_gpu else row)

    # `aux` keeps what the activation was given, for a backward pass of your own.
    before = torch.empty(rows, features, device=device, dtype=dtype)
    after = outblas.matmul(x, weight.T, bias=bias, activation="relu", aux=before)
    assert torch.equal(after, before.relu())
    print("aux holds the values before the activation")


def time_of(call: Call, calls: int = 20) -> float:
    """Milliseconds of a call on the GPU: the mean of a burst, after a call to warm up."""
    call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / calls


if __name__ == "__main__":
    main()
