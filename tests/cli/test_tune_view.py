"""How a sweep is shown while it runs: a live view in a terminal, lines elsewhere."""

import io
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from support.stored import WORKLOAD

from outblas.autotune.measure import progress as reporting
from outblas.autotune.measure.progress import Progress
from outblas.cli import tune_view

BEST: dict[str, Any] = {
    "best": "hopper.hilbert[tile_m=128,tile_n=256]",
    "best_ratio": 1.032,
    "best_us": 169.8,
}
NOW = 10_000.0


@pytest.fixture(autouse=True)
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that stands still at NOW."""
    monkeypatch.setattr(reporting, "time", SimpleNamespace(monotonic=lambda: NOW))


def screening() -> Progress:
    """A workload whose configs are being screened since 133 s, with an hour to go."""
    now = NOW
    return Progress(
        WORKLOAD,
        "0",
        "screening",
        valid=212,
        known=40,
        screened=91,
        compiling=4,
        compiled=7,
        failures=Counter(wrong=3, hang=1),
        started=now - 133,
        deadline=now + 4000,
        **BEST,
    )


def snapshots() -> list[Progress]:
    """Three workloads that are being tuned, and four that are finished or wait."""
    rows = [replace(WORKLOAD, M=m) for m in (1, 2, 3, 4)]
    in_finals = Progress(
        replace(WORKLOAD, out_dtype="float32"),
        "1",
        "finals",
        valid=9,
        screened=9,
        rounds=45,
        started=NOW - 4000,
    )
    preparing = Progress(
        replace(WORKLOAD, K=64),
        "node:GPU-0123456789abcdef",
        "preparing",
        started=NOW,
        message="asks\n[the model]",
    )
    return [
        screening(),
        in_finals,
        preparing,
        Progress(rows[0], "0", "done", 9, 0, 9, **BEST),
        Progress(rows[1], "0", "done", 9, 0, 9, failures=Counter(crash=9)),
        Progress(rows[2], "0", "failed", message="RuntimeError: no\nway"),
        Progress(rows[3]),
    ]


def shown(snapshots: Sequence[Progress]) -> list[str]:
    """The lines that a terminal of 80 columns shows."""
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(tune_view.render(snapshots))
    return console.export_text().splitlines()


def test_a_workload_being_tuned_has_a_line_and_a_bar() -> None:
    *line, bar = shown([screening()])[2:]

    assert " ".join(part.strip() for part in line) == tune_view.line(screening())
    assert re.fullmatch("[━╸╺ ]+", bar)


@pytest.mark.parametrize(
    ("progress", "line"),
    [
        (
            screening(),
            "4096 bfloat16 nt on GPU 0: screening, 131 of 212 (40 known), 4 compiling, 7 compiled "
            "and waiting, best 1.032 × cuBLAS, 169.8 µs by hopper.hilbert[tile_m=128,tile_n=256], "
            "failures: 3 wrong, 1 hang, 2:13 elapsed, 1:58 left",
        ),
        (
            snapshots()[1],
            "4096 bfloat16 to float32 nt on GPU 1: finals, 9 of 9, 45 rounds, 1:06:40 elapsed",
        ),
        (
            snapshots()[2],
            "4096x4096x64 bfloat16 nt on node:GPU-01234567: preparing, 0:00 elapsed, asks "
            "[the model]",
        ),
        (snapshots()[5], "3x4096x4096 bfloat16 nt on GPU 0: failed, RuntimeError: no way"),
        (snapshots()[6], "4x4096x4096 bfloat16 nt: waiting"),
    ],
    ids=["screening", "finals", "preparing", "failed", "waiting"],
)
def test_a_line_says_what_is_tuned_where_and_how_far_it_is(progress: Progress, line: str) -> None:
    assert tune_view.line(progress) == line


def test_a_finished_workload_has_one_line() -> None:
    lines = shown(snapshots())[-3:]

    assert [line[:2] for line in lines] == ["✓ ", "✗ ", "✗ "]
    assert lines[0].startswith("✓ 1x4096x4096 bfloat16 nt on GPU 0: done, best 1.032 × cuBLAS")
    assert lines[1].endswith("done, failures: 9 crash")
