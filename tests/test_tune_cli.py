"""`outblas tune` without a GPU: what it would try, what matmul would take, a sweep in the interpreter, bad options."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from outblas.autotune import choose, gpu, sweeping
from outblas.autotune.records import Winner, Workload
from outblas.autotune.store import Store
from outblas.autotune.sweeping import Failure, Sweep
from outblas.cli import app
from outblas.cli.tune import parse_budget
from outblas.configs import to_text
from outblas.kernels.portable_config import PortableConfig

H100 = gpu.imagined("h100")
PLAIN = ("--dtype", "float32", "--layout", "nn", "--gpus", "cpu")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["tune", *arguments])


def said(result: Result) -> str:
    """What stands in the box of an error, in one line."""
    return " ".join(result.stderr.replace("│", " ").split())


def crowned(path: Path, **changes: Any) -> None:
    fields: dict[str, Any] = {
        "gpu": H100, "workload": Workload(4096, 4096, 4096), "kernel": "portable", "source": "abc",
        "config": to_text(PortableConfig(group_m=5)), "us": 100.0, "cublas_us": 110.0, "ratio": 1.1, "ratio_low": 1.0,
        "ratio_high": 1.2, "rounds": 12, "when": "2026-01-01T00:00:00+00:00",
    }  # fmt: skip
    with Store(path) as store:
        store.crown(Winner(**fields | changes))


# ---- dry runs -------------------------------------------------------------------------------------------------------
def test_dry_run_as_json() -> None:
    result = invoke("--dry-run", "--gpu", "h100", "--shapes", "4096,128x4096x4096", "--trials", "20", "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
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


def test_dry_run_for_people() -> None:
    result = invoke("--dry-run", "--gpu", "a100", "--kernels", "turing.cp_async", "--dtype", "float16")
    assert result.exit_code == 0
    assert "4096 float16 nt on NVIDIA A100" in result.stdout
    assert "configs generated" in result.stdout
    assert "expected at most 64" in result.stdout
    assert "The first 10 by model" in result.stdout


def test_dry_run_of_the_interpreter() -> None:
    found = json.loads(invoke("--dry-run", "--shapes", "64", *PLAIN, "--json").stdout)
    assert found["gpu"].startswith("CPU, interpreted")
    assert {c["kernel"] for c in found["plans"][0]["ranked"]} == {"portable"}


# ---- explanations ---------------------------------------------------------------------------------------------------
def test_explain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTBLAS_TUNE", raising=False)
    monkeypatch.setattr(choose, "TABLES", tmp_path)
    path = tmp_path / "tuning.sqlite"
    crowned(path)
    options = "--gpu", "h100", "--store", str(path)
    found = json.loads(invoke("--explain", "4096,8192x4096x4096,64", *options, "--json").stdout)
    assert found["mode"] == "lookup"
    here, near, nowhere = found["choices"]
    assert (here["kernel"], here["config"]) == ("portable", to_text(PortableConfig(group_m=5)))
    assert here["why"] == "tuned on this GPU, 4096 bfloat16 nt, 1.100 of cuBLAS there"
    assert "neighbour 4096 bfloat16 nt" in near["why"]
    assert nowhere["why"].startswith("analytic model")
    assert [step["place"] for step in here["steps"]] == [
        "tuned on this GPU", "tuned on this GPU model, other versions", "shipped table of this GPU model",
        "shipped table of the nearest GPU model", "model",
    ]  # fmt: skip
    people = invoke("--explain", "4096", *options).stdout
    assert "portable[group_m=5] 1.100 of cuBLAS" in people
    assert "matmul takes portable, group_m=5: tuned on this GPU" in people


def test_explain_passes_over_what_cannot_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTBLAS_TUNE", raising=False)
    monkeypatch.setattr(choose, "TABLES", tmp_path)
    path = tmp_path / "tuning.sqlite"
    crowned(path, config="block_m=17")
    (found,) = json.loads(invoke("--explain", "4096", "--gpu", "h100", "--store", str(path), "--json").stdout)[
        "choices"
    ]
    assert found["why"] == "nothing is known: by rule"
    assert found["config"] == ""
    assert found["passed_over"] == ["portable cannot: block_m is 17, expected a power of two from 16 to 1024"]


def test_explain_says_what_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBLAS_TUNE", "off")
    options = "--gpu", "h100", "--layout", "nn"
    odd, even = json.loads(invoke("--explain", "1024x1023x1024,1024", *options, "--json").stdout)["choices"]
    assert odd["kernel"] == even["kernel"] == "hopper.gemm"
    assert even["remarks"] == []
    (said,) = odd["remarks"]
    assert "b is copied first" in said
    assert "strides (1023, 1)" in said
    assert "b is copied first" in invoke("--explain", "1024x1023x1024", *options).stdout


def test_explain_passes_over_what_copies_more_than_it_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTBLAS_TUNE", raising=False)
    (found,) = json.loads(
        invoke("--explain", "16x4096x4095", "--gpu", "h100", "--store", str(tmp_path / "none.sqlite"), "--json").stdout
    )["choices"]
    assert found["kernel"] == "portable"
    assert any(said.startswith("hopper.gemm had better not: it copies") for said in found["passed_over"])


def test_explain_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBLAS_TUNE", "off")
    crowned(tmp_path / "tuning.sqlite")
    options = "--gpu", "h100", "--store", str(tmp_path / "tuning.sqlite"), "--json"
    found = json.loads(invoke("--explain", "4096", *options).stdout)
    assert found["mode"] == "off"
    assert found["choices"][0]["why"] == "OUTBLAS_TUNE=off: by rule"
    assert found["choices"][0]["steps"] == []
    monkeypatch.setenv("OUTBLAS_TUNE", "perhaps")
    result = invoke("--explain", "4096", *options)
    assert result.exit_code == 2
    assert "OUTBLAS_TUNE is 'perhaps', expected one of off, lookup, on" in said(result)


# ---- sweeps ---------------------------------------------------------------------------------------------------------
@pytest.mark.interpreter
def test_sweep_in_the_interpreter(tmp_path: Path) -> None:
    path = tmp_path / "tuning.sqlite"
    options = "--shapes", "16", "--trials", "2", "--top-k", "1", "--store", str(path), *PLAIN
    result = invoke(*options, "--json", "--save", str(tmp_path / "found.json"))
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert json.loads((tmp_path / "found.json").read_text()) == found
    assert found["finished"]
    assert found["failures"] == []
    assert found["store"] == str(path)
    (winner,), (outcome,) = found["winners"], found["outcomes"]
    assert winner["kernel"] == "portable"
    assert outcome["workload"] == "16 float32 nn"
    assert outcome["failed"] == 0
    with Store(path, read_only=True) as store:
        assert len(store.trials()) == outcome["new"] == outcome["trials"] >= 2
        assert [w.config for w in store.winners()] == [winner["config"]]


def test_exit_code_of_a_shape_that_could_not_be_tuned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failed = Sweep(failures=[Failure(Workload(16, 16, 16), "GPU 0: [it] went away")], store=tmp_path)
    monkeypatch.setattr(sweeping, "sweep", lambda *_, **__: failed)
    result = invoke("--shapes", "16", *PLAIN)
    assert result.exit_code == 1
    assert "! 16 bfloat16 nt: GPU 0: [it] went away" in result.stdout
    assert json.loads(invoke("--shapes", "16", *PLAIN, "--json").stdout)["failures"] == [
        {"workload": "16 bfloat16 nt", "reason": "GPU 0: [it] went away"}
    ]


@pytest.mark.no_gpu
def test_without_a_gpu() -> None:
    for options in ((), ("--gpus", "all"), ("--gpus", "0,1", "--json")):
        result = invoke("--kernels", "portable", *options)
        assert result.exit_code == 3
        assert "No NVIDIA GPU that torch can use: --dry-run shows what would be tried" in said(result)
        assert result.stdout == ""


# ---- bad options ----------------------------------------------------------------------------------------------------
BAD: dict[str, tuple[tuple[str, ...], str]] = {
    "shape": (("--shapes", "16x16"), "--shapes is '16x16', expected N, MxNxK or suite"),
    "no shape": (("--shapes", ","), "--shapes is ','"),
    "empty shape": (("--shapes", "0"), "--shapes has 0, expected sizes of at least 1"),
    "explain": (("--explain", "many"), "--explain is 'many'"),
    "layout": (("--layout", "nm"), "--layout is 'nm', expected of nt, nn, tn, tt"),
    "no layout": (("--layout", ""), "--layout is ''"),
    "dtype": (("--dtype", "float64"), "dtype is 'float64', expected one of bfloat16, float16, float32, tf32"),
    "out_dtype": (("--out-dtype", "float16"), "out_dtype is 'float16', expected float32"),
    "budget": (("--budget", "soon"), "--budget is 'soon', expected a time such as 90s, 20m or 8h"),
    "no budget": (("--budget", "0s"), "--budget is '0s'"),
    "kernel": (("--kernels", "hopper.nothing"), "kernel is 'hopper.nothing', expected one of"),
    "kernel of GPUs": (("--kernels", "simt.naive"), "kernel 'simt.naive' needs an NVIDIA GPU"),
    "engine": (("--engine", "slurm"), "expected"),
    "ranker": (("--ranker", "luck"), "ranker is 'luck', expected one of model, heuristics"),
    "gpu": (("--dry-run", "--gpu", "voodoo"), "machine is 'voodoo', expected one of"),
    "trials": (("--trials", "0"), "'--trials'"),
    "top_k": (("--top-k", "0"), "'--top-k'"),
    "save": (("--save", "/nonexistent/found.json"), "--save is '/nonexistent/found.json', expected a file in a folder"),
    "dry run of the wrong GPU": (
        ("--dry-run", "--gpu", "a100", "--kernels", "hopper.hilbert", "--dtype", "bfloat16"),
        "kernel 'hopper.hilbert' needs sm_90 to sm_90",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_options(case: str, tmp_path: Path) -> None:
    options, message = BAD[case]
    result = invoke("--shapes", "16", *PLAIN, "--store", str(tmp_path / "tuning.sqlite"), *options)
    assert result.exit_code == 2, result.output
    assert message in said(result)
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_a_store_of_another_program(tmp_path: Path) -> None:
    path = tmp_path / "shopping.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE list (item)")
    result = invoke("--shapes", "16", *PLAIN, "--store", str(path))
    assert result.exit_code == 2
    assert "is a database of another program" in said(result)


def test_a_cluster_that_is_not_there() -> None:
    pytest.importorskip("ray")
    result = invoke("--kernels", "portable", "--engine", "ray", "--address", "127.0.0.1:9")
    assert result.exit_code == 2
    assert "no Ray cluster answers at 127.0.0.1:9" in said(result)


def test_budgets() -> None:
    assert parse_budget("") is None
    assert parse_budget("90") == parse_budget("90s") == parse_budget("1.5m") == 90
    assert parse_budget(" 8h ") == 8 * 3600
    assert parse_budget("0.5d") == 43200
    for wrong in ("0", "0.0h", "-1", "1h30m", "1e3", "s", "5w", "nan", "1 m"):
        with pytest.raises(ValueError, match=r"--budget is .* expected a time such as"):
            parse_budget(wrong)
