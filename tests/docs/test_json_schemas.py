"""What commands print as JSON has the keys and types that docs/reference/json-schemas.md lists."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from support import commands, json_schemas
from support.paths import ROOT
from support.stored import WORKLOAD
from support.tuning_reports import SWEPT, winner

from outblas.autotune import Store
from outblas.autotune.sweeps.outcome import Failure, Sweep
from outblas.cli import tune_result

TIMES = [
    path
    for path in sorted((ROOT / "results").glob("*.json"))
    if not re.search("counters|phases|host", path.stem)
]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with trials of one workload, some of which failed, and their winner."""
    path = tmp_path / "tuning.sqlite"
    with Store(path) as opened:
        opened.merge(SWEPT, [winner()])
    return path


def printed(*arguments: object) -> Any:
    """The JSON that a command prints, whatever its exit code."""
    return json.loads(commands.invoke(*arguments, "--json").stdout)


@pytest.mark.parametrize(
    ("heading", "arguments"),
    [
        ("outblas list", ("list",)),
        ("outblas inspect", ("inspect", "simt.vectorized", "--arch", "80")),
        ("outblas inspect", ("inspect", "turing.wmma", "--arch", "75")),
        (
            "outblas tune --dry-run",
            ("tune", "--dry-run", "--kernels", "portable", "--gpu", "H100", "--shapes", "256"),
        ),
        pytest.param("outblas doctor", ("doctor",), marks=pytest.mark.long),
        pytest.param(
            "outblas verify",
            ("verify", "portable", "--shapes", "16", "--dtype", "float32", "--layout", "nt"),
            marks=pytest.mark.interpreter,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_command_prints_the_keys_that_are_documented(
    heading: str, arguments: tuple[str, ...]
) -> None:
    assert not json_schemas.problems(printed(*arguments), heading)


@pytest.mark.parametrize(
    ("heading", "arguments"),
    [
        ("outblas cache ls", ("cache", "ls")),
        ("outblas cache show", ("cache", "show", SWEPT[0].kernel)),
        ("outblas tune --report", ("tune", "--report")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_command_that_reads_a_store_prints_the_keys_that_are_documented(
    heading: str, arguments: tuple[str, ...], store: Path
) -> None:
    assert not json_schemas.problems(printed(*arguments, "--store", store), heading)


@pytest.mark.long  # the tables of the H100 are searched
def test_an_explanation_has_the_keys_that_are_documented(tmp_path: Path) -> None:
    options = ("--explain", "4096x4096x4096", "--gpu", "H100", "--store", tmp_path / "none.sqlite")

    assert not json_schemas.problems(printed("tune", *options), "outblas tune --explain")


def test_a_sweep_and_its_winner_have_the_keys_that_are_documented() -> None:
    sweep = Sweep(failures=[Failure(WORKLOAD, "an example")], store=Path("tuning.sqlite"))

    assert not json_schemas.problems(tune_result.record(sweep), "outblas tune")
    assert not json_schemas.problems(asdict(winner()), "best config")


@pytest.mark.parametrize("path", TIMES, ids=lambda path: path.stem)
def test_a_file_of_times_has_the_keys_that_are_documented(path: Path) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))

    assert not json_schemas.problems(content, "outblas bench")
