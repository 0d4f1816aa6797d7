"""Launches of Triton's kernels that pass over memory, with a stand-in for Triton's kernels."""

import contextlib
from typing import Any

import pytest
import torch

from outblas.core import compiling
from outblas.core.compiling import CompileForbidden
from outblas.kernels import passes
from outblas.kernels.passes import Passes

Launch = tuple[str, tuple[int, ...], tuple[Any, ...]]


class OnGpu(torch.Tensor):
    """A CPU tensor that says it is on a GPU."""

    device = torch.device("cuda", 0)


def tensor(offset: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor that begins `offset` elements behind an address that divides by 64."""
    found: torch.Tensor = torch.zeros(256, dtype=dtype)[offset:].as_subclass(OnGpu)
    return found


class Compiled:
    """What Triton's launch returns: a kernel that may be started by itself."""

    def __init__(self, launches: list[Launch]) -> None:
        self.launches = launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *given: self.launches.append(("compiled", grid, given))


class Kernel:
    """Stands for a kernel that Triton compiles when it is launched."""

    arg_names = ("x", "out", "rows", "WIDTH", "FAST")

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*given: Any, **constants: Any) -> Compiled:
            self.launches.append(("Triton", grid, given))
            assert constants == {
                "FAST": True,
                "WIDTH": 128,
                "num_warps": 8,
                "enable_fp_fusion": True,
            }
            return Compiled(self.launches)

        return launch


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(passes.language, "interpreted", lambda kernel: None)
    monkeypatch.setattr(passes, "capturing", lambda device: False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return Kernel()


def start(passes_of: Passes, kernel: Kernel, *given: Any, grid: tuple[int, ...] = (7,)) -> None:
    passes_of.launch(kernel, grid, given, {"FAST": True, "WIDTH": 128}, warps=8)


def test_the_second_launch_starts_what_the_first_one_compiled(kernel: Kernel) -> None:
    """With constants in the order of the kernel's parameters, and a grid of three dimensions."""
    x, out, of_passes = tensor(), tensor(), Passes("kernels", kernel)

    start(of_passes, kernel, x, out, 32)
    start(of_passes, kernel, x, out, 48, grid=(5, 2))

    assert kernel.launches == [
        ("Triton", (7,), (x, out, 32)),
        ("compiled", (5, 2, 1), (x, out, 48, 128, True)),
    ]


@pytest.mark.parametrize(
    "other",
    [
        (tensor(1), tensor(), 32),
        (tensor(), tensor(dtype=torch.bfloat16), 32),
        (tensor(), None, 32),
        (tensor(), tensor(), 1),
        (tensor(), tensor(), 33),
        (tensor(), tensor(), 2**31),
    ],
    ids=["address", "dtype", "none", "one", "odd", "wide"],
)
def test_what_triton_compiles_anew_for_is_launched_by_triton(kernel: Kernel, other: Any) -> None:
    of_passes = Passes("kernels", kernel)
    start(of_passes, kernel, tensor(), tensor(), 32)

    start(of_passes, kernel, *other)

    assert [by for by, *_ in kernel.launches] == ["Triton", "Triton"]


def test_a_kernel_that_is_there_needs_no_compiler(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_passes = Passes("kernels", kernel)
    start(of_passes, kernel, tensor(), tensor(), 32)

    def forbid(name: str) -> None:
        raise CompileForbidden(name)

    monkeypatch.setattr(compiling, "check_allowed", forbid)

    start(of_passes, kernel, tensor(), tensor(), 64)
    with pytest.raises(CompileForbidden):
        start(of_passes, kernel, tensor(), tensor(), 65)

    assert [by for by, *_ in kernel.launches] == ["Triton", "compiled"]
