"""What the CUDA driver says of contexts, streams and captures, and threads of the host."""

import os
import threading
from typing import Any

import pytest

from outblas.device import driver


def test_threads_have_numbers_of_their_own() -> None:
    """Also those that begin when others have ended, which Python's and the system's numbers do not
    tell apart.
    """
    numbers = [driver.thread()]
    for _ in range(3):
        thread = threading.Thread(target=lambda: numbers.append(driver.thread()))
        thread.start()
        thread.join()

    assert len(set(numbers)) == 4


def test_a_forked_child_has_a_background_of_its_own() -> None:
    """The parent's thread is not there, and jobs for it would wait for ever."""
    assert driver.background().submit(lambda: 3).result() == 3
    child = os.fork()
    if not child:
        os._exit(driver.background().submit(lambda: 7).result(timeout=20))

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


class TestWithoutADriver:
    """Nothing is known, and nothing fails."""

    @pytest.fixture(autouse=True)
    def no_driver(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The driver's library lacks every function."""
        monkeypatch.setattr(driver, "_function", lambda name: None)

    def test_no_context_and_no_stream_has_a_number(self) -> None:
        assert (driver.context(), driver.stream_id(4096)) == (None, None)

    def test_a_capture_is_not_relaxed(self) -> None:
        with driver.relaxed_capture():
            pass


class FakeDriver:
    """The mode of captures of a driver: `modes` has those that were asked for. It refuses them with
    the error `status`, where that is not 0.
    """

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.modes: list[int] = []

    def exchange_mode(self, mode: Any) -> int:
        self.modes.append(mode._obj.value)
        mode._obj.value = 0  # the mode before
        return self.status


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """A driver that cannot say which context is current."""
    fake = FakeDriver()
    functions = {
        "cuCtxGetId": lambda context, number: 201,
        "cuThreadExchangeStreamCaptureMode": fake.exchange_mode,
    }
    monkeypatch.setattr(driver, "_function", functions.get)
    return fake


def test_the_mode_of_captures_is_set_and_set_back(fake: FakeDriver) -> None:
    with driver.relaxed_capture():
        assert fake.modes == [driver._RELAXED]

    assert fake.modes == [driver._RELAXED, 0]


def test_a_mode_that_could_not_be_set_is_not_set_back(fake: FakeDriver) -> None:
    fake.status = 3

    with driver.relaxed_capture():
        pass

    assert len(fake.modes) == 1
