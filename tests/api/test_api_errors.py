"""Bad input: messages that name the argument, errors that torch's callers catch, and nothing
written.
"""

import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.causes import A, B

import outblas
from outblas import OperandError, addmm, ladder, linear, matmul
from outblas.hopper.parts.config import HopperConfig
from outblas.kernels.portable_config import PortableConfig

pytestmark = pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")

Tensor = torch.Tensor
LEAF = A.clone().requires_grad_()

# ---- messages
BUFFER = torch.randn(20, 20)
BadCalls = dict[str, Callable[[Tensor], object]]

# Calls by the message that they raise; they take an output, which none of them writes.
BAD_VALUES: BadCalls = {
    r"input.shape\[1\] is 5 but other.shape\[0\] is 4": lambda out: matmul(A, B[:4], out=out),
    r"input.shape\[0\] is 5 but other.shape\[0\] is 4": lambda out: matmul(A[0], B[:4]),
    r"input.shape\[:-2\] is \(2,\) but other.shape\[:-2\] is \(3,\)": lambda out: matmul(
        A.expand(2, 6, 5), B.expand(3, 5, 4)
    ),
    "other.dtype is torch.float16 but input.dtype is torch.float32": lambda out: matmul(
        A, B.half(), out=out
    ),
    "other is on meta but input is on cpu": lambda out: matmul(A, B.to("meta"), out=out),
    "input has 0 dimensions, expected at least 1": lambda out: matmul(torch.tensor(1.0), B),
    "other has 0 dimensions, expected at least 1": lambda out: matmul(A, torch.tensor(1.0)),
    r"out.shape is \(4, 6\), expected \(6, 4\)": lambda out: matmul(A, B, out=torch.empty(4, 6)),
    "out.dtype is torch.float64, expected torch.float32": lambda out: matmul(
        A, B, out=out.double()
    ),
    "out is on meta but input is on cpu": lambda out: matmul(A, B, out=out.to("meta")),
    "out overlaps input in memory": lambda out: matmul(BUFFER[:6, :5], B, out=BUFFER[3:9, 4:8]),
    "out overlaps other in memory": lambda out: matmul(A, BUFFER[:5, :4], out=BUFFER[:6, :4]),
    r"out has strides \(0, 1\)": lambda out: matmul(A, B, out=torch.empty(1, 4).expand(6, 4)),
    "out is given with inputs that need gradients": lambda out: matmul(LEAF, B, out=out),
    "out.layout is torch.sparse_coo": lambda out: matmul(A, B, out=torch.zeros(6, 4).to_sparse()),
    "out requires grad": lambda out: matmul(A, B, out=torch.empty(6, 4, requires_grad=True)),
    "out_dtype is torch.float16, expected torch.float32 for operands of torch.float32$": (
        lambda out: matmul(A, B, out_dtype=torch.float16)
    ),
    "kernel is 'hopper.nothing', expected one of: simt.naive, simt.coalesced": lambda out: matmul(
        A, B, out=out, kernel="hopper.nothing"
    ),
    "kernel 'hopper.tma_wgmma' needs an NVIDIA GPU, but was given CPU tensors": (
        lambda out: matmul(A, B, out=out, kernel="hopper.tma_wgmma")
    ),
    "kernel 'portable' needs operands of dtype bfloat16 or float16 or float32, but was given "
    "float64": lambda out: matmul(A.double(), B.double(), kernel="portable"),
    "kernel 'portable' needs plain tensors, but was given meta tensors": lambda out: matmul(
        A.to("meta"), B.to("meta"), kernel="portable"
    ),
    "config is given without kernel": lambda out: matmul(A, B, out=out, config=PortableConfig()),
    "kernel 'portable'.*block_m is 17": lambda out: matmul(
        A, B, out=out, kernel="portable", config=PortableConfig(block_m=17)
    ),
    "mat1 has 3 dimensions, expected 2": lambda out: addmm(out, A.expand(2, 6, 5), B),
    r"input.shape is \(5, 4\), expected a shape that broadcasts to \(6, 4\)": lambda out: addmm(
        torch.zeros(5, 4), A, B, out=out
    ),
    "input.dtype is torch.float64 but mat1.dtype is torch.float32": lambda out: addmm(
        out.double(), A, B, out=out
    ),
    "name is 'nothing', expected a ladder": lambda out: ladder("nothing"),
}
BAD_TYPES: BadCalls = {
    "input is list, expected a torch.Tensor": lambda out: matmul([[1.0]], B, out=out),  # type: ignore[arg-type]
    "other is list, expected a torch.Tensor": lambda out: matmul(A, [1.0], out=out),  # type: ignore[arg-type]
    "input is float, expected a torch.Tensor": lambda out: addmm(1.0, A, B, out=out),  # type: ignore[arg-type]
    "out is list, expected a torch.Tensor": lambda out: matmul(A, B, out=[]),  # type: ignore[arg-type]
    "out_dtype is str": lambda out: matmul(A, B, out_dtype="float32"),  # type: ignore[arg-type]
    "kernel is int, expected a name": lambda out: matmul(A, B, out=out, kernel=3),  # type: ignore[arg-type]
    "config is HopperConfig, expected PortableConfig for kernel 'portable'": lambda out: matmul(
        A, B, out=out, kernel="portable", config=HopperConfig()
    ),
    "alpha is str, expected a number": lambda out: addmm(out, A, B, alpha="1"),  # type: ignore[arg-type]
    r"beta is a tensor of shape \(1,\), expected a number or one of shape \(\)": (
        lambda out: addmm(out, A, B, beta=torch.ones(1))
    ),
    "beta is a tensor that requires grad": lambda out: addmm(
        out, A, B, beta=torch.ones((), requires_grad=True)
    ),
}


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [pytest.param(ValueError, text, call, id=text) for text, call in BAD_VALUES.items()]
    + [pytest.param(TypeError, text, call, id=text) for text, call in BAD_TYPES.items()],
)
def test_bad_input_names_the_argument_and_writes_nothing(
    error: type[Exception], message: str, call: Callable[[Tensor], object]
) -> None:
    out, buffer = torch.full((6, 4), 7.0), BUFFER.clone()

    with pytest.raises(error, match=message):
        call(out)

    assert torch.equal(out, torch.full((6, 4), 7.0))
    assert torch.equal(BUFFER, buffer)


