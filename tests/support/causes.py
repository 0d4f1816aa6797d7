"""What torch's functions compute of a call, and why."""

from collections.abc import Callable
from typing import Any

import torch

from outblas import addmm, matmul

A, B = torch.randn(6, 5), torch.randn(5, 4)


class Tagged(torch.Tensor):
    """A subclass that overrides nothing."""


class Own(torch.Tensor):
    """A subclass that computes torch's functions by itself, and knows none of ours."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (addmm, matmul):
            return NotImplemented
        values = [t.as_subclass(torch.Tensor) if isinstance(t, Own) else t for t in args]
        return func(*values, **(kwargs or {}))


# Calls that no kernel of ours takes, by the cause that a warning or an error names. They take
# keywords of a product.
CAUSES: dict[str, Callable[..., Any]] = {
    "CPU tensors": lambda **how: matmul(A, B, **how),
    "tensor subclass Own": lambda **how: addmm(B[0], A.as_subclass(Own), B, **how),
    "meta tensors": lambda **how: matmul(A.to("meta"), B.to("meta"), **how),
    "torch.sparse_coo": lambda **how: matmul(A.to_sparse(), B, **how),
    "forward-mode gradients": lambda **how: torch.func.jvp(
        lambda a: matmul(a, B, **how), (A,), (A,)
    ),
}
