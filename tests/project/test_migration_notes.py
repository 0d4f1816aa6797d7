"""docs/migrate.md and the list that the fuzz goes by are one, and each entry is a difference that
there is.
"""

import re

import pytest
from fuzz import runner
from fuzz.known import KNOWN
from support.paths import ROOT

NOTES = ROOT / "docs" / "migrate.md"

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("as_in_the_fuzz")]


def test_the_notes_list_what_the_fuzz_lets_pass() -> None:
    text = NOTES.read_text(encoding="utf-8").split("## Differences")[1]

    noted = re.findall(r"^- \*\*(.+?)\*\*: .", text, re.MULTILINE)

    assert sorted(noted) == sorted(entry.name for entry in KNOWN)


def marks(entry):
    return [pytest.mark.gpu] if entry.example.get("device") == "cuda" else []


@pytest.mark.parametrize(
    "entry", [pytest.param(entry, marks=marks(entry), id=entry.name) for entry in KNOWN]
)
def test_an_entry_is_a_difference(entry) -> None:
    ours, theirs, rows = runner.once(entry.example)
    found = {row["known"] for row in rows}
    assert found == {entry.name}, f"outblas: {ours}, torch: {theirs}, {rows}"
