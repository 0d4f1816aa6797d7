"""`outblas tune` without a GPU: what it would try, what matmul would take, a sweep in the interpreter, bad options."""

import json
import sqlite3

import commands
import known
import pytest

from outblas.autotune import choose, gpu, sweeping
from outblas.autotune.records import Workload
from outblas.autotune.store import Store
from outblas.autotune.sweeping import Failure, Sweep
from outblas.cli.tune import parse_budget

PLAIN = "--dtype float32 --layout nn --gpus cpu"


def invoke(line, code=0):
    return commands.invoke("tune", *line.split(), code=code)


def parsed(line):
    return json.loads(invoke(f"{line} --json").stdout)


def refusal(line, code=2):
    """What stands in the box of an error, in one line."""
    result = invoke(line, code)
    assert result.stdout == ""
    return " ".join(result.stderr.replace("│", " ").split())


def test_dry_run_as_json():
    found = parsed("--dry-run --gpu h100 --shapes 4096,128x4096x4096 --trials 20")
    assert found["gpu"] == "NVIDIA H100 80GB HBM3"
    assert [plan["workload"] for plan in found["plans"]] == ["4096 bfloat16 nt", "128x4096x4096 bfloat16 nt"]
    for plan in found["plans"]:
        assert set(plan) == {"workload", "generated", "valid", "pruned", "ranked"}
        assert plan["generated"] == plan["valid"] + sum(rule["count"] for rule in plan["pruned"])
        assert {c["kernel"] for c in plan["ranked"]} == {"hopper.gemm", "portable"}
        assert 40 <= len(plan["ranked"]) <= 42
        times = [c["predicted_us"] for c in plan["ranked"]]
        assert times == sorted(times)
        assert all("waves" in c["limits"] for c in plan["ranked"])


def test_dry_run_for_people():
    result = invoke("--dry-run --gpu a100 --kernels turing.cp_async --dtype float16")
    for text in ("4096 float16 nt on NVIDIA A100", "configs generated", "expected at most 64", "The first 10 by model"):
        assert text in result.stdout


def test_dry_run_of_the_interpreter():
    found = parsed(f"--dry-run --shapes 64 {PLAIN}")
    assert found["gpu"].startswith("CPU, interpreted")
    assert {c["kernel"] for c in found["plans"][0]["ranked"]} == {"portable"}


@pytest.fixture
def on_h100(path, monkeypatch):
    """Options for an H100 of which one winner is known, with changes, and no table."""
    monkeypatch.delenv("OUTBLAS_TUNE", raising=False)
    monkeypatch.setattr(choose, "TABLES", path.parent)

    def crowned(**changes):
        with Store(path) as store:
            store.crown(known.winner(4, gpu=gpu.imagined("h100"), ratio=1.1, **changes))
        return f"--gpu h100 --store {path}"

    return crowned


def test_explain(on_h100):
    options = on_h100()
    found = parsed(f"--explain 4096,8192x4096x4096,64 {options}")
    assert found["mode"] == "lookup"
    here, near, nowhere = found["choices"]
    assert (here["kernel"], here["config"]) == ("portable", known.CONFIGS[4])
    assert here["why"] == "tuned on this GPU, 4096 bfloat16 nt, 1.100 of cuBLAS there"
    assert "neighbour 4096 bfloat16 nt" in near["why"]
    assert nowhere["why"].startswith("analytic model")
    assert [step["place"] for step in here["steps"]] == [
        "tuned on this GPU", "tuned on this GPU model, other versions", "shipped table of this GPU model",
        "shipped table of the nearest GPU model", "model",
    ]  # fmt: skip
    people = invoke(f"--explain 4096 {options}").stdout
    assert "portable[group_m=5] 1.100 of cuBLAS" in people
    assert "matmul takes portable, group_m=5: tuned on this GPU" in people


def test_explain_passes_over_what_cannot_run(on_h100):
    (found,) = parsed(f"--explain 4096 {on_h100(config='block_m=17')}")["choices"]
    assert (found["why"], found["config"]) == ("nothing is known: by rule", "")
    assert found["passed_over"] == ["portable cannot: block_m is 17, expected a power of two from 16 to 1024"]


def test_explain_says_what_is_copied(monkeypatch):
    monkeypatch.setenv("OUTBLAS_TUNE", "off")
    line = "--gpu h100 --layout nn --explain 1024x1023x1024"
    odd, even = parsed(f"{line},1024")["choices"]
    assert odd["kernel"] == even["kernel"] == "hopper.gemm"
    assert even["remarks"] == []
    (remark,) = odd["remarks"]
    assert "b is copied first" in remark
    assert "strides (1023, 1)" in remark
    assert "b is copied first" in invoke(line).stdout


