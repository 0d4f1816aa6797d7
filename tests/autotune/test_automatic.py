"""From a call to what was tuned for it: workloads, what is launched, tuning at the first call. No
GPU needed.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from support.imagined_gpu import ImaginedGpu, empty, imagine, on_gpu
from support.known import A100, CONFIGS, H100, winner

import outblas
from outblas.autotune import automatic, lookup
from outblas.autotune.search import gpu as gpus
from outblas.autotune.store.records import Workload
from outblas.autotune.sweeps import outcome
from outblas.autotune.sweeps import sweep as sweeping
from outblas.base.configs import to_text
from outblas.call import hooks, launcher
from outblas.call.epilogue import EpilogueArgs
from outblas.call.problem import Problem, problem
from outblas.hopper import gemm, hilbert

AT = Workload(64, 64, 64)
HILBERT: dict[str, Any] = {"kernel": "hopper.hilbert", "config": to_text(hilbert.Config())}


def matmul_problem(
    a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None = None, **more: Any
) -> Problem:
    return problem(a, b, (a @ b).to(out_dtype or a.dtype), **more)


# The workload that a call is tuned as.

WORKLOADS = {
    "nn": (matmul_problem(empty(6, 8), empty(8, 4)), "6x4x8 bfloat16 nn"),
    "nt": (matmul_problem(empty(6, 8), empty(4, 8).t()), "6x4x8 bfloat16 nt"),
    "tn": (matmul_problem(empty(8, 6).t(), empty(8, 4)), "6x4x8 bfloat16 tn"),
    "tt": (matmul_problem(empty(8, 6).t(), empty(4, 8).t()), "6x4x8 bfloat16 tt"),
    "to fp32": (
        matmul_problem(empty(6, 8), empty(8, 4), torch.float32),
        "6x4x8 bfloat16 to float32 nn",
    ),
    "fp32": (matmul_problem(empty(6, 8).float(), empty(8, 4).float()), "6x4x8 float32 nn"),
    "tf32": (matmul_problem(empty(6, 8).float(), empty(8, 4).float(), tf32=True), "6x4x8 tf32 nn"),
    "rows apart": (matmul_problem(empty(6, 16)[:, :8], empty(8, 16)[:, :4]), "6x4x8 bfloat16 nn"),
    "a batch that shares b": (matmul_problem(empty(3, 6, 8), empty(8, 4)), "18x4x8 bfloat16 nn"),
    "one row": (matmul_problem(empty(1, 8), empty(8, 4)), "1x4x8 bfloat16 nn"),
    "one column": (matmul_problem(empty(6, 8), empty(8, 1)), "6x1x8 bfloat16 nn"),
    "one term": (matmul_problem(empty(6, 1), empty(1, 4)), "6x4x1 bfloat16 nn"),
    "a batch": (matmul_problem(empty(3, 6, 8), empty(3, 8, 4)), None),
    "empty": (matmul_problem(empty(0, 8), empty(8, 4)), None),
    "no terms": (matmul_problem(empty(6, 0), empty(0, 4)), None),
    "no unit stride": (matmul_problem(empty(6, 16)[:, ::2], empty(8, 4)), None),
    "repeated": (matmul_problem(empty(1, 1).expand(6, 8), empty(8, 4)), None),
}


@pytest.mark.parametrize(("call", "workload"), WORKLOADS.values(), ids=WORKLOADS)
def test_a_call_is_tuned_as_a_workload(call: Problem, workload: str | None) -> None:
    found = automatic.of_problem(call)

    assert (found and str(found)) == workload


# What matmul launches.


@pytest.fixture
def h100(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ImaginedGpu]:
    """An H100 for which nothing was tuned."""
    yield imagine(H100, tmp_path, monkeypatch)
    lookup.clear_cache()


@pytest.fixture
def tuned(h100: ImaginedGpu) -> ImaginedGpu:
    """An H100 where `portable` won at `AT`, `hopper.hilbert` was second, and another workload was
    tuned too.
    """
    h100.tune(
        winner(0, workload=AT, ratio=1.0),
        winner(workload=AT, ratio=0.9, **HILBERT),
        winner(1, workload=replace(AT, K=128)),
    )
    return h100


CALL = on_gpu(empty(64, 64), empty(64, 64).t())
BEST, SECOND = ("portable", CONFIGS[0]), ("hopper.hilbert", HILBERT["config"])
DEFAULT = ("hopper.gemm", "")  # the kernel that an H100 takes by rule, with its own config


def with_epilogue(columns: int = 64, **extra: Any) -> Problem:
    """The problem of a call on the imagined GPU with an epilogue, whose B has so many columns."""
    a, b, out = empty(64, 64), empty(columns, 64).t(), empty(64, 64)
    return replace(problem(a, b, out, extra=EpilogueArgs(**extra)), device=CALL.device)


FUSED: dict[str, tuple[dict[str, Any], Workload]] = {
    "bias": ({"bias": empty(64)}, AT),
    "bias+gelu": ({"bias": empty(64), "activation": "gelu"}, AT),
    "residual": ({"residual": empty(64, 64)}, AT),
    "swiglu": ({"activation": "swiglu", "columns": 128}, replace(AT, N=128)),
}


@pytest.mark.parametrize("epilogue", FUSED)
def test_a_call_takes_the_config_that_was_the_fastest_with_its_epilogue(
    tuned: ImaginedGpu, epilogue: str
) -> None:
    extra, workload = FUSED[epilogue]
    tuned.tune(winner(4, workload=replace(workload, epilogue=epilogue)))

    assert tuned.launched(with_epilogue(**extra)) == ("portable", CONFIGS[4])


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param({"activation": "gelu"}, id="another epilogue"),
        pytest.param({"bias": empty(64), "aux": empty(64, 64)}, id="x stored too"),
    ],
)
def test_a_call_with_an_epilogue_that_was_not_tuned_takes_what_the_bare_one_takes(
    tuned: ImaginedGpu, extra: dict[str, Any]
) -> None:
    tuned.tune(winner(4, workload=replace(AT, epilogue="bias")))

    assert tuned.launched(with_epilogue(**extra)) == BEST


def test_a_kernel_that_fails_gives_way_with_a_warning(tuned: ImaginedGpu) -> None:
    tuned.failures["portable"] = RuntimeError("bad")
    message = r"portable\[block_m=.*\], which was tuned for this call, fails: bad"

    with pytest.warns(RuntimeWarning, match=message):
        assert tuned.launched(CALL) == SECOND
    tuned.failures |= dict.fromkeys(("portable", "hopper.hilbert"), ImportError("no DSL"))
    assert tuned.launched(CALL) == DEFAULT


@pytest.mark.parametrize(
    ("environment", "tune", "launched"),
    [
        pytest.param("", "off", DEFAULT, id="off by the argument"),
        pytest.param("off", "", DEFAULT, id="off by the environment"),
        pytest.param("off", "lookup", BEST, id="the argument before the environment"),
        pytest.param("", "", BEST, id="on otherwise"),
    ],
)
def test_lookups_can_be_switched_off(
    tuned: ImaginedGpu,
    monkeypatch: pytest.MonkeyPatch,
    environment: str,
    tune: str,
    launched: tuple[str, str],
) -> None:
    monkeypatch.setenv("OUTBLAS_TUNE", environment)

    assert tuned.launched(CALL, tune) == launched


def test_what_cannot_be_looked_up_costs_a_warning_alone(
    h100: ImaginedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "current", Mock(side_effect=KeyError("a bug")))

    with pytest.warns(RuntimeWarning, match="a bug"):
        assert h100.launched(CALL) == DEFAULT


COLUMN_MAJOR = on_gpu(empty(96, 64), empty(64, 128), empty(128, 96).t())
GIVEN, TRANSPOSED = Workload(96, 128, 64, layout="nn"), Workload(128, 96, 64, layout="tt")


def test_an_h100_looks_a_c_stored_by_columns_up_as_the_one_that_runs(h100: ImaginedGpu) -> None:
    """`hopper.gemm` computes C^T = B^T A^T there; `portable` does not, whose tiles are not
    transposed.
    """
    own = to_text(gemm.Config())
    h100.tune(
        winner(0, workload=GIVEN),
        winner(1, workload=TRANSPOSED, ratio=0.9),
        winner(kernel="hopper.gemm", config=own, workload=TRANSPOSED),
    )

    found = list(automatic.choices(COLUMN_MAJOR))

    assert found[:2] == [("hopper.gemm", own), ("portable", "")]


def test_an_a100_looks_a_c_stored_by_columns_up_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a100 = imagine(A100, tmp_path, monkeypatch)
    a100.tune(
        winner(0, workload=GIVEN, gpu=A100), winner(1, workload=TRANSPOSED, gpu=A100, ratio=0.9)
    )

    found = list(automatic.choices(COLUMN_MAJOR))

    lookup.clear_cache()
    assert found[0] == ("portable", CONFIGS[0])


# What was measured of a product.


CUDA = torch.device("cuda", 0)


def test_the_gain_of_a_call_is_that_of_its_workload(h100: ImaginedGpu) -> None:
    layer = Workload(16, 4096, 2048)
    h100.tune(winner(0, workload=AT, ratio=0.93), winner(0, workload=layer, ratio=0.95))

    assert automatic.measured_gain(CALL) == 0.93
    assert automatic.measured_gain(replace(CALL, batch=(2,))) is None
    assert automatic.measured_gain(replace(CALL, device=torch.device("cpu"))) is None
    assert automatic.measured_gains(CUDA, 4096, 2048, torch.bfloat16) == {16: 0.95}
    assert automatic.measured_gains(CUDA, 4096, 4096, torch.float64) == {}
    assert automatic.measured_gains(torch.device("cpu"), 4096, 2048, torch.bfloat16) == {}


@pytest.mark.parametrize(
    ("ask", "answer"),
    [
        (lambda: automatic.measured_gain(CALL), None),
        (lambda: automatic.measured_gains(CUDA, 4096, 4096, torch.bfloat16), {}),
    ],
    ids=["a call", "a weight"],
)
def test_a_store_that_cannot_be_read_costs_the_gain_alone(
    ask: Callable[[], object], answer: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "tuning_index", Mock(side_effect=OSError("no disk")))

    with pytest.warns(RuntimeWarning, match="no tuning result is used: no disk"):
        assert ask() == answer


# Calls for which nothing is looked up.


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"batch": (2,)}, id="a batch"),
        pytest.param({"M": 0}, id="empty"),
        pytest.param({"device": torch.device("cpu")}, id="on the CPU"),
    ],
)
def test_nothing_is_looked_up_for_batches_empty_calls_and_cpus(
    h100: ImaginedGpu, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tuner = Mock()
    tuner.choices.side_effect = lambda *_: pytest.fail("asks what was tuned")
    monkeypatch.setattr(hooks.tuner, "_loaded", tuner)
    call = replace(CALL, **changes)

    launch = launcher.best_launcher(call, "on", no_product=False)

    assert callable(launch)


A, B = torch.randn(6, 5), torch.randn(5, 4)
MATMUL, TUNE = cast("Callable[..., Any]", outblas.matmul), cast("Callable[..., Any]", outblas.tune)


# Tuning a shape that is met for the first time.


@dataclass
class FakeSweep:
    """Stands for `autotune.sweep`: stores `found` as the winner, if there is one, or fails.

    `calls` has the shape and the keywords of each call.
    """

    gpu: ImaginedGpu
    found: str = ""
    error: Exception | None = None
    calls: list[tuple[tuple[int, int, int], dict[str, Any]]] = field(default_factory=list)

    def __call__(self, kernels: Any, shape: tuple[int, int, int], **options: Any) -> outcome.Sweep:
        self.calls.append((shape, options))
        if self.error:
            raise self.error
        best = winner(config=self.found or CONFIGS[0], workload=Workload(*shape))
        if self.found:
            self.gpu.tune(best)
        return Mock(winners=[best])


@pytest.fixture
def swept(h100: ImaginedGpu, monkeypatch: pytest.MonkeyPatch) -> FakeSweep:
    """What stands for sweeps on the imagined H100."""
    found = FakeSweep(h100, found=CONFIGS[3])
    monkeypatch.setattr(sweeping, "sweep", found)
    return found


_sizes = itertools.count(72, 8)


@pytest.fixture
def first_met() -> Problem:
    """A call of a shape that this process has not met: what could not be tuned once is not tried
    again.
    """
    return on_gpu(empty(next(_sizes), 64), empty(64, 64).t())


def choices(call: Problem, tune: str = "on") -> list[tuple[str, str]]:
    return list(automatic.choices(call, tune))


def test_a_shape_is_tuned_once_and_shortly_when_it_is_first_met(
    swept: FakeSweep, first_met: Problem
) -> None:
    assert choices(first_met, "") == []
    assert swept.calls == [], "no shape is tuned by default"
    assert choices(first_met) == choices(first_met) == [("portable", CONFIGS[3])]

    ((shape, options),) = swept.calls
    assert shape == (first_met.M, first_met.N, first_met.K)
    assert options["budget"] == automatic.FIRST_SECONDS
    assert options["trials"] == automatic.FIRST_TRIALS


def test_the_environment_sets_the_budget_of_the_first_tuning(
    swept: FakeSweep, first_met: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTBLAS_TUNE_BUDGET", "soon")
    with pytest.warns(RuntimeWarning, match="OUTBLAS_TUNE_BUDGET is .soon., expected a number"):
        assert choices(replace(first_met, M=first_met.M + 1)) == []
    monkeypatch.setenv("OUTBLAS_TUNE_BUDGET", "1.5")
    assert choices(first_met) == [("portable", CONFIGS[3])]

    assert [options["budget"] for _, options in swept.calls] == [1.5]


def test_a_tuning_that_fails_is_warned_of_and_not_tried_again(
    swept: FakeSweep, first_met: Problem
) -> None:
    swept.error = RuntimeError("the GPU is on fire")
    message = f"{first_met.M}x64x64 bfloat16 nt could not be tuned: the GPU is on fire"

    with pytest.warns(RuntimeWarning, match=message):
        assert choices(first_met) == []

    assert choices(first_met) == []
    assert len(swept.calls) == 1


def test_a_shape_is_tuned_once_though_the_store_keeps_nothing(
    swept: FakeSweep, first_met: Problem
) -> None:
    """The winner cannot be looked up afterwards: the next call must not tune again."""
    swept.found = ""

    found = [choices(first_met) for _ in range(3)]

    assert found == [[], [], []]
    assert len(swept.calls) == 1


@pytest.fixture
def measured(h100: ImaginedGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mock:
    """What measures on the imagined H100, where the user's store can have no file."""
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(sweeping, "visible_gpus", lambda gpus: ["0"])
    found = Mock(return_value=outcome.Sweep())
    monkeypatch.setattr(sweeping.engine, "run_local", found)
    return found


