"""Commands: what they print, as tables and as JSON, and their exit codes."""

import json
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch
from support.commands import invoke, refuses

from outblas.cli import demo as cli_demo
from outblas.cli import inspect as cli_inspect
from outblas.cli.common import save_json, without_nulls
from outblas.core import registry, requirements
from outblas.kernels import portable


def parsed(*arguments: object) -> Any:
    return json.loads(invoke(*arguments, "--json").stdout)


# Lists of kernels.


def test_a_list_names_every_kernel() -> None:
    result = invoke("list", code=0)

    assert [kernel.name for kernel in registry.ladder() if kernel.name not in result.stdout] == []


def test_a_list_of_a_ladder_has_its_kernels_in_order() -> None:
    records = parsed("list", "hopper")

    keys = ["name", "ladder", "idea", "parent", "source", "dtypes", "min_arch", "max_arch", "dsl"]
    assert all(list(record) == keys for record in records)
    assert records[0]["name"] == "hopper.tma_wgmma"


def test_an_unknown_ladder_is_refused() -> None:
    refuses("expected a ladder", "list", "nothing")


# The doctor.


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """What the doctor says of this machine."""
    result = invoke("doctor", "--json")
    found: dict[str, Any] = json.loads(result.stdout)
    assert result.exit_code == (1 if found["problems"] else 0)
    return found


def test_the_doctor_has_the_installed_and_the_tested_versions(report: dict[str, Any]) -> None:
    versions = {row["name"]: row for row in report["versions"]}

    assert versions["torch"]["installed"] == metadata.version("torch")
    assert versions["triton"]["tested"] == ">=3.6,<3.10"


def test_the_doctor_has_every_kernel(report: dict[str, Any]) -> None:
    kernels = {kernel["name"] for kernel in report["kernels"]}

    assert kernels == {kernel.name for kernel in registry.ladder()}


def test_the_doctor_names_a_ladder_whose_rungs_have_the_same_answer(
    report: dict[str, Any],
) -> None:
    answers = {kernel["runs"] for kernel in report["kernels"] if kernel["name"][:6] == "hopper"}
    rungs = len(registry.LADDERS["hopper"])

    assert len(answers) == 1
    assert f"all {rungs} of hopper" in invoke("doctor").stdout


def test_the_doctor_has_no_problem_with_the_cache(report: dict[str, Any]) -> None:
    assert report["cache"]["problem"] is None


def test_the_doctor_names_a_version_outside_the_tested_range(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed = requirements.installed
    monkeypatch.setattr(
        requirements, "installed", lambda name: "3.5.0" if name == "triton" else installed(name)
    )

    result = invoke("doctor", code=1)

    assert "triton: outside the tested range: pip install 'triton" in result.stdout


# Verification.


@pytest.mark.interpreter
@pytest.mark.no_gpu
def test_a_verification_is_saved(tmp_path: Path) -> None:
    saved = tmp_path / "verify.json"
    line = "verify portable --shapes 17,20x30x40 --dtype float16"

    invoke(*line.split(), "--save", saved, code=0)

    result = {"kernel": "portable", "dtype": "float16", "passed": 24, "failed": [], "refused": {}}
    assert json.loads(saved.read_text()) == {"device": "cpu", "results": [result]}


@pytest.mark.interpreter
@pytest.mark.no_gpu
def test_a_verification_without_a_kernel_is_of_those_that_run_here() -> None:
    found = parsed("verify", "--shapes", "8", "--layout", "tt", "--dtype", "float32")

    assert [result["kernel"] for result in found["results"]] == ["portable"]


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The portable kernel adds 1 to the first element of each product."""
    plan = portable.plan

    def plan_broken(*arguments: Any) -> Any:
        launch = plan(*arguments)

        def run(a: Any, b: Any, c: Any, out: torch.Tensor, alpha: Any, beta: Any) -> None:
            launch(a, b, c, out, alpha, beta)
            out[0, 0] += 1

        return run

    monkeypatch.setattr(portable, "plan", plan_broken)


@pytest.mark.interpreter
@pytest.mark.no_gpu
@pytest.mark.usefixtures("broken")
def test_a_verification_names_the_first_element_that_is_wrong() -> None:
    line = "verify portable --shapes 23 --dtype float32 --layout nn"

    result = invoke(*line.split(), code=1)

    message = "portable exact 23x23x23-fp32-nn: wrong: 1 of 529 elements, first at [0, 0]"
    assert message in result.stdout


@pytest.mark.no_gpu
def test_a_kernel_that_cannot_run_here_is_not_verified() -> None:
    refuses("needs an NVIDIA GPU", "verify", "hopper.tma_wgmma")


# Options.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing",), "kernel is 'nothing'"),
        (("portable", "--shapes", "4x4"), "--shapes is '4x4'"),
        (("portable", "--dtype", "int8"), "--dtype is 'int8'"),
        (("portable", "--layout", "xy"), "--layout is 'xy'"),
    ],
)
def test_a_verification_refuses_a_bad_option_by_its_name(
    arguments: tuple[str, ...], message: str
) -> None:
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
        ("inspect hopper.hilbert --arch sm_80", "--arch is 80, expected 90 for hopper.hilbert"),
        (
            "inspect portable --arch 75a",
            "--arch is '75a', expected one of 75, 80, 90, sm_75, sm_80, sm_90a",
        ),
        ("inspect portable --layout nm", "--layout is 'nm', expected one of"),
    ],
)
def test_messages_name_the_option_that_was_given(
    line: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outblas.cli.verify._tally", lambda *_, **__: pytest.fail("runs"))
    refuses(message, *line.split())


@pytest.fixture
def inspected(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The architectures for which a kernel is inspected, without compiling it."""
    found: list[int] = []

    def inspect(kernel: str, *, arch: int, **_: Any) -> Mock:
        found.append(arch)
        return MagicMock()

    monkeypatch.setattr("outblas.inspect.inspect", inspect)
    monkeypatch.setattr(cli_inspect, "_show", lambda found: None)
    return found


@pytest.mark.parametrize("arch", ["90", "sm_90", "90a", "sm_90a", "SM_90A", "sm_90,90a"])
def test_an_architecture_has_several_names(arch: str, inspected: list[int]) -> None:
    invoke("inspect", "portable", "--arch", f"75,{arch},sm_80", code=0)

    assert inspected == [75, 90, 80]


@pytest.mark.interpreter
@pytest.mark.compile
@pytest.mark.no_gpu
@pytest.mark.parametrize("rungs", [2, pytest.param(11, marks=pytest.mark.slow)])
def test_the_demo_checks_products_and_shows_machine_code(
    rungs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ladder = registry.ladder("hopper")
    monkeypatch.setattr(registry, "ladder", lambda name: ladder[:rungs])

    result = invoke("demo", code=0)

    assert len(ladder) == 11
    assert result.stdout.count("every element is exact") == 5
    assert "HGMMA.64x64x16.F32.BF16" in result.stdout
    assert sum(line.startswith("│ hopper.") for line in result.stdout.splitlines()) == rungs


@pytest.mark.parametrize("on_gpu", [True, False])
def test_the_demo_ends_with_commands_to_copy_that_fit_a_narrow_terminal(
    on_gpu: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    cli_demo._show_next_steps(on_gpu=on_gpu)

    _, title, *lines = capsys.readouterr().out.splitlines()
    assert title == "Try next:"
    assert len(lines) == 4
    assert all(line.startswith("  outblas ") and len(line.rstrip()) <= 80 for line in lines)


# Files.


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
