"""A user's mistakes, which type checkers find: `make lint` fails where a line needs no comment."""

import torch

import outblas
from outblas.autotune import SweepOptions

a, b = torch.randn(64, 32), torch.randn(32, 48)

outblas.matmul(a, b, activation=1)  # type: ignore[arg-type]
outblas.matmul(a, b, activation="tanh")  # type: ignore[arg-type]
outblas.linear(a, b.T, tune="yes")  # type: ignore[arg-type]
outblas.matmul(a, b, batch_invariant="yes")  # type: ignore[arg-type]
outblas.Linear(8, 8, activation="tanh")  # type: ignore[arg-type]
outblas.tune(a, b, weights="hot")  # type: ignore[arg-type]
SweepOptions(engine="spark")  # type: ignore[arg-type]
outblas.no_such_call(a)  # type: ignore[attr-defined]
outblas.autotune.no_such_call(a)  # type: ignore[attr-defined]
wrong: int = outblas.matmul(a, b)  # type: ignore[assignment]
no_layer: int = outblas.Linear(8, 8).weight  # type: ignore[assignment]
no_model: int = torch.nn.Sequential(outblas.Linear(8, 8))  # type: ignore[assignment]
no_contexts: int = outblas.batch_invariant()  # type: ignore[assignment]
