"""docs/learn/learn.ipynb runs on a CPU from its first cell to its last, and stores its outputs."""

import contextlib
import io
import json
from typing import Any

import pytest
from support.paths import ROOT

NOTEBOOK = ROOT / "docs" / "learn" / "learn.ipynb"
VARIES = "varies"  # the tag of a cell whose output depends on the compiler
RENEW = "run jupyter-execute --inplace docs/learn/learn.ipynb"


@pytest.fixture(scope="module")
def cells() -> list[dict[str, Any]]:
    """The code cells."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def stored(cell: dict[str, Any]) -> str:
    """What a cell printed when it was stored."""
    texts = [output["text"] for output in cell["outputs"] if output["output_type"] == "stream"]
    return "".join("".join(text) for text in texts)


@pytest.mark.long
@pytest.mark.compile
@pytest.mark.interpreter
@pytest.mark.filterwarnings("ignore")
def test_every_cell_runs_and_prints_what_is_stored(cells: list[dict[str, Any]]) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    names: dict[str, Any] = {"__name__": "__main__"}

    for cell in cells:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"{NOTEBOOK.name}:{cell['id']}", "exec"), names)

        if VARIES not in cell["metadata"].get("tags", ()):
            assert printed.getvalue() == stored(cell), f"{cell['id']}: {RENEW}"
