"""What a sweep plans to try: which configs are rated, pruned and kept, and in which order."""

import re

import pytest
from support.spaces import SQUARE

from outblas.autotune.search import gpu
from outblas.autotune.search.plan import plan as plan_of
from outblas.autotune.search.prune import Plan
from outblas.autotune.search.target import TuneTarget, of
from outblas.autotune.store.records import Workload

HILBERT, PORTABLE = of("hopper.hilbert"), of("portable")
# A kernel of as many configs as the environment says.
SYNTHETIC = TuneTarget("synthetic", "support.faulty_kernel")


@pytest.fixture(scope="module")
def whole() -> Plan:
    """All that would be tried on an H100 of three kernels, of which one has a thousand configs
    alike.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAULTY_CONFIGS", "1000")
        return plan_of((HILBERT, PORTABLE, SYNTHETIC), SQUARE, gpu.imagined("h100"))


def test_what_is_generated_is_ranked_by_its_prediction_or_pruned_by_a_rule(whole: Plan) -> None:
    assert whole.generated > 6000
    assert whole.generated == len(whole.ranked) + sum(pruned.count for pruned in whole.pruned)
    assert whole.valid == len(whole.ranked)
    times = [candidate.predicted_us for candidate in whole.ranked]
    assert times == sorted(times)
    assert {candidate.target for candidate in whole.ranked} == {HILBERT, PORTABLE, SYNTHETIC}
    for pruned in whole.pruned:
        assert not re.search(r"\d", pruned.rule)
        assert re.search(r"\d", pruned.example)


@pytest.mark.parametrize(
    ("name", "machine", "message"),
    [
        (
            "hopper.hilbert",
            "a100",
            "kernel 'hopper.hilbert' needs sm_90, but NVIDIA A100.* is sm_80",
        ),
        ("turing.cp_async", "t4", "needs sm_80 or newer, but .*T4 is sm_75"),
        (
            "hopper.hilbert",
            "h100",
            "needs operands of dtype bfloat16 or float16, but was given float32",
        ),
        (
            "simt.naive",
            "",
            "needs an NVIDIA GPU, but was given the CPU: only portable runs there, in Triton's ",
        ),
    ],
)
def test_a_kernel_that_does_not_fit_is_refused(name: str, machine: str, message: str) -> None:
    target = gpu.imagined(machine) if machine else gpu.current()

    with pytest.raises(ValueError, match=message):
        plan_of((of(name),), Workload(64, 64, 64, "float32"), target)
