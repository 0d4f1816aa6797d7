"""Commands that are neither bench, tune, cache nor pack: what they print, as tables and as JSON,
their exit codes, and what they refuse.
"""

import json
import platform
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from support.commands import invoke, refuses
from support.hopper_problems import ONE_CONSUMER
from support.inspections import RECORD_FIELDS

from outblas.base import compile_worker, registry, requirements
from outblas.cli import inspect as cli_inspect
from outblas.kernels import portable

LONG = "/" + "a" * 5000


def parsed(line: str, *, code: int | None = None) -> Any:
    """The JSON that a command prints."""
    return json.loads(invoke(*line.split(), "--json", code=code).stdout)


# ---- list
def test_a_list_names_every_kernel_and_a_ladder_has_its_rungs_in_order() -> None:
    listed = invoke("list", code=0).stdout
    records = parsed("list hopper", code=0)

    assert [kernel.name for kernel in registry.ladder() if kernel.name not in listed] == []
    assert [record["name"] for record in records] == list(registry.LADDERS["hopper"])
    keys = "name ladder idea parent source dtypes min_arch max_arch dsl config"
    assert all(" ".join(record) == keys for record in records)
    assert "sm_90" in invoke("list", "hopper", "--long", code=0).stdout


# ---- doctor
@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch):
    """Has `doctor` find another version of a package, or of Python; None: the package is absent."""

    def pretend(name: str, version: str | None) -> None:
        if name == "Python":
            monkeypatch.setattr(platform, "python_version", lambda: version)
            return
        installed = requirements.installed
        monkeypatch.setattr(
            requirements, "installed", lambda other: version if other == name else installed(other)
        )

    return pretend


def problems() -> list[str]:
    """The problems that `outblas doctor --json` reports."""
    result = invoke("doctor", "--json")
    found: list[str] = json.loads(result.stdout)["problems"]
    assert result.exit_code == (1 if found else 0)
    return found


def test_the_doctor_shows_every_kernel_by_where_it_runs() -> None:
    report = parsed("doctor")
    shown = invoke("doctor").stdout

    assert {kernel["name"] for kernel in report["kernels"]} == {k.name for k in registry.ladder()}
    assert f"all {len(registry.LADDERS['hopper'])} of hopper" in shown
    assert report["cache"]["problem"] is None
    assert {"outblas", "driver", "gpus", "tuning", "native"} <= report.keys()


def test_the_doctor_names_what_could_not_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = {"hopper_kernel": "too many registers"}
    monkeypatch.setattr(compile_worker, "failures", failures.copy)

    assert "hopper_kernel: cannot be compiled: too many registers" in problems()


@pytest.mark.parametrize(
    ("name", "version", "problem"),
    [
        ("torch", "2.10.0", "outside the tested range: pip install 'torch"),
        ("torch", "2.16.0", "outside the tested range: pip install 'torch"),
        ("torch", "2.15.0+cu130", None),
        ("triton", "3.5.1", "outside the tested range: pip install 'triton"),
        ("triton", "3.6.0", None),
        ("nvidia-cutlass-dsl", "4.9.0", "outside the tested range: pip install 'nvidia-cutlass"),
        ("apache-tvm-ffi", "0.1.15.post2", None),
        ("apache-tvm-ffi", "0.2.0", "outside the tested range: pip install 'apache-tvm-ffi"),
        ("apache-tvm-ffi", None, "not installed: pip install"),
        ("Python", "3.10.13", "outside the tested range: use Python 3.11 to 3.14"),
        ("Python", "3.14.10", None),
        ("Python", "3.15.0", "outside the tested range: use Python 3.11 to 3.14"),
    ],
)
def test_a_version_outside_of_the_tested_range_is_a_problem(
    install, name: str, version: str | None, problem: str | None
) -> None:
    install(name, version)

    mine = [line for line in problems() if line.startswith(f"{name}:")]

    assert bool(mine) is (problem is not None)
    assert problem is None or mine[0].startswith(f"{name}: {problem}")


