"""Workspaces of split-K among host threads, streams and contexts: a model of their life around the
real `get_workspace`.

Host threads take turns at every step that others may come between, in an order drawn at random;
kernels end at any time after their launch, in the order of their stream. The model knows what is
really one stream, and keeps to the allocator's rules. A fault is memory that two streams' kernels
may have at once, that goes back to the allocator while a kernel may use it, that is not zero yet,
too small, or asked for on a stream that is gone.
"""

import random
import threading
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outblas.device import driver
from outblas.hopper.gemm import workspace

SEEDS = 60
STEPS = 5000  # of a run, after which it counts as hung
MOST = 2  # workspaces kept of streams that are not torch's own


class Stream:
    """One that is really one, whatever its handle: how many kernels it was given, and those that
    have not ended."""

    def __init__(self, handle, number=0) -> None:
        self.cuda_stream, self.number, self.stream_id = handle, number, handle
        self.given, self.running, self.gone = 0, [], False
        if handle > 1000:
            self.stream_id = handle | 1  # of torch's pool


class World:
    """Host threads, of which one runs at a time, and a GPU."""

    def __init__(self, seed) -> None:
        self.draw, self.faults, self.steps, self.streams = random.Random(seed), [], 0, []
        self.turns, self.ready, self.state = {}, [], threading.local()
        self.special = defaultdict(lambda: self.stream(0))  # of a context, or of a thread in it
        self.made, self.handles = 0, []

    def stream(self, handle):
        self.made += 1
        self.streams.append(Stream(handle, self.made))
        return self.streams[-1]

    def run(self, *bodies) -> None:
        """Each body in a thread of its own."""

        def work(body):
            self.turns[threading.get_ident()].acquire()
            self.state.context = "primary"
            try:
                body(self)
            except BaseException as error:
                self.faults.append(repr(error))
            self.ready.remove(threading.get_ident())
            if self.ready:
                self.turns[self.draw.choice(self.ready)].release()

        threads = [threading.Thread(target=work, args=(body,), daemon=True) for body in bodies]
        started = threading.Barrier(len(threads) + 1)

        def begin(thread):
            run = thread.run

            def registered():
                self.turns[threading.get_ident()] = threading.Semaphore(0)
                self.ready.append(threading.get_ident())
                started.wait()
                run()

            thread.run = registered
            thread.start()

        for thread in threads:
            begin(thread)
        started.wait()
        self.ready.sort()
        self.turns[self.draw.choice(self.ready)].release()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()

    def pause(self) -> None:
        """Others may do something here."""
        self.steps += 1
        assert self.steps < STEPS, "the threads wait for each other"
        while self.draw.random() < 0.25 and (
            busy := [stream for stream in self.streams if stream.running]
        ):
            self.draw.choice(busy).running.pop(0)
        own = threading.get_ident()
        if own in self.ready and (other := self.draw.choice(self.ready)) != own:
            self.turns[other].release()
            self.turns[own].acquire()

    # host threads
    def on(self, handle, real=None) -> None:
        """Makes a stream the thread's own. `real`: of a handle that is not one in every context or
        thread."""
        if handle == 0:
            real = self.special[self.state.context]
        elif handle == driver.PER_THREAD:
            real = self.special[self.state.context, threading.get_ident()]
        self.state.real = real
        self.state.seen = SimpleNamespace(
            cuda_stream=handle, stream_id=handle | 1 if handle > 1000 else handle
        )

    def current(self, index=0):
        self.pause()
        return self.state.seen

    def real(self, seen):
        """What the driver takes a handle for: in the calling thread."""
        return self.state.real if seen.cuda_stream in (0, 2) else self.by_handle(seen.cuda_stream)

    def by_handle(self, handle):
        return next((s for s in self.streams if s.cuda_stream == handle and not s.gone), None)

    def call(self, floats, counters):
        lent: Any = workspace.get_workspace(0, floats, counters)  # its tensors are stand-ins
        self.pause()
        real, blocks = self.state.real, (lent.sums.block, lent.counters.block)
        if lent.sums.numel() < floats or lent.counters.numel() < counters:
            self.faults.append("too small")
        if not blocks[1].zero:
            self.faults.append("not zero yet")
        others = [
            block
            for stream in self.streams
            if stream is not real
            for kernel in stream.running
            for block in kernel
        ]
        if any(block in others for block in blocks):
            self.faults.append("two streams have one workspace")
        real.given += 1
        real.running.append(blocks)
        self.pause()
        lent.launched()
        self.pause()

    def created(self):
        """A stream of the caller's own, with the handle of one that it destroyed if there is
        one."""
        handle = self.handles.pop() if self.handles else 100 + 2 * self.made
        return self.stream(handle)

    def destroyed(self, stream) -> None:
        """Its kernels run on."""
        stream.gone = True
        self.handles.append(stream.cuda_stream)

    # driver and allocator
    def stream_id(self, handle):
        self.pause()
        real = self.by_handle(handle)
        if real is None:
            self.faults.append("asked for the number of a stream that is gone")
        return real and real.number

    def for_good(self, device, make):
        own, self.state.context = self.state.context, "primary"
        made = make()
        self.state.context = own
        self.pause()
        made[1].block.zero = True
        return made

    def freed(self, block) -> None:
        """Its last tensor is gone: it waits for the streams that were recorded, and for no
        other."""
        if any(stream is None or stream.gone for stream in block.recorded):
            self.faults.append("a stream that is gone is asked when its kernels end")
        using = [s for s in self.streams if any(block in kernel for kernel in s.running)]
        if any(
            stream not in block.recorded
            for stream in using
            if stream is not self.special["primary"]
        ):
            self.faults.append("freed while a kernel may use it")


