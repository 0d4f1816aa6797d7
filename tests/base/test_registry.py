"""Records, packaging and imports: everything that must hold before a kernel is ever used."""

import dataclasses
import json
import sys

import pytest
from support.fresh_torch import run_beside_torch

import outblas
from outblas.base import configs, registry

KERNELS = [kernel.name for kernel in registry.ladder()]


# ---- records
@pytest.mark.parametrize("name", KERNELS)
def test_a_record_read_from_source_is_the_modules(name: str) -> None:
    assert registry.find(name) == registry.load(name).KERNEL


@pytest.mark.parametrize("name", KERNELS)
def test_a_default_config_is_read_from_its_text(name: str) -> None:
    kind = registry.load(name).Config

    config = configs.from_text(kind, configs.to_text(kind()))

    assert dataclasses.is_dataclass(config)
    assert config == kind()


def test_parents_come_first() -> None:
    before: set[str | None] = {None}
    for kernel in outblas.ladder():
        assert kernel.parent in before, kernel.name
        before.add(kernel.name)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("simt", "nn"),
        ("simt.warptile", "nn"),
        ("hopper.hilbert", "nt"),
        ("portable", "nt"),
        ("turing.wmma", "nt"),
        ("cublas", "nt"),
    ],
)
def test_a_ladder_is_measured_in_its_layout(name: str, layout: str) -> None:
    assert registry.layout_of(name) == layout


# ---- configs as text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tile=1", "config has 'tile=1'"),
        ("tile_m=x", "tile_m is 'x'"),
        ("jitter=2", "jitter is '2'"),
    ],
    ids=["unknown field", "no number", "no truth value"],
)
def test_a_text_that_is_no_config_is_refused(text: str, message: str) -> None:
    kind = registry.load("hopper.tma_wgmma").Config

    with pytest.raises(ValueError, match=message):
        configs.from_text(kind, text)


# ---- packaging
# ---- imports
def run(code: str) -> str:
    """What a program prints that begins with torch imported."""
    done = run_beside_torch(code)
    assert done.returncode == 0, done.stderr
    return done.stdout


# What the first product needs: no ladder, no tuner, no command.
IMPORTED_AT_ONCE = {"__init__", "api", "base", "core", "runtime", "torch_ops"}


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


HIDDEN = """
import sys, warnings
assert not {"triton", "cutlass", "tvm_ffi"} & {*sys.modules}
for name in ("triton", "cutlass", "tvm_ffi"):
    sys.modules[name] = None
warnings.simplefilter("ignore")
import torch, outblas
from outblas.base import registry
a, b = torch.ones(2, 3), torch.ones(3, 4)
"""


def test_without_triton_and_cutlass_every_exported_name_is_there() -> None:
    run(
        HIDDEN
        + """
assert {*outblas.__all__} < {*dir(outblas)} and "outblas.nn" not in sys.modules
from outblas import *
assert Linear is outblas.nn.Linear and tune is outblas.autotune.automatic.tune
"""
    )


@pytest.mark.parametrize(
    ("name", "package"), [("portable", "triton"), ("hopper.tma_wgmma", "nvidia-cutlass-dsl")]
)
def test_a_kernel_whose_package_is_not_installed_says_how_to_install_it(
    name: str, package: str
) -> None:
    said = run(
        HIDDEN
        + f"""
try:
    registry.load({name!r})
except ImportError as error:
    print(error)
"""
    )

    assert f"pip install '{package}" in said


@pytest.mark.parametrize(("command", "named"), [("list", "hopper.tma_wgmma"), ("doctor", "triton")])
def test_without_triton_and_cutlass_a_command_runs(command: str, named: str) -> None:
    said = run(
        HIDDEN
        + f"""
from outblas.cli import app
app([{command!r}], standalone_mode=False)
"""
    )

    assert named in said
