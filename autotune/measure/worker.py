"""The code inside the isolated worker: it holds the workload's operands, the oracle and the timers,
and measures one config at a time.

`isolated.MeasureWorker`, on the driver's side, calls the functions here by name; they return plain
values. Whatever a config does to this process affects only that config, because the driver starts
another process.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from outblas.autotune.measure.products import UnusableConfig, product_of
from outblas.autotune.search import gpu
from outblas.autotune.search.target import TuneTarget
from outblas.autotune.store.records import Gpu, Status, Workload
from outblas.base.configs import from_text
from outblas.base.serve import brief
from outblas.bench import burst, cold, schedule, turn
from outblas.bench.clock import Clock
from outblas.bench.record import Device
from outblas.bench.statistics import ratio

SCREEN_ROUNDS = 3
SCREEN_IDLE = 0.01  # idle seconds before a screening turn
SCREEN_US = 20_000.0  # maximum duration of a screening turn
ONE_ROUND_BEYOND = 1.5  # times the best so far; a slower config gets only one round
Entry = tuple[TuneTarget, str]  # a kernel, and its config as text

_bench: _WorkloadTimer | None = None


@dataclass(frozen=True)
class Screened:
    """The result of screening a config. `lost`: this process is no longer usable. Figures are as in
    `records.Trial`.
    """

    status: Status
    reason: str = ""
    us: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    clock_mhz: float | None = None

    @property
    def lost(self) -> bool:
        """Whether the state of this worker can no longer be trusted."""
        return self.status in ("wrong", "device lost")


class _WorkloadTimer:
    """Checks and times configs at one workload on this process's device.

    The calls of a batch, cuBLAS's too, use `weights` in turn; that is B alone where it may be in
    L2.

    Where an epilogue follows the product, torch's calls for the same work are the base, and a
    config must pass the exact oracle without the epilogue, then the error bound with it. The base
    of groups is torch's `grouped_mm`.
    """

    def __init__(self, workload: Workload, on_gpu: bool) -> None:
        self.workload = workload
        self.device = "cuda" if on_gpu else "cpu"
        torch.set_float32_matmul_precision("high" if workload.dtype == "tf32" else "highest")
        self.product = product_of(workload, self.device)
        self.clock = Clock() if on_gpu else None
        self.calls: dict[Entry, tuple[turn.Call, turn.Batch]] = {}
        self.weights = self._weights()
        base = self.product.by_torch
        us = self._rough(base)
        self.short = us < turn.SHORT_US
        self.base = self._turn(base, us)
        self.cublas_us = us if workload.weights == "warm" else self._elapsed(self.base[1])

    def _weights(self) -> list[torch.Tensor]:
        """Returns B, or with cold weights as many copies of it as do not fit L2 together; the
        interpreter uses two.
        """
        b = self.product.b
        if self.workload.weights == "warm":
            return [b]
        on_gpu = self.device == "cuda"
        return cold.copies(b, Device.current(self.workload.dtype).l2_bytes if on_gpu else 0)

    def _rough(self, call: turn.WeightCall) -> float:
        """Measures roughly how many µs a call takes when its weights are in L2."""
        one = partial(call, self.weights[0])
        return turn.rough_us(one) if self.device == "cuda" else self._elapsed(turn.eager([one]))

    def _elapsed(self, batch: turn.Batch) -> float:
        """Returns the µs per call of one batch."""
        if self.device == "cuda":
            return turn.elapsed_us(batch)
        start = time.perf_counter()
        batch.run()
        return (time.perf_counter() - start) * 1e6 / batch.calls

    def _turn(self, call: turn.WeightCall, us: float) -> tuple[turn.Call, turn.Batch]:
        """Returns a warm call, and a batch of calls of about `us` µs each.

        All calls of a workload run in CUDA graphs, or none do, so that times are comparable. A
        batch uses no more copies of the weights than it has time for. Where there are many copies
        they are small, and the other data of such long calls evicts them from L2. The warm call
        uses the last weights of a batch, not the first.
        """
        weights = self.weights[: max(2, int(SCREEN_US / us))]
        warm = partial(call, weights[-1])
        if self.device == "cpu":
            return warm, turn.eager([partial(call, b) for b in weights])
        calls = max(2, min(turn.CALLS, int(SCREEN_US / us)))
        return warm, cold.batch(call, weights, us, short=self.short, calls=calls)

    def prepare(self, entry: Entry) -> turn.WeightCall:
        """Compiles or loads the kernel, and checks it against the oracle. Raises
        UnusableConfig.
        """
        target, text = entry
        module = target.load()
        return self.product.prepare(module, from_text(module.Config, text))

    def batch(self, entry: Entry) -> tuple[turn.Call, turn.Batch]:
        call = self.prepare(entry)
        return self._turn(call, self._rough(call))

    def screen(self, entry: Entry, best_us: float | None) -> Screened:
        call = self.prepare(entry)
        us = self._rough(call)
        self.calls = {entry: self._turn(call, us)}
        rounds = 1 if best_us is not None and us > ONE_ROUND_BEYOND * best_us else SCREEN_ROUNDS
        times, clocks = self.rounds([entry], rounds, SCREEN_IDLE)
        config_us, base_us = times[entry], times[None]
        ratios = [base / config for base, config in zip(base_us, config_us, strict=True)]
        mhz = statistics.median(clocks[entry]) if clocks else None
        return Screened(
            "ok",
            us=statistics.median(config_us),
            ratio=ratio(base_us, config_us).median if rounds > 1 else ratios[0],
            ratio_low=min(ratios),
            ratio_high=max(ratios),
            clock_mhz=mhz,
        )

    def rounds(
        self, entries: Sequence[Entry], count: int, idle: float
    ) -> tuple[dict[Entry | None, list[float]], dict[Entry | None, list[float]]]:
        """Returns the µs per call, and the MHz, of each entry and of cuBLAS (None), measured in
        turns.
        """
        batches: dict[Entry | None, tuple[turn.Call, turn.Batch]] = {None: self.base}
        batches |= {entry: self.calls[entry] for entry in entries}
        if self.clock is not None:
            by_name = {str(i): batch for i, batch in enumerate(batches.values())}
            samples = burst.run(by_name, self.clock, rounds=count, idle=idle)
            names = dict(zip(batches, by_name, strict=True))
            return (
                {key: samples[name].us for key, name in names.items()},
                {key: samples[name].mhz for key, name in names.items()},
            )
        times: dict[Entry | None, list[float]] = {key: [] for key in batches}
        for order in schedule.rounds(list(batches), count):
            for key in order:
                times[key].append(self._elapsed(batches[key][1]))
        return times, {}


def describe() -> Gpu:
    """Returns the GPU that this process sees."""
    return gpu.current()


def open_bench(workload: Workload, on_gpu: bool) -> float:
    """Makes the operands of a workload and drops the previous ones; returns cuBLAS's µs per
    call.
    """
    global _bench
    _bench = None
    if on_gpu:
        torch.cuda.empty_cache()
    try:
        _bench = _WorkloadTimer(workload, on_gpu)
    except BaseException as error:  # the exception may hold objects that cannot be sent
        raise NotOpen(brief(error)) from None
    return _bench.cublas_us


def load(target: TuneTarget) -> None:
    """Imports a kernel's module and its DSL, which may take longer than a trial."""
    target.load()