class Block:
    """Memory, and the streams that the allocator waits for before it gives it to others."""

    def __init__(self) -> None:
        self.recorded, self.zero = [], False


class Tensor:
    def __init__(self, world, elements) -> None:
        self.world, self.elements, self.block = world, elements, Block()

    def numel(self):
        self.world.pause()
        return self.elements

    def record_stream(self, stream) -> None:
        self.world.pause()
        self.block.recorded.append(self.world.real(stream))

    def __del__(self) -> None:
        self.world.freed(self.block)


class Lock:
    def __init__(self, world) -> None:
        self.world, self.taken = world, False

    def __enter__(self) -> None:
        self.world.pause()
        while self.taken:
            self.world.pause()
        self.taken = True

    def __exit__(self, *_) -> None:
        self.taken = False
        self.world.pause()


class Event:
    def __init__(self, world) -> None:
        self.world, self.after = world, 0
        self.of: Stream | None = None  # the one that it was recorded on

    def record(self, stream) -> None:
        self.world.pause()
        real = self.world.real(stream)
        assert real is self.world.state.real, (
            "an event is recorded on the stream of another thread or context"
        )
        self.of, self.after = real, real.given

    def query(self):
        self.world.pause()
        return self.of.given - len(self.of.running) >= self.after


def shared(stream):
    """Threads that call on one stream, each with more and more."""

    def body(world):
        world.on(stream, world.by_handle(stream))
        for size in (100, 200, 150, 400):
            world.call(size + world.draw.randrange(50), size // 10)

    return body


def alone(world) -> None:
    """A stream of each thread's own, which ends with it."""
    world.on(driver.PER_THREAD)
    for size in (100, 300):
        world.call(size, 10)


def short(world) -> None:
    """Streams that are destroyed when all is launched."""
    for size in (100, 300, 100):
        stream = world.created()
        world.on(stream.cuda_stream, stream)
        world.call(size, 10)
        world.call(2 * size, 20)
        world.destroyed(stream)


def elsewhere(world) -> None:
    """The stream 0 of another context."""
    for context in ("green", "primary", "blue"):
        world.state.context = context
        world.on(0)
        world.call(200, 20)


POOL = 1024
SCENES = {
    "one stream of the pool": [shared(POOL)] * 3,
    "the default stream": [shared(0)] * 3,
    "streams of threads": [alone] * 4,
    "handles that come again": [short, short],
    "other contexts": [elsewhere, elsewhere, shared(0)],
    "all": [shared(POOL), shared(POOL), alone, alone, short, elsewhere],
}


def faults(monkeypatch: pytest.MonkeyPatch, bodies, seed, broken=lambda monkeypatch: None):
    world = World(seed)
    world.stream(POOL)
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "current_stream", world.current)
        patched.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patched.setattr(torch.cuda, "Event", lambda: Event(world))
        patched.setattr(driver, "context", lambda: world.state.context)
        patched.setattr(driver, "stream_id", world.stream_id)
        patched.setattr(workspace.memory, "for_good", world.for_good)
        patched.setattr(
            workspace, "_tensors", lambda index, *sizes: tuple(Tensor(world, n) for n in sizes)
        )
        patched.setattr(workspace, "_making", Lock(world))
        patched.setattr(workspace, "_workspaces", {})
        patched.setattr(workspace, "FOREIGN", MOST)
        workspace._retired.clear()
        broken(patched)
        world.run(*bodies)
        found = list(world.faults)
        if sum(kept.done is not None for kept in workspace._workspaces.values()) > MOST:
            found.append("workspaces of streams that are gone are kept")
        for stream in world.streams:
            stream.running.clear()
            stream.gone = False
        world.draw.choice = lambda among: among[0]  # type: ignore[method-assign, assignment]
        workspace._workspaces.clear()
        workspace._retired.clear()
    return found


