"""`outblas tune` without a GPU: what it would try, what matmul would take, a sweep in the
interpreter, bad options.
"""

import json
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from support import commands, known, stored
from support.faulty_kernel import notes
from support.paths import TESTS
from support.sweeps import gone, soon
from typer.testing import Result

from outblas.autotune import lookup
from outblas.autotune.search import gpu
from outblas.autotune.store.records import Workload
from outblas.autotune.store.store import Store
from outblas.autotune.sweeps import sweep
from outblas.autotune.sweeps.outcome import Failure, Sweep
from outblas.autotune.sweeps.screening import Unmeasured
from outblas.autotune.sweeps.tuner import Job, Outcome
from outblas.cli import tune_result
from outblas.cli.tune import parse_budget

pytestmark = pytest.mark.long

PLAIN = "--dtype float32 --layout nn --gpus cpu"


def invoke(line: str, code=0) -> Result:
    return commands.invoke("tune", *line.split(), code=code)


def parsed(line: str) -> Any:
    return json.loads(invoke(f"{line} --json").stdout)


def refusal(line: str, code: int = 2) -> str:
    """What stands in the box of an error, in one line."""
    result = invoke(line, code)
    assert result.stdout == ""
    return " ".join(result.stderr.replace("│", " ").split())


def test_dry_run_as_json() -> None:
    found = parsed("--dry-run --gpu h100 --shapes 4096,128x4096x4096 --trials 20")
    assert found["gpu"] == "NVIDIA H100 80GB HBM3"
    assert [plan["workload"] for plan in found["plans"]] == [
        "4096 bfloat16 nt",
        "128x4096x4096 bfloat16 nt",
    ]
    for plan in found["plans"]:
        assert set(plan) == {"workload", "generated", "valid", "pruned", "ranked"}
        assert plan["generated"] == plan["valid"] + sum(rule["count"] for rule in plan["pruned"])
        assert {c["kernel"] for c in plan["ranked"]} == {"hopper.gemm", "portable"}
        assert 40 <= len(plan["ranked"]) <= 42
        times = [c["predicted_us"] for c in plan["ranked"]]
        assert times == sorted(times)
        assert all("waves" in c["limits"] for c in plan["ranked"])


def test_dry_run_for_people() -> None:
    result = invoke("--dry-run --gpu a100 --kernels turing.cp_async --dtype float16")
    for text in (
        "4096 float16 nt on NVIDIA A100",
        "configs generated",
        "expected at most 64",
        "The first 10 by model",
    ):
        assert text in result.stdout


def test_dry_run_of_the_interpreter() -> None:
    found = parsed(f"--dry-run --shapes 64 {PLAIN}")
    assert found["gpu"].startswith("CPU, interpreted")
    assert {c["kernel"] for c in found["plans"][0]["ranked"]} == {"portable"}


