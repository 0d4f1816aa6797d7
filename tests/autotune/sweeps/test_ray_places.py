"""GPUs of a cluster as the tuner sees them, with a cluster that is played: what the death of an
actor costs. test_ray_engine.py has a real one.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from support.in_process import InProcessWorker
from support.sweeps import SUBJECT

from outblas.autotune import Progress, Sweep, sweep
from outblas.autotune.measure.progress import Report, silent
from outblas.autotune.sweeps import ray_engine

pytestmark = pytest.mark.usefixtures("faulty_log")


class ActorDied(Exception):
    """As Ray's."""


class FakeActor:
    """An actor in this process: it is dead after `deaths` has its next call of that method."""

    def __init__(self, ray: "FakeRay", instance: object) -> None:
        self.ray, self.instance, self.dead = ray, instance, False
        FakeRay.actors.append(self)

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any) -> Callable[[], Any]:
            self.ray.calls.append(arguments[0] if name == "measure" else name)
            self.dead |= next(self.ray.deaths, "") == "dies" if "screen" in arguments else False
            return lambda: self._answer(name, arguments)

        return SimpleNamespace(remote=remote, options=lambda **_: SimpleNamespace(remote=remote))

    def _answer(self, name: str, arguments: tuple[Any, ...]) -> Any:
        if self.dead:
            raise ActorDied("its node went away")
        return getattr(self.instance, name)(*arguments)


class FakeRay:
    """Stands for the module: a cluster with one CPU. `deaths` says for each screening whether its
    actor dies.
    """

    actors: ClassVar[list[FakeActor]]  # those of the last cluster
    exceptions = SimpleNamespace(
        RayError=ActorDied, RayTaskError=ZeroDivisionError, GetTimeoutError=TimeoutError
    )

    def __init__(self, deaths: list[str]) -> None:
        self.deaths: Iterator[str] = iter(deaths)
        self.calls: list[str] = []
        FakeRay.actors = []

    def is_initialized(self) -> bool:
        return True

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 1.0}

    def get_runtime_context(self) -> None:
        pass

    def remote(self, **_: object) -> Callable[[type], Any]:
        return lambda kind: SimpleNamespace(
            remote=lambda *arguments: FakeActor(self, kind(*arguments))
        )

    def get(self, reference: Callable[[], Any], timeout: float | None = None) -> Any:
        return reference()

    def kill(self, actor: FakeActor) -> None:
        actor.dead = True


def swept(
    path: Path, monkeypatch: pytest.MonkeyPatch, deaths: list[str], report: Report = silent
) -> tuple[Sweep, FakeRay]:
    """A sweep of three configs on the cluster."""
    ray = FakeRay(deaths)
    monkeypatch.setitem(sys.modules, "ray", ray)  # type: ignore[arg-type]
    monkeypatch.setattr(ray_engine, "MeasureWorker", InProcessWorker)
    monkeypatch.setenv("FAULTY_CONFIGS", "3")
    options: dict[str, Any] = {"dtype": "float32", "layout": "nn", "engine": "ray"}
    return sweep(SUBJECT, 16, store=path, progress=report, **options), ray


def test_a_config_with_which_actors_die_is_left_unmeasured(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried three times."""
    result, _ = swept(path, monkeypatch, ["", "dies", "dies", "dies"])

    (outcome,) = result.outcomes
    assert [trial.status for trial in outcome.trials] == ["ok"] * 2
    assert len(outcome.unmeasured) == 1
    assert "its node went away" in outcome.unmeasured[0].reason
    assert not result.finished


def test_a_workload_whose_actors_always_die_fails(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, _ = swept(path, monkeypatch, ["dies"] * 100)

    (failure,) = result.failures
    assert "5 actors died in a row without a result" in failure.reason


def test_an_interrupt_ends_the_actors(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.screened:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        swept(path, monkeypatch, [], interrupt)

    (actor,) = FakeRay.actors
    assert actor.dead
