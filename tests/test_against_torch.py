"""Every kernel against torch: the first tests to read, and to run on a product of your own.

    pytest tests/test_against_torch.py
    pytest tests/test_against_torch.py --kernel hopper.gemm --shape 4096x4096x4096 --dtype bfloat16

Where there is an NVIDIA GPU, each kernel runs that takes it, and so does the call that names none.
Elsewhere `portable` runs, through Triton's interpreter. `--kernel`, `--shape`, `--dtype` and
`--layout` may be repeated; each replaces what this file lists. `-rs` shows which calls a kernel
refused, and why.

Two questions are asked of a product. Of small integers, whose sums no order of summation rounds, it
must be the exact product rounded once, bit by bit. Of random numbers, its error must be no larger
than that of torch's own product by more than a small factor.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support import own_cases
from support.own_cases import DEFAULT, DEVICE, Call

import outblas
from outblas.base import registry

pytestmark = [
    pytest.mark.oldest_triton,
    pytest.mark.watched if DEVICE == "cuda" else pytest.mark.interpreter,
]

# An error may be this many times torch's own. 16-bit products end in one rounding, which is nearly
# all of their error; fp32 sums differ by the order in which a kernel adds up.
ERROR_FACTOR = {torch.bfloat16: 1.1, torch.float16: 1.1, torch.float32: 4.0}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Gives each test the kernels, shapes, dtypes and layouts that are asked for."""
    if "call" in metafunc.fixturenames:
        metafunc.parametrize("call", own_cases.calls(metafunc.config), ids=str)
    if "kernel" in metafunc.fixturenames:
        kernels = own_cases.kernels(metafunc.config)
        metafunc.parametrize("kernel", [name for name in kernels if name != DEFAULT])


@dataclass(frozen=True)
class Operands:
    """A (M×K), B (K×N) and C (M×N) of one call, stored as its layout says."""

    a: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor

    @classmethod
    def of_integers(cls, call: Call) -> "Operands":
        """Integers so small that fp32 holds every partial sum, and fp16 every result."""
        largest = max(1, min(4, int((60_000 / max(call.K, 1)) ** 0.5)))

        def make(*shape: int) -> torch.Tensor:
            return torch.randint(-largest, largest + 1, shape, device=DEVICE).to(call.dtype)

        return cls(*own_cases.stored(call, make))

    @classmethod
    def of_random_numbers(cls, call: Call) -> "Operands":
        """Standard normal numbers."""

        return cls(*own_cases.stored(call, lambda *n: torch.randn(n, device=DEVICE).to(call.dtype)))


@pytest.fixture(autouse=True)
def seed() -> None:
    """The same numbers in every run."""
    torch.manual_seed(0)


SCALES: dict[str, Any] = {"alpha": 2, "beta": -1}


def exact(x: Operands, with_c: bool) -> torch.Tensor:
    """A B, or 2 A B - C, in float64."""
    a, b, c = (t.double() for t in (x.a, x.b, x.c))
    return torch.addmm(c, a, b, **SCALES) if with_c else torch.matmul(a, b)


def test_matmul_of_integers_equals_torch(call: Call) -> None:
    x = Operands.of_integers(call)
    out = torch.full((call.M, call.N), float("nan"), dtype=call.dtype, device=DEVICE)

    product = call.run(outblas.matmul, x.a, x.b)
    returned = call.run(outblas.matmul, x.a, x.b, out=out)

    want = exact(x, with_c=False).to(call.dtype)
    assert returned is out
    assert torch.equal(product, want), own_cases.difference(product, want)
    assert torch.equal(out, want), own_cases.difference(out, want)


def test_addmm_of_integers_equals_torch(call: Call) -> None:
    x = Operands.of_integers(call)

    result = call.run(outblas.addmm, x.c, x.a, x.b, **SCALES)

    want = exact(x, with_c=True).to(call.dtype)
    assert torch.equal(result, want), own_cases.difference(result, want)


@pytest.mark.parametrize("with_c", [False, True], ids=["matmul", "addmm"])
def test_a_result_of_random_numbers_is_as_accurate_as_torchs(call: Call, with_c: bool) -> None:
    x = Operands.of_random_numbers(call)
    want = exact(x, with_c)

    if with_c:
        ours = call.run(outblas.addmm, x.c, x.a, x.b, **SCALES)
        theirs = torch.addmm(x.c, x.a, x.b, **SCALES)
    else:
        ours, theirs = call.run(outblas.matmul, x.a, x.b), torch.matmul(x.a, x.b)

    our_error, their_error = ((y.double() - want).norm() for y in (ours, theirs))
    least = torch.finfo(call.dtype).eps * want.norm() / 16  # where torch happens to be exact
    assert our_error <= ERROR_FACTOR[call.dtype] * their_error + least


def test_a_kernel_takes_aligned_operands_of_all_its_dtypes(kernel: str) -> None:
    """Other calls a kernel may refuse, and their tests are skipped then; these it may not."""
    side = own_cases.ALIGNED
    for name in registry.find(kernel).dtypes:
        call = Call(kernel, side, side, side, getattr(torch, name), registry.layout_of(kernel))
        x = Operands.of_integers(call)

        product = outblas.matmul(x.a, x.b, kernel=kernel)

        assert product.shape == (side, side), f"{kernel} of {name}"


def test_every_kernel_of_this_machine_is_tested(pytestconfig: pytest.Config) -> None:
    if own_cases.narrowed(pytestconfig):
        pytest.skip("the command line names the cases")

    tested = {call.kernel for call in own_cases.calls(pytestconfig)}

    assert tested == set(own_cases.runnable())
    assert "portable" in tested
