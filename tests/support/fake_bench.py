"""A measuring worker that is played, for tests of what drives one."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from outblas.autotune.measure.isolated import WorkerDied
from outblas.autotune.measure.worker import Screened
from outblas.base.configs import from_text
from support.faulty_kernel import Config


def number(of):
    return number_in(of.config)


def number_in(config):
    return from_text(Config, config).number


@dataclass
class FakeWorker:
    """Stands for a worker: µs by a config's number, 100 for cuBLAS. Goes `down` with `status` at
    that call of that config (of any, for None), but for the first `spared` times, and `dies` times
    at most.
    """

    down: tuple[str, int | None] | None = None
    spared: int = 0
    us: float = 50.0
    seconds: float = 0.0
    sleep: Callable[[float], None] = time.sleep
    calls: list[tuple[str, int | None]] = field(default_factory=list)
    unlocked: str = ""
    status: str = "crash"
    dies: int = 1 << 30

    def open(self, workload):
        self._called("open")
        return 100.0

    def screen(self, workload, entry, best_us):
        us = self._called("screen", entry)
        return Screened("ok", us=us, ratio=100 / us, ratio_low=100 / us, ratio_high=100 / us)

    def race(self, workload, entries, rounds):
        return [100.0] * rounds, [[self._called("race", entry)] * rounds for entry in entries]

    def _called(self, call, entry=None):
        config = from_text(Config, entry[1]).number if entry else None
        self.sleep(self.seconds)
        self.calls.append((call, config))
        if (
            self.down in ((call, config), (call, None))
            and self.calls.count((call, config)) > self.spared
            and self.dies
        ):
            self.dies -= 1
            raise WorkerDied(self.status, "a bad day")
        return self.us + (config or 0)

    def configs(self, call):
        return [config for name, config in self.calls if name == call]
