"""Launches of Triton's kernels that pass over memory, with a stand-in for Triton's kernels."""

import contextlib
from typing import Any

import pytest
import torch

from outblas.base import compiling, pack
from outblas.base.compiling import CompileForbidden
from outblas.device.triton_variant import TritonVariant
from outblas.kernels import moe, passes, quantize
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


@pytest.mark.parametrize("packs", [(), ("a pack",)])
def test_no_kernel_is_loaded_while_a_graph_is_captured(
    packs: tuple[str, ...], kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "capturing", lambda device: True)
    monkeypatch.setattr(pack, "loaded", lambda: packs)

    with pytest.raises(RuntimeError, match=r"outblas\.warmup\(function, \*args\) puts it there"):
        start(Passes("kernels", kernel), kernel, tensor(), tensor(), 32)

    assert kernel.launches == []


# ---- kernels of packs
@pytest.fixture
def served(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> list[TritonVariant]:
    """What a pack is asked for, which has the first kernel that it is asked for."""
    asked: list[TritonVariant] = []

    def packed(variant: TritonVariant, device: int) -> Compiled | None:
        asked.append(variant)
        return Compiled(kernel.launches) if variant == asked[0] else None

    def forbid(name: str) -> None:
        raise CompileForbidden(name)

    monkeypatch.setattr(kernel, "fn", forbid, raising=False)
    monkeypatch.setattr(passes, "ready", packed)
    monkeypatch.setattr(passes, "arch_of", lambda device: 90)
    monkeypatch.setattr(pack, "loaded", lambda: ("a pack",))
    monkeypatch.setattr(compiling, "check_allowed", forbid)
    return asked


def test_a_kernel_of_a_pack_is_started_without_triton(
    kernel: Kernel, served: list[TritonVariant]
) -> None:
    x, out, of_passes = tensor(), tensor(), Passes("kernels", kernel)

    start(of_passes, kernel, x, out, 32)
    start(of_passes, kernel, x, out, 48)

    assert kernel.launches == [
        ("compiled", (7, 1, 1), (x, out, 32, 128, True)),
        ("compiled", (7, 1, 1), (x, out, 48, 128, True)),
    ]
    (variant,) = served
    assert variant.signature == (
        ("x", "*fp32"),
        ("out", "*fp32"),
        ("rows", "i32"),
        ("WIDTH", "constexpr"),
        ("FAST", "constexpr"),
    )
    assert variant.constants == (((3,), 128), ((4,), True))
    assert variant.divisors == (((0,), 16), ((1,), 16), ((2,), 16))
    assert dict(variant.options) == {"num_warps": 8, "enable_fp_fusion": True}


@pytest.mark.parametrize(
    ("other", "differs"),
    [
        ((tensor(1), tensor(), 32), {"divisors": (((1,), 16), ((2,), 16))}),
        ((tensor(), tensor(), 33), {"divisors": (((0,), 16), ((1,), 16))}),
        ((tensor(), None, 32), {}),
        ((tensor(), tensor(), 1), {}),
        ((tensor(), tensor(), 2**31), {}),
    ],
    ids=["address", "odd", "none", "one", "wide"],
)
def test_a_pack_is_asked_for_what_triton_would_compile_anew(
    kernel: Kernel, served: list[TritonVariant], other: Any, differs: dict[str, Any]
) -> None:
    of_passes = Passes("kernels", kernel)
    start(of_passes, kernel, tensor(), tensor(), 32)

    with pytest.raises(CompileForbidden):
        start(of_passes, kernel, *other)

    first, second = served
    assert first != second
    assert {name: getattr(second, name) for name in differs} == differs


# ---- what is planned without a GPU
def of_quantize(device: str) -> None:
    for recipe in ("tensorwise", "rowwise", "1x128", "128x128"):
        for rows in (1, 3, 64):
            x = torch.ones(rows, 384, dtype=torch.bfloat16, device=device)
            quantize.quantize(x, recipe, torch.float8_e4m3fn, False)


def of_experts(device: str) -> None:
    for tokens in (1, 5, 256):
        index = torch.zeros(tokens, 2, dtype=torch.int64, device=device)
        _, row_of_slot, _ = moe.route(index, 4)
        rows = moe.dispatch(torch.ones(tokens, 64, device=device), row_of_slot)
        moe.combine(rows, row_of_slot, torch.ones(tokens, 2, device=device))


@pytest.mark.parametrize("run", [of_quantize, of_experts])
def test_what_is_planned_is_what_tensors_in_memory_launch(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = passes.planned(lambda: run("meta"))
    launched = []

    def note(kernel: Any, grid: Any, given: Any, constants: Any, warps: int = 4) -> None:
        launched.append(passes._variant(kernel, given, constants, warps))

    for module in (quantize, moe):
        monkeypatch.setattr(module, "_launch", note)
    monkeypatch.setattr(quantize, "arch", lambda device: 90)
    monkeypatch.setattr(moe, "_tile", lambda device: moe._COMPILED)
    run("cpu")

    assert planned == launched
    assert len(set(planned)) > 3
