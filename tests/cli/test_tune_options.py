"""Options of `outblas tune` that are refused, each by its name and before anything is measured."""

from pathlib import Path

import pytest
from support import commands
from support.in_process import measure_here

from outblas.cli.tune import parse_budget

PLAIN = "--dtype float32 --layout nn --gpus cpu"


def refused(message: str, line: str, code: int = 2) -> None:
    """Whatever is printed on standard output would be taken for a result."""
    done = commands.refuses(message, "tune", *line.split(), code=code)
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--shapes 16x16", "--shapes is '16x16', expected N, MxNxK or one of suite, grid, decode"),
        ("--shapes ,", "--shapes is ','"),
        ("--shapes 0", "--shapes has 0, expected sizes of at least 1"),
        ("--explain many", "--explain is 'many'"),
        ("--layout nm", "--layout is 'nm', expected one of nt, nn, tn, tt"),
        ("--op conv", "--op is 'conv', expected one of gemm, grouped"),
        ("--op grouped", "--shapes is '16', expected EXPERTSxROWSxNxK, deepgemm or moe:"),
        ("--op grouped --shapes moe", "kernel 'hopper.grouped' needs sm_90, but was given the CPU"),
        ("--op grouped --shapes moe --kernels portable", "'portable' multiplies no groups"),
        ("--op grouped --shapes moe --explain 16", "--explain cannot be combined with --op gr"),
        (
            "--op grouped --shapes moe --epilogue bias",
            "--epilogue is 'bias', expected none with grouping",
        ),
        ("--op grouped --shapes moe:terms --weights cold", "--weights is 'cold', expected 'warm'"),
        ("--kernels hopper.grouped", "'hopper.grouped' multiplies groups, but was given one"),
        ("--layout=", "--layout is ''"),
        ("--weights hot", "--weights is 'hot', expected one of warm, cold"),
        ("--epilogue bias+tanh", "--epilogue is 'bias+tanh', expected some of bias, an activation"),
        ("--epilogue=", "--epilogue is '', expected a value, or no --epilogue"),
        (
            "--kernels simt.naive --epilogue bias",
            "kernel 'simt.naive' has no epilogue besides alpha",
        ),
        ("--shapes 16x15x16 --epilogue swiglu", "N is 15, expected an even number with swiglu"),
        (
            "--explain 16 --weights cold",
            "--weights is 'cold', expected no --weights with --explain",
        ),
        (
            "--dtype float64",
            "--dtype is 'float64', expected one of bfloat16, float16, float32, tf32",
        ),
        ("--out-dtype float16", "--out-dtype is 'float16', expected float32"),
        ("--budget 0s", "--budget is '0s'"),
        ("--kernels simt.naive", "kernel 'simt.naive' needs an NVIDIA GPU"),
        ("--strategy json:dumps", "--strategy is 'json:dumps', expected a subclass of outblas."),
        ("--strategy no_such:X", "--strategy is 'no_such:X', which cannot be imported"),
        ("--dry-run --gpu voodoo", "--gpu is 'voodoo', expected one of"),
        ("--trials 0", "'--trials'"),
        ("--top-k 0", "'--top-k'"),
        ("--address 1.2.3.4:5", "--address is '1.2.3.4:5', expected none without engine 'ray'"),
        ("--save /nowhere/f", "--save is '/nowhere/f', expected a file in a folder"),
        (
            "--dry-run --gpu a100 --kernels hopper.hilbert --dtype bfloat16",
            "kernel 'hopper.hilbert' needs sm_90",
        ),
    ],
)
def test_a_bad_option_is_refused_by_its_name(
    options: str, message: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure_here(monkeypatch)

    refused(message, f"--shapes 16 {PLAIN} --store {path} {options}")


@pytest.mark.parametrize("mode", ["", "--dry-run", "--explain 16"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--engine foo", "--engine is 'foo', expected one of local, ray"),
        ("--gpus zero", "--gpus is 'zero', expected"),
        ("--strategy luck", "--strategy is 'luck', expected one of grid, ranked, random,"),
        ("--budget 1h30m", "--budget is '1h30m', expected a time such as 90s, 20m or 8h"),
        ("--shapes 1x", "--shapes is "),
        ("--kernels nothing", "--kernels is 'nothing', expected one of"),
        ("--kernels=", "--kernels is '', expected a value, or no --kernels"),
        ("--budget=", "--budget is ''"),
        ("--gpus ,", "--gpus is ','"),
        ("--out-dtype=", "--out-dtype is ''"),
        ("--explain=", "--explain is ''"),
        ("--engine ray --gpus 0", "--gpus is '0', expected no --gpus with --engine ray"),
        ("--store /", "--store is '/', a folder, expected"),
    ],
)
def test_every_option_is_checked_before_anything_runs(
    mode: str, options: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tune._sweep", "tune_output.dry_run", "tune_output.explain"):
        monkeypatch.setattr(f"outblas.cli.{name}", lambda *_, **__: pytest.fail("runs"))

    refused(message, f"{mode} {options}")


@pytest.mark.no_gpu
@pytest.mark.parametrize("options", ["", "--gpus all", "--gpus 0,1 --json"])
def test_without_a_gpu_it_says_what_can_be_done(options: str) -> None:
    message = "No NVIDIA GPU that torch can use. --dry-run shows what a sweep would measure"

    refused(message, f"--kernels portable {options}", code=3)


@pytest.mark.no_gpu
@pytest.mark.parametrize("options", ["--dry-run", "--dry-run --gpu h100", "--explain 16"])
def test_a_gpu_that_is_not_there_is_refused_where_nothing_is_measured_too(options: str) -> None:
    refused("--gpus is '3', and there is no NVIDIA GPU", f"{options} --gpus 3")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--gpu h100", "--gpu is 'h100', expected --dry-run or --explain or --report with it"),
        ("--html a.html", "--html is 'a.html', expected --report with it"),
        ("--dry-run --explain 16", "--dry-run and --explain are given, expected one of them"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: str, message: str) -> None:
    refused(message, options)


def test_a_cluster_that_is_not_there_is_named() -> None:
    pytest.importorskip("ray")

    refused(
        "no Ray cluster answers at 127.0.0.1:9",
        "--kernels portable --engine ray --address 127.0.0.1:9",
    )


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("", None),
        ("90", 90),
        ("90s", 90),
        ("1.5m", 90),
        (" 8h ", 8 * 3600),
        ("0.5d", 43200),
    ],
)
def test_a_budget_is_a_number_with_a_unit(text: str, seconds: float | None) -> None:
    assert parse_budget(text) == seconds
