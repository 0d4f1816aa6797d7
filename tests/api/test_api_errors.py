"""Bad input: messages that name the argument, errors that torch's callers catch, and nothing
written.
"""

import pickle
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.causes import A, B

import outblas
from outblas import OperandError, ladder, matmul
from outblas.hopper.parts.config import HopperConfig
from outblas.kernels.portable_config import PortableConfig

pytestmark = pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")

Tensor = torch.Tensor
LEAF = A.clone().requires_grad_()

# ---- messages
WRONG = PortableConfig(num_warps=4.0)  # type: ignore[arg-type]
BUFFER = torch.randn(20, 20)
with torch.inference_mode():
    INFERENCE = torch.empty(6, 4)
TORCHS = SimpleNamespace(matmul=torch.matmul, addmm=torch.addmm, linear=torch.nn.functional.linear)

# Calls by the message that they raise: of a module with the functions, ours or torch's, and an
# output, which none of them writes. Torch refuses them too.
BOTH_REFUSE: dict[str, Callable[[Any, Tensor], object]] = {
    r"input.shape\[1\] is 5 but other.shape\[0\] is 4": lambda f, out: f.matmul(A, B[:4]),
    r"input.shape\[0\] is 5 but other.shape\[0\] is 4": lambda f, out: f.matmul(A[0], B[:4]),
    r"input.shape\[:-2\] is \(2,\) but other.shape\[:-2\] is \(3,\)": (
        lambda f, out: f.matmul(A.expand(2, 6, 5), B.expand(3, 5, 4))
    ),
    "other.dtype is torch.float16 but input.dtype is torch.float32": (
        lambda f, out: f.matmul(A, B.half(), out=out)
    ),
    "input has 0 dimensions, expected at least 1": lambda f, out: f.matmul(torch.tensor(1.0), B),
    "other has 0 dimensions, expected at least 1": lambda f, out: f.matmul(A, torch.tensor(1.0)),
    "out.dtype is torch.float64, expected torch.float32": (
        lambda f, out: f.matmul(A, B, out=out.double())
    ),
    "out is on meta but input is on cpu": lambda f, out: f.matmul(A, B, out=out.to("meta")),
    r"out has strides \(0, 1\)": lambda f, out: f.matmul(A, B, out=out[:1].expand(6, 4)),
    "out is given with inputs that need gradients": lambda f, out: f.matmul(LEAF, B, out=out),
    "out.layout is torch.sparse_coo": lambda f, out: f.matmul(A, B, out=out.to_sparse()),
    "out requires grad": lambda f, out: f.matmul(A, B, out=out.clone().requires_grad_()),
    "inference": lambda f, out: f.matmul(A, B, out=INFERENCE),
    "input is list, expected a torch.Tensor": lambda f, out: f.matmul([[1.0]], B, out=out),
    "other is list, expected a torch.Tensor": lambda f, out: f.matmul(A, [1.0], out=out),
    "out is list": lambda f, out: f.matmul(A, B, out=[]),
    "got an unexpected keyword argument": lambda f, out: f.matmul(A, B, nothing=1),
    "mat1 has 3 dimensions, expected 2": lambda f, out: f.addmm(out, A.expand(2, 6, 5), B),
    r"input.shape is \(5, 4\), expected a shape that broadcasts to \(6, 4\)": (
        lambda f, out: f.addmm(torch.zeros(5, 4), A, B, out=out)
    ),
    "input.dtype is torch.float64 but mat1.dtype is torch.float32": (
        lambda f, out: f.addmm(out.double(), A, B, out=out)
    ),
    "input is float, expected a torch.Tensor": lambda f, out: f.addmm(1.0, A, B, out=out),
    "alpha is 1e.300, expected a number": lambda f, out: f.addmm(out, A, B, alpha=1e300),
    r"alpha is \(1\+2j\), expected a real": lambda f, out: f.addmm(out, A, B, alpha=1 + 2j),
    "alpha is str, expected a number": lambda f, out: f.addmm(out, A, B, alpha="1"),
    "alpha is NoneType, expected a number": lambda f, out: f.addmm(out, A, B, alpha=None),
    "alpha is ndarray, expected a number": lambda f, out: f.addmm(out, A, B, alpha=np.ones(())),
    r"beta is a tensor of shape \(1,\), expected a number or one of shape \(\)": (
        lambda f, out: f.addmm(out, A, B, beta=torch.ones(1))
    ),
    "beta is a tensor that requires grad": (
        lambda f, out: f.addmm(out, A, B, beta=torch.ones((), requires_grad=True))
    ),
    r"input.shape is \(6, 5\), expected \(..., 4\) for weight.shape \(5, 4\)": (
        lambda f, out: f.linear(A, B)
    ),
    r"weight has 3 dimensions, expected 2 \(N, K\) or 1 \(K\)": (
        lambda f, out: f.linear(A, B.t().expand(2, 4, 5))
    ),
    "weight.dtype is torch.float16 but input.dtype is": lambda f, out: f.linear(A, B.t().half()),
    r"bias.shape is \(3,\), expected a shape that broadcasts to \(6, 4\)": (
        lambda f, out: f.linear(A, B.t(), torch.zeros(3))
    ),
    "bias.dtype is torch.float64": lambda f, out: f.linear(A, B.t(), torch.zeros(4).double()),
}
# Of calls that torch's functions do not know, or take.
WE_REFUSE: dict[str, Callable[[Tensor], object]] = {
    "other is on meta but input is on cpu": lambda out: matmul(A, B.to("meta"), out=out),
    r"out.shape is \(4, 6\), expected \(6, 4\)": lambda out: matmul(A, B, out=torch.empty(4, 6)),
    "out overlaps input in memory": lambda out: matmul(BUFFER[:6, :5], B, out=BUFFER[3:9, 4:8]),
    "out overlaps other in memory": lambda out: matmul(A, BUFFER[:5, :4], out=BUFFER[:6, :4]),
    "out_dtype is torch.float16, expected torch.float32 for operands of torch.float32$": (
        lambda out: matmul(A, B, out_dtype=torch.float16)
    ),
    "out_dtype is str": lambda out: matmul(A, B, out_dtype="float32"),  # type: ignore[arg-type]
    "kernel is 'hopper.nothing', expected one of: simt.naive, simt.coalesced": (
        lambda out: matmul(A, B, out=out, kernel="hopper.nothing")
    ),
    "kernel is int, expected a name": lambda out: matmul(A, B, out=out, kernel=3),  # type: ignore[arg-type]
    "kernel 'hopper.tma_wgmma' needs an NVIDIA GPU, but was given CPU tensors": (
        lambda out: matmul(A, B, out=out, kernel="hopper.tma_wgmma")
    ),
    "kernel 'portable' needs operands of dtype bfloat16 or float16 or float32, but was given "
    "float64": lambda out: matmul(A.double(), B.double(), kernel="portable"),
    "kernel 'portable' needs plain tensors, but was given meta tensors": (
        lambda out: matmul(A.to("meta"), B.to("meta"), kernel="portable")
    ),
    "config is given without kernel": lambda out: matmul(A, B, out=out, config=PortableConfig()),
    "kernel 'portable'.*block_m is 17": (
        lambda out: matmul(A, B, out=out, kernel="portable", config=PortableConfig(block_m=17))
    ),
    "config is HopperConfig, expected PortableConfig for kernel 'portable'": (
        lambda out: matmul(A, B, out=out, kernel="portable", config=HopperConfig())
    ),
    r"config num_warps is 4.0 \(float\), expected int": (
        lambda out: matmul(A, B, out=out, kernel="portable", config=WRONG)
    ),
    "name is 'nothing', expected a ladder": lambda out: ladder("nothing"),
}


