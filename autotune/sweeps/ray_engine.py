"""Sweeps on a Ray cluster: one actor per GPU, one call of it per workload, and the store with the
driver.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..measure.compile_pool import Compilers, default_workers
from ..measure.isolated import START_SECONDS, MeasureWorker, WorkerDied
from ..measure.progress import Progress, Report, Stage, silent
from ..search.candidates import by_model
from ..search.strategy import ModelRanked
from ..store.claims import Claim
from ..store.records import BestConfig, Facts, Gpu, Trial, Workload
from ..store.store import Store
from .job_view import JobView
from .outcome import LEAST_SECONDS, Budget, Failure, Sweep, one_at_a_time
from .tuner import Job, Outcome, tune

# How often a worker may die without a new trial before its workload, or its GPU, is given up.
RESTARTS = 3
PERIOD = 0.25  # seconds between two snapshots of a workload
CONNECT_SECONDS = 10.0


@dataclass(frozen=True)
class Question:
    """A worker's question to the store: a method of `job_view.TrialStore` with its arguments."""

    method: str
    facts: tuple[Any, ...]
    arguments: dict[str, Any]


# The messages of a worker, in the order of events. A Trial and a BestConfig are for the store. The
# clocks of a Progress count from its sending, because machines share no clock.
Message = Trial | BestConfig | Progress | Question | Outcome


def run(
    jobs: Sequence[Job],
    store: Store,
    report: Report = silent,
    *,
    budget: float | None = None,
    address: str | None = None,
    workers: int | None = None,
) -> Sweep:
    """Tunes workloads on all GPUs of a cluster; on a cluster without GPUs, in the interpreter on
    its CPUs.

    The cluster is the one that this process is connected to, or the one at `address`; otherwise the
    one of RAY_ADDRESS, one on this machine, or one that is started and ended here. Its nodes need
    outblas and the kernels' modules, but no shared files. On each node `workers` processes compile,
    by default as many as the node can carry, and its GPUs share them.

    The death of a worker costs only time. Its workload continues with another worker, which tries
    the interrupted config once more at the end, and leaves it unmeasured if that worker dies too. A
    workload whose workers die again and again without a result counts as failed.

    Raises ImportError without ray, ValueError or ConnectionError for an address where no cluster
    answers.
    """
    try:
        import ray
    except ImportError:
        raise ImportError("engine 'ray' needs ray: pip install 'outblas[ray]'") from None
    with _connected(ray, address):
        return _Driver(ray, jobs, store, report, budget, workers).run()


@contextlib.contextmanager
def _connected(ray: Any, address: str | None) -> Iterator[None]:
    if ray.is_initialized():
        if ray.util.client.ray.is_connected():
            raise ValueError(
                "this process is connected through Ray Client, expected one that runs on a node "
                "of the cluster: results are streamed to it"
            )
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
        raise ConnectionError(_connection_message(address, error)) from error
    try:
        yield
    finally:
        ray.shutdown()


def _connection_message(address: str | None, error: BaseException) -> str:
    """Returns a message for the user about why there is no cluster."""
    if address:
        message = f"no Ray cluster of this version answers at {address}"
    else:
        message = "Ray cannot be started"
    if "AuthenticationError" in f"{error!r} {error.__cause__}":
        return f"{message}, or it asks for a token: Ray sends yours only if RAY_AUTH_MODE is token"
    return message if isinstance(error, SystemExit) else f"{message}: {_brief(error)}"


def _check(address: str | None) -> None:
    """Raises ValueError for an invalid address, ConnectionError where no cluster answers.

    Ray itself would try for minutes to reach an address where nothing answers.
    """
    if address in (None, "auto", "local"):
        return
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        raise ValueError(
            f"address is {address!r}, expected host:port of a cluster's head, 'auto' or 'local'"
        )
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS) as there:
            there.settimeout(CONNECT_SECONDS)
            # the start of a gRPC connection
            there.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
            frame = there.recv(9)[3:4]
    except (OSError, OverflowError) as error:
        raise ConnectionError(f"no Ray cluster answers at {address}: {error}") from None
    if frame != b"\4" and os.environ.get("RAY_USE_TLS", "0") == "0":
        raise ConnectionError(
            f"another program answers at {address}: the port of a Ray cluster's head is 6379 by "
            "default"
        )