@pytest.fixture
def on_h100(path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Options for an H100 of which one winner is known, with changes, and no table."""
    monkeypatch.delenv("OUTBLAS_TUNE", raising=False)
    monkeypatch.setattr(lookup, "TABLES", path.parent)

    def recorded(**changes: Any) -> str:
        with Store(path) as store:
            store.record_best(known.winner(4, gpu=gpu.imagined("h100"), ratio=1.1, **changes))
        return f"--gpu h100 --store {path}"

    return recorded


def test_explain(on_h100: Callable[..., str]) -> None:
    options = on_h100()
    found = parsed(f"--explain 4096,8192x4096x4096,64 {options}")
    assert found["mode"] == "lookup"
    here, near, nowhere = found["choices"]
    assert (here["kernel"], here["config"]) == ("portable", known.CONFIGS[4])
    assert here["why"] == "tuned on this GPU, 4096 bfloat16 nt, 1.100 of cuBLAS there"
    assert "neighbour 4096 bfloat16 nt" in near["why"]
    assert nowhere["why"].startswith("analytic model")
    assert [step["place"] for step in here["steps"]] == [
        "tuned on this GPU",
        "tuned on this GPU model, other versions",
        "shipped table of this GPU model",
        "shipped table of the nearest GPU model",
        "model",
    ]
    people = invoke(f"--explain 4096 {options}").stdout
    assert "portable[group_m=5] 1.100 of cuBLAS" in people
    assert "matmul takes portable, group_m=5: tuned on this GPU" in people


def test_explain_passes_over_what_cannot_run(on_h100: Callable[..., str]) -> None:
    (found,) = parsed(f"--explain 4096 {on_h100(config='block_m=17')}")["choices"]
    assert (found["why"], found["config"]) == ("nothing is known: by rule", "")
    assert found["passed_over"] == [
        "portable cannot: block_m is 17, expected a power of two from 16 to 1024"
    ]


def test_explain_says_what_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBLAS_TUNE", "off")
    line = "--gpu h100 --layout nn --explain 1024x1023x1024"
    odd, even = parsed(f"{line},1024")["choices"]
    assert odd["kernel"] == even["kernel"] == "hopper.gemm"
    assert even["remarks"] == []
    (remark,) = odd["remarks"]
    assert "b is copied first" in remark
    assert "strides (1023, 1)" in remark
    assert "b is copied first" in invoke(line).stdout


def test_explain_passes_over_what_copies_more_than_it_saves(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OUTBLAS_TUNE", raising=False)
    (found,) = parsed(f"--explain 16x4096x4095 --gpu h100 --store {path}")["choices"]
    assert found["kernel"] == "portable"
    assert any(
        reason.startswith("hopper.gemm had better not: it copies")
        for reason in found["passed_over"]
    )


def test_explain_off(on_h100: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    line = f"--explain 4096 {on_h100()}"
    monkeypatch.setenv("OUTBLAS_TUNE", "off")
    found = parsed(line)
    assert found["mode"] == "off"
    assert found["choices"][0]["why"] == "OUTBLAS_TUNE=off: by rule"
    assert found["choices"][0]["steps"] == []
    monkeypatch.setenv("OUTBLAS_TUNE", "perhaps")
    assert "OUTBLAS_TUNE is 'perhaps', expected one of off, lookup, on" in refusal(line)


@pytest.mark.interpreter
def test_sweep_in_the_interpreter(path: Path, tmp_path: Path) -> None:
    saved = tmp_path / "found.json"
    found = parsed(f"--shapes 16 --trials 2 --top-k 1 --store {path} {PLAIN} --save {saved}")
    assert json.loads(saved.read_text()) == found
    assert found["finished"]
    assert found["failures"] == []
    assert found["store"] == str(path)
    (winner,), (outcome,) = found["winners"], found["outcomes"]
    assert winner["kernel"] == "portable"
    assert (outcome["workload"], outcome["failed"]) == ("16 float32 nn", 0)
    with Store(path, read_only=True) as store:
        assert len(store.trials()) == outcome["new"] == outcome["trials"] >= 2
        assert [w.config for w in store.winners()] == [winner["config"]]


def test_exit_code_of_a_shape_that_could_not_be_tuned(
    monkeypatch: pytest.MonkeyPatch, path: Path
) -> None:
    reason = "GPU 0: [it] went away"
    failed = Sweep(failures=[Failure(Workload(16, 16, 16), reason)], store=path)
    monkeypatch.setattr(sweep, "sweep", lambda *_, **__: failed)
    assert f"! 16 bfloat16 nt: {reason}" in invoke(PLAIN, 1).stdout
    value = json.loads(invoke(f"{PLAIN} --json", 1).stdout)
    assert value["failures"] == [{"workload": "16 bfloat16 nt", "reason": reason}]


@pytest.mark.no_gpu
@pytest.mark.parametrize("options", ["", "--gpus all", "--gpus 0,1 --json"])
def test_without_a_gpu(options: str) -> None:
    said = refusal(f"--kernels portable {options}", 3)
    assert "No NVIDIA GPU that torch can use: --dry-run shows what would be tried" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--shapes 16x16", "--shapes is '16x16', expected N, MxNxK or suite"),
        ("--shapes ,", "--shapes is ','"),
        ("--shapes 0", "--shapes has 0, expected sizes of at least 1"),
        ("--explain many", "--explain is 'many'"),
        ("--layout nm", "--layout is 'nm', expected of nt, nn, tn, tt"),
        ("--layout=", "--layout is ''"),
        (
            "--dtype float64",
            "--dtype is 'float64', expected one of bfloat16, float16, float32, tf32",
        ),
        ("--out-dtype float16", "--out-dtype is 'float16', expected float32"),
        ("--budget soon", "--budget is 'soon', expected a time such as 90s, 20m or 8h"),
        ("--budget 0s", "--budget is '0s'"),
        ("--kernels hopper.nothing", "--kernels is 'hopper.nothing', expected one of"),
        ("--kernels simt.naive", "kernel 'simt.naive' needs an NVIDIA GPU"),
        ("--engine slurm", "--engine is 'slurm', expected one of local, ray"),
        ("--ranker luck", "--ranker is 'luck', expected one of model, heuristics"),
        ("--strategy luck", "--strategy is 'luck', expected one of grid, ranked, random,"),
        ("--strategy json:dumps", "--strategy is 'json:dumps', expected a subclass of outblas."),
        ("--strategy no_such:X", "--strategy is 'no_such:X', which cannot be imported"),
        ("--dry-run --gpu voodoo", "--gpu is 'voodoo', expected one of"),
        ("--trials 0", "'--trials'"),
        ("--top-k 0", "'--top-k'"),
        (
            "--save /nonexistent/f.json",
            "--save is '/nonexistent/f.json', expected a file in a folder",
        ),
        (
            "--dry-run --gpu a100 --kernels hopper.hilbert --dtype bfloat16",
            "kernel 'hopper.hilbert' needs sm_90 to sm_90",
        ),
    ],
)
def test_bad_options(options: str, message: str, path: Path) -> None:
    assert message in refusal(f"--shapes 16 {PLAIN} --store {path} {options}")


@pytest.mark.parametrize("mode", ["", "--dry-run", "--explain 16"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--engine foo", "--engine is 'foo', expected one of local, ray"),
        ("--gpus zero", "--gpus is 'zero', expected"),
        ("--ranker luck", "--ranker is 'luck'"),
        ("--strategy luck", "--strategy is 'luck'"),
        ("--budget soon", "--budget is 'soon'"),
        ("--shapes 1x", "--shapes is "),
        ("--kernels nothing", "--kernels is 'nothing'"),
        ("--address 1.2.3.4:5", "--address is '1.2.3.4:5', expected none"),
        ("--kernels=", "--kernels is '', expected a value, or no --kernels"),
        ("--budget=", "--budget is ''"),
        ("--gpus ,", "--gpus is ','"),
        ("--out-dtype=", "--out-dtype is ''"),
        ("--explain=", "--explain is ''"),
        ("--engine ray --gpus 0", "--gpus is '0', expected none with --engine ray"),
        ("--store /", "--store is '/', exp"),
    ],
)
def test_every_option_is_checked_before_anything_runs(mode, options, message, monkeypatch):
    for name in ("tune._sweep", "tune_preview.dry_run", "tune_preview.explain"):
        monkeypatch.setattr(f"outblas.cli.{name}", lambda *_, **__: pytest.fail("runs"))
    assert message in refusal(f"{mode} {options}")


@pytest.mark.no_gpu
def test_gpus_that_are_not_there() -> None:
    for options in ("--dry-run", "--dry-run --gpu h100", "--explain 16"):
        assert "--gpus is '3', and there is no NVIDIA GPU" in refusal(f"{options} --gpus 3")
    for gpus in ("0", "all", "cpu"):
        invoke(f"--dry-run --shapes 64 --dtype float32 --kernels portable --trials 1 --gpus {gpus}")


def test_a_gpu_to_imagine_is_none_to_tune_on() -> None:
    assert "--gpu is 'h100', expected none without --dry-run or --explain" in refusal("--gpu h100")
    assert "--dry-run and --explain are both given" in refusal("--dry-run --explain 16")


def squeezed(text):
    """However a terminal breaks it."""
    return "".join(text.split())


def swept(monkeypatch: pytest.MonkeyPatch, **facts) -> None:
    found = Sweep(**facts)
    monkeypatch.setattr(sweep, "sweep", lambda *_, **__: found)


def test_results_that_are_not_in_the_store_are_no_success(
    monkeypatch: pytest.MonkeyPatch, path: Path, tmp_path: Path
) -> None:
    """Nothing is claimed that is not on disk."""
    rescued = tmp_path / "rescued.json"
    swept(monkeypatch, store=path, unsaved=142, rescued=rescued)
    said = invoke(PLAIN, 1).stdout
    assert "trials in" not in said
    assert squeezed(
        f"142 results could not be written to {path}: they are in {rescued}"
    ) in squeezed(said)
    value = json.loads(invoke(f"{PLAIN} --json", 1).stdout)
    assert (value["unsaved"], value["rescued"]) == (142, str(rescued))
    swept(monkeypatch, store=path, unsaved=3)
    assert squeezed("nor anywhere else: they are lost") in squeezed(invoke(PLAIN, 1).stdout)


def test_what_is_left_unmeasured_is_said(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    left = Unmeasured("portable", known.CONFIGS[4], "killed from outside 3 times: SIGKILL")
    job = Job((), Workload(16, 16, 16))
    outcome = Outcome(
        job, known.H100, Mock(generated=2, valid=2), unmeasured=[left], finished=False
    )
    swept(monkeypatch, store=path, outcomes=[outcome])
    said = (
        "portable[group_m=5]: not measured, and tried again by the next sweep: killed from "
        "outside 3 times"
    )
    assert squeezed(said) in squeezed(invoke(PLAIN).stdout)
    value = json.loads(invoke(f"{PLAIN} --json").stdout)
    assert [each["reason"] for each in value["outcomes"][0]["unmeasured"]] == [left.reason]


def test_measuring_without_the_lock_is_said(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    why = "the lock was not free within 900 s; figures may be disturbed by other sweeps on GPU 0"
    outcome = Outcome(
        Job((), Workload(16, 16, 16)), known.H100, Mock(generated=2, valid=2), unlocked=why
    )
    swept(monkeypatch, store=path, outcomes=[outcome])
    assert squeezed(f"measured without the lock on the GPU: {why}") in squeezed(
        invoke(PLAIN).stdout
    )
    assert json.loads(invoke(f"{PLAIN} --json").stdout)["outcomes"][0]["unlocked"] == why


def test_a_confidence_that_says_nothing_is_a_tie(
    monkeypatch: pytest.MonkeyPatch, path: Path
) -> None:
    """The doubts of several finalists add up to more than 1."""
    shown = [
        tune_result._confidence(stored.winner(confidence=confidence, separated=separated))
        for confidence, separated in (
            (0.0, True),
            (0.0, False),
            (0.981, True),
            (0.9995, True),
            (0.2, False),
        )
    ]
    assert shown == [
        "tie",
        "tie, not separated",
        "at least 98.1%",
        "over 99.9%",
        "at least 20.0%, not separated",
    ]


TUNE = """
import sys
sys.path.insert(0, {folder!r})
from outblas.autotune.search import target as subjects
from outblas.cli import app
from support.sweeps import SUBJECT
find = subjects.of
subjects.of = lambda name: SUBJECT if name == "faulty" else find(name)
from outblas.autotune.sweeps import sweep as sweeping
sweeping.target_of = subjects.of
sys.argv = ["outblas", *sys.argv[1:]]
app()
"""


def started(path, *options):
    """`outblas tune` of tests/support/faulty_kernel.py in a process of its own."""
    code = TUNE.format(folder=str(TESTS))
    line = f"tune --kernels faulty --shapes 16 {PLAIN} --top-k 1 --store {path}".split()
    command = [sys.executable, "-c", code, *line, *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.usefixtures("faulty_log")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_says_how_to_go_on(
    path: Path, number, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULTY_FAULTS", "hang")
    with started(path, "--no-resume") as process:
        assert soon(lambda: any("hang" in note.config for note in notes()), 120)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (code, "")
    assert (
        f"Interrupted: what was measured is in {path}. The same command goes on from there:" in err
    )
    line = next(line.strip() for line in err.splitlines() if line.startswith("  outblas tune"))
    assert line == f"outblas tune --kernels faulty --shapes 16 {PLAIN} --top-k 1 --store {path}"
    assert "Traceback" not in err
    assert soon(lambda: all(gone(note.process) for note in notes()))
    with Store(path) as store:
        trials = store.trials()
        assert [trial.status for trial in trials] == ["ok"]
        assert store.claim(
            *facts_of(trials[0], notes()[-1].config)
        ).granted  # and nothing holds the other


def facts_of(trial, config):
    return trial.gpu, trial.workload, trial.kernel, trial.source, config


STUBBORN = """
import time
from outblas.cli import interrupts
with interrupts.handled():
    try:
        print("ready", flush=True)
        time.sleep(100)
    except KeyboardInterrupt:
        print("first", flush=True)
    time.sleep(100)
"""


def test_a_second_interrupt_ends_at_once() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, text=True
    ) as process:
        for said in ("ready\n", "first\n"):
            assert process.stdout.readline() == said
            process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130


@pytest.mark.usefixtures("faulty_log")
def test_a_store_that_cannot_be_written_is_refused_before_measuring(tmp_path: Path) -> None:
    folder = tmp_path / "file"
    folder.write_text("no folder")
    with started(folder / "store.sqlite") as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 2, err
    assert out == ""
    assert "store.sqlite" in "".join(err.split())
    assert notes() == []


def test_a_store_of_another_program(tmp_path: Path) -> None:
    path = tmp_path / "shopping.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE list (item)")
    assert "is a database of another program" in refusal(f"--shapes 16 {PLAIN} --store {path}")


def test_a_cluster_that_is_not_there() -> None:
    pytest.importorskip("ray")
    said = refusal("--kernels portable --engine ray --address 127.0.0.1:9")
    assert "no Ray cluster answers at 127.0.0.1:9" in said


def test_budgets() -> None:
    assert parse_budget("") is None
    assert parse_budget("90") == parse_budget("90s") == parse_budget("1.5m") == 90
    assert parse_budget(" 8h ") == 8 * 3600
    assert parse_budget("0.5d") == 43200
    for wrong in ("0", "0.0h", "-1", "1h30m", "1e3", "s", "5w", "nan", "1 m"):
        with pytest.raises(ValueError, match=r"--budget is .* expected a time such as"):
            parse_budget(wrong)
