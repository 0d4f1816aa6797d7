"""What the measuring worker times, in this process and without a GPU: which weights the calls
take.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import faulty_kernel
from support.faulty_kernel import Config
from support.sweeps import SUBJECT, WORKLOAD

from outblas.autotune.measure import worker
from outblas.autotune.measure.worker import Entry
from outblas.bench import cold
from outblas.core.configs import to_text

pytestmark = pytest.mark.usefixtures("faulty_log")

COLD = replace(WORKLOAD, weights="cold")
ENTRY: Entry = (SUBJECT, to_text(Config()))


@pytest.fixture
def multiplied(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The weights of each call of cuBLAS, in order."""
    found: list[torch.Tensor] = []
    mm = torch.mm

    def recording(a: torch.Tensor, b: torch.Tensor, **more: Any) -> torch.Tensor:
        found.append(b)
        return mm(a, b, **more)

    monkeypatch.setattr(torch, "mm", recording)
    return found


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The weights of each launch of the kernel, in order."""
    found: list[torch.Tensor] = []

    def product(config: Config) -> Callable[..., None]:
        def launch(a: torch.Tensor, b: torch.Tensor, c: None, out: torch.Tensor, *_: float) -> None:
            found.append(b)
            out.copy_(a @ b)

        return launch

    monkeypatch.setattr(faulty_kernel, "product", product)
    return found


def addresses(tensors: list[torch.Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def test_warm_calls_take_the_same_weights(launched: list[torch.Tensor]) -> None:
    worker.open_bench(WORKLOAD, on_gpu=False)
    worker.enter(ENTRY)
    launched.clear()

    worker.race([ENTRY], 3)

    assert len(launched) == 3
    assert len(set(addresses(launched))) == 1


def test_cold_calls_of_the_screen_take_copies_of_the_weights_in_turn(
    launched: list[torch.Tensor],
) -> None:
    worker.open_bench(COLD, on_gpu=False)

    found = worker.screen(ENTRY, None)

    first, second, *others = addresses(launched)[-2 * worker.SCREEN_ROUNDS :]
    assert found.status == "ok"
    assert first != second
    assert others == [first, second] * (worker.SCREEN_ROUNDS - 1)


def test_cold_calls_of_the_finals_take_copies_of_the_weights_in_turn(
    launched: list[torch.Tensor],
) -> None:
    worker.open_bench(COLD, on_gpu=False)
    worker.enter(ENTRY)
    launched.clear()

    worker.race([ENTRY], 3)

    first, second, *others = addresses(launched)
    assert first != second
    assert others == [first, second] * 2


def test_cold_calls_of_cublas_take_the_same_copies(
    launched: list[torch.Tensor], multiplied: list[torch.Tensor]
) -> None:
    worker.open_bench(COLD, on_gpu=False)
    worker.enter(ENTRY)
    launched.clear()
    multiplied.clear()

    worker.race([ENTRY], 3)

    assert addresses(multiplied) == addresses(launched)


def test_copies_of_the_weights_are_equal_and_lie_alike(multiplied: list[torch.Tensor]) -> None:
    worker.open_bench(replace(COLD, layout="nt"), on_gpu=False)

    first, second = multiplied[-2:]
    assert torch.equal(first, second)
    assert first.stride() == second.stride() == (1, 16)


def test_a_batch_takes_no_more_copies_than_it_has_time_for(
    launched: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small weights have thousands of copies, and with many rows a call takes long all the same."""
    monkeypatch.setattr(cold, "copies", lambda b, _: [b.clone() for _ in range(1000)])
    monkeypatch.setattr(worker, "SCREEN_US", 0.0)
    worker.open_bench(COLD, on_gpu=False)
    worker.enter(ENTRY)
    launched.clear()

    worker.race([ENTRY], 3)

    assert len(launched) == 6
    assert len(set(addresses(launched))) == 2


def test_a_config_that_is_wrong_is_not_timed_with_cold_weights() -> None:
    worker.open_bench(COLD, on_gpu=False)

    found = worker.screen((SUBJECT, to_text(Config(fault="wrong"))), None)

    assert (found.status, found.us) == ("wrong", None)
