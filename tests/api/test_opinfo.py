"""Torch's own samples of its products (OpInfo), through outblas: values, gradients, and who
computed them.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import outblas
from outblas.runtime import dispatch, launcher

Tensor = torch.Tensor
OURS: dict[str, Callable[..., Tensor]] = {
    "matmul": outblas.matmul,
    "__rmatmul__": lambda x, y: outblas.matmul(y, x),
    "mm": outblas.matmul,
    "bmm": outblas.matmul,
    "addmm": outblas.addmm,
    "nn.functional.linear": outblas.linear,
}
DTYPES = torch.float32, torch.bfloat16, torch.float16
COMPLEX = torch.complex64, torch.complex128
LEAST = 256


@functools.cache
def operator(name: str) -> Any:
    from torch.testing._internal.common_methods_invocations import op_db  # takes seconds

    return next(op for op in op_db if op.name == name and not op.variant_test_name)


def scaled(t: Tensor) -> Tensor:
    """At least LEAST rows and columns, laid out as it is: the same order of strides, repeats, gaps
    and ones.
    """
    lead = max(t.dim() - 2, 0)
    shape = [n if i < lead or n < 2 else n * -(-LEAST // n) for i, n in enumerate(t.shape)]
    stored = [n if stride else 1 for n, stride in zip(shape, t.stride(), strict=True)]
    order = sorted(range(t.dim()), key=lambda i: (-t.stride()[i], i))
    gap = min(
        (stride for n, stride in zip(t.shape, t.stride(), strict=True) if stride and n > 1),
        default=1,
    )
    memory = torch.testing.make_tensor(
        *(stored[i] for i in order), gap, device=t.device, dtype=t.dtype, low=-4, high=4
    )[..., 0]
    return (
        memory.permute(*(order.index(i) for i in range(t.dim()))).expand(shape)
        if t.dim()
        else memory
    )


def widened(t):
    return t.detach().to(torch.complex128 if t.is_complex() else torch.float64).requires_grad_()


def compare(name: str, given: list[Any], how: dict[str, Any]) -> None:
    """Values and gradients, of the same gradient of the output: near to those of the widest dtype
    if torch's are.
    """
    op, exact = operator(name).op, [widened(t) if isinstance(t, Tensor) else t for t in given]
    got, want, truth = OURS[name](*given, **how), op(*given, **how), op(*exact, **how)
    assert (got.shape, got.dtype, got.is_contiguous()) == (want.shape, want.dtype, True)
    weight = torch.testing.make_tensor(
        want.shape, dtype=want.dtype, device=want.device, low=-1, high=1
    )

    def results(y, operands):
        return [
            y,
            *torch.autograd.grad(
                y, [t for t in operands if isinstance(t, Tensor)], weight.to(y.dtype)
            ),
        ]

    unit = 4 * torch.finfo(want.dtype).eps
    for ours, torchs, right in zip(
        results(got, given), results(want, given), results(truth, exact), strict=True
    ):
        if right.numel():
            error, theirs, largest = (
                float(t.detach().abs().amax()) for t in (ours - right, torchs - right, right)
            )
            assert error <= max(2 * theirs, unit * max(1.0, largest))


def share(
    name: str, device: str, dtype: torch.dtype, change: Callable[[Tensor], Tensor] = lambda t: t
) -> float:
    """Of a name's samples, how many were right and, where OUTBLAS_STRICT=1, ran on kernels
    of ours.
    """
    taken = []
    for sample in operator(name).sample_inputs(device, dtype):
        given = [change(t) if isinstance(t, Tensor) else t for t in (sample.input, *sample.args)]
        try:
            compare(
                name,
                [t.detach().requires_grad_() if isinstance(t, Tensor) else t for t in given],
                sample.kwargs,
            )
            taken.append(True)
        except RuntimeError as error:
            if "OUTBLAS_STRICT=1 forbids" not in str(error):
                raise
            taken.append(False)
    return sum(taken) / len(taken)


@pytest.fixture
def _strict(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On the CPU, `portable` takes all, as some kernel does on a GPU."""
    monkeypatch.setenv("OUTBLAS_STRICT", "1")
    real = launcher.no_kernel_reason
    monkeypatch.setattr(
        launcher, "no_kernel_reason", lambda p: None if p.device.type == "cpu" else real(p)
    )
    dispatch.clear_cache()
    yield
    dispatch.clear_cache()


@pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64, *COMPLEX], ids=str)
@pytest.mark.parametrize("name", OURS)
def test_samples_by_torch(name: str, dtype: torch.dtype) -> None:
    assert share(name, "cpu", dtype) == 1


@pytest.mark.interpreter
@pytest.mark.usefixtures("_strict")
@pytest.mark.parametrize("name", OURS)
def test_samples_by_kernels(name: str) -> None:
    for dtype in DTYPES[:2]:
        assert share(name, "cpu", dtype) == 1


def test_scaling_keeps_the_pattern() -> None:
    t = torch.empty(3, 1, 10, 5).transpose(0, 3)[:, :, ::2].expand(5, 4, 5, 3)
    large = scaled(t)
    assert large.shape == (5, 4, 260, 258)
    assert [bool(stride) for stride in large.stride()] == [True, False, True, True]
    assert sorted(range(4), key=large.stride) == sorted(range(4), key=t.stride)


@pytest.mark.gpu
@pytest.mark.usefixtures("_strict")
@pytest.mark.parametrize("change", [lambda t: t, scaled], ids=["as they are", "scaled"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OURS)
def test_samples_on_a_gpu(
    name: str, dtype: torch.dtype, change: Callable[[Tensor], Tensor]
) -> None:
    assert share(name, "cuda", dtype, change) == 1
