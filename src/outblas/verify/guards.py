"""Guarded buffers: a strided view between poisoned bands, so that stray writes are found and stray
reads become visible.

The poison is a NaN with a special payload, so that a NaN from a kernel differs from it. Inputs and
outputs have different payloads, because CPUs carry a payload through arithmetic: a NaN that was
read outside an input must not count as "unwritten".
"""

from collections.abc import Sequence

import torch

from outblas.call.tensor_memory import span

_BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
_OUTPUT_POISON = {torch.bfloat16: 0x7FD5, torch.float16: 0x7F55, torch.float32: 0x7FC5A5A5}
_INPUT_POISON = {torch.bfloat16: 0x7FCA, torch.float16: 0x7F2A, torch.float32: 0x7FCA5A5A}
_ALIGNMENT = 64  # elements: at least 128 bytes, more than the 16 that TMA needs
_CHUNK = 1 << 28  # elements: torch.nonzero takes fewer than 2³¹


class Guarded:
    """A view of `shape` and `strides` (elements) in a storage that is poisoned before, after and
    between the view's elements.

    `view` starts `offset` elements after a 128-byte boundary and holds poison until it is written.
    `guard` is the minimum number of elements in each band. After `arm` has been called, `violation`
    reports later changes.
    """

    def __init__(
        self,
        name: str,
        shape: Sequence[int],
        strides: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        offset: int = 0,
        guard: int = 256,
        output: bool = False,
    ) -> None:
        self.name, self.shape, self.strides = name, tuple(shape), tuple(strides)
        self.start = -(-guard // _ALIGNMENT) * _ALIGNMENT + offset
        self.end = self.start + span(shape, strides)
        self.poison = (_OUTPUT_POISON if output else _INPUT_POISON)[dtype]
        self.storage = torch.full(
            (self.end + guard,), self.poison, dtype=_BITS[dtype], device=device
        ).view(dtype)
        self.view = self._window(self.storage)
        self._armed = self.storage

    def _window(self, storage: torch.Tensor) -> torch.Tensor:
        return storage.as_strided(self.shape, self.strides, self.start)

    @property
    def cells(self) -> torch.Tensor:
        """Returns the view without stride-0 repetitions, which is safe to fill in place."""
        return self.view[
            tuple(slice(0, 1) if stride == 0 else slice(None) for stride in self.strides)
        ]

    @property
    def armed(self) -> torch.Tensor:
        """Returns the view as it was when `arm` was called."""
        return self._window(self._armed)

    def arm(self) -> None:
        """Saves all bits of the storage."""
        self._armed = self.storage.clone()

    def reset(self) -> None:
        """Restores the state that `arm` saved."""
        self.storage.copy_(self._armed)

    def bits(self) -> torch.Tensor:
        """Returns the view as integers."""
        return self._window(self.storage.view(_BITS[self.storage.dtype]))

    def unwritten(self) -> torch.Tensor:
        """Returns a mask, of the view's shape, of the elements that still hold poison."""
        return self.bits() == self.poison

    def violation(self, *, writable: bool) -> str | None:
        """Returns a message about forbidden changes since `arm`: any change at all, or if
        `writable` only changes outside the view.

        Returns None if there are none. Compares bits, so NaN equals itself and -0 differs from 0.
        Offset 0 is the view's first element.
        """
        bits = _BITS[self.storage.dtype]
        changed = self.storage.view(bits) != self._armed.view(bits)
        if writable:
            self._window(changed).fill_(False)
        if not bool(changed.any()):
            return None
        operand = torch.zeros_like(changed)
        self._window(operand).fill_(True)
        regions = {
            "before it": changed[: self.start],
            "inside it": changed[self.start : self.end] & operand[self.start : self.end],
            "in its gaps": changed[self.start : self.end] & ~operand[self.start : self.end],
            "after it": changed[self.end :],
        }
        counts = ", ".join(
            f"{count} {where}" for where, mask in regions.items() if (count := int(mask.sum()))
        )
        first = next(
            begin + int(hits[0])
            for begin in range(0, changed.numel(), _CHUNK)
            if (hits := changed[begin : begin + _CHUNK].nonzero()).numel()
        )
        offset = first - self.start
        strides = f"strides {list(self.strides)}"
        return f"{self.name}: elements overwritten {counts}; first at offset {offset}, {strides}"
