"""A model of host threads, CUDA streams and contexts, and of the allocator, around the real
`get_workspace` of hopper.gemm.

Host threads take turns at every step that others may come between, in an order drawn at random;
kernels end at any time after their launch, in the order of their stream. The model knows what is
really one stream, and keeps to the allocator's rules. A fault is memory that two streams' kernels
may have at once, that goes back to the allocator while a kernel may use it, that is not zero yet,
too small, or asked for on a stream that is gone.
"""

import random
import threading
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outblas.device import driver
from outblas.hopper.gemm import workspace

MOST_STEPS = 5000  # of a run, after which it counts as hung
MOST_FOREIGN = 2  # workspaces kept of streams that are not torch's own
POOL = 1024  # the handle of a stream of torch's pool


def seen_by_torch(handle: int) -> SimpleNamespace:
    """What torch says of a stream: the id of one of its pool is odd."""
    return SimpleNamespace(cuda_stream=handle, stream_id=handle | 1 if handle >= POOL else handle)


class Stream:
    """What is really one stream, whatever its handle.

    number: the driver's, which no other stream has, had or will have.
    launched: how many kernels it was given. running: the memory blocks of those that have not
    ended. gone: whether it is destroyed; its kernels run on.
    """

    def __init__(self, handle: int, number: int) -> None:
        self.cuda_stream, self.number = handle, number
        self.launched, self.gone = 0, False
        self.running: list[tuple[Any, ...]] = []