LINEAR_ERRORS: dict[str, tuple[Tensor, ...]] = {
    r"input.shape is \(6, 5\), expected \(..., 4\) for weight.shape \(5, 4\)": (A, B),
    r"weight has 3 dimensions, expected 2 \(N, K\) or 1 \(K\)": (A, B.t().expand(2, 4, 5)),
    "weight.dtype is torch.float16 but input.dtype is torch.float32": (A, B.t().half()),
    r"bias.shape is \(3,\), expected a shape that broadcasts to \(6, 4\)": (
        A,
        B.t(),
        torch.zeros(3),
    ),
}


@pytest.mark.parametrize("message", LINEAR_ERRORS)
def test_linear_names_its_own_parameters(message: str) -> None:
    with pytest.raises(OperandError, match=message):
        linear(*LINEAR_ERRORS[message])


# ---- configs
def test_a_field_of_a_wrong_type_is_refused_by_name() -> None:
    config = PortableConfig(num_warps=4.0)  # type: ignore[arg-type]

    with pytest.raises(TypeError, match=r"config num_warps is 4.0 \(float\), expected int"):
        matmul(A, B, kernel="portable", config=config)


def test_a_wrong_config_spoils_no_equal_one() -> None:
    wrong, right = PortableConfig(num_warps=4.0), PortableConfig(num_warps=4)  # type: ignore[arg-type]
    assert wrong == right
    with pytest.raises(TypeError):
        matmul(A, B, kernel="portable", config=wrong)

    got = matmul(A, B, kernel="portable", config=right)

    torch.testing.assert_close(got, A @ B)


# ---- as torch's own errors
with torch.inference_mode():
    INFERENCE = torch.empty(6, 4)
