"""How a sweep is shown while it runs: blocks in a terminal, lines elsewhere."""

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


def in_finals() -> Progress:
    return Progress(
        replace(WORKLOAD, out_dtype="float32"),
        "1",
        "finals",
        valid=9,
        screened=9,
        rounds=45,
        started=NOW - 4000,
    )


def snapshots() -> list[Progress]:
    """Three workloads that are being tuned, and four that are finished or wait."""
    rows = [replace(WORKLOAD, M=m) for m in (1, 2, 3, 4)]
    preparing = Progress(
        replace(WORKLOAD, K=64),
        "node:GPU-0123456789abcdef",
        "preparing",
        message="asks\n[the model]",
    )
    return [
        screening(),
        in_finals(),
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


def test_the_heading_counts_the_workloads_by_stage() -> None:
    lines = shown(snapshots())

    assert lines[0] == "3 tuned now, 2 done, 1 failed, 1 waiting"
    assert max(map(len, lines)) <= 80


def test_nothing_to_tune_is_said() -> None:
    assert shown([]) == ["nothing to tune"]


def test_a_workload_being_tuned_has_a_block() -> None:
    title, bar, best, queue, failures = shown([screening()])[2:7]

    assert re.fullmatch(r"4096 bfloat16 nt  screening on GPU 0 +2:13 elapsed, 1:58 left", title)
    assert bar.endswith("131/212 (40 known)  1.032 × cuBLAS, 169.8 µs")
    assert queue == "4 compiling, 7 compiled and waiting"
    assert failures == "failures: 3 wrong, 1 hang"
    assert best.startswith("best: hopper.hilbert[tile_m=128")


@pytest.mark.parametrize(
    "part",
    [
        pytest.param("finals, 45 rounds on GPU 1", id="the rounds of the finals"),
        pytest.param("on node:GPU-01234567 ", id="a UUID cut short"),
        pytest.param("asks [the model]", id="a message on one line, with its brackets"),
    ],
)
def test_a_block_says_what_is_being_done_and_where(part: str) -> None:
    assert part in "\n".join(shown(snapshots()))


def test_a_finished_workload_has_one_line() -> None:
    assert shown(snapshots())[-3:] == [
        "✓ 1x4096x4096 bfloat16 nt on GPU 0  1.032 × cuBLAS, 169.8 µs  hopper.hilbert[ti…",
        "✗ 2x4096x4096 bfloat16 nt on GPU 0  no config is right, failures: 9 crash",
        "✗ 3x4096x4096 bfloat16 nt on GPU 0  RuntimeError: no way",
    ]


def test_configs_that_were_not_measured_are_counted() -> None:
    unmeasured = Counter(unmeasured=2)
    done = Progress(
        WORKLOAD, "0", "done", 9, 0, 7, best="portable", best_ratio=1.5, failures=unmeasured
    )

    assert shown([done])[-1] == (
        "✓ 4096 bfloat16 nt on GPU 0  1.500 × cuBLAS, 2 configs not measured  portable"
    )
    assert "failures: 2 unmeasured" in tune_view.line(done)


def test_a_plain_line_says_all_that_a_block_says() -> None:
    assert re.fullmatch(
        r"4096 bfloat16 nt on GPU 0: screening, 131 of 212, 4 compiling, 7 compiled and waiting, "
        r"best 1\.032 × cuBLAS, "
        r"169\.8 µs by hopper\.hilbert\[tile_m=128.*\], failures: 3 wrong, 1 hang, 2:13 elapsed, "
        r"1:58 left",
        tune_view.line(screening()),
    )


def test_a_plain_line_is_one_line() -> None:
    lines = [tune_view.line(progress) for progress in snapshots()]

    assert all("\n" not in line for line in lines)
    assert lines[5:] == [
        "3x4096x4096 bfloat16 nt on GPU 0: failed, RuntimeError: no way",
        "4x4096x4096 bfloat16 nt: waiting",
    ]


def test_on_a_cpu_times_are_not_compared_with_cublas() -> None:
    found = replace(screening(), base="")

    assert "best 169.8 µs by hopper" in tune_view.line(found)
    assert "cuBLAS" not in "\n".join([tune_view.line(found), *shown([found])])


def test_with_an_epilogue_times_are_compared_with_torch() -> None:
    assert "best 1.032 × torch, 169.8 µs by" in tune_view.line(replace(screening(), base="torch"))
