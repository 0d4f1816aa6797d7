"""Torch's own samples of its products (OpInfo), through outblas: values, gradients, and who
computed them.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
from support.opinfo import (
    Sample,
    assert_as_near,
    first_of_each_kind,
    one_of_each_kind,
    operator,
    resized,
    samples,
)

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
REAL = torch.float32, torch.bfloat16, torch.float16


# ---- tensors of other sizes
def unchanged(t: Tensor) -> Tensor:
    return t


def scaled(t: Tensor) -> Tensor:
    """At least 256 rows and columns, where there is more than one."""
    batch = max(t.dim() - 2, 0)
    return resized(
        t, [n if i < batch or n < 2 else n * -(-256 // n) for i, n in enumerate(t.shape)]
    )


# ---- comparisons
def assert_near(name: str, sample: Sample) -> None:
    """Values, and gradients for the same gradient of the output, are as near to those of the widest
    dtype as torch's, but for a factor of two.
    """
    ours, torchs, wide = sample.with_leaves(), sample.with_leaves(), sample.widened()
    product = operator(name).op
    got = OURS[name](*ours.given, **ours.how)
    want = product(*torchs.given, **torchs.how)
    truth = product(*wide.given, **wide.how)
    assert got.is_contiguous(), sample
    arriving = torch.testing.make_tensor(
        want.shape, dtype=want.dtype, device=want.device, low=-1, high=1
    )

    def results(y: Tensor, operands: Sample) -> list[Tensor]:
        leaves = [t for t in operands.given if isinstance(t, Tensor)]
        return [y, *torch.autograd.grad(y, leaves, arriving.to(y.dtype))]

    of_all = results(got, ours), results(want, torchs), results(truth, wide)
    for mine, theirs, right in zip(*of_all, strict=True):
        assert_as_near(mine.detach(), theirs.detach(), right.detach(), str(sample))


@pytest.fixture
def ours_alone(monkeypatch: pytest.MonkeyPatch, float32_by_kernels: None) -> Iterator[None]:
    """A product that torch would compute raises (OUTBLAS_STRICT=1). On the CPU, `portable` takes
    all of them, as some kernel does on a GPU.
    """
    monkeypatch.setenv("OUTBLAS_STRICT", "1")
    real = launcher.no_kernel_reason
    monkeypatch.setattr(
        launcher, "no_kernel_reason", lambda p: None if p.device.type == "cpu" else real(p)
    )
    dispatch.clear_cache()
    yield
    dispatch.clear_cache()


# ---- on the CPU
@pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")
@pytest.mark.parametrize("dtype", [torch.float16, torch.complex64], ids=str)
@pytest.mark.parametrize("name", OURS)
def test_samples_that_torch_takes_are_near(name: str, dtype: torch.dtype) -> None:
    for sample in first_of_each_kind(samples(name, "cpu", dtype)):
        assert_near(name, sample)


# The samples of `mm` are among those of `matmul`; `__rmatmul__` has the operands exchanged.
@pytest.mark.interpreter
@pytest.mark.usefixtures("ours_alone")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("matmul", torch.bfloat16),
        ("bmm", torch.float32),
        ("addmm", torch.bfloat16),
        ("nn.functional.linear", torch.float32),
    ],
    ids=str,
)
def test_a_sample_of_each_kind_is_near_by_kernels_of_ours(name: str, dtype: torch.dtype) -> None:
    for sample in one_of_each_kind(samples(name, "cpu", dtype)):
        assert_near(name, sample)


# ---- on a GPU
@pytest.mark.gpu
@pytest.mark.usefixtures("ours_alone")
@pytest.mark.parametrize("change", [unchanged, scaled], ids=["as they are", "scaled"])
@pytest.mark.parametrize("dtype", REAL, ids=str)
@pytest.mark.parametrize("name", OURS)
def test_samples_on_a_gpu_are_near_by_kernels_of_ours(
    name: str, dtype: torch.dtype, change: Callable[[Tensor], Tensor]
) -> None:
    for sample in samples(name, "cuda", dtype):
        assert_near(name, sample.relaid(change))
