"""Every program in examples/ runs on this machine, and is listed."""

import importlib.util
import re
import runpy
import sys
from pathlib import Path

import pytest
from support.paths import ROOT

pytest_plugins = ("support.batch_invariance",)
pytestmark = pytest.mark.usefixtures("no_context_before")  # one of them enters a context

EXAMPLES = ROOT / "examples"
PROGRAMS = sorted(path.stem for path in EXAMPLES.glob("*.py"))

# Those that trace a program, import transformers or start processes take seconds each.
LONG = {"compile_and_export", "patch_hugging_face", "patch_vit", "tune_my_shapes", "whole_models"}
NEED_TRANSFORMERS = {"patch_hugging_face", "patch_vit", "whole_models"}

# Programs, the options with which they run, and something that they print then.
RUNS: list[tuple[str, tuple[str, ...], str]] = [
    *((name, (), "") for name in PROGRAMS),
    ("patch_hugging_face", ("--model", "gpt2"), "1 layers swapped"),
    ("read_the_ladder", ("--ladder", "simt"), "simt.pipelined"),
    ("read_the_ladder", ("--rung", "hopper.large_tile"), "Why it pays"),
]


def _marks(name: str) -> list[pytest.MarkDecorator]:
    marks = [pytest.mark.long] if name in LONG else []
    if name in NEED_TRANSFORMERS and importlib.util.find_spec("transformers") is None:
        marks.append(pytest.mark.skip(reason="transformers is not installed: the extra `test`"))
    return marks


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "options", "printed"),
    [pytest.param(*run, marks=_marks(run[0]), id="-".join((run[0], *run[1]))) for run in RUNS],
)
def test_an_example_runs(
    name: str,
    options: tuple[str, ...],
    printed: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In an empty folder, as `python examples/NAME.py` would."""
    path = EXAMPLES / f"{name}.py"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(path), *options])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # nothing is to be downloaded
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:
        assert end.code == 0, name

    output = capsys.readouterr().out
    assert output
    assert printed in output
    assert not list(tmp_path.iterdir()), "it left files in the folder where it ran"


def test_the_list_of_examples_names_each_once() -> None:
    rows = re.findall(r"^\| \[(\w+)\.py\]\((\w+)\.py\)", (EXAMPLES / "README.md").read_text(), re.M)

    assert sorted(rows) == [(name, name) for name in PROGRAMS]