class World:
    """Host threads, of which one runs at a time, and a GPU. What it finds wrong is in `faults`.

    ended: whether the run is over, after which nobody takes turns any more.
    """

    def __init__(self, seed: int) -> None:
        self.draw, self.steps, self.ended = random.Random(seed), 0, False
        self.faults: list[str] = []
        self.streams: list[Stream] = []
        # The stream of handle 0, of a context; or of a thread in one.
        self.special: dict[Any, Stream] = defaultdict(lambda: self.add_stream(0))
        self.free_handles: list[int] = []  # of streams that were destroyed
        self.turns: dict[int, threading.Semaphore] = {}
        self.ready: list[int] = []  # threads that have not ended
        self.current = threading.local()  # context and stream of a thread

    def add_stream(self, handle: int) -> Stream:
        self.streams.append(Stream(handle, len(self.streams) + 1))
        return self.streams[-1]

    # ---- turns of host threads
    def run(self, bodies: list[Callable[["World"], None]]) -> None:
        """Runs each body in a thread of its own, to the end."""
        started = threading.Barrier(len(bodies) + 1)
        threads = [
            threading.Thread(target=self._thread, args=(body, started), daemon=True)
            for body in bodies
        ]
        for thread in threads:
            thread.start()
        started.wait()
        self.ready.sort()
        self._wake_any()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive(), "a thread of the model hangs"

    def _thread(self, body: Callable[["World"], None], started: threading.Barrier) -> None:
        own = threading.get_ident()
        self.turns[own] = threading.Semaphore(0)
        self.ready.append(own)
        started.wait()
        self.turns[own].acquire()
        self.current.context = "primary"
        try:
            body(self)
        except BaseException as error:
            self.faults.append(repr(error))
        self.ready.remove(own)
        if self.ready:
            self._wake_any()

    def _wake_any(self) -> None:
        self.turns[self.draw.choice(self.ready)].release()

    def pause(self) -> None:
        """Kernels may end here, and other threads may do something."""
        self.steps += 1
        assert self.steps < MOST_STEPS, "the threads wait for each other"
        while self.draw.random() < 0.25:
            busy = [stream for stream in self.streams if stream.running]
            if not busy:
                break
            self.draw.choice(busy).running.pop(0)
        own = threading.get_ident()
        if own in self.ready:
            other = self.draw.choice(self.ready)
            if other != own:
                self.turns[other].release()
                self.turns[own].acquire()

    # ---- what a host thread does
    def enter_context(self, context: str) -> None:
        self.current.context = context

    def use_stream(self, handle: int, real: Stream | None = None) -> None:
        """Makes a stream the thread's current one. `real`: which one that is, of a handle that is
        not another in every context or thread.
        """
        if handle == 0:
            real = self.special[self.current.context]
        elif handle == driver.PER_THREAD:
            real = self.special[self.current.context, threading.get_ident()]
        self.current.real, self.current.seen = real, seen_by_torch(handle)

    def create_stream(self) -> Stream:
        """A stream of the caller's own, with the handle of one that it destroyed if there is
        one.
        """
        if self.free_handles:
            return self.add_stream(self.free_handles.pop())
        return self.add_stream(100 + 2 * len(self.streams))

    def destroy_stream(self, stream: Stream) -> None:
        stream.gone = True
        self.free_handles.append(stream.cuda_stream)

    def launch_kernel(self, floats: int, counters: int) -> None:
        """A launch that needs a workspace, as hopper.gemm makes it."""
        lent: Any = workspace.get_workspace(0, floats, counters)  # its tensors are stand-ins
        self.pause()
        blocks = (lent.sums.block, lent.counters.block)
        if lent.sums.numel() < floats or lent.counters.numel() < counters:
            self.faults.append("too small")
        if not lent.counters.block.zero:
            self.faults.append("not zero yet")
        own = self.current.real
        if any(block in self._blocks_of_others(own) for block in blocks):
            self.faults.append("two streams have one workspace")
        own.launched += 1
        own.running.append(blocks)
        self.pause()
        lent.launched()
        self.pause()

    def _blocks_of_others(self, own: Stream) -> list["Block"]:
        others = [stream for stream in self.streams if stream is not own]
        return [block for stream in others for kernel in stream.running for block in kernel]

    # ---- what stands for torch, the driver and the allocator
    def current_stream(self, index: int = 0) -> SimpleNamespace:
        self.pause()
        return self.current.seen

    def real_stream(self, seen: SimpleNamespace) -> Stream | None:
        """Which stream the driver takes a handle for, in the calling thread."""
        if seen.cuda_stream in (0, driver.PER_THREAD):
            return self.current.real
        return self.stream_of(seen.cuda_stream)

    def stream_of(self, handle: int) -> Stream | None:
        alive = (s for s in self.streams if s.cuda_stream == handle and not s.gone)
        return next(alive, None)

    def stream_id(self, handle: int) -> int | None:
        self.pause()
        real = self.stream_of(handle)
        if real is None:
            self.faults.append("asked for the number of a stream that is gone")
            return None
        return real.number

    def for_good(self, device: Any, make: Callable[[], Any]) -> Any:
        """Makes tensors in the primary context, and returns when they are zero on the GPU."""
        own, self.current.context = self.current.context, "primary"
        made = make()
        self.current.context = own
        self.pause()
        made[1].block.zero = True
        return made

    def freed(self, block: "Block") -> None:
        """A block's last tensor is gone: the allocator waits for the streams that were recorded,
        and for no other.
        """
        if any(stream is None or stream.gone for stream in block.recorded):
            self.faults.append("a stream that is gone is asked when its kernels end")
        using = [s for s in self.streams if any(block in kernel for kernel in s.running)]
        awaited = [*block.recorded, self.special["primary"]]
        if any(stream not in awaited for stream in using):
            self.faults.append("freed while a kernel may use it")


class Block:
    """Memory, and the streams that the allocator waits for before it gives it to others."""

    def __init__(self) -> None:
        self.recorded: list[Stream | None] = []
        self.zero = False


class FakeTensor:
    """A tensor that is its size and its memory."""

    def __init__(self, world: World, elements: int) -> None:
        self.world, self.elements, self.block = world, elements, Block()

    def numel(self) -> int:
        self.world.pause()
        return self.elements

    def record_stream(self, stream: SimpleNamespace) -> None:
        self.world.pause()
        self.block.recorded.append(self.world.real_stream(stream))

    def __del__(self) -> None:
        self.world.freed(self.block)


class FakeLock:
    """A lock at which threads of the model take turns."""

    def __init__(self, world: World) -> None:
        self.world, self.taken = world, False

    def __enter__(self) -> None:
        self.world.pause()
        while self.taken:
            self.world.pause()
        self.taken = True

    def __exit__(self, *_: object) -> None:
        self.taken = False
        self.world.pause()