def test_explain_passes_over_what_copies_more_than_it_saves(path, monkeypatch):
    monkeypatch.delenv("OUTBLAS_TUNE", raising=False)
    (found,) = parsed(f"--explain 16x4096x4095 --gpu h100 --store {path}")["choices"]
    assert found["kernel"] == "portable"
    assert any(reason.startswith("hopper.gemm had better not: it copies") for reason in found["passed_over"])


def test_explain_off(on_h100, monkeypatch):
    line = f"--explain 4096 {on_h100()}"
    monkeypatch.setenv("OUTBLAS_TUNE", "off")
    found = parsed(line)
    assert found["mode"] == "off"
    assert found["choices"][0]["why"] == "OUTBLAS_TUNE=off: by rule"
    assert found["choices"][0]["steps"] == []
    monkeypatch.setenv("OUTBLAS_TUNE", "perhaps")
    assert "OUTBLAS_TUNE is 'perhaps', expected one of off, lookup, on" in refusal(line)


@pytest.mark.interpreter
def test_sweep_in_the_interpreter(path, tmp_path):
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


def test_exit_code_of_a_shape_that_could_not_be_tuned(monkeypatch, path):
    reason = "GPU 0: [it] went away"
    failed = Sweep(failures=[Failure(Workload(16, 16, 16), reason)], store=path)
    monkeypatch.setattr(sweeping, "sweep", lambda *_, **__: failed)
    assert f"! 16 bfloat16 nt: {reason}" in invoke(PLAIN, 1).stdout
    value = json.loads(invoke(f"{PLAIN} --json", 1).stdout)
    assert value["failures"] == [{"workload": "16 bfloat16 nt", "reason": reason}]


@pytest.mark.no_gpu
@pytest.mark.parametrize("options", ["", "--gpus all", "--gpus 0,1 --json"])
def test_without_a_gpu(options):
    said = refusal(f"--kernels portable {options}", 3)
    assert "No NVIDIA GPU that torch can use: --dry-run shows what would be tried" in said


@pytest.mark.parametrize(("options", "message"), [
    ("--shapes 16x16", "--shapes is '16x16', expected N, MxNxK or suite"), ("--shapes ,", "--shapes is ','"),
    ("--shapes 0", "--shapes has 0, expected sizes of at least 1"), ("--explain many", "--explain is 'many'"),
    ("--layout nm", "--layout is 'nm', expected of nt, nn, tn, tt"), ("--layout=", "--layout is ''"),
    ("--dtype float64", "dtype is 'float64', expected one of bfloat16, float16, float32, tf32"),
    ("--out-dtype float16", "out_dtype is 'float16', expected float32"),
    ("--budget soon", "--budget is 'soon', expected a time such as 90s, 20m or 8h"),
    ("--budget 0s", "--budget is '0s'"), ("--kernels hopper.nothing", "kernel is 'hopper.nothing', expected one of"),
    ("--kernels simt.naive", "kernel 'simt.naive' needs an NVIDIA GPU"), ("--engine slurm", "expected"),
    ("--ranker luck", "ranker is 'luck', expected one of model, heuristics"),
    ("--dry-run --gpu voodoo", "machine is 'voodoo', expected one of"), ("--trials 0", "'--trials'"),
    ("--top-k 0", "'--top-k'"),
    ("--save /nonexistent/f.json", "--save is '/nonexistent/f.json', expected a file in a folder"),
    ("--dry-run --gpu a100 --kernels hopper.hilbert --dtype bfloat16", "kernel 'hopper.hilbert' needs sm_90 to sm_90"),
])  # fmt: skip
def test_bad_options(options, message, path):
    assert message in refusal(f"--shapes 16 {PLAIN} --store {path} {options}")


def test_a_store_of_another_program(tmp_path):
    path = tmp_path / "shopping.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE list (item)")
    assert "is a database of another program" in refusal(f"--shapes 16 {PLAIN} --store {path}")


def test_a_cluster_that_is_not_there():
    pytest.importorskip("ray")
    said = refusal("--kernels portable --engine ray --address 127.0.0.1:9")
    assert "no Ray cluster answers at 127.0.0.1:9" in said


def test_budgets():
    assert parse_budget("") is None
    assert parse_budget("90") == parse_budget("90s") == parse_budget("1.5m") == 90
    assert parse_budget(" 8h ") == 8 * 3600
    assert parse_budget("0.5d") == 43200
    for wrong in ("0", "0.0h", "-1", "1h30m", "1e3", "s", "5w", "nan", "1 m"):
        with pytest.raises(ValueError, match=r"--budget is .* expected a time such as"):
            parse_budget(wrong)
