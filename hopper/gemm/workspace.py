"""Memory in which CTAs leave partial sums, and count which have: one `Workspace` for each stream,
as large as was ever needed there.

Kernels of one stream run one after the other, and each leaves the counters at 0 for the next.
Kernels of two streams must never have one workspace. The life of a workspace, and what makes each
step safe:

1. Made, under `_making`: whoever finds none, or too small a one, takes the lock and looks again, so
   that threads which share a stream get one workspace between them. `memory.for_good` returns when
   the counters are zero on the GPU: every kernel that uses them, on whichever stream, is launched
   later.
2. Handed out: `get_workspace` returns it, and the caller's frame refers to it until the launch is
   enqueued. That reference alone keeps the memory between the two: another thread may replace the
   workspace in `_workspaces` meanwhile, but cannot free it.
3. Replaced by a larger one, or dropped for lack of room: `_workspaces` lets go of it. Kernels may
   still run, or be about to be launched by those who refer to it; they, and kernels with its
   successor, follow each other on their stream.
4. Let go of by the last caller, whose kernel is enqueued: now the memory may go back to the
   allocator as soon as the kernels enqueued so far have ended. Of a stream of torch's own, which
   lives for ever, the allocator sees to that: `record_stream` came before the workspace was ever
   handed out, so the tensors may be dropped by anyone at any time. Any other stream cannot be asked
   any more, for its owner may have destroyed it: `launched` records an event behind every kernel,
   and the tensors wait in `_retired` until the event has come to pass.

Streams are told apart by what no two of them share in the life of the process (`_stream_key`). A
handle is not that: a new stream may get that of a destroyed one, whose kernels still run; 0 is
another stream in each context (green contexts), `cudaStreamPerThread` another in each thread.
Contexts, streams and threads that are gone leave workspaces that nobody asks for again: only so
many workspaces of other than torch's own streams are kept, the latest made.

While a CUDA graph is captured the memory is the graph's own, for it may run beside anything later.
So is a call's where the driver cannot tell which stream it is on: memory of the current stream
then, zeroed by the call.
"""

from collections import deque
from collections.abc import Hashable
from typing import Any

import torch

from ...core import forks
from ...device import driver, memory

FOREIGN = 64  # workspaces kept of streams that are not torch's own


# Events, and what nobody but kernels may use until they have come to pass.
_retired: deque[tuple[Any, ...]] = deque()


class Workspace:
    """The partial sums and counters of the kernels of one stream.

    sums: fp32.
    counters: int32, and 0 whenever no kernel of their stream runs.
    done: an event behind the last kernel, where `stream` is not torch's own.

    Whoever launches a kernel refers to the workspace until it is enqueued, and calls `launched`
    then.
    """

    def __init__(
        self,
        sums: torch.Tensor | None,
        counters: torch.Tensor | None,
        done: Any = None,
        stream: Any = None,
    ):
        self.sums, self.counters, self.done, self.stream = sums, counters, done, stream

    def fits(self, floats: int, counters: int) -> bool:
        """Whether it has room for so many sums and counters."""
        assert self.sums is not None
        assert self.counters is not None
        return self.sums.numel() >= floats and self.counters.numel() >= counters

    def launched(self) -> None:
        """A kernel that uses it is on the current stream, which is the workspace's."""
        if self.done is not None:
            self.done.record(self.stream)

    def __del__(self, retired: deque[tuple[Any, ...]] = _retired) -> None:
        if self.done is not None:
            retired.append(
                (self.done, self.sums, self.counters)
            )  # takes no lock: any thread may be anywhere


NO_WORKSPACE = Workspace(None, None)  # for kernels without partial sums
_workspaces: dict[Hashable, Workspace] = {}
_making = forks.Lock()


def get_workspace(index: int, floats: int, counters: int) -> Workspace:
    """A workspace of at least so many fp32 sums and so many int32 counters, which are 0, for one
    launch on the current stream of GPU `index`.
    """
    stream = torch.cuda.current_stream(index)
    if torch.cuda.is_current_stream_capturing():
        return _temporary(index, floats, counters)
    key = _stream_key(index, stream)
    if key is None:
        return _temporary(index, floats, counters)
    found = _workspaces.get(key)
    if found is None or not found.fits(floats, counters):
        with _making:
            found = _workspaces.get(key)  # another thread of this stream may have been first
            if found is None or not found.fits(floats, counters):
                found = _make(index, stream, key, floats, counters)
    return found


def _stream_key(index: int, stream: Any) -> Hashable | None:
    """What no other stream has, had or will have; None where that cannot be known."""
    handle = stream.cuda_stream
    if _pooled(stream):
        return index, handle  # made once, and never destroyed
    if handle in (0, driver.LEGACY):
        return index, 0, driver.context()
    if handle == driver.PER_THREAD:
        return index, handle, driver.context(), driver.thread()
    number = driver.stream_id(handle)
    return None if number is None else (index, handle, number)


def _pooled(stream: Any) -> bool:
    """Whether a stream is one of torch's pool: ids of others are their handles, which are even, or
    0."""
    return bool(stream.stream_id & 1) and stream.cuda_stream > driver.PER_THREAD


def _make(index: int, stream: Any, key: Hashable, floats: int, counters: int) -> Workspace:
    """A workspace for a stream that has none, or in place of a smaller one. The caller holds
    `_making`.
    """
    _free_retired()
    foreign = [other for other, kept in _workspaces.items() if kept.done is not None]
    if key not in foreign and len(foreign) >= FOREIGN:
        del _workspaces[foreign[0]]
    before = _workspaces.get(key)
    if before is not None and before.sums is not None and before.counters is not None:
        floats, counters = max(floats, before.sums.numel()), max(counters, before.counters.numel())

    def tensors_and_context() -> tuple[torch.Tensor, torch.Tensor, int | None]:
        """Runs in a thread of its own, whose context is the primary one."""
        return *_tensors(index, floats, counters), driver.context()

    device = torch.device("cuda", index)
    sums, zeros, primary = memory.for_good(device, tensors_and_context)
    if _pooled(stream) or key == (index, 0, primary):
        for tensor in (sums, zeros):
            tensor.record_stream(stream)
        made = Workspace(sums, zeros)
    else:
        try:
            done = torch.cuda.Event()
            done.record(stream)
        except RuntimeError:  # it is of a context whose events are not torch's
            return _temporary(index, floats, counters)
        made = Workspace(sums, zeros, done, stream)
    _workspaces.pop(key, None)  # so that it is the latest
    _workspaces[key] = made
    return made


def _free_retired() -> None:
    """Frees the tensors that kernels of other streams than torch's own have done with."""
    with driver.relaxed_capture():  # to ask for an event may fail another thread's capture
        for _ in range(len(_retired)):
            waiting = _retired.popleft()
            try:
                passed = waiting[0].query()
            except RuntimeError:  # the context is gone, and with it all that ran there
                passed = True
            if not passed:
                _retired.append(waiting)


def _temporary(index: int, floats: int, counters: int) -> Workspace:
    """A workspace for one launch, zeroed on the current stream."""
    return Workspace(*_tensors(index, floats, counters))


def _tensors(index: int, floats: int, counters: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums, and counters of 0."""
    device = torch.device("cuda", index)
    return (
        torch.empty(floats, dtype=torch.float32, device=device),
        torch.zeros(counters, dtype=torch.int32, device=device),
    )
