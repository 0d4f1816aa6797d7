"""Sweeps on a Ray cluster: one actor per GPU measures and compiles; the driver decides what, and
has the store.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from outblas.autotune.measure.compile_pool import Compiled, Compilers
from outblas.autotune.measure.isolated import Cancelled, MeasureWorker, Raced
from outblas.autotune.measure.progress import Report
from outblas.autotune.measure.worker import Entry, Screened
from outblas.autotune.search.target import TuneTarget
from outblas.autotune.store.records import Gpu, Workload
from outblas.autotune.store.store import Store
from outblas.autotune.sweeps.engine import Engine, Place
from outblas.autotune.sweeps.options import SweepOptions
from outblas.autotune.sweeps.outcome import Job, Sweep
from outblas.base import limits
from outblas.base.processes import START_SECONDS, WorkerDied

T = TypeVar("T")

# Actors that die in a row without a result before their GPU is given up: more than a config may
# take with it.
RESTARTS = 5
CONNECT_SECONDS = 10.0


def run(jobs: Sequence[Job], store: Store, report: Report, options: SweepOptions) -> Sweep:
    """Tunes workloads on all GPUs of a cluster; on a cluster without GPUs, in the interpreter on
    its CPUs.

    The cluster is the one that this process is connected to, or the one at `address`; otherwise the
    one of RAY_ADDRESS, one on this machine, or one that is started and ended here. Its nodes need
    outblas and the kernels' modules, but no shared files. The GPUs of a node share its processes
    that compile.

    An actor that dies costs only time: to the tuner it is a worker that was killed from outside,
    and another actor takes its place.

    Raises ImportError without ray, ValueError or ConnectionError for an address where no cluster
    answers.
    """
    try:
        import ray
    except ImportError:
        raise ImportError("engine 'ray' needs ray: pip install 'outblas[ray]'") from None
    with _connected(ray, options.address):
        resources = ray.cluster_resources()
        needs = "GPU" if resources.get("GPU", 0) >= 1 else "CPU"
        places = min(len(jobs), int(resources.get(needs, 0)))
        if places < 1:
            raise ValueError("the Ray cluster has neither GPUs nor CPUs")
        gpus = [RemoteGpu(ray, needs, options) for _ in range(places)]
        remote = [Place(gpu, gpu if needs == "GPU" else None) for gpu in gpus]
        return Engine(jobs, remote, store, report, options).run()


@contextlib.contextmanager
def _connected(ray: Any, address: str | None) -> Iterator[None]:
    if ray.is_initialized():
        yield
        return
    address = address or os.environ.get("RAY_ADDRESS") or None
    _check(address)
    try:
        ray.init(
            address=address, include_dashboard=False, log_to_driver=False, logging_level="error"
        )
    except (OSError, RuntimeError, ValueError, SystemExit) as error:
        # SystemExit: Ray exits a process that it cannot connect.
        where = f"no Ray cluster of this version answers at {address}"
        raise ConnectionError(
            f"{where if address else 'Ray cannot be started'}: {_brief(error)}; a cluster that "
            "asks for a token needs RAY_AUTH_MODE=token here"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _check(address: str | None) -> None:
    """Raises ValueError for an invalid address, ConnectionError where nothing answers: Ray itself
    would try for minutes to reach it.
    """
    if address in (None, "auto", "local"):
        return
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        raise ValueError(
            f"address is {address!r}, expected host:port of a cluster's head, 'auto' or 'local'"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ConnectionError(f"no Ray cluster answers at {address}: {error}") from None


def _brief(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


# Runs on a node.
class Actor:
    """One GPU of a node, or one of its CPUs: a measuring worker, and compilers on a GPU."""

    def __init__(self, on_gpu: bool, workers: int | None, trial_seconds: float) -> None:
        import ray

        context = ray.get_runtime_context()
        visible = str(context.get_accelerator_ids()["GPU"][0]) if on_gpu else "cpu"
        self._label = f"{socket.gethostname()}:{visible}"
        self._bench = MeasureWorker(visible, trial_seconds=trial_seconds)
        self._compilers = None
        if on_gpu:
            here = context.get_node_id()
            nodes = {node["NodeID"]: node["Resources"] for node in ray.nodes()}
            resources: dict[str, float] = nodes.get(here, {})
            cpus = int(resources.get("CPU", 0)) or limits.default_workers()
            on_node = workers or min(limits.default_workers(), cpus)
            gpus = max(1.0, resources.get("GPU", 1.0))
            self._compilers = Compilers(max(1, int(on_node / gpus)))

    def start(self) -> tuple[str, int]:
        """Returns the host and the GPU, and the number of processes that compile."""
        return self._label, self._compilers.workers if self._compilers else 0

    def measure(self, method: str, *arguments: Any) -> tuple[Any, str]:
        """Returns what a method of the worker returns, or its WorkerDied, and the state that the
        driver needs.
        """
        try:
            result = getattr(self._bench, method)(*arguments)
        except WorkerDied as death:
            result = death.status, str(death)
        return result, self._bench.unlocked

    def compile(self, target: TuneTarget, *arguments: Any) -> Compiled:
        assert self._compilers is not None, "the driver asks on GPUs only"
        return self._compilers.submit(target, *arguments).result()

    def await_one(self, target: TuneTarget, seconds: float) -> None:
        assert self._compilers is not None, "the driver asks on GPUs only"
        self._compilers.await_one(target, seconds)


# Runs on the driver.
class RemoteGpu:
    """A GPU of the cluster, whichever is free, as the tuner sees one here: it is its own bench and
    its own compilers.
    """

    def __init__(self, ray: Any, needs: str, options: SweepOptions) -> None:
        self._ray, self._on_gpu = ray, needs == "GPU"
        concurrency = {"measure": 1, "compile": os.cpu_count() or 1}
        self._class = ray.remote(
            num_gpus=int(self._on_gpu),
            num_cpus=int(not self._on_gpu),
            concurrency_groups=concurrency,
        )(Actor)
        self._arguments = self._on_gpu, options.compile_workers, options.trial_seconds
        self._actor: Any = None
        self._needs = needs
        self._lost = 0  # actors in a row, without a result
        self._cancelled = False
        self.label, self.unlocked, self.workers = "", "", 1

    def describe(self) -> Gpu:
        gpu = self._measure(MeasureWorker.describe)
        if self._on_gpu and gpu.arch == 0:
            raise WorkerDied("failed", "torch finds no NVIDIA GPU that it can use")
        return gpu

    def open(self, workload: Workload) -> float:
        return self._measure(MeasureWorker.open, workload)

    def screen(self, workload: Workload, entry: Entry, best_us: float | None) -> Screened:
        return self._measure(MeasureWorker.screen, workload, entry, best_us)

    def race(self, workload: Workload, entries: Sequence[Entry], rounds: int) -> Raced:
        return self._measure(MeasureWorker.race, workload, entries, rounds)

    def submit(
        self, target: TuneTarget, workload: Workload, config: str, arch: int
    ) -> Future[Compiled]:
        """Starts a compile on the node of the actor."""
        compiled = Future[Compiled]()
        method = self._started().compile.options(concurrency_group="compile")
        reference = method.remote(target, workload, config, arch)

        def settle(remote: Future[Compiled]) -> None:
            error = remote.exception()
            lost = Compiled("killed", f"its node or actor was lost: {error}")
            if compiled.set_running_or_notify_cancel():
                compiled.set_result(remote.result() if error is None else lost)

        reference.future().add_done_callback(settle)
        return compiled

    def await_one(self, target: TuneTarget, seconds: float) -> None:
        method = self._started().await_one.options(concurrency_group="compile")
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.get(method.remote(target, seconds))

    def cancel(self) -> None:
        self._cancelled = True
        self.close()

    def close(self) -> None:
        if self._actor is not None:
            with contextlib.suppress(Exception):
                self._ray.kill(self._actor)

    stop = close

    def _measure(self, method: Callable[..., T], *arguments: Any) -> T:
        """Calls a method of the actor's worker. Raises WorkerDied, Cancelled."""
        name = method.__name__
        actor = self._started()
        call = actor.measure.options(concurrency_group="measure").remote
        result, self.unlocked = self._answer(lambda: call(name, *arguments))
        if name in ("screen", "race"):
            self._lost = 0
        if isinstance(result, tuple) and isinstance(result[0], str):
            raise WorkerDied(*result)
        returned: T = result
        return returned

    def _started(self) -> Any:
        """Returns the actor, a new one where there is none. Raises WorkerDied, Cancelled."""
        if self._cancelled:
            raise Cancelled
        if self._actor is None:
            if self._lost >= RESTARTS:
                reason = f"{self._lost} actors died in a row without a result"
                raise WorkerDied("killed", reason)
            self._actor = self._class.remote(*self._arguments)
            self.label, self.workers = self._answer(self._actor.start.remote, START_SECONDS)
        return self._actor

    def _answer(self, ask: Callable[[], Any], seconds: float | None = None) -> Any:
        """Waits for the answer of the actor, and forgets an actor that is lost. With a limit it
        waits as long as the cluster has what the actor needs.
        """
        errors, begun = self._ray.exceptions, time.monotonic()
        reference = ask()
        while True:
            try:
                return self._ray.get(reference, timeout=seconds and 1.0)
            except errors.GetTimeoutError:
                waited = time.monotonic() - begun
                there = self._ray.cluster_resources().get(self._needs)
                if self._cancelled or (waited > (seconds or 0.0) and not there):
                    reason = f"the cluster has had no {self._needs} for {waited:.0f} s"
                    raise self._lose(reason) from None
            except errors.RayTaskError as error:  # raised by this program
                raise error.cause from error
            except errors.RayError as error:
                raise self._lose(_brief(error)) from None

    def _lose(self, reason: str) -> BaseException:
        self.close()
        self._actor = None
        self._lost += 1
        return Cancelled() if self._cancelled else WorkerDied("killed", f"its actor died: {reason}")
