"""A GPU that the bench can time without one: figures that heat and noise change, and a virtual
device with the clocks and events that the protocols use.
"""

import contextlib
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outblas.bench import burst, campaign, schedule, sustained, turn
from outblas.bench.clock import Clock
from outblas.bench.operation import Operation
from outblas.bench.record import Device


class Machine:
    """µs a call of providers on a GPU that heats up: every call slows as the run goes on."""

    def __init__(
        self, us: dict[str, float], *, seed: int, drift: float = 0.1, noise: float = 0.005
    ) -> None:
        """`us`: of a call of each provider on the cold device. `noise` is relative; with any, one
        turn in twenty also stumbles.
        """
        self.us = us
        self.random = random.Random(seed)
        self.drift, self.noise = drift, noise
        self.turns = 0

    def time(self, name: str) -> float:
        """µs a call of the next turn, which is this provider's."""
        heat = 1 + self.drift * self.turns / 60
        self.turns += 1
        stumble = 1.3 if self.noise and self.random.random() < 0.05 else 1.0
        return self.us[name] * heat * stumble * self.random.gauss(1, self.noise)

    def burst(self, rounds: int) -> dict[str, list[float]]:
        """The times of all providers in that many rounds, as the burst protocol orders them."""
        times: dict[str, list[float]] = {name: [] for name in self.us}
        for order in schedule.rounds(list(self.us), rounds):
            for name in order:
                times[name].append(self.time(name))
        return times


class VirtualGpu:
    """A device and the host beside it, each with a clock in µs. A launch costs the host
    `HOST_US`; the device runs launches one after another.
    """

    HOST_US = 12.0
    FOREIGN_US = 5.0  # of the kernel that stands between calls which are timed apart

    def __init__(self) -> None:
        self.host = 0.0
        self.device = 0.0
        self.launched: list[str] = []
        self._captured: list[Callable[[], None]] | None = None

    def launch(self, name: str, us: float) -> None:
        """Queues a kernel of `us` µs, or notes it in the graph that is being captured."""
        if self._captured is not None:
            self._captured.append(lambda: self._run(name, us))
            return
        self.host += self.HOST_US
        self._run(name, us)

    def _run(self, name: str, us: float) -> None:
        self.launched.append(name)
        self.device = max(self.device, self.host) + us

    def synchronize(self) -> None:
        self.host = max(self.host, self.device)

    def sleep(self, seconds: float) -> None:
        self.host += seconds * 1e6

    def perf_counter(self) -> float:
        return self.host / 1e6

    def event(self, enable_timing: bool = False) -> "VirtualEvent":
        return VirtualEvent(self)

    @contextlib.contextmanager
    def capture(self, graph: "VirtualGraph") -> Iterator[None]:
        """As torch.cuda.graph."""
        self._captured = graph.kernels
        try:
            yield
        finally:
            self._captured = None

    def graph_apart(self, call: turn.Call | None, calls: int) -> turn.Batch:
        """As `turn.graph_apart`, whose foreign kernel needs memory of a device."""

        def one() -> None:
            self.launch("foreign", self.FOREIGN_US)
            if call is not None:
                call()

        return turn.graph([one] * calls)


class VirtualEvent:
    """As torch.cuda.Event: the time on the device when it was recorded."""

    def __init__(self, gpu: VirtualGpu) -> None:
        self.gpu = gpu
        self.at = 0.0

    def record(self) -> None:
        self.at = max(self.gpu.device, self.gpu.host)

    def synchronize(self) -> None:
        self.gpu.host = max(self.gpu.host, self.at)

    def elapsed_time(self, end: "VirtualEvent") -> float:
        """Milliseconds."""
        return (end.at - self.at) / 1000


class VirtualGraph:
    """As torch.cuda.CUDAGraph: kernels that run without the host between them."""

    def __init__(self) -> None:
        self.kernels: list[Callable[[], None]] = []

    def replay(self) -> None:
        for kernel in self.kernels:
            kernel()


class SteadyClock(Clock):
    """SMs that always run at 1500 MHz."""

    def __init__(self) -> None:  # without a device
        pass

    def start(self, wait_us: float = 0.0) -> None: ...

    def stop(self) -> None: ...

    def mhz(self) -> float:
        return 1500.0


def _no_energy_meter() -> None:
    raise RuntimeError("no energy counter")


def install(gpu: VirtualGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the bench time that device, with a steady clock and without an energy counter."""
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.synchronize)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", VirtualGraph)
    monkeypatch.setattr(torch.cuda, "graph", gpu.capture)
    clocks = SimpleNamespace(sleep=gpu.sleep, perf_counter=gpu.perf_counter)
    for protocol in (burst, sustained, turn):
        monkeypatch.setattr(protocol, "time", clocks)
    monkeypatch.setattr(turn, "graph_apart", gpu.graph_apart)
    monkeypatch.setattr(campaign, "Clock", SteadyClock)
    monkeypatch.setattr(campaign, "EnergyMeter", _no_energy_meter)
    monkeypatch.setattr(Device, "current", lambda dtype: Device(None))
    monkeypatch.setattr(Operation, "operands", _operands)


def _operands(*_: Any) -> tuple[torch.Tensor, ...]:
    """Operands and an output, which virtual providers do not read."""
    return tuple(torch.empty(1, dtype=torch.bfloat16) for _ in range(3))
