"""`outblas tune --dry-run` and `--explain`: what would be tried, and what matmul would take."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import commands, known

from outblas.autotune import lookup
from outblas.autotune.search import gpu
from outblas.autotune.store.store import Store
from outblas.base import configs
from outblas.call import launcher
from outblas.hopper import gemm
from outblas.hopper.parts.config_limits import gated_reason


def shown(line: str) -> str:
    """What `outblas tune` prints for people."""
    return commands.invoke("tune", *line.split(), code=0).stdout


def parsed(line: str) -> Any:
    return json.loads(shown(f"{line} --json"))


# Dry runs.


def test_a_dry_run_has_a_plan_for_each_shape_with_trials_of_each_kernel() -> None:
    found = parsed("--dry-run --gpu h100 --shapes 1024,128x1024x1024 --trials 20")

    assert found["gpu"] == "NVIDIA H100 80GB HBM3"
    assert [plan["workload"] for plan in found["plans"]] == [
        "1024 bfloat16 nt",
        "128x1024x1024 bfloat16 nt",
    ]
    for plan in found["plans"]:
        assert {c["kernel"] for c in plan["ranked"]} == {"hopper.gemm", "portable"}
        assert 40 <= len(plan["ranked"]) <= 42  # with the kernels' own configs


def test_a_dry_run_of_groups_plans_hopper_grouped() -> None:
    line = "--dry-run --gpu h100 --op grouped --shapes 8x4096x4096x14336:zipf --trials 4"

    (plan,) = parsed(line)["plans"]

    assert plan["workload"] == "4096x4096x14336 bfloat16 nt groups 8:zipf"
    assert {c["kernel"] for c in plan["ranked"]} == {"hopper.grouped"}
    assert len(plan["ranked"]) in (4, 5)  # with the rule's own


def test_a_dry_run_with_an_epilogue_has_the_kernels_that_take_it() -> None:
    line = "--dry-run --gpu h100 --shapes 1024 --dtype float32 --trials 1"

    (bare,) = parsed(line)["plans"]
    (fused,) = parsed(f"{line} --epilogue bias+gelu")["plans"]

    assert fused["workload"] == "1024 float32 nt bias+gelu"
    assert {c["kernel"] for c in bare["ranked"]} == {"simt.pipelined", "portable"}
    assert {c["kernel"] for c in fused["ranked"]} == {"portable"}


def test_a_dry_run_with_a_gated_activation_plans_configs_that_take_pairs_of_columns() -> None:
    line = "--dry-run --gpu h100 --shapes 1024 --kernels hopper.gemm --epilogue swiglu"

    (plan,) = parsed(line)["plans"]

    assert plan["workload"] == "1024 bfloat16 nt swiglu"
    assert plan["ranked"]
    for candidate in plan["ranked"]:
        config = configs.from_text(gemm.Config, candidate["config"])
        assert gated_reason(config) is None, candidate["config"]


@pytest.mark.parametrize(
    ("call", "mode", "kernel"),
    [
        ("2048 --dtype float32", "lookup", "simt.pipelined"),
        ("1024 --dtype float32", "lookup", "torch"),  # 0.790 of cuBLAS
        ("2000 --dtype float32", "lookup", "torch"),
        ("2048 --dtype tf32", "lookup", "torch"),
        ("2048 --dtype float32", "off", "torch"),
        ("2000 --dtype float32", "on", "simt.pipelined"),
    ],
)
def test_an_explanation_of_float32_names_torch_where_no_kernel_was_measured_to_be_faster(
    monkeypatch: pytest.MonkeyPatch, call: str, mode: str, kernel: str
) -> None:
    monkeypatch.setenv("OUTBLAS_TUNE", mode)

    (choice,) = parsed(f"--explain {call} --gpu h100")["choices"]

    assert choice["kernel"] == kernel
    if kernel == "torch":
        assert choice["why"] == launcher.SLOWER
        assert "matmul takes torch: a float32" in shown(f"--explain {call} --gpu h100")


MINE = """
from outblas.autotune import Strategy


class Last(Strategy):
    def propose(self, search):
        yield search.ranked()[-2:]
"""


def test_a_strategy_in_the_current_folder_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "my_strategies.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])

    text = shown("--dry-run --gpu h100 --kernels portable --strategy my_strategies:Last")

    assert "The first 3 in the order of Last" in text
    assert "3 to measure" in text


@pytest.mark.no_gpu
@pytest.mark.parametrize("gpus", ["0", "all", "cpu"])
def test_a_machine_without_a_gpu_may_name_the_first_or_all_where_nothing_is_measured(
    gpus: str,
) -> None:
    line = "--dry-run --shapes 64 --dtype float32 --kernels portable --trials 1"

    assert shown(f"{line} --gpus {gpus}")


# Explanations.


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


def test_an_explanation_has_a_choice_for_each_shape_and_why(on_h100: Callable[..., str]) -> None:
    found = parsed(f"--explain 4096,8192x4096x4096,64 {on_h100()}")

    here, near, nowhere = found["choices"]
    assert found["mode"] == "lookup"
    assert (here["kernel"], here["config"]) == ("portable", known.CONFIGS[4])
    assert here["why"] == "tuned on this GPU, 4096 bfloat16 nt, 1.100 × cuBLAS there"
    assert "neighbour 4096 bfloat16 nt" in near["why"]
    assert nowhere["why"].startswith("analytic model")


def test_an_explanation_passes_over_what_cannot_run(on_h100: Callable[..., str]) -> None:
    (found,) = parsed(f"--explain 4096 {on_h100(config='block_m=17')}")["choices"]

    why = "nothing that was tuned applies, so the fixed rule decides"
    assert (found["why"], found["config"]) == (why, "")
    assert found["passed_over"] == [
        "portable does not run here: block_m is 17, expected a power of two from 16 to 1024"
    ]


def test_an_explanation_says_what_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBLAS_TUNE", "off")
    line = "--gpu h100 --layout nn --explain 1024x1023x1024"

    odd, even = parsed(f"{line},1024")["choices"]

    assert odd["kernel"] == even["kernel"] == "hopper.gemm"
    assert even["remarks"] == []
    (remark,) = odd["remarks"]
    assert "b is copied first" in remark
    assert "strides (1023, 1)" in remark


def test_an_explanation_passes_over_what_copies_more_than_it_saves(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OUTBLAS_TUNE", raising=False)

    (found,) = parsed(f"--explain 16x4096x4095 --gpu h100 --store {path}")["choices"]

    assert found["kernel"] == "portable"
    assert any(
        reason.startswith("hopper.gemm would be slow here: it copies")
        for reason in found["passed_over"]
    )
