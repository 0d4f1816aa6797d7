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
from types import ModuleType

import torch

from ...bench import burst, cold, schedule, turn
from ...bench.clock import Clock
from ...bench.operands import normal
from ...bench.operation import Operation
from ...bench.record import Device
from ...bench.statistics import ratio
from ...core import problem
from ...core.configs import from_text
from ...core.epilogue import EpilogueArgs, glu_split
from ...core.problem import Launch
from ...verify.cases import Case
from ...verify.oracle import Exact
from ..search import gpu
from ..search.target import TuneTarget
from ..store.records import Gpu, Status, Workload
from .grouped_product import GroupedProduct
from .serve import brief
from .unusable import UnusableConfig

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
        self.product: _Plain | GroupedProduct
        if workload.grouping:
            self.product = GroupedProduct(workload, self.device)
        else:
            self.product = _Plain(workload, self.device)
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
        return turn.rough_us(one) if self.device == "cuda" else self._elapsed(turn.eager(one, 1))

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
            return warm, turn.eager_of([partial(call, b) for b in weights])
        calls = max(2, min(turn.CALLS, int(SCREEN_US / us)))
        return warm, cold.batch(call, weights, us, short=self.short, calls=calls)

    def prepare(self, entry: Entry) -> turn.WeightCall:
        """Compiles or loads the kernel, and checks it against the oracle. Raises
        UnusableConfig.
        """
        target, text = entry
        module = target.load()
        return self.product.prepare(module, from_text(module.Config, text))

    def screen(self, entry: Entry, best_us: float | None) -> Screened:
        call = self.prepare(entry)
        us = self._rough(call)
        self.calls[entry] = self._turn(call, us)
        rounds = 1 if best_us is not None and us > ONE_ROUND_BEYOND * best_us else SCREEN_ROUNDS
        times, clocks = self.rounds([entry], rounds, SCREEN_IDLE)
        own, base = times[entry], times[None]
        mhz = statistics.median(clocks[entry]) if clocks else None
        spread = ratio(base, own) if rounds > 1 else None
        return Screened(
            "ok",
            us=statistics.median(own),
            ratio=spread.median if spread else base[0] / own[0],
            ratio_low=min(b / t for b, t in zip(base, own, strict=True)),
            ratio_high=max(b / t for b, t in zip(base, own, strict=True)),
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


class _Plain:
    """One product: the operands, cuBLAS's call, and the kernel's."""

    def __init__(self, workload: Workload, device: str) -> None:
        dtype, out_dtype = (
            getattr(torch, name) for name in (workload.operand_dtype, workload.out_dtype)
        )
        self.is_tf32 = workload.dtype == "tf32"
        self.tensors = normal(workload.shape, workload.layout, dtype, out_dtype, device)
        case = Case(*workload.shape, dtype, out_dtype, layout=workload.layout, tf32=self.is_tf32)
        self.exact = Exact(case, device)
        self.fused = _Fused(workload, self.tensors) if workload.epilogue else None
        self.b = self.tensors[1]

    def by_torch(self, b: torch.Tensor) -> torch.Tensor:
        if self.fused is not None:
            return self.fused.by_torch(b)
        a, _, out = self.tensors
        if out.dtype == a.dtype:
            return torch.mm(a, b, out=out)
        if a.device.type == "cpu":
            return out.copy_(a.float() @ b.float())
        return torch.mm(a, b, out.dtype, out=out)

    def prepare(self, module: ModuleType, config: object) -> turn.WeightCall:
        """Plans a config, and checks it. Raises UnusableConfig."""
        asked = problem.problem(*self.tensors, tf32=self.is_tf32)
        if reason := module.unsupported(asked, config):
            raise UnusableConfig("refused", reason)
        launch: Callable[..., None] = module.plan(asked, config)
        result = self.exact(launch)
        if not result.ok:
            raise UnusableConfig("wrong", result.message)
        if self.fused is not None:
            return self.fused.prepare(module, config)
        a, _, out = self.tensors
        return lambda b: launch(a, b, None, out, 1.0, 0.0)


class _Fused:
    """A workload's product with its epilogue: the operands, torch's calls, and the kernel's."""

    def __init__(
        self, workload: Workload, tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    ) -> None:
        a, b, x = tensors
        self.workload, self.a, self.b = workload, a, b
        self.operation = Operation(workload.dtype, workload.steps)
        split = glu_split(workload.steps.activation)
        self.out = x.new_empty(x.shape[0], x.shape[1] // split)
        self.extras = self.operation.extras(a, b, self.out)

    def by_torch(self, b: torch.Tensor) -> torch.Tensor:
        return self.operation.by_torch(self.a, b, self.out, self.extras)

    def prepare(self, module: ModuleType, config: object) -> turn.WeightCall:
        """Plans a config with the epilogue, and checks it. Raises UnusableConfig."""
        extra = EpilogueArgs(self.workload.steps.activation, self.extras.bias, self.extras.residual)
        tf32 = self.workload.dtype == "tf32"
        asked = problem.problem(self.a, self.b, self.out, tf32=tf32, extra=extra)
        if reason := module.unsupported(asked, config):
            raise UnusableConfig("refused", reason)
        launch: Launch = module.plan(asked, config)
        fault = self.operation.fault(
            partial(self._checked_call, launch),
            self.workload.shape,
            self.a.device.type,
            self.workload.layout,
        )
        if fault is not None:
            raise UnusableConfig("wrong", f"{self.workload.epilogue}: {fault}")
        bias, residual = self.extras.bias, self.extras.residual
        a, out = self.a, self.out
        return lambda b: launch(a, b, None, out, 1.0, 0.0, bias, residual, None)

    def _checked_call(
        self, launch: Launch, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor
    ) -> turn.Call:
        extras = self.operation.extras(a, b, out)

        def call() -> torch.Tensor:
            launch(a, b, None, out, 1.0, 0.0, extras.bias, extras.residual, None)
            return out

        return call


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


def enter(entry: Entry) -> Screened:
    """Makes a config ready for `race`, and checks it again; returns no figures."""
    return _guarded(_enter(entry))


def _enter(entry: Entry) -> Callable[[_WorkloadTimer], Screened]:
    def run(bench: _WorkloadTimer) -> Screened:
        if entry not in bench.calls:
            call = bench.prepare(entry)
            bench.calls[entry] = bench._turn(call, bench._rough(call))
        return Screened("ok")

    return run


def race(entries: Sequence[Entry], rounds: int) -> tuple[list[float], list[list[float]]]:
    """Returns the µs per call of cuBLAS and of each entry, by round; all take turns under the burst
    protocol.
    """
    times, _ = _opened().rounds(entries, rounds, burst.IDLE_SECONDS)
    return times[None], [times[entry] for entry in entries]


def forget(entries: Sequence[Entry]) -> None:
    """Frees what was kept for configs that are out of the race, because graphs hold memory."""
    if _bench is not None:
        for entry in entries:
            _bench.calls.pop(entry, None)


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
