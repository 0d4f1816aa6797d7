"""Records of kernels, and imports: everything that must hold before a kernel is ever used."""

import json
import pickle
import sys

import pytest
from support.fresh_torch import run_beside_torch

import outblas
from outblas.base import registry

KERNELS = [kernel.name for kernel in registry.ladder()]


# ---- records
@pytest.mark.parametrize("name", KERNELS)
def test_a_record_read_from_source_is_the_modules(name: str) -> None:
    assert registry.find(name) == registry.load(name).KERNEL


@pytest.mark.parametrize("name", KERNELS)
def test_a_config_goes_to_another_process(name: str) -> None:
    config = registry.load(name).Config()

    assert pickle.loads(pickle.dumps(config)) == config


def test_parents_come_first() -> None:
    before: set[str | None] = {None}
    for kernel in outblas.ladder():
        assert kernel.parent in before, kernel.name
        before.add(kernel.name)


@pytest.mark.parametrize(
    ("name", "layout"), [("simt", "nn"), ("simt.warptile", "nn"), ("turing.wmma", "nt")]
)
def test_a_ladder_is_measured_in_its_layout(name: str, layout: str) -> None:
    assert registry.layout_of(name) == layout


# ---- imports
def run(code: str) -> str:
    """What a program prints that begins with torch imported."""
    done = run_beside_torch(code)
    assert done.returncode == 0, done.stderr
    return done.stdout


# What the first product needs: no ladder, no tuner, no command.
IMPORTED_AT_ONCE = {"__init__", "api", "base", "call", "torch_ops"}


def test_import_is_light() -> None:
    """Beside torch it imports the standard library and what the first product needs."""
    code = (
        "import json, sys, torch; before = {*sys.modules}; import outblas;"
        "print(json.dumps([*({*sys.modules} - before)]))"
    )

    names = [name.split(".") for name in json.loads(run(code))]

    foreign = {name[0] for name in names} - {"outblas", "torch", *sys.stdlib_module_names}
    assert not foreign, f"import outblas imports {sorted(foreign)}"
    parts = {name[1] for name in names if name[0] == "outblas" and name[1:]}
    assert parts <= IMPORTED_AT_ONCE, f"import outblas imports {sorted(parts - IMPORTED_AT_ONCE)}"


WITHOUT_DSLS = """
import sys, warnings
assert not {"triton", "cutlass", "tvm_ffi"} & {*sys.modules}
for name in ("triton", "cutlass", "tvm_ffi"):
    sys.modules[name] = None
warnings.simplefilter("ignore")
import _outblas_command, torch, outblas
assert not hasattr(outblas, "no_such_name")
assert {*outblas.__all__} < {*dir(outblas)} and "outblas.nn" not in sys.modules
from outblas import *
assert Linear is outblas.nn.Linear and tune is outblas.autotune.automatic.tune
assert torch.ops.outblas.gemm
from outblas.base import registry
for name in ("portable", "hopper.tma_wgmma"):
    try:
        registry.load(name)
    except ImportError as error:
        print(error)
from outblas.cli import app
for command in ("list", "doctor"):
    app([command], standalone_mode=False)
"""


def test_without_triton_and_cutlass_names_are_there_and_kernels_say_how_to_install_them() -> None:
    said = run(WITHOUT_DSLS)

    for package in ("triton", "nvidia-cutlass-dsl"):
        assert f"pip install '{package}" in said
    assert "hopper.tma_wgmma" in said  # of `list`
    assert "Versions" in said  # of `doctor`
