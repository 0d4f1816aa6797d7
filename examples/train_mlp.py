"""A small network trained twice: with torch's layers, and with `outblas.Linear`.

The layers have their activation in the kernel, their gradients are products of outblas too, and
both networks begin with the same weights, so that their losses can be compared. On a GPU products
are in bfloat16 by autocast, and the weights stay in float32.

    python examples/train_mlp.py
    python examples/train_mlp.py --steps 200 --width 4096
"""

import argparse

import torch
from torch import nn

import outblas


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description="Train an MLP with and without outblas.")
    parser.add_argument("--steps", type=int, default=100 if on_gpu else 30)
    parser.add_argument("--width", type=int, default=2048 if on_gpu else 64)
    parser.add_argument("--rows", type=int, default=4096 if on_gpu else 128)
    given = parser.parse_args()
    device, width = "cuda" if on_gpu else "cpu", given.width

    torch.manual_seed(0)
    # [layers]
    by_torch = nn.Sequential(
        nn.Linear(width, 2 * width),
        nn.GELU(),
        nn.Linear(2 * width, width),
    )
    by_us = nn.Sequential(
        outblas.Linear(width, 2 * width, activation="gelu"),
        outblas.Linear(2 * width, width),
    )
    # [end]
    names = {"0.weight": "0.weight", "0.bias": "0.bias", "1.weight": "2.weight", "1.bias": "2.bias"}
    weights = by_torch.state_dict()
    by_us.load_state_dict({ours: weights[theirs] for ours, theirs in names.items()})

    x = torch.randn(given.rows, width, device=device)
    target = x.roll(1, dims=1).tanh()
    losses = {
        name: train(model.to(device), x, target, given.steps)
        for name, model in (("torch", by_torch), ("outblas", by_us))
    }

    print("step   torch  outblas")
    for step in sorted({0, given.steps // 4, given.steps // 2, given.steps - 1}):
        print(f"{step:4}  {losses['torch'][step]:6.4f}   {losses['outblas'][step]:6.4f}")
    first, last = losses["outblas"][0], losses["outblas"][-1]
    assert last < 0.9 * first, "the loss did not go down"
    assert abs(last - losses["torch"][-1]) < 0.05 * first, "the losses went apart"


def train(model: nn.Module, x: torch.Tensor, target: torch.Tensor, steps: int) -> list[float]:
    """Takes some steps of gradient descent; returns the loss before each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    losses = []
    for _ in range(steps):
        with torch.autocast("cuda", torch.bfloat16, enabled=x.is_cuda):
            loss = nn.functional.mse_loss(model(x), target)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


if __name__ == "__main__":
    main()