class FakeEvent:
    """An event, which passes when the kernels before it in its stream have ended."""

    def __init__(self, world: World) -> None:
        self.world, self.kernels_before = world, 0
        self.stream: Stream | None = None

    def record(self, stream: SimpleNamespace) -> None:
        self.world.pause()
        real = self.world.real_stream(stream)
        assert real is self.world.current.real, (
            "an event is recorded on the stream of another thread or context"
        )
        self.stream, self.kernels_before = real, real.launched

    def query(self) -> bool:
        if self.world.ended:  # the collector may retire a workspace of this run during a later one
            return True
        self.world.pause()
        ended = self.stream.launched - len(self.stream.running)
        return ended >= self.kernels_before


# ---- what host threads do
def on_shared_stream(handle: int) -> Callable[[World], None]:
    """A thread that calls on a stream which others use, too, each time for another size."""

    def body(world: World) -> None:
        world.use_stream(handle, world.stream_of(handle))
        for size in (100, 200, 150, 400):
            world.launch_kernel(size + world.draw.randrange(50), size // 10)

    return body


def on_stream_of_its_own(world: World) -> None:
    """A thread on the stream that is each thread's own, which ends with it."""
    world.use_stream(driver.PER_THREAD)
    for size in (100, 300):
        world.launch_kernel(size, 10)


def on_streams_that_end(world: World) -> None:
    """A thread that destroys its streams when all is launched."""
    for size in (100, 300, 100):
        stream = world.create_stream()
        world.use_stream(stream.cuda_stream, stream)
        world.launch_kernel(size, 10)
        world.launch_kernel(2 * size, 20)
        world.destroy_stream(stream)


def in_other_contexts(world: World) -> None:
    """A thread on stream 0 of several contexts."""
    for context in ("green", "primary", "blue"):
        world.enter_context(context)
        world.use_stream(0)
        world.launch_kernel(200, 20)


SCENES: dict[str, list[Callable[[World], None]]] = {
    "one stream of the pool": [on_shared_stream(POOL)] * 3,
    "the default stream": [on_shared_stream(0)] * 3,
    "streams of threads": [on_stream_of_its_own] * 4,
    "handles that come again": [on_streams_that_end] * 2,
    "other contexts": [in_other_contexts, in_other_contexts, on_shared_stream(0)],
    "all": [
        on_shared_stream(POOL),
        on_shared_stream(POOL),
        on_stream_of_its_own,
        on_stream_of_its_own,
        on_streams_that_end,
        in_other_contexts,
    ],
}


def play(
    monkeypatch: pytest.MonkeyPatch,
    scene: str,
    seed: int,
    plant: Callable[[pytest.MonkeyPatch], None] | None = None,
) -> list[str]:
    """Runs a scene in the order that the seed draws, and returns the faults. `plant` breaks
    something first.
    """
    world = World(seed)
    world.add_stream(POOL)
    with monkeypatch.context() as patched:
        _stand_in(patched, world)
        workspace._retired.clear()
        if plant:
            plant(patched)
        world.run(SCENES[scene])
        faults = list(world.faults)
        foreign = [kept for kept in workspace._workspaces.values() if kept.done is not None]
        if len(foreign) > MOST_FOREIGN:
            faults.append("workspaces of streams that are gone are kept")
        _end(world)
    return faults


def _stand_in(patched: pytest.MonkeyPatch, world: World) -> None:
    """Puts the model in place of torch, the driver and the allocator."""

    def tensors(index: int, *sizes: int) -> tuple[FakeTensor, ...]:
        return tuple(FakeTensor(world, elements) for elements in sizes)

    patched.setattr(torch.cuda, "current_stream", world.current_stream)
    patched.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    patched.setattr(torch.cuda, "Event", lambda: FakeEvent(world))
    patched.setattr(driver, "context", lambda: world.current.context)
    patched.setattr(driver, "stream_id", world.stream_id)
    patched.setattr(workspace.driver, "for_good", world.for_good)
    patched.setattr(workspace, "_tensors", tensors)
    patched.setattr(workspace, "_making", FakeLock(world))
    patched.setattr(workspace, "_workspaces", {})
    patched.setattr(workspace, "FOREIGN", MOST_FOREIGN)


def _end(world: World) -> None:
    """All kernels end, and what is kept is freed while the model still stands in."""
    for stream in world.streams:
        stream.running.clear()
        stream.gone = False
    workspace._workspaces.clear()
    workspace._retired.clear()
    world.ended = True
