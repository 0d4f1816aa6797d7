"""Cycles by phase in reports, beside those of the documents."""

from pathlib import Path
from typing import Any

import pytest
from support.reports import Entry, loaded, verdict, write

from outblas.report import phases


def counted(**changes: Any) -> Entry:
    """The cycles of hopper.large_tile, whose roles are one."""
    role = {
        "name": "all",
        "wait": 0.0,
        "load": 1450.0,
        "tensor": 690.0,
        "store": 11000.0,
        "total": 150000.0,
    }
    return {
        "provider": "hopper.large_tile",
        "shape": [4096] * 3,
        "dtype": "bfloat16",
        "phases": [role | changes],
    }


def test_the_documents_cycles_follow_those_of_its_kernel() -> None:
    rows = phases.rows(loaded(counted()).phases)

    assert [row[0] for row in rows] == ["hopper.large_tile", "001 kernel 3"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the load phase of a k tile takes 1415 cycles", "confirmed"),
        ("storing a tile takes 4572 cycles", "differs"),
    ],
)
def test_cycles_settle_what_the_document_says_of_a_phase(text: str, expected: str) -> None:
    assert verdict(text, counted())[0] == expected


@pytest.mark.parametrize(("field", "value"), [("load", -1.0), ("store", "fast"), ("name", 3)])
def test_malformed_phases_name_the_field(tmp_path: Path, field: str, value: Any) -> None:
    path = write(tmp_path / "p.json", counted(**{field: value}))

    with pytest.raises(ValueError, match=rf"p.json: results\[0\].phases\[0\].*{field}"):
        phases.load([path])
