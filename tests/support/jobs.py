"""Jobs of one workload with a worker and compilers that are played."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest

from outblas.autotune.measure.compile_pool import Compiled
from outblas.autotune.measure.progress import Report, silent
from outblas.autotune.search.target import TuneTarget
from outblas.autotune.store.records import Gpu, Workload
from outblas.autotune.store.store import Store
from outblas.autotune.sweeps import tuner
from outblas.autotune.sweeps.outcome import Job, Outcome
from outblas.base.configs import to_text
from support.fake_bench import FakeWorker, number_in
from support.faulty_kernel import Config
from support.sweeps import H100, SUBJECT, WORKLOAD

ONE = to_text(Config(number=1))


@dataclass
class FakeCompilers:
    """Stands for the compilers. Their compiles have taken `seconds`, or never end for None; those
    of configs 1 and 3 are `killed` so many times.

    `most`: by how many configs the bench was behind.
    """

    bench: FakeWorker
    seconds: float | None = None
    workers: int = 2
    futures: list[Future[Compiled]] = field(default_factory=list)
    most: int = 0
    killed: int = 0

    def submit(self, subject, workload, config, arch) -> Future[Compiled]:
        self.futures.append(Future())
        if self.killed and number_in(config) in (1, 3):
            self.killed -= 1
            self.futures[-1].set_result(Compiled("killed", "the compiler was killed"))
        elif self.seconds is not None:
            self.futures[-1].set_result(Compiled(seconds=self.seconds))
        self.most = max(self.most, len(self.futures) - len(self.bench.configs("screen")))
        return self.futures[-1]


def tuning(store: Store, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """A function that tunes the faulty kernel, which has so many sound configs."""

    def tune(
        bench: FakeWorker,
        configs: int = 3,
        *,
        on: Gpu = H100,
        targets: tuple[TuneTarget, ...] = (SUBJECT,),
        compilers: Any = None,
        report: Report = silent,
        workload: Workload = WORKLOAD,
        **options: Any,
    ) -> Outcome:
        monkeypatch.setenv("FAULTY_CONFIGS", str(configs))
        return tuner.tune(Job(targets, workload, **options), on, bench, compilers, store, report)  # type: ignore[arg-type]

    return tune


def screened(*benches: FakeWorker) -> list[int]:
    """The configs that workers have screened, by number."""
    return sorted(config for bench in benches for config in bench.configs("screen"))


def facts(config: str) -> tuple[Any, ...]:
    """A config of the faulty kernel, as `Store.claim` takes it."""
    return H100, WORKLOAD, "faulty", SUBJECT.fingerprint, config