def test_a_budget_that_ends_before_the_first_trial_is_named(
    measured: Mock, first_met: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not "none is valid": another process had the GPU for all that time."""
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path / "cache"))
    nothing = Mock(finished=False, trials=[], unmeasured=[], winner=None, failure="")
    measured.return_value = outcome.Sweep([nothing])

    with pytest.warns(RuntimeWarning, match=r"the budget ended after \d+ s, before a trial"):
        choices(first_met)


# Bad arguments.


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ValueError, "tune is 'yes', expected one of", lambda: MATMUL(A, B, tune="yes")),
        (ValueError, "tune is ''", lambda: MATMUL(A, B, tune="")),
        (TypeError, "tune is bool, expected a str", lambda: MATMUL(A, B, tune=True)),
        (ValueError, "input is on cpu, expected an NVIDIA GPU", lambda: outblas.tune(A, B)),
        (TypeError, "input is list, expected a torch.Tensor", lambda: TUNE([1.0], B)),
        (ValueError, r"input.shape\[1\] is 5 but other", lambda: outblas.tune(A, B[:4])),
        (TypeError, "unexpected keyword argument 'a'", lambda: TUNE(A, B, a=A)),
        (ValueError, "out_dtype is", lambda: outblas.tune(A, B, out_dtype=torch.float16)),
    ],
)
def test_bad_arguments_are_named(
    error: type[Exception], message: str, call: Callable[[], Any]
) -> None:
    with pytest.raises(error, match=message):
        call()
