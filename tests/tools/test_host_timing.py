"""Host timing: the layout of a checkout for it, and when a call is slower than another's."""

import itertools
import json
from pathlib import Path

import pytest
from support.fresh_torch import run_beside_torch

from tools import host, host_calls


@pytest.mark.parametrize(
    ("here", "there", "word"),
    [
        ([2.0, 2.1, 2.2, 2.1], [1.0, 1.1, 1.2, 1.1], "slower"),
        ([1.0, 1.1, 1.2, 1.1], [2.0, 2.1, 2.2, 2.1], "faster"),
        ([1.00, 1.01, 1.02, 1.01], [1.03, 1.04, 1.05, 1.04], "as fast"),
        ([1.0, 3.0, 1.0, 3.0], [1.0, 1.5, 2.0, 1.6], "as fast"),
    ],
)
def test_a_verdict_needs_a_difference_beyond_the_spread(
    here: list[float], there: list[float], word: str
) -> None:
    assert host.verdict(here, there) == word


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a checkout of outblas"):
        host.package_path(tmp_path)


def test_every_pair_can_be_called(monkeypatch: pytest.MonkeyPatch) -> None:
    from outblas.call import launcher

    monkeypatch.setattr(launcher, "no_kernel_reason", launcher.no_kernel_reason)
    monkeypatch.setattr(launcher, "best_launcher", launcher.best_launcher)

    for ours, theirs in host_calls.pairs().values():
        ours()
        theirs()


def test_a_report_has_the_ratio_to_torch_and_to_the_other_checkout() -> None:
    here = {"matmul": [(3.0, 1.0), (4.0, 1.0), (8.0, 2.0)], "import": [(5.0, 4.0)]}
    there = {"matmul": [(2.0, 1.0), (2.0, 1.0), (2.0, 1.0)]}

    matmul, imported = host.lines(here, there)

    assert (matmul["us"], matmul["torch_us"], matmul["ratio"]) == (4, 1, 4)
    assert (matmul["of_the_others"], matmul["verdict"]) == (2, "slower")
    assert imported == {"call": "import", "us": 5, "torch_us": 4, "ratio": 1.25}
    assert "4.00 × torch, 2.000 of the other's, slower" in host.text(matmul)


def test_calls_are_timed_in_turns() -> None:
    called: list[str] = []

    times = host_calls.quickly((lambda: called.append("a"), lambda: called.append("b")), turns=2)

    assert [len(turn) for turn in times] == [2, 2]
    assert all(time > 0 for turn in times for time in turn)
    assert "".join(name for name, _ in itertools.groupby(called)) == "ab" + 2 * "ab", "after trials"


@pytest.mark.long
def test_first_calls_are_planned_for_a_gpu_that_is_not_there() -> None:
    code = """
import json
import torch
from tools import host_planning
torch.set_grad_enabled(False)
host_planning.play_h100()
print(json.dumps(host_planning.measured(steps=host_planning.LEFT_OUT + 5, rows=40)))
assert {kernel.__class__.__name__ for kernel in host_planning.kernels} == {"Variant"}
"""

    done = run_beside_torch(code)

    assert done.returncode == 0, done.stderr
    lines = json.loads(done.stdout)
    assert [line["call"] for line in lines] == [
        "first call of the process",
        "first call of a layer",
        "first call of a range of rows",
        "first call of a number of rows",
        "chunked prefill",
    ]
    assert all(0 < line["median_us"] <= line["most_us"] for line in lines)
    assert "Warning" not in done.stderr
