"""`outblas tune` without a GPU: a sweep in the interpreter, what is said of results, interrupts."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from click.testing import Result
from support import commands, known, stored
from support.commands import squeezed
from support.in_process import measure_here
from support.stored import BARE

from outblas.autotune.store.records import Workload
from outblas.autotune.store.store import Store
from outblas.autotune.sweeps import sweep
from outblas.autotune.sweeps.outcome import Failure, Job, Outcome, Sweep, Unmeasured

pytestmark = pytest.mark.long

PLAIN = "--dtype float32 --layout nn --gpus cpu"


def tune(line: str, code: int = 0) -> Result:
    return commands.invoke("tune", *line.split(), code=code)


def parsed(line: str, code: int = 0) -> Any:
    return json.loads(tune(f"{line} --json", code).stdout)


@pytest.mark.interpreter
def test_a_sweep_in_the_interpreter_finds_and_stores_a_winner(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure_here(monkeypatch)
    saved = tmp_path / "found.json"

    found = parsed(
        f"--shapes 16 --trials 1 --store {path} {PLAIN} --epilogue bias+relu --save {saved}"
    )

    assert json.loads(saved.read_text()) == found
    assert (found["finished"], found["failures"], found["store"]) == (True, [], str(path))
    (winner,), (outcome,) = found["winners"], found["outcomes"]
    assert (winner["kernel"], winner["workload"]["epilogue"]) == ("portable", "bias+relu")
    assert (outcome["workload"], outcome["failed"]) == ("16 float32 nn bias+relu", 0)
    with Store(path, read_only=True) as store:
        assert len(store.trials()) == outcome["new"] == outcome["trials"] >= 1
        assert [w.config for w in store.winners()] == [winner["config"]]


# What is said of a sweep.

Ended = Callable[..., None]


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch, path: Path) -> Ended:
    """Has every sweep end at once with what the test says."""

    def end(**facts: Any) -> None:
        found = Sweep(store=path, **facts)
        monkeypatch.setattr(sweep, "sweep", lambda *_, **__: found)

    return end


def outcome_of(**facts: Any) -> Outcome:
    """What came of one workload on an H100."""
    plan = Mock(generated=2, valid=2)
    return Outcome(Job((), Workload(16, 16, 16)), known.H100, plan, **facts)


def test_a_shape_that_could_not_be_tuned_is_said_and_is_no_success(ended: Ended) -> None:
    reason = "GPU 0: [it] went away"
    ended(failures=[Failure(Workload(16, 16, 16), reason)])

    assert f"! 16 bfloat16 nt: {reason}" in tune(PLAIN, 1).stdout
    assert parsed(PLAIN, 1)["failures"] == [{"workload": "16 bfloat16 nt", "reason": reason}]


def test_what_is_left_unmeasured_is_said(ended: Ended) -> None:
    left = Unmeasured("portable", known.CONFIGS[4], "killed from outside 3 times: SIGKILL")
    ended(outcomes=[outcome_of(unmeasured=[left], finished=False)])

    said, value = tune(PLAIN).stdout, parsed(PLAIN)

    message = (
        "portable[group_m=5]: not measured (killed from outside 3 times: SIGKILL); the next sweep "
        "tries it again"
    )
    assert squeezed(message) in squeezed(said)
    assert [each["reason"] for each in value["outcomes"][0]["unmeasured"]] == [left.reason]


def column(table: str, title: str) -> str:
    """What stands below a title in a table of one row, which may have several lines."""
    lines = [
        [cell.strip() for cell in line.replace("┃", "│").split("│")]
        for line in table.splitlines()
        if line[:1] in "┃│"
    ]
    place = lines[0].index(title)
    return " ".join(line[place] for line in lines[1:]).strip()


@pytest.mark.parametrize(
    ("changes", "ratio"),
    [
        ({}, "× cuBLAS"),
        ({"workload": Workload(16, 16, 16, epilogue="bias")}, "× torch"),
        ({"gpu": stored.INTERPRETED}, None),
    ],
    ids=["on a GPU", "with an epilogue", "on a CPU"],
)
def test_a_winner_is_compared_with_what_was_measured_beside_it(
    ended: Ended, changes: dict[str, Any], ratio: str | None
) -> None:
    ended(outcomes=[outcome_of(winners=[stored.winner(**changes)])])

    said = tune(PLAIN).stdout

    assert column(said, "confidence") == "at least 99.0%"
    if ratio is None:
        assert "1.047" not in said
        assert squeezed("times say nothing of a GPU") in squeezed(said)
    else:
        assert column(said, ratio) == "1.047 (1.040–1.050)"


# Interrupts.


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_says_how_to_go_on(
    number: signal.Signals, code: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = f"--shapes 16 {PLAIN} --store {path}"
    monkeypatch.setattr(sys, "argv", ["outblas", "tune", *line.split(), "--no-resume"])
    monkeypatch.setattr(sweep, "sweep", lambda *_, **__: os.kill(os.getpid(), number))

    done = tune(f"{line} --no-resume", code)

    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        f"Interrupted: what was measured is in {path}. The same command continues from there:",
        f"  outblas tune {line}",
    ]


# Imports neither outblas as a whole, which imports torch, nor all commands.
STUBBORN = f"""{BARE}
sys.modules["outblas.cli"] = types.ModuleType("outblas.cli")
sys.modules["outblas.cli"].__path__ = [places["outblas"] + "/cli"]
import time
from outblas.cli.tune import interruptible
with interruptible():
    try:
        print("ready", flush=True)
        time.sleep(100)
    except KeyboardInterrupt:
        print("first", flush=True)
    time.sleep(100)
"""


def test_a_second_interrupt_ends_at_once() -> None:
    command = [sys.executable, "-c", STUBBORN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for said in ("ready\n", "first\n"):
            assert process.stdout.readline() == said
            process.send_signal(signal.SIGINT)

        assert process.wait(20) == 130
