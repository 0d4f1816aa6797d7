"""Exported kernels are linked into memory of the process; the DSL loads what is of another kind."""

from pathlib import Path
from typing import Any

import cutlass
import pytest
from support.hopper_problems import load, problem

from outblas.base import cache
from outblas.device import driver, exported
from outblas.hopper.parts import host

pytestmark = pytest.mark.compile

RUNG = "tma_wgmma"


@pytest.fixture(scope="module")
def kernel() -> tuple[bytes, str]:
    """The object of a compiled kernel, and its name."""
    module, posed = load(RUNG), problem()
    module.precompile(posed, module.Config(), 90)
    variant = host._variant(f"hopper.{RUNG}", posed, module.Config())
    return cache.packed_object(variant.cache_key_fields), variant.name


@pytest.fixture
def by_the_dsl(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The objects that the DSL is asked to load."""
    asked: list[bytes] = []

    def load_module(path: str, *, enable_tvm_ffi: bool) -> Any:
        asked.append(Path(path).read_bytes())
        return {name: name for name in ("a kernel", "another")}

    monkeypatch.setattr("cutlass.cute.runtime.load_module", load_module)
    return asked


def test_a_kernel_runs_from_memory_and_checks_its_arguments(
    kernel: tuple[bytes, str], by_the_dsl: list[bytes]
) -> None:
    """It reads texts among its data, calls TVM FFI, and returns, all by relocated addresses."""
    run = exported.load(*kernel)

    with pytest.raises(TypeError, match=r"Expects 5 parameters when calling: `__call__\(a: Tensor"):
        run(1)
    with pytest.raises(TypeError, match="Mismatched type on argument #0"):
        run(1, 2, 3, 4, 5)
    assert by_the_dsl == []


def test_what_executes_cannot_be_written(kernel: tuple[bytes, str]) -> None:
    linked = exported._Linked(kernel[0])
    maps = Path("/proc/self/maps").read_text().splitlines()

    flags = [line.split()[1] for line in maps if line.startswith(f"{linked._base:x}-")]
    assert flags == ["r-xp"]


@pytest.mark.parametrize("what", ["relocation", "machine", "magic", "name"])
def test_an_object_of_another_kind_is_loaded_by_the_dsl(
    what: str, kernel: tuple[bytes, str], by_the_dsl: list[bytes]
) -> None:
    content, name = bytearray(kernel[0]), "a kernel"
    linked = exported._Linked(kernel[0])
    if what == "relocation":
        content[int(linked._of_type(exported._RELA)[0]["offset"]) + 8] = 250
        name = "another"
    elif what == "machine":
        content[18] = 183  # aarch64
    elif what == "magic":
        content[0] = 0

    assert exported.load(bytes(content), name) == name
    assert by_the_dsl == [content]


def test_the_dsl_is_that_for_the_same_cuda() -> None:
    assert exported.cuda_of_dsl() == cutlass.CUDA_VERSION.major


@pytest.mark.parametrize(
    ("supported", "chosen"), [(None, 13), (13010, 13), (14000, 13), (12090, 12)]
)
def test_the_newest_libraries_that_the_driver_supports_are_taken(
    supported: int | None, chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "cuda_version", lambda: supported)
    monkeypatch.setattr(exported, "_runtimes", lambda: {12: Path("12"), 13: Path("13")})

    assert exported.cuda_of_dsl.__wrapped__() == chosen


def test_a_driver_that_is_too_old_for_all_libraries_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(driver, "cuda_version", lambda: 11080)

    with pytest.raises(ImportError, match="no libraries of the CuTe DSL for CUDA 11080"):
        exported.cuda_of_dsl.__wrapped__()
