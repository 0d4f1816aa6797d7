"""Memory for partial sums and the counters of arrived CTAs: one `Workspace` per stream, as large as
was ever needed there.

Kernels of one stream run one after the other, and each leaves the counters at 0 for the next.
Kernels of two streams must never share a workspace. These are the steps in the life of a workspace,
and what makes each step safe:

1. Created, under `_making`: a thread that finds no workspace, or too small a one, takes the lock
   and looks again, so that threads that share a stream get the same workspace. `driver.for_good`
   returns when the counters are zero on the GPU, so every kernel that uses them, on any stream, is
   launched later.
2. Handed out: `get_workspace` returns it, and the caller's frame refers to it until the launch is
   enqueued. Only that reference keeps the memory alive between the two: another thread may replace
   the workspace in `_workspaces` meanwhile, but cannot free it.
3. Replaced by a larger one, of the next powers of two, or dropped for lack of room: `_workspaces`
   drops its reference. Kernels may still run, or be about to be launched by threads that refer to
   it; they run in stream order with the kernels of its successor.
4. Dropped by the last caller, whose kernel is enqueued: the memory may return to the allocator as
   soon as the kernels enqueued so far have ended. For a stream of torch's own, which is never
   destroyed, the allocator ensures that: `record_stream` was called before the workspace was first
   handed out, so any thread may drop the tensors at any time. Any other stream cannot be used any
   more, because its owner may have destroyed it: `launched` records an event after every kernel,
   and the tensors wait in `_retired` until the event has completed.

Streams are identified by a key that no two of them share during the life of the process
(`_stream_key`). The handle is not sufficient: a new stream may get the handle of a destroyed one
whose kernels still run; 0 is a different stream in each context (green contexts), and
`cudaStreamPerThread` a different one in each thread. Contexts, streams and threads that have ended
leave workspaces that nothing asks for again. Therefore only the newest `FOREIGN` workspaces of
streams that are not torch's own are kept.

While a CUDA graph is captured, the memory belongs to the graph, because the graph may later run
concurrently with anything. Where the driver cannot identify the stream of a call, the call uses
memory of the current stream and zeroes it.
"""

from collections import deque
from collections.abc import Hashable
from typing import Any

import torch

from outblas.base import forks
from outblas.device import driver

FOREIGN = 64  # number of kept workspaces of streams that are not torch's own


# Events, and the tensors that only kernels may use until their event has completed.
_retired: deque[tuple[Any, ...]] = deque()


class Workspace:
    """The partial sums and counters of the kernels of one stream.

    sums: fp32.
    counters: int32, and 0 whenever no kernel of their stream runs.
    done: an event after the last kernel, where `stream` is not torch's own.

    A thread that launches a kernel must refer to the workspace until the kernel is enqueued, and
    then call `launched`.
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
        """Returns whether it has room for this many sums and counters."""
        assert self.sums is not None
        assert self.counters is not None
        return self.sums.numel() >= floats and self.counters.numel() >= counters

    def launched(self) -> None:
        """Records that a kernel which uses the workspace is on the current stream, which must be
        the workspace's.
        """
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
    """Returns a workspace of at least `floats` fp32 sums and `counters` int32 counters, which are
    0, for one launch on the current stream of GPU `index`.
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
            found = _workspaces.get(key)  # another thread of this stream may have made it meanwhile
            if found is None or not found.fits(floats, counters):
                found = _make(index, stream, key, floats, counters)
    return found


def _stream_key(index: int, stream: Any) -> Hashable | None:
    """Returns a key that no other stream has, had or will have; None where that cannot be known."""
    handle = stream.cuda_stream
    if _pooled(stream):
        return index, handle  # created once, and never destroyed
    if handle in (0, driver.LEGACY):
        return index, 0, driver.context()
    if handle == driver.PER_THREAD:
        return index, handle, driver.context(), driver.thread()
    number = driver.stream_id(handle)
    return None if number is None else (index, handle, number)


def _pooled(stream: Any) -> bool:
    """Returns whether a stream is one of torch's pool. The ids of other streams are their handles,
    which are even, or 0.
    """
    return bool(stream.stream_id & 1) and stream.cuda_stream > driver.PER_THREAD


def _make(index: int, stream: Any, key: Hashable, floats: int, counters: int) -> Workspace:
    """Makes a workspace for a stream that has none, or to replace a smaller one. The caller holds
    `_making`.
    """
    _free_retired()
    foreign = [other for other, kept in _workspaces.items() if kept.done is not None]
    if key not in foreign and len(foreign) >= FOREIGN:
        del _workspaces[foreign[0]]
    # A new number of rows may need a little more; few workspaces are waited for this way.
    floats, counters = (1 << (size - 1).bit_length() for size in (floats, counters))
    before = _workspaces.get(key)
    if before is not None and before.sums is not None and before.counters is not None:
        floats, counters = max(floats, before.sums.numel()), max(counters, before.counters.numel())

    def tensors_and_context() -> tuple[torch.Tensor, torch.Tensor, int | None]:
        """Allocates the tensors in a separate thread, whose context is the primary one."""
        return *_tensors(index, floats, counters), driver.context()

    device = torch.device("cuda", index)
    sums, zeros, primary = driver.for_good(device, tensors_and_context)
    if _pooled(stream) or key == (index, 0, primary):
        for tensor in (sums, zeros):
            tensor.record_stream(stream)
        made = Workspace(sums, zeros)
    else:
        try:
            done = torch.cuda.Event()
            done.record(stream)
        except RuntimeError:  # the stream's context is not the one of torch's events
            return _temporary(index, floats, counters)
        made = Workspace(sums, zeros, done, stream)
    _workspaces.pop(key, None)  # so that it becomes the newest entry
    _workspaces[key] = made
    return made


def _free_retired() -> None:
    """Frees tensors whose kernels, on streams that are not torch's own, have ended."""
    with driver.relaxed_capture():  # querying an event may fail another thread's capture
        for _ in range(len(_retired)):
            waiting = _retired.popleft()
            try:
                passed = waiting[0].query()
            except RuntimeError:  # the context is gone, and with it everything that ran there
                passed = True
            if not passed:
                _retired.append(waiting)


def _temporary(index: int, floats: int, counters: int) -> Workspace:
    """Returns a workspace for one launch, zeroed on the current stream."""
    return Workspace(*_tensors(index, floats, counters))


def _tensors(index: int, floats: int, counters: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocates sums, and counters of 0."""
    device = torch.device("cuda", index)
    return (
        torch.empty(floats, dtype=torch.float32, device=device),
        torch.zeros(counters, dtype=torch.int32, device=device),
    )