def screen(entry: Entry, best_us: float | None) -> Screened:
    """Checks and times one config together with cuBLAS. `best_us` is the time of the best config so
    far.
    """
    return _guarded(lambda bench: bench.screen(entry, best_us))


def race(entries: Sequence[Entry], rounds: int) -> tuple[list[float], list[list[float]]]:
    """Returns the µs per call of cuBLAS and of each entry, by round; all take turns under the burst
    protocol. Entries that this process has not checked yet are checked first, and what it has of
    others is freed, because graphs hold memory. Raises whatever a config raises.
    """
    bench = _opened()
    bench.calls = {entry: bench.calls.get(entry) or bench.batch(entry) for entry in entries}
    times, _ = bench.rounds(entries, rounds, burst.IDLE_SECONDS)
    return times[None], [times[entry] for entry in entries]


class NotOpen(Exception):
    """This process has no operands, because it is not the one that was asked to make them."""


def _opened() -> _WorkloadTimer:
    if _bench is None:
        raise NotOpen
    return _bench


def _guarded(body: Callable[[_WorkloadTimer], Screened]) -> Screened:
    bench = _opened()
    try:
        return body(bench)
    except UnusableConfig as error:
        return Screened(error.status, str(error)[:1000])
    except (torch.OutOfMemoryError, MemoryError) as error:
        return Screened("out of memory", brief(error))
    except BaseException as error:  # a config may raise anything
        if bench.device == "cuda":
            try:
                torch.cuda.synchronize()
            except BaseException as lost:
                return Screened("device lost", brief(lost))
        return Screened("failed", brief(error))
