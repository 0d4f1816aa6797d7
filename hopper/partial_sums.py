"""Memory in which CTAs leave partial sums and count who has: one piece for each stream, as large as was ever needed.

Calls on one stream run one after the other, and each leaves the counters at 0. While a CUDA graph is captured the
memory is the graph's own, for it may run beside anything later.
"""

import threading

import torch

from ..device import memory

_held: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
_making = threading.Lock()


def borrow(index: int, floats: int, counters: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`floats` fp32 and `counters` int32 of 0 at least, on the current stream of a GPU."""
    stream = torch.cuda.current_stream(index)
    if torch.cuda.is_current_stream_capturing():
        return _made(index, floats, counters)
    key = index, stream.cuda_stream
    held = _held.get(key)
    if held is None or held[0].numel() < floats or held[1].numel() < counters:
        with _making:
            before = (0, 0) if held is None else (held[0].numel(), held[1].numel())
            for smaller in held or ():
                smaller.record_stream(stream)  # a call may still use it
            wanted = max(floats, before[0]), max(counters, before[1])
            held = _held[key] = memory.for_good(torch.device("cuda", index), lambda: _made(index, *wanted))
    return held


def _made(index: int, floats: int, counters: int) -> tuple[torch.Tensor, torch.Tensor]:
    device = torch.device("cuda", index)
    return (
        torch.empty(floats, dtype=torch.float32, device=device),
        torch.zeros(counters, dtype=torch.int32, device=device),
    )
