"""What torch's functions compute of a call, and why."""

import torch

from outblas import addmm, matmul

A, B = torch.randn(6, 5), torch.randn(5, 4)


class Tagged(torch.Tensor):
    pass


CAUSES = {
    "CPU tensors": lambda **how: matmul(A, B, **how),
    "tensor subclass Tagged": lambda **how: addmm(B[0], A.as_subclass(Tagged), B, **how),
    "meta tensors": lambda **how: matmul(A.to("meta"), B.to("meta"), **how),
    "torch.sparse_coo": lambda **how: matmul(A.to_sparse(), B, **how),
    "forward-mode gradients": lambda **how: torch.func.jvp(
        lambda a: matmul(a, B, **how), (A,), (A,)
    ),
}
