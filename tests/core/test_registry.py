"""Records, packaging and imports: everything that must hold before a kernel is ever used."""

import dataclasses
import json
import re
import sys
import tomllib

import pytest
from support.fresh_torch import run_beside_torch
from support.paths import ROOT

import outblas
from outblas.core import configs, registry


@pytest.mark.parametrize("name", [kernel.name for kernel in registry.ladder()])
def test_record_read_from_source_is_the_module_s(name: str) -> None:
    module = registry.load(name)
    assert registry.find(name) == module.KERNEL
    config = module.Config()
    assert dataclasses.is_dataclass(config)
    assert configs.from_text(module.Config, configs.to_text(config)) == config


@pytest.mark.parametrize("name", [kernel.name for kernel in registry.ladder()])
def test_rung_opens_with_its_idea(name: str) -> None:
    doc = registry.load(name).__doc__
    assert doc is not None
    assert doc.startswith(name)
    headings = re.findall(r"^(Idea|Parent|Changes|Why it pays|Source):", doc, re.MULTILINE)
    assert headings == ["Idea", "Parent", "Changes", "Why it pays", "Source"]


def test_parents_come_first() -> None:
    seen = set()
    for kernel in outblas.ladder():
        assert kernel.parent is None or kernel.parent in seen
        seen.add(kernel.name)
    assert outblas.ladder("hopper")[0].name == "hopper.tma_wgmma"


def test_records_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        registry.find("portable").name = "other"


def test_config_text() -> None:
    kind = registry.load("hopper.tma_wgmma").Config
    assert configs.from_text(kind, "tile_m=128,jitter=True") == kind(tile_m=128, jitter=True)
    for text, message in (
        ("tile=1", "config has 'tile=1'"),
        ("tile_m=x", "tile_m is 'x'"),
        ("jitter=2", "jitter is '2'"),
    ):
        with pytest.raises(ValueError, match=message):
            configs.from_text(kind, text)


def test_every_package_is_declared() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    src = ROOT / "src"
    found = {".".join(p.parent.relative_to(src).parts) for p in src.rglob("__init__.py")}
    for ladder in ("autotune", "hopper", "kernels", "turing"):
        packages = [path.parent for path in (ROOT / ladder).rglob("__init__.py")]
        found |= {".".join(("outblas", *path.relative_to(ROOT).parts)) for path in packages}
    assert set(settings["packages"]) == found
    for package, folder in settings["package-dir"].items():
        assert package == "" or (ROOT / folder / "__init__.py").exists()


def run(code: str) -> str:
    """What a program prints that begins with torch imported."""
    done = run_beside_torch(code)
    assert done.returncode == 0, done.stderr
    return done.stdout


# What the first product needs: no ladder, no tuner, no command.
IMPORTED_AT_ONCE = {"__init__", "api", "core", "runtime", "torch_ops"}


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


def test_works_without_triton_and_cutlass() -> None:
    out = run(
        """
import sys, warnings
assert not {"triton", "cutlass", "tvm_ffi"} & {*sys.modules}
for name in ("triton", "cutlass", "tvm_ffi"):
    sys.modules[name] = None
import torch, outblas
from outblas.cli import app
warnings.simplefilter("ignore")
a, b = torch.ones(2, 3), torch.ones(3, 4)
assert torch.equal(outblas.matmul(a, b), a @ b)
assert {*outblas.__all__} < {*dir(outblas)} and "outblas.nn" not in sys.modules
from outblas import *
assert Linear is outblas.nn.Linear and tune is outblas.autotune.automatic.tune
from outblas.core import registry
for name, missing in (("portable", "triton"), ("hopper.tma_wgmma", "nvidia-cutlass-dsl")):
    try:
        outblas.core.registry.load(name)
    except ImportError as error:
        assert f"pip install '{missing}" in str(error), error
    else:
        raise AssertionError(name)
try:
    outblas.matmul(a, b, kernel="portable")
except ImportError as error:
    print(error)
app(["list"], standalone_mode=False)
app(["doctor"], standalone_mode=False)
"""
    )
    assert "kernel 'portable' needs triton, which is not installed: pip install 'triton" in out
    assert "hopper.tma_wgmma" in out


def test_each_ladder_is_measured_in_its_layout() -> None:
    names = ("hopper.hilbert", "portable", "turing.wmma", "cublas")
    assert [registry.layout_of(name) for name in ("simt", "simt.warptile")] == ["nn", "nn"]
    assert [registry.layout_of(name) for name in names] == ["nt"] * 4