def refused(message: str, call: Callable[[Tensor], object]) -> Exception:
    """The error of a call, which writes nothing."""
    out, buffer = torch.full((6, 4), 7.0), BUFFER.clone()

    with pytest.raises((ValueError, TypeError, RuntimeError), match=message) as caught:
        call(out)

    assert torch.equal(out, torch.full((6, 4), 7.0))
    assert torch.equal(BUFFER, buffer)
    return caught.value


@pytest.mark.parametrize("message", WE_REFUSE)
def test_bad_input_names_the_argument_and_writes_nothing(message: str) -> None:
    error = refused(message, WE_REFUSE[message])

    is_of_a_type = re.search("is str|is int|HopperConfig|4.0", message)
    assert type(error) is TypeError if is_of_a_type else isinstance(error, ValueError)


@pytest.mark.parametrize("message", BOTH_REFUSE)
def test_who_catches_what_torch_raises_catches_ours(message: str) -> None:
    call = BOTH_REFUSE[message]
    with pytest.raises(Exception) as theirs:  # noqa: PT011
        call(TORCHS, torch.full((6, 4), 7.0))

    error = refused(message, lambda out: call(outblas, out))

    assert isinstance(error, theirs.type)
    assert isinstance(error, ValueError) == (theirs.type is RuntimeError)


def test_a_wrong_config_spoils_no_equal_one() -> None:
    right = PortableConfig(num_warps=4)
    assert right == WRONG
    with pytest.raises(TypeError):
        matmul(A, B, kernel="portable", config=WRONG)

    got = matmul(A, B, kernel="portable", config=right)

    torch.testing.assert_close(got, A @ B)


def test_an_operand_error_can_be_pickled() -> None:
    message = r"input.shape\[1\] is 5 but other.shape\[0\] is 4"
    with pytest.raises(OperandError, match=message) as caught:
        matmul(A, B[:4])

    copy = pickle.loads(pickle.dumps(caught.value))

    assert type(copy) is OperandError
    assert str(copy) == str(caught.value)
