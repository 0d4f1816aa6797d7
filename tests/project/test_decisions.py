"""The records of decisions: each is complete, listed, and points to what WORKLOG.md has."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "decisions"
RECORDS = sorted(path for path in FOLDER.glob("[0-9]*.md") if path.name != "0000-template.md")
PARTS = ["Context", "Decision", "Consequences"]


def headings(path: Path) -> list[str]:
    return re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)


def test_records_are_numbered_one_after_the_other() -> None:
    numbers = [int(path.name[:4]) for path in RECORDS]

    assert numbers == list(range(1, len(RECORDS) + 1))


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_a_record_has_its_parts_in_order(record: Path) -> None:
    found = [title for title in headings(record) if title in PARTS]

    assert found == PARTS, f"{record.name} has the parts {found}"


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_a_record_says_its_status(record: Path) -> None:
    text = record.read_text(encoding="utf-8")

    assert re.search(r"^Status: (proposed|accepted|replaced by \d+)", text, re.MULTILINE), (
        f"{record.name} has no status"
    )


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_a_record_points_to_sections_that_the_worklog_has(record: Path) -> None:
    figures = record.read_text(encoding="utf-8").split("## Figures\n")[1]
    plain = " ".join(figures.split())
    sections = {title.replace("`", "") for title in headings(ROOT / "WORKLOG.md")}

    named = re.findall(r'"([^"]+)"', plain)

    assert named, f"{record.name} names no section of WORKLOG.md"
    assert not set(named) - sections, f"{record.name} names sections that WORKLOG.md lacks"


def test_the_index_lists_every_record_by_its_title() -> None:
    listed = re.findall(
        r"^\| \[\d{4}\]\((.+?)\) \| (.+) \|$",
        (FOLDER / "README.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )

    expected = [(path.name, headings(path)[0].split(". ", 1)[1]) for path in RECORDS]

    assert listed == expected