@pytest.mark.parametrize("scene", SCENES)
def test_no_two_streams_share_and_nothing_is_freed_early(
    scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(SEEDS):
        assert not (found := faults(monkeypatch, SCENES[scene], seed)), f"seed {seed}: {found}"


def _forgetful(patched) -> None:
    """Nobody tells the allocator which stream uses the memory."""
    patched.setattr(Tensor, "record_stream", lambda self, stream: None)


def _by_handle(patched):
    patched.setattr(workspace, "_stream_key", lambda index, stream: (index, stream.cuda_stream))


def _unbounded(patched) -> None:
    patched.setattr(workspace, "FOREIGN", 1000)


def _unmarked(patched) -> None:
    """No event follows a kernel."""
    patched.setattr(workspace.Workspace, "launched", lambda self: None)


def _impatient(patched) -> None:
    """What was let go of is freed whether or not its event has come to pass."""
    patched.setattr(workspace, "_free_retired", workspace._retired.clear)


@pytest.mark.parametrize(
    ("scene", "broken", "fault"),
    [
        ("one stream of the pool", _forgetful, "freed while a kernel may use it"),
        ("streams of threads", _by_handle, "two streams have one workspace"),
        ("handles that come again", _by_handle, "two streams have one workspace"),
        ("other contexts", _by_handle, "two streams have one workspace"),
        ("handles that come again", _unbounded, "workspaces of streams that are gone are kept"),
        ("streams of threads", _unmarked, "freed while a kernel may use it"),
        ("handles that come again", _impatient, "freed while a kernel may use it"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__.strip("_"),
)
def test_the_model_sees_what_is_missing(scene, broken, fault, monkeypatch):
    """Each of these is what an earlier `get_workspace` did, or what this one would do with a line
    less.
    """
    assert any(fault in faults(monkeypatch, SCENES[scene], seed, broken) for seed in range(SEEDS))


# ---- one thread
class Fake:
    def __init__(self, elements) -> None:
        self.elements, self.recorded = elements, []

    def numel(self):
        return self.elements

    def record_stream(self, stream) -> None:
        self.recorded.append(stream)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch):
    """Tensors without a GPU; `made` of each workspace, kept or not; `stream` is the current one."""
    given = SimpleNamespace(
        made=[], kept=0, capturing=False, stream=SimpleNamespace(cuda_stream=POOL, stream_id=3)
    )

    def tensors(index, *sizes):
        given.made.append(tuple(map(Fake, sizes)))
        return given.made[-1]

    def for_good(device, make):
        given.kept += 1
        return make()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda index=None: given.stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: given.capturing)
    monkeypatch.setattr(workspace, "_tensors", tensors)
    monkeypatch.setattr(workspace.memory, "for_good", for_good)
    monkeypatch.setattr(workspace, "_workspaces", {})
    monkeypatch.setattr(driver, "stream_id", lambda handle: None)
    monkeypatch.setattr(driver, "context", lambda: None)
    return given


def test_a_workspace_is_kept_and_grows(host):
    first = workspace.get_workspace(0, 100, 10)
    assert workspace.get_workspace(0, 60, 10) is first
    second = workspace.get_workspace(0, 50, 20)
    assert (second.sums.numel(), second.counters.numel()) == (100, 20)
    assert workspace.get_workspace(0, 100, 20) is second
    assert (len(host.made), host.kept) == (2, 2)
    assert all(tensor.recorded == [host.stream] for pair in host.made for tensor in pair)


def test_threads_that_come_at_once_get_one_workspace(host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both find none; whoever is second looks again under the lock."""
    together, looked, found = threading.Barrier(2), set(), []

    class Held(dict):
        def get(self, key, default=None):
            held = super().get(key, default)
            if threading.get_ident() not in looked:
                looked.add(threading.get_ident())
                together.wait(10)
            return held

    monkeypatch.setattr(workspace, "_workspaces", Held())
    threads = [
        threading.Thread(target=lambda: found.append(workspace.get_workspace(0, 100, 10)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert found[0] is found[1]
    assert host.kept == 1


def test_a_graph_has_memory_of_its_own(host) -> None:
    """And so has a call on a stream that the driver cannot tell from others."""
    host.capturing = True
    workspace.get_workspace(0, 100, 10)
    host.capturing, host.stream = False, SimpleNamespace(cuda_stream=4096, stream_id=4096)
    workspace.get_workspace(0, 100, 10)
    assert (len(host.made), host.kept, workspace._workspaces) == (2, 0, {})
    assert not any(tensor.recorded for pair in host.made for tensor in pair)


def test_threads_have_numbers_of_their_own() -> None:
    """Also those that begin when others have ended, which Python's and the system's numbers do not
    tell apart."""
    found = [driver.thread(), driver.thread()]
    for _ in range(3):
        thread = threading.Thread(target=lambda: found.append(driver.thread()))
        thread.start()
        thread.join()
    assert len(set(found)) == 4


def test_without_a_driver_nothing_is_known_and_nothing_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(driver, "_function", lambda name: None)
    assert (driver.context(), driver.stream_id(4096)) == (None, None)
    with driver.relaxed_capture():
        pass


def test_a_refusal_of_the_driver_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mode of captures is set and set back, and not where it could not be set."""
    asked = []

    def exchange(mode):
        before, mode._obj.value = mode._obj.value, 0
        asked.append(before)
        return 0

    functions = {
        "cuCtxGetId": lambda of, number: 201,
        "cuThreadExchangeStreamCaptureMode": exchange,
    }
    monkeypatch.setattr(driver, "_function", functions.get)
    assert driver.context() is None
    with driver.relaxed_capture():
        assert asked == [driver._RELAXED]
    assert asked == [driver._RELAXED, 0]
    functions["cuThreadExchangeStreamCaptureMode"] = lambda mode: asked.append("refused") or 3
    with driver.relaxed_capture():
        pass
    assert asked[2:] == ["refused"]
