"""The operators as torch sees them: schema, fake, mutation, tracing."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

ops = torch.ops.outblas
A, B, C = (torch.randint(-8, 9, shape).float() for shape in ((6, 5), (5, 4), (6, 4)))

CALLS = {
    "matmul": (ops.matmul.default, (A, B)),
    "matmul batched": (ops.matmul.default, (A.expand(3, 6, 5), B)),
    "matmul 1-D": (ops.matmul.default, (A[0], B)),
    "matmul wide": (ops.matmul.default, (A.half(), B.half(), torch.float32)),
    "matmul named": (ops.matmul.default, (A, B, None, "portable", "block_m=32")),
    "matmul_out": (ops.matmul_out.default, (A, B, torch.empty(6, 4))),
    "addmm": (ops.addmm.default, (C, A, B, 0.5, 2.0)),
    "addmm row": (ops.addmm.default, (C[0], A, B)),
    "addmm_out": (ops.addmm_out.default, (C, A, B, torch.empty(6, 4), 0.5, 2.0)),
    "gemm": (ops.gemm.default, (A, B, None, C[0], C, 1, 1, "gelu")),
    "gemm gated": (ops.gemm.default, (A, B, C[0], None, None, 0.5, 2.0, "swiglu")),
    "gemm_aux": (ops.gemm_aux.default, (A, B, None, C[0], None, 1, 1, "silu")),
    "gemm_out": (ops.gemm_out.default, (torch.empty(6, 4), torch.empty(6, 4), A, B, None, C[0], None, 1, 1, "gelu")),
    "activation_backward": (ops.activation_backward.default, (C[:, :2], C, "geglu")),
}


@pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")
@pytest.mark.parametrize("grown", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name, grown):
    op, arguments = CALLS[name]
    if grown and "_out" not in name:
        arguments = tuple(t.clone().requires_grad_() if isinstance(t, torch.Tensor) else t for t in arguments)
    torch.library.opcheck(op, arguments)


def test_fake_checks_like_the_real_one():
    with FakeTensorMode() as mode:
        a, b = mode.from_tensor(A), mode.from_tensor(B)
        assert ops.matmul(a, b).shape == (6, 4)
        assert ops.matmul(a.half(), b.half(), torch.float32).dtype == torch.float32
        with pytest.raises(ValueError, match=r"a.shape\[1\] is 5 but b.shape\[0\] is 4"):
            ops.matmul(a, b[:4])
        with pytest.raises(ValueError, match=r"out\.dtype is"):
            ops.matmul_out(a, b, mode.from_tensor(torch.empty(6, 4, dtype=torch.float64)))
