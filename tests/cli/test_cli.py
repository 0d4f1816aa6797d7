"""Commands: what they print, as tables and as JSON, and their exit codes."""

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import invoke, refuses

from outblas.cli import inspect as cli_inspect
from outblas.cli.common import save_json, without_nulls
from outblas.core import registry
from outblas.kernels import portable


def test_list() -> None:
    result = invoke("list", code=0)
    assert all(kernel.name in result.stdout for kernel in registry.ladder())
    records = json.loads(invoke("list", "hopper", "--json").stdout)
    keys = ["name", "ladder", "idea", "parent", "source", "dtypes", "min_arch", "max_arch", "dsl"]
    assert all(list(record) == keys for record in records)
    assert records[0]["name"] == "hopper.tma_wgmma"


def test_list_of_an_unknown_ladder() -> None:
    refuses("expected a ladder", "list", "nothing")


def test_doctor() -> None:
    result = invoke("doctor", "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == (1 if report["problems"] else 0)
    versions = {row["name"]: row for row in report["versions"]}
    assert versions["torch"]["installed"] == metadata.version("torch")
    assert versions["triton"]["tested"] == "<3.10,>=3.6"
    assert {kernel["name"] for kernel in report["kernels"]} == {
        kernel.name for kernel in registry.ladder()
    }
    assert report["cache"]["problem"] is None
    assert "hopper.tma_wgmma" in invoke("doctor").stdout


def test_doctor_reports_a_version_outside_the_tested_range(monkeypatch: pytest.MonkeyPatch) -> None:
    from outblas.core import requirements

    installed = requirements.installed
    monkeypatch.setattr(
        requirements, "installed", lambda name: "3.5.0" if name == "triton" else installed(name)
    )
    result = invoke("doctor", code=1)
    assert "triton: outside the tested range: pip install 'triton" in result.stdout


@pytest.mark.interpreter
@pytest.mark.no_gpu
def test_verify(tmp_path: Path) -> None:
    saved = tmp_path / "verify.json"
    invoke(
        "verify",
        "portable",
        "--shapes",
        "33,20x30x40",
        "--dtype",
        "float16",
        "--save",
        saved,
        code=0,
    )
    report = json.loads(saved.read_text())
    assert report == {
        "device": "cpu",
        "results": [
            {"kernel": "portable", "dtype": "float16", "passed": 24, "failed": [], "refused": {}}
        ],
    }
    assert json.loads(
        invoke("verify", "--shapes", "8", "--layout", "tt", "--dtype", "float32", "--json").stdout
    )


@pytest.mark.interpreter
@pytest.mark.no_gpu
def test_verify_reports_a_broken_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = portable.plan

    def broken(*arguments: Any) -> Any:
        launch = plan(*arguments)

        def run(a: Any, b: Any, c: Any, out: torch.Tensor, alpha: Any, beta: Any) -> None:
            launch(a, b, c, out, alpha, beta)
            out[0, 0] += 1

        return run

    monkeypatch.setattr(portable, "plan", broken)
    result = invoke(
        "verify", "portable", "--shapes", "23", "--dtype", "float32", "--layout", "nn", code=1
    )
    assert (
        "portable exact 23x23x23-fp32-nn: wrong: 1 of 529 elements, first at [0, 0]"
        in result.stdout
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing",), "kernel is 'nothing'"),
        (("portable", "--shapes", "4x4"), "--shapes is '4x4'"),
        (("portable", "--dtype", "int8"), "--dtype is 'int8'"),
        (("portable", "--layout", "xy"), "--layout is 'xy'"),
    ],
)
def test_verify_usage_errors(arguments: tuple[str, ...], message: str) -> None:
    refuses(message, "verify", *arguments)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("verify --shapes=", "--shapes is '', expected a value"),
        ("verify --dtype=", "--dtype is ''"),
        ("verify --layout ,", "--layout is ','"),
        ("verify portable simt.naive --dtype int8", "--dtype is 'int8'"),
        ("bench --kernels nothing", "--kernels is 'nothing', expected one of"),
        ("bench --ladder nothing", "--ladder is 'nothing', expected a ladder"),
        ("list nothing", "ladder is 'nothing', expected a ladder"),
        ("report ladder --ladder nothing", "--ladder is 'nothing', expected one of"),
        ("report roofline --gpu B200", "--gpu is 'B200', expected one of"),
        ("report roofline --ladder nothing", "--ladder is 'nothing', expected a ladder"),
        ("tune --dry-run --gpu B200", "--gpu is 'B200', expected one of"),
        ("inspect --arch=", "--arch is ''"),
        (
            "tune --dry-run --out-dtype float16",
            "--out-dtype is 'float16', expected bfloat16 or float32",
        ),
        ("inspect portable --config x=1", "--config has 'x=1', expected name=value"),
        ("inspect hopper.hilbert --arch sm_80", "--arch is 80, expected for hopper.hilbert"),
        (
            "inspect portable --arch 75a",
            "--arch is '75a', expected one of 75, 80, 90, sm_75, sm_80, sm_90a",
        ),
        ("inspect portable --layout nm", "--layout is 'nm', expected one of"),
        ("profile portable --layout nm", "--layout is 'nm', expected one of"),
    ],
)
def test_messages_name_the_option_that_was_given(
    line: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outblas.cli.verify._tally", lambda *_, **__: pytest.fail("runs"))
    refuses(message, *line.split())


@pytest.mark.parametrize("arch", ["90", "sm_90", "90a", "sm_90a", "SM_90A", "sm_90,90a"])
def test_an_architecture_has_several_names(arch: str) -> None:
    assert cli_inspect._archs(arch) == [90]
    assert cli_inspect._archs(f"75,{arch},sm_80") == [75, 90, 80]


@pytest.mark.no_gpu
def test_verify_of_a_kernel_that_cannot_run_here() -> None:
    refuses("needs an NVIDIA GPU", "verify", "hopper.tma_wgmma")


@pytest.mark.interpreter
@pytest.mark.compile
@pytest.mark.no_gpu
def test_demo() -> None:
    result = invoke("demo", code=0)
    assert result.stdout.count("every element exact") == 5
    assert "HGMMA.64x64x16.F32.BF16" in result.stdout


def test_saved_json_is_indented_and_keeps_every_digit(tmp_path: Path) -> None:
    records = [
        {"us": 12.0, "ratio": 1 / 3, "shape": [1, 2]},
        without_nulls({"us": 1e300, "ratio": None, "check": "exact"}),
    ]
    save_json(tmp_path / "saved.json", {"environment": {"sms": 132}, "results": records})
    assert (tmp_path / "saved.json").read_text().splitlines() == [
        "{",
        '  "environment": {',
        '    "sms": 132',
        "  },",
        '  "results": [',
        "    {",
        '      "us": 12.0,',
        '      "ratio": 0.3333333333333333,',
        '      "shape": [',
        "        1,",
        "        2",
        "      ]",
        "    },",
        "    {",
        '      "us": 1e+300,',
        '      "check": "exact"',
        "    }",
        "  ]",
        "}",
    ]
