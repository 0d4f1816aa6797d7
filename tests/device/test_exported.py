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
def kernel(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The object of a compiled kernel, and its name."""
    module, posed = load(RUNG), problem()
    module.precompile(posed, module.Config(), 90)
    variant = host._variant(f"hopper.{RUNG}", posed, module.Config())
    path = tmp_path_factory.mktemp("object") / "kernel.o"
    path.write_bytes(cache.packed_object(variant.cache_key_fields))
    return path, variant.name


@pytest.fixture
def by_the_dsl(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of objects that the DSL is asked to load."""
    asked: list[str] = []

    def load_module(path: str, *, enable_tvm_ffi: bool) -> Any:
        asked.append(path)
        return {name: name for name in ("a kernel", "another")}

    monkeypatch.setattr("cutlass.cute.runtime.load_module", load_module)
    return asked


def test_a_kernel_runs_from_memory_and_checks_its_arguments(
    kernel: tuple[Path, str], by_the_dsl: list[str]
) -> None:
    """It reads texts among its data, calls TVM FFI, and returns, all by relocated addresses."""
    run = exported.load(*kernel)

    with pytest.raises(TypeError, match=r"Expects 5 parameters when calling: `__call__\(a: Tensor"):
        run(1)
    with pytest.raises(TypeError, match="Mismatched type on argument #0"):
        run(1, 2, 3, 4, 5)
    assert by_the_dsl == []


def test_what_executes_cannot_be_written(kernel: tuple[Path, str]) -> None:
    exported.load(*kernel)
    maps = Path("/proc/self/maps").read_text().splitlines()

    assert not [line for line in maps if "rwx" in line.split()[1]]


@pytest.mark.parametrize("what", ["relocation", "machine", "magic", "name"])
def test_an_object_of_another_kind_is_loaded_by_the_dsl(
    what: str, kernel: tuple[Path, str], by_the_dsl: list[str], tmp_path: Path
) -> None:
    path, name = tmp_path / "other.o", "a kernel"
    content = bytearray(kernel[0].read_bytes())
    linked = exported._Linked(bytes(content))
    if what == "relocation":
        content[int(linked._of_type(exported._RELA)[0]["offset"]) + 8] = 250
        name = "another"
    elif what == "machine":
        content[18] = 183  # aarch64
    elif what == "magic":
        content[0] = 0
    path.write_bytes(content)

    assert exported.load(path, name) == name
    assert by_the_dsl == [str(path)]


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
