"""Commands: what they print, as tables and as JSON, and their exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from outblas import registry
from outblas.cli import app
from outblas.cli.common import said, save_json
from outblas.kernels import portable


def invoke(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code, result.output
    return result


def test_list() -> None:
    output = invoke("list").stdout
    assert all(kernel.name in output for kernel in registry.ladder())
    records = json.loads(invoke("list", "hopper", "--json").stdout)
    keys = ["name", "ladder", "idea", "parent", "source", "dtypes", "min_arch", "max_arch", "dsl"]
    assert all(list(record) == keys for record in records)
    assert records[0]["name"] == "hopper.tma_wgmma"


def test_doctor() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    report = json.loads(result.stdout)
    assert result.exit_code == (1 if report["problems"] else 0)
    versions = {row["name"]: row for row in report["versions"]}
    assert versions["torch"]["installed"] == torch.__version__
    assert versions["triton"]["tested"] == "<3.10,>=3.6"
    assert {kernel["name"] for kernel in report["kernels"]} == {kernel.name for kernel in registry.ladder()}
    assert report["cache"]["problem"] is None


def test_doctor_reports_a_version_outside_the_tested_range(monkeypatch: pytest.MonkeyPatch) -> None:
    from outblas import requirements

    installed = requirements._installed
    monkeypatch.setattr(requirements, "_installed", lambda name: "3.5.0" if name == "triton" else installed(name))
    output = invoke("doctor", code=1).stdout
    assert "triton: outside the tested range: pip install 'triton" in output
    assert "hopper.tma_wgmma" in output


@pytest.mark.interpreter
@pytest.mark.no_gpu
def test_verify(tmp_path: Path) -> None:
    saved = tmp_path / "verify.json"
    invoke("verify", "portable", "--shapes", "33,20x30x40", "--dtype", "float16", "--save", str(saved))
    assert json.loads(saved.read_text()) == {
        "device": "cpu",
        "results": [{"kernel": "portable", "dtype": "float16", "passed": 24, "failed": [], "refused": {}}],
    }
    assert json.loads(invoke("verify", "--shapes", "8", "--layout", "tt", "--dtype", "float32", "--json").stdout)


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
    result = invoke("verify", "portable", "--shapes", "23", "--dtype", "float32", "--layout", "nn", code=1)
    assert "portable exact 23x23x23-fp32-nn: wrong: 1 of 529 elements, first at [0, 0]" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("list", "nothing"), "expected a ladder"),
        (("verify", "nothing"), "kernel is 'nothing'"),
        (("verify", "portable", "--shapes", "4x4"), "--shapes is '4x4'"),
        (("verify", "portable", "--dtype", "int8"), "--dtype is 'int8'"),
        (("verify", "portable", "--layout", "xy"), "--layout is 'xy'"),
        pytest.param(("verify", "hopper.tma_wgmma"), "needs an NVIDIA GPU", marks=pytest.mark.no_gpu),
    ],
)
def test_usage_errors(arguments: tuple[str, ...], message: str) -> None:
    assert message in invoke(*arguments, code=2).stderr


@pytest.mark.interpreter
@pytest.mark.compile
@pytest.mark.no_gpu
def test_demo() -> None:
    output = invoke("demo").stdout
    assert output.count("every element exact") == 5
    assert "HGMMA.64x64x16.F32.BF16" in output


def test_saved_json_has_a_short_line_for_each_record(tmp_path: Path) -> None:
    records = [{"us": 12.0, "ratio": 1 / 3, "shape": [1, 2]}, said({"us": 1e300, "ratio": None, "check": "exact"})]
    saved = tmp_path / "saved.json"
    save_json(saved, {"environment": {"sms": 132}, "results": records})
    assert saved.read_text().splitlines() == [
        "{", '"environment": {"sms":132},', '"results": [', '{"us":12,"ratio":0.3333333,"shape":[1,2]},',
        '{"us":1e+300,"check":"exact"}', "]", "}",
    ]  # fmt: skip