def _brief(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


# Runs on a node.
class Worker:
    """The actor of one GPU, with a measuring process and compilers that outlive a workload."""

    def __init__(self, on_gpu: bool, workers: int | None) -> None:
        import ray

        self._on_gpu = on_gpu
        visible = (
            str(ray.get_runtime_context().get_accelerator_ids()["GPU"][0]) if on_gpu else "cpu"
        )
        self._label = f"{socket.gethostname()}:{visible}"
        self._bench = MeasureWorker(visible)
        self._compilers = Compilers(_compile_workers(workers)) if on_gpu else None
        self._line = _DriverLine()

    def start(self) -> Gpu | str:
        """Returns the GPU, or why there is none."""
        try:
            self._gpu = self._bench.describe()
        except WorkerDied as death:
            return f"{self._label}: {death}"
        if self._on_gpu and self._gpu.arch == 0:
            return f"{self._label}: torch finds no NVIDIA GPU that it can use"
        return self._gpu

    def tune(self, job: Job) -> Iterator[Message]:
        """Runs a job. Each `Question` waits for a call of `answer`; the last message is the
        outcome.
        """
        line = self._line = _DriverLine()
        threading.Thread(target=self._work, args=(job, line), daemon=True).start()
        while True:
            message = line.sent.get()
            if isinstance(message, BaseException):
                raise message
            yield message
            if isinstance(message, Outcome):
                return

    def answer(self, value: Any) -> None:
        self._line.answers.put(value)

    def _work(self, job: Job, line: _DriverLine) -> None:
        try:
            outcome = tune(
                job, self._gpu, self._bench, self._compilers, line, line.report, label=self._label
            )
            # The ranker that was used, or a user's strategy, may not be picklable.
            outcome.job = replace(job, ranker=by_model, strategy=ModelRanked())
            line.sent.put(outcome)
        except BaseException as error:
            line.sent.put(error)


class _DriverLine:
    """The connection to the driver: a `job_view.TrialStore` whose store is on the driver.

    The driver holds the leases.
    """

    def __init__(self) -> None:
        self.sent = queue.SimpleQueue[Message | BaseException]()
        self.answers = queue.SimpleQueue[Any]()
        self._told, self._stage = 0.0, ""

    def trials(self, *, workload: Workload) -> list[Trial]:
        found: list[Trial] = self._ask("trials", workload=workload)
        return found

    def winners(self, *, workload: Workload) -> list[BestConfig]:
        found: list[BestConfig] = self._ask("winners", workload=workload)
        return found

    def claim(self, *facts: *Facts, again: bool = False) -> Claim:
        """Returns once the driver has taken the lease, and stored everything that was added
        before.
        """
        claim: Claim = self._ask("claim", *facts, again=again)
        return claim

    def release(self, *facts: *Facts) -> None:
        self._ask("release", *facts)

    def add(self, trial: Trial, *, replace: bool = False) -> bool:
        self.sent.put(trial)
        return True  # the driver counts

    def record_best(self, winner: BestConfig) -> None:
        self.sent.put(winner)

    def report(self, progress: Progress) -> None:
        """Sends every change of stage, and a few snapshots per second in between."""
        now = time.monotonic()
        if progress.stage != self._stage or now - self._told >= PERIOD:
            self._told, self._stage = now, progress.stage
            self.sent.put(_shifted(progress, -now))

    def _ask(self, method: str, *facts: Any, **arguments: Any) -> Any:
        """Sends a question, and waits for the answer."""
        self.sent.put(Question(method, facts, arguments))
        return self.answers.get()


def _shifted(progress: Progress, seconds: float) -> Progress:
    """Returns a copy of a snapshot on a clock that is `seconds` ahead."""
    deadline = None if progress.deadline is None else progress.deadline + seconds
    return replace(
        progress,
        started=progress.started + seconds,
        deadline=deadline,
        failures=Counter(progress.failures),
    )


def _compile_workers(workers: int | None) -> int:
    """Returns the number of compile processes for one GPU of this node, whose GPUs share those of
    the node.
    """
    import ray

    here = ray.get_runtime_context().get_node_id()
    resources: dict[str, float] = next(
        (node["Resources"] for node in ray.nodes() if node["NodeID"] == here), {}
    )
    cpus = int(resources.get("CPU", 0)) or default_workers()
    on_node = workers or min(default_workers(), cpus)
    return max(1, int(on_node / max(1.0, resources.get("GPU", 1.0))))


# Runs on the driver.
@dataclass(eq=False)
class _Task:
    """A job that has been handed out or is waiting.

    Attributes:
        view: the store as the job sees it, with the leases of the worker that has it.
        new: how many trials of a GPU were new to the store.
        deaths: how many workers died with it since the last trial.
        started: whether a worker has had it, and its share of the budget is fixed.
    """

    job: Job
    view: JobView
    new: Counter[Gpu] = field(default_factory=Counter)
    deaths: int = 0
    started: bool = False
    deadline: float | None = None


@dataclass(eq=False)
class _Hand:
    """An actor, from its start on. It has no GPU until it has started.

    `attempts`: how many actors were started in its place before and failed to start.
    """

    actor: Any
    attempts: int = 0
    gpu: Gpu | None = None
    task: _Task | None = None


def _view(store: Store, job: Job) -> JobView:
    return JobView(store, job.workload, resume=job.resume, retry_failed=job.retry_failed)


class _Driver:
    """Hands out whole workloads to workers. Only the driver writes to the store."""

    def __init__(
        self,
        ray: Any,
        jobs: Sequence[Job],
        store: Store,
        report: Report,
        budget: float | None,
        workers: int | None,
    ) -> None:
        self.ray, self.store, self.report = ray, store, one_at_a_time(report)
        self.tasks = [_Task(job, _view(store, job)) for job in jobs]
        self.waiting = deque(self.tasks)
        self.found = Sweep()
        self.awaited: dict[Any, _Hand] = {}  # by the source of the next message
        self.reason = ""  # why the last worker was lost
        resources = ray.cluster_resources()
        self.needs = "GPU" if resources.get("GPU", 0) >= 1 else "CPU"
        available = int(resources.get(self.needs, 0))
        if available < 1:
            raise ValueError("the Ray cluster has neither GPUs nor CPUs")
        on_gpu = self.needs == "GPU"
        self.hands = min(len(jobs), available)
        self.actor = ray.remote(num_gpus=int(on_gpu), num_cpus=int(not on_gpu), max_concurrency=2)(
            Worker
        )
        self.arguments = on_gpu, workers
        self.budget = Budget(budget, len(jobs), self.hands)
        self.last_seen = time.monotonic()  # when a worker last existed
        self.end = None if budget is None else self.last_seen + budget

    def run(self) -> Sweep:
        for task in self.waiting:
            self.report(Progress(task.job.workload))
        try:
            for _ in range(self.hands):
                self._spawn()
            while self.awaited and (
                self.waiting or any(hand.task for hand in self.awaited.values())
            ):
                ready, _ = self.ray.wait(list(self.awaited), num_returns=1, timeout=1.0)
                for source in ready:
                    self._on_message(source, self.awaited.pop(source))
                self._check_timeout()
        finally:
            for hand in self.awaited.values():
                self._dismiss(hand)
            for task in self.tasks:
                task.view.release_all()
        self._give_up_waiting()
        return self.found

    def _spawn(self, attempts: int = 0) -> None:
        """Starts a worker. Its first message tells which GPU it has."""
        actor = self.actor.remote(*self.arguments)
        self.awaited[actor.start.remote()] = _Hand(actor, attempts)

    def _dismiss(self, hand: _Hand) -> None:
        with contextlib.suppress(Exception):
            self.ray.kill(hand.actor)

    def _on_message(self, source: Any, hand: _Hand) -> None:
        """Processes the next message of a worker."""
        errors = self.ray.exceptions
        try:
            message: Message | Gpu | str = self.ray.get(
                source if hand.task is None else next(source)
            )
        except errors.RayTaskError as error:  # raised by this program
            self._dismiss(hand)
            raise error.cause from error
        except (errors.RayError, StopIteration) as error:
            self._lost(hand, _brief(error))
            return
        if isinstance(message, str):
            self._lost(hand, message)
        elif isinstance(message, Gpu):
            hand.gpu = message
            self._hand_out(hand)
        elif isinstance(message, Outcome):
            assert hand.task is not None
            message.job, message.new = hand.task.job, hand.task.new[message.gpu]
            self.found.add(message)
            self._hand_out(hand)
        else:
            assert hand.task is not None
            self.awaited[source] = hand
            self._take(message, hand, hand.task)

    def _take(
        self, message: Trial | BestConfig | Progress | Question, hand: _Hand, task: _Task
    ) -> None:
        if isinstance(message, Trial):
            task.new[message.gpu] += task.view.add(message)
            task.deaths = 0
        elif isinstance(message, BestConfig):
            self.store.record_best(message)
        elif isinstance(message, Progress):
            self.report(_shifted(message, time.monotonic()))
        else:
            hand.actor.answer.remote(self._answer(message, task))

    def _answer(self, question: Question, task: _Task) -> Any:
        return getattr(task.view, question.method)(*question.facts, **question.arguments)

    def _hand_out(self, hand: _Hand) -> None:
        """Gives a worker the next workload. If there is none, the worker ends, and its GPU becomes
        free for others.
        """
        if not self.waiting:
            self._dismiss(hand)
            return
        task = hand.task = self.waiting.popleft()
        now = time.monotonic()
        if not task.started:
            seconds, task.started = self.budget.share(), True
            task.deadline = None if seconds is None else now + seconds
        left = None if task.deadline is None else max(LEAST_SECONDS, task.deadline - now)
        # The view decides what is measured again; the trials of a worker that died count as known.
        job = replace(task.job, seconds=left, resume=True, retry_failed=False)
        self.awaited[hand.actor.tune.options(num_returns="streaming").remote(job)] = hand

    def _lost(self, hand: _Hand, reason: str) -> None:
        """Puts the workload of a lost worker back into the queue, and starts another worker."""
        self._dismiss(hand)
        self.reason = reason
        task = hand.task
        if task is None:
            if hand.attempts < RESTARTS and self.waiting:
                self._spawn(hand.attempts + 1)
            return
        task.deaths += 1
        task.view.worker_died()
        if task.deaths > RESTARTS:
            self._fail(task, f"{task.deaths} workers died in a row, the last with: {reason}")
        else:
            self._report_stage(task, "waiting", f"its worker died: {reason}")
            self.waiting.appendleft(task)
        if self.waiting:
            self._spawn()

    def _check_timeout(self) -> None:
        """Gives up if no worker has existed for a long time, and none will come.

        A full cluster may keep a sweep waiting until its budget is spent; a cluster that lost all
        its nodes may not.
        """
        now = time.monotonic()
        if any(hand.gpu for hand in self.awaited.values()):
            self.last_seen = now
        waited = now - self.last_seen
        if waited < START_SECONDS:
            return
        if not self.ray.cluster_resources().get(self.needs):
            self.reason = f"no {self.needs} is left"
        elif self.end is not None and now > self.end:
            self.reason = f"none was free for {waited:.0f} s"
        else:
            return
        for hand in self.awaited.values():
            self._dismiss(hand)
        self.awaited.clear()

    def _give_up_waiting(self) -> None:
        while self.waiting:
            self._fail(self.waiting.popleft(), f"the cluster provides no worker: {self.reason}")

    def _fail(self, task: _Task, reason: str) -> None:
        self.found.failures.append(Failure(task.job.workload, reason))
        self._report_stage(task, "failed", reason)

    def _report_stage(self, task: _Task, stage: Stage, message: str) -> None:
        self.report(
            Progress(task.job.workload, stage=stage, deadline=task.deadline, message=message)
        )