TORCHS = SimpleNamespace(matmul=torch.matmul, addmm=torch.addmm, linear=torch.nn.functional.linear)

# Calls that torch refuses, of its functions and of ours.
REFUSED_BY_TORCH: dict[str, Callable[[Any], object]] = {
    "0 dimensions": lambda f: f.matmul(torch.tensor(1.0), B),
    "sizes": lambda f: f.matmul(A, B[:4]),
    "batches": lambda f: f.matmul(A.expand(2, 6, 5), B.expand(3, 5, 4)),
    "dtypes": lambda f: f.matmul(A, B.half()),
    "list": lambda f: f.matmul([1.0], B),
    "None": lambda f: f.matmul(None, B),
    "keyword": lambda f: f.matmul(A, B, nothing=1),
    "out's dtype": lambda f: f.matmul(A, B, out=torch.empty(6, 4).double()),
    "out's device": lambda f: f.matmul(A, B, out=torch.empty(6, 4, device="meta")),
    "out's strides": lambda f: f.matmul(A, B, out=torch.empty(1, 4).expand(6, 4)),
    "out's layout": lambda f: f.matmul(A, B, out=torch.zeros(6, 4).to_sparse()),
    "out's gradient": lambda f: f.matmul(A, B, out=torch.empty(6, 4, requires_grad=True)),
    "inputs' gradient": lambda f: f.matmul(LEAF, B, out=torch.empty(6, 4)),
    "out's inference": lambda f: f.matmul(A, B, out=INFERENCE),
    "3 dimensions": lambda f: f.addmm(torch.zeros(6, 4), A.expand(2, 6, 5), B),
    "addend's shape": lambda f: f.addmm(torch.zeros(5, 4), A, B),
    "addend's dtype": lambda f: f.addmm(torch.zeros(6, 4).double(), A, B),
    "addend's type": lambda f: f.addmm(1.0, A, B),
    "large alpha": lambda f: f.addmm(torch.zeros(6, 4), A, B, alpha=1e300),
    "complex alpha": lambda f: f.addmm(torch.zeros(6, 4), A, B, alpha=1 + 2j),
    "alpha's type": lambda f: f.addmm(torch.zeros(6, 4), A, B, alpha="1"),
    "alpha's shape": lambda f: f.addmm(torch.zeros(6, 4), A, B, alpha=torch.ones(1)),
    "alpha's gradient": lambda f: f.addmm(
        torch.zeros(6, 4), A, B, alpha=torch.tensor(1.0, requires_grad=True)
    ),
    "alpha is None": lambda f: f.addmm(torch.zeros(6, 4), A, B, alpha=None),
    "alpha is an array": lambda f: f.addmm(torch.zeros(6, 4), A, B, alpha=np.ones(())),
    "weight's dimensions": lambda f: f.linear(A, B.t().expand(2, 4, 5)),
    "weight's shape": lambda f: f.linear(A, B),
    "weight's dtype": lambda f: f.linear(A, B.t().half()),
    "linear of 0 dimensions": lambda f: f.linear(torch.tensor(1.0), B),
    "bias' shape": lambda f: f.linear(A, B.t(), torch.zeros(3)),
    "bias' dtype": lambda f: f.linear(A, B.t(), torch.zeros(4).double()),
}


@pytest.mark.parametrize("name", REFUSED_BY_TORCH)
def test_who_catches_what_torch_raises_catches_ours(name: str) -> None:
    call = REFUSED_BY_TORCH[name]
    with pytest.raises(Exception) as theirs:  # noqa: PT011
        call(TORCHS)

    with pytest.raises(theirs.type) as ours:
        call(outblas)

    assert isinstance(ours.value, ValueError) == (theirs.type is RuntimeError)


def test_an_operand_error_can_be_pickled() -> None:
    message = r"input.shape\[1\] is 5 but other.shape\[0\] is 4"
    with pytest.raises(OperandError, match=message) as caught:
        matmul(A, B[:4])

    copy = pickle.loads(pickle.dumps(caught.value))

    assert type(copy) is OperandError
    assert str(copy) == str(caught.value)