@pytest.mark.parametrize(
    ("cuda", "cu12", "cu13", "lacking"),
    [
        ("13.0", "4.8.1", None, True),
        ("13.0", "4.8.1", "4.8.0", True),
        ("12.8", None, "4.8.1", True),
        ("12.8", "4.8.1", "4.8.1", False),
        ("13.0", "4.8.1", "4.8.1", False),
        (None, None, None, False),
    ],
)
def test_libraries_of_the_dsl_that_torchs_cuda_lacks_are_a_problem(
    install,
    monkeypatch: pytest.MonkeyPatch,
    cuda: str | None,
    cu12: str | None,
    cu13: str | None,
    lacking: bool,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    for name, version in (("", "4.8.1"), ("-libs-cu12", cu12), ("-libs-cu13", cu13)):
        install(f"nvidia-cutlass-dsl{name}", version)

    mine = [line for line in problems() if line.startswith("nvidia-cutlass-dsl: ")]

    assert bool(mine) is lacking
    assert all("pip install 'nvidia-cutlass-dsl[cu13]>=4.8.1,<4.9'" in line for line in mine)


# ---- verify
@pytest.mark.interpreter
@pytest.mark.no_gpu
def test_a_verification_counts_what_passed_in_every_layout() -> None:
    shapes = parsed("verify portable --shapes 17,20x30x40 --dtype float16", code=0)
    default = parsed("verify --shapes 8 --layout tt --dtype float32", code=0)

    result = {"kernel": "portable", "dtype": "float16", "passed": 24, "failed": [], "refused": {}}
    assert shapes == {"device": "cpu", "results": [result]}
    assert [each["kernel"] for each in default["results"]] == ["portable"]


@pytest.mark.interpreter
@pytest.mark.no_gpu
def test_a_verification_names_the_first_element_that_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = portable.plan

    def plan_broken(*arguments: Any) -> Any:
        launch = plan(*arguments)

        def run(a: Any, b: Any, c: Any, out: torch.Tensor, alpha: Any, beta: Any) -> None:
            launch(a, b, c, out, alpha, beta)
            out[0, 0] += 1

        return run

    monkeypatch.setattr(portable, "plan", plan_broken)

    line = "verify portable --shapes 23 --dtype float32 --layout nn"
    result = invoke(*line.split(), code=1)

    message = "portable exact 23x23x23-fp32-nn: wrong: 1 of 529 elements, first at [0, 0]"
    assert message in result.stdout


# ---- inspect
@pytest.mark.compile
def test_inspections_have_a_record_of_every_kernel_that_the_gpu_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("portable", "turing.ldmatrix", "turing.cp_async", "hopper.tma_wgmma")
    kernels = [registry.find(name) for name in names]
    monkeypatch.setattr(registry, "ladder", lambda: kernels)

    records = parsed("inspect --arch 90", code=0)

    runs = [kernel.name for kernel in kernels if (kernel.max_arch or 90) >= 90]
    assert [record["kernel"] for record in records] == runs
    assert all(list(record) == RECORD_FIELDS for record in records)


@pytest.mark.compile
def test_an_inspection_shows_resources_instructions_and_a_roofline() -> None:
    output = invoke("inspect", "simt.naive", "--arch", "80", code=0).stdout

    for text in ("Resources", "8 FFMA", "16 LDG", "Roofline", "A100", "the kernel's own config"):
        assert text in output
    config = f"--config={ONE_CONSUMER}"
    spilling = invoke("inspect", "hopper.two_consumers", config, code=0).stdout
    assert "wgmma.mma_async instructions are serialized" in " ".join(spilling.split())


@pytest.mark.compile
def test_machine_code_and_ptx_are_printed() -> None:
    sass = invoke("inspect", "hopper.large_tile", "--sass", "--config", "mma_n=32").stdout
    ptx = invoke("inspect", "hopper.tma_wgmma", "--ptx").stdout

    assert "HGMMA.64x32x16.F32.BF16 R" in sass
    assert "wgmma.mma_async" not in sass
    assert "wgmma.mma_async.sync.aligned.m64n64k16" in ptx
    assert "HGMMA" not in ptx


@pytest.mark.parametrize("arch", ["90", "sm_90", "90a", "SM_90A", "sm_90,90a"])
def test_an_architecture_has_several_names(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    archs: list[int] = []

    def inspect(kernel: str, *, arch: int, **_: Any) -> MagicMock:
        archs.append(arch)
        return MagicMock()

    monkeypatch.setattr("outblas.inspect.inspect", inspect)
    monkeypatch.setattr(cli_inspect, "show", lambda inspections: None)

    invoke("inspect", "portable", "--arch", f"75,{arch},sm_80", code=0)

    assert archs == [75, 90, 80]


# ---- demo
@pytest.mark.interpreter
@pytest.mark.compile
@pytest.mark.no_gpu
@pytest.mark.parametrize("rungs", [2, pytest.param(11, marks=pytest.mark.slow)])
def test_the_demo_checks_products_and_shows_machine_code(
    rungs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ladder = registry.ladder("hopper")
    monkeypatch.setattr(registry, "ladder", lambda name: ladder[:rungs])

    lines = invoke("demo", code=0).stdout.splitlines()

    assert any(line.startswith("│ portable") and "18" in line for line in lines)
    assert len({line.split()[1] for line in lines if line.startswith("│ hopper.")}) == rungs
    assert any("HGMMA.64x64x16.F32.BF16" in line for line in lines)
    steps = lines[lines.index("Try next:") + 1 :]
    assert len(steps) == 4
    assert all(line.startswith("  outblas ") and len(line.rstrip()) <= 80 for line in steps)


# ---- what is refused, by the name of the option
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("list nothing", "ladder is 'nothing', expected a ladder"),
        ("verify nothing", "kernel is 'nothing'"),
        ("verify portabel", "did you mean 'portable'?"),
        ("verify portable --shapes 4x4", "--shapes is '4x4'"),
        ("verify --shapes=", "--shapes is '', expected a value"),
        ("verify portable simt.naive --dtype int8", "--dtype is 'int8'"),
        ("verify --layout ,", "--layout is ','"),
        ("verify portable --layout xy", "--layout is 'xy'"),
        ("inspect hoper.gemm", "did you mean 'hopper.gemm'?"),
        ("inspect hopper.tma_wgmma --arch 75", "--arch is 75, expected 90 for hopper.tma_wgmma"),
        ("inspect --arch sm_900x", "--arch is 'sm_900x'"),
        ("inspect portable --arch 75a", "expected one of 75, 80, 90, sm_75, sm_80, sm_90a"),
        ("inspect --arch=", "--arch is ''"),
        ("inspect --dtype int8", "--dtype is 'int8'"),
        ("inspect --shapes 64,128", "--shapes is '64,128'"),
        ("inspect portable --layout nm", "--layout is 'nm', expected one of"),
        ("inspect portable --config x=1", "--config has 'x=1', expected name=value"),
        ("inspect hopper.tma_wgmma --config tile_m=80", "tile_m is 80"),
        ("inspect portable --sass", "name one kernel and one --arch"),
        ("inspect hopper.tma_wgmma --ptx --json", "--json"),
        ("bnch", "Did you mean 'bench'?"),
        (f"pack show {LONG}", "File name too long"),
        (f"pack build --shapes x -o {LONG}", "File name too long"),
        ("pack build --shapes x -o /nowhere/it", "--output is '/nowhere/it', expected a file in"),
        ("pack build -o it", "expected --shapes or --model, one of them"),
    ],
)
def test_messages_name_what_is_wrong_before_anything_runs(
    line: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outblas.cli.verify.count", lambda *_, **__: pytest.fail("runs"))

    done = refuses(message, *line.split())

    assert LONG[:1000] not in done.output
