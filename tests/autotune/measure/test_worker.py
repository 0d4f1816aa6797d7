"""How the measuring worker checks and times configs, in this process and without a GPU: products,
what follows them, and those of groups.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import faulty_kernel, fused_kernel, grouped_kernel
from support.sweeps import SUBJECT, WORKLOAD

from outblas.autotune.measure import worker
from outblas.autotune.measure.products import UnusableConfig
from outblas.autotune.measure.worker import Entry, Screened
from outblas.autotune.search.target import TuneTarget
from outblas.autotune.store.records import Workload
from outblas.base.configs import to_text
from outblas.bench import cold

pytestmark = pytest.mark.usefixtures("faulty_log")

COLD = replace(WORKLOAD, weights="cold")
ENTRY: Entry = (SUBJECT, to_text(faulty_kernel.Config()))
FUSED = TuneTarget("fused", "support.fused_kernel")
GROUPED = TuneTarget("grouped", "support.grouped_kernel")
EPILOGUE = Workload(24, 32, 16, "float32", layout="nn", epilogue="bias+gelu+residual")
ROWS = Workload(100, 32, 16, "float32", grouping="8:zipf")
TERMS = Workload(16, 32, 100, "float32", layout="tn", grouping="8:zipf:terms")
CONFIGS: dict[str, Any] = {
    "faulty": faulty_kernel.Config,
    "fused": fused_kernel.Config,
    "grouped": grouped_kernel.Config,
}


def screened(target: TuneTarget, workload: Workload, fault: str = "") -> Screened:
    """What the worker finds of a config with a fault at a workload."""
    worker.open_bench(workload, on_gpu=False)
    return worker.screen((target, to_text(CONFIGS[target.name](fault=fault))), None)


@pytest.mark.parametrize(
    ("target", "workload"),
    [
        (SUBJECT, WORKLOAD),
        (SUBJECT, COLD),
        *(
            (FUSED, replace(EPILOGUE, dtype=dtype, out_dtype="", layout=layout, epilogue=epilogue))
            for dtype, layout in (("float32", "nn"), ("bfloat16", "tt"))
            for epilogue in ("bias", "gelu", "residual", "bias+gelu+residual", "swiglu+residual")
        ),
        (FUSED, replace(EPILOGUE, weights="cold")),
        (GROUPED, ROWS),
        (GROUPED, TERMS),
        (GROUPED, replace(ROWS, layout="nn")),
        (GROUPED, replace(ROWS, dtype="bfloat16", out_dtype="")),
        (GROUPED, replace(ROWS, grouping="8", weights="cold")),
    ],
    ids=str,
)
def test_a_config_is_timed_beside_torch(target: TuneTarget, workload: Workload) -> None:
    result = screened(target, workload)

    assert (result.status, result.reason) == ("ok", "")
    assert result.us is not None
    assert result.ratio is not None


@pytest.mark.parametrize(
    ("target", "workload", "fault", "status", "reason"),
    [
        (SUBJECT, COLD, "wrong", "wrong", "wrong: "),
        (SUBJECT, WORKLOAD, "refuse", "refused", "fault is refuse"),
        (SUBJECT, WORKLOAD, "raise", "failed", "RuntimeError: no luck today"),
        (SUBJECT, WORKLOAD, "base", "failed", "NotAnException"),
        (SUBJECT, WORKLOAD, "unprintable", "failed", "Unprintable"),
        (SUBJECT, WORKLOAD, "oom", "out of memory", "OutOfMemoryError: CUDA out of memory"),
        (FUSED, EPILOGUE, "wrong", "wrong", "wrong: "),
        (FUSED, EPILOGUE, "wrong-epilogue", "wrong", "bias+gelu+residual: wrong: "),
        (FUSED, EPILOGUE, "silent-epilogue", "wrong", "bias+gelu+residual: wrong: "),
        (FUSED, EPILOGUE, "refuse-epilogue", "refused", "fault is refuse-epilogue"),
        (FUSED, replace(EPILOGUE, epilogue=""), "wrong-epilogue", "ok", ""),
        *(
            (GROUPED, workload, *rest)
            for workload in (ROWS, TERMS)
            for rest in (
                ("wrong", "wrong", "wrong: "),
                ("leave-out", "wrong", "wrong: "),
                ("refuse", "refused", "fault is refuse"),
            )
        ),
    ],
)
def test_a_config_with_a_fault_is_found_out(
    target: TuneTarget, workload: Workload, fault: str, status: str, reason: str
) -> None:
    assert screened(target, workload).status == "ok"  # and leaves its result in memory

    result = screened(target, workload, fault)

    assert result.status == status
    assert result.reason.startswith(reason)
    assert (result.us is None) == (status != "ok")


def test_operands_that_cannot_be_had_are_an_error_with_the_reason() -> None:
    """fp32 cannot hold the sums of so long a K."""
    with pytest.raises(worker.NotOpen, match=r"expected K < 2\*\*24"):
        worker.open_bench(Workload(1, 1, 1 << 24, "float32"), on_gpu=False)


def test_a_race_checks_what_is_new_and_frees_what_is_out() -> None:
    entries: list[Entry] = [(SUBJECT, to_text(faulty_kernel.Config(number=n))) for n in range(3)]
    worker.open_bench(WORKLOAD, on_gpu=False)
    worker.screen(entries[0], None)

    base, times = worker.race(entries[:2], 3)

    assert len(base) == len(times[0]) == len(times[1]) == 3
    worker.race(entries[1:], 1)
    assert list(worker._opened().calls) == entries[1:]
    with pytest.raises(UnusableConfig, match="wrong: "):
        worker.race([entries[1], (SUBJECT, to_text(faulty_kernel.Config(fault="wrong")))], 1)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The weights of each launch of the kernel, in order."""
    weights: list[torch.Tensor] = []

    def product(config: object) -> Callable[..., None]:
        def launch(a: torch.Tensor, b: torch.Tensor, c: None, out: torch.Tensor, *_: float) -> None:
            weights.append(b)
            out.copy_(a @ b)

        return launch

    monkeypatch.setattr(faulty_kernel, "product", product)
    return weights


@pytest.mark.parametrize(("workload", "copies"), [(WORKLOAD, 1), (COLD, 2)], ids=["warm", "cold"])
def test_calls_take_copies_of_the_weights_in_turn(
    launched: list[torch.Tensor], workload: Workload, copies: int
) -> None:
    worker.open_bench(workload, on_gpu=False)
    worker.race([ENTRY], 1)
    launched.clear()

    worker.race([ENTRY], 3)

    places = [tensor.data_ptr() for tensor in launched]
    assert len(places) == 3 * copies
    assert len(set(places)) == copies
    assert places == places[:copies] * 3
    assert all(torch.equal(launched[0], b) for b in launched)
    assert {b.stride() for b in launched} == {launched[0].stride()}


def test_a_batch_takes_no_more_copies_than_it_has_time_for(
    launched: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small weights have thousands of copies, and with many rows a call takes long all the same."""
    monkeypatch.setattr(cold, "copies", lambda b, _: [b.clone() for _ in range(1000)])
    monkeypatch.setattr(worker, "SCREEN_US", 0.0)
    worker.open_bench(COLD, on_gpu=False)
    worker.race([ENTRY], 1)
    launched.clear()

    worker.race([ENTRY], 3)

    assert len(launched) == 6
