"""What `outblas.patch` and `outblas.unpatch` report."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

Row = tuple[str, str, str]  # the name of a layer, what became of it, and why


@dataclass(frozen=True)
class Report:
    """What `patch` or `unpatch` did with each linear layer of a model.

    Layers are named as in `torch.nn.Module.named_modules`; "(root)" is the model itself. `str`
    makes a table, followed by the notes. Layers whose names differ in numbers only share a row if
    the rest of it is equal: `model.layers.{0..31}.mlp.up_proj (32)`.

    Attributes:
        swapped: The linear layers that have the new class now, and fp8 layers that have the new
            forward, including those that had it before.
        kept: The layers that were left as they are, with the reason for each.
        remarks: The swapped layers and experts that outblas's kernels do not compute for the time
            being, with the reason for each: because they are on the CPU, for example. And the gated
            MLPs that `fuse` leaves to their class, because something else uses the memory of their
            weights, for example.
        notes: Tools of torch that do not accept the model in its present state.
        unreached: Weights of products that outblas does not compute, with what computes them: the
            input projections of attention, the layers of GPT-2, experts and fp8 layers that were
            kept.
        gains: For a swapped layer on a GPU the time of cuBLAS over that of the best kernel, by the
            number of rows, where a sweep measured exactly these sizes on this model of GPU, or a
            shipped table has it.
        fused: What `fuse` did, by the name of the layer or module: the layers that compute the
            activation after them, and the gated MLPs whose first two layers are one product.
        experts: Modules of experts that `outblas.moe_mlp` computes now, each with what it is.
        dry_run: Whether nothing was changed: the layers in `swapped` would be.
        restored: Whether this is what `unpatch` did: the layers in `swapped` have their own class
            or forward again.

    Example:
        >>> import torch, outblas
        >>> report = outblas.patch(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()))
        >>> report.swapped
        ('0',)
        >>> report.remarks
        {'0': 'on cpu: torch takes it until it moves to an NVIDIA GPU'}
        >>> print(report)
        1 swapped, 0 kept
        0  swapped  on cpu: torch takes it until it moves to an NVIDIA GPU
        ...
    """

    swapped: tuple[str, ...] = ()
    kept: dict[str, str] = field(default_factory=dict)
    remarks: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    unreached: dict[str, str] = field(default_factory=dict)
    gains: dict[str, dict[int, float]] = field(default_factory=dict)
    fused: dict[str, str] = field(default_factory=dict)
    experts: dict[str, str] = field(default_factory=dict)
    dry_run: bool = False
    restored: bool = False

    def prepare(self, rows: int = 8192) -> None:
        """Compile and load the kernels of the model's layers, so that no call waits for one or is
        computed by torch meanwhile. It shows on a terminal how many are left.

        They are compiled in several processes at a time, and kept in the cache. Kernels of
        gradients are not among them, and neither are those of layers on a CPU.

        Args:
            rows: The largest number of rows of a call: tokens of a batch together.

        Raises:
            TypeError: `rows` is no int.
            ValueError: `rows` is not positive, or the report is that of a dry run or of `unpatch`.
            ReferenceError: The model is gone.
            RuntimeError: `OUTBLAS_COMPILE` is `never`.

        Example:
            >>> import torch, outblas
            >>> model = torch.nn.Linear(16, 32).bfloat16()
            >>> outblas.patch(model).prepare(rows=512)
        """
        if not isinstance(rows, int) or isinstance(rows, bool):
            raise TypeError(f"rows is {type(rows).__name__}, expected an int")
        if rows < 1:
            raise ValueError(f"rows is {rows}, expected a positive number")
        prepare: Callable[[int], None] | None = vars(self).get("_prepare")  # `patch` adds it
        if prepare is None:
            raise ValueError("the report is that of a dry run or of unpatch, expected one of patch")
        prepare(rows)

    def __str__(self) -> str:
        swaps, fuses = ("would swap", "would fuse") if self.dry_run else ("swapped", "fused")
        if self.restored:
            swaps = "restored"
        rows = [(name, swaps, self._said_of(name)) for name in self.swapped]
        rows += [(name, "kept", why) for name, why in self.kept.items()]
        rows += [
            (name, swaps, "; ".join(filter(None, (what, self.remarks.get(name)))))
            for name, what in self.experts.items()
        ]
        rows += [(name, fuses, what) for name, what in self.fused.items()]
        others = self.remarks.keys() - set(self.swapped) - self.experts.keys()
        rows += [(name, "not fused", why) for name, why in self.remarks.items() if name in others]
        rows += [(name, "unreached", why) for name, why in self.unreached.items()]
        rows = list(_together(rows))
        width = max((len(name) for name, *_ in rows), default=0)
        words = max((len(what) for _, what, _ in rows), default=0)
        lines = [f"{name:{width}}  {what:{words}}  {why}".rstrip() for name, what, why in rows]
        counts = [f"{len(self.swapped)} {swaps}", f"{len(self.kept)} kept"]
        if self.experts:
            counts.append(f"{len(self.experts)} {swaps} with experts")
        if self.fused:
            counts.append(f"{len(self.fused)} {fuses}")
        if others:
            counts.append(f"{len(others)} not fused")
        if self.unreached:
            counts.append(f"{len(self.unreached)} unreached")
        return "\n".join([", ".join(counts), *lines, *self.notes])

    def _said_of(self, name: str) -> str:
        """Returns the remark on a swapped layer and its gains, for a row of the table."""
        gains = [f"{gain:.3f} at {rows}" for rows, gain in sorted(self.gains.get(name, {}).items())]
        measured = f"× cuBLAS by rows: {', '.join(gains)}" if gains else ""
        return "; ".join(filter(None, (self.remarks.get(name, ""), measured)))


_NUMBER = re.compile(r"(\d+)")


def _together(rows: Iterable[Row]) -> Iterator[Row]:
    """Yields one row for those that are equal but for numbers in their names, in the place of the
    first one.
    """
    alike: dict[tuple[str, ...], list[list[str]]] = {}
    for name, *rest in rows:
        parts = _NUMBER.split(name)  # every second one is a number
        alike.setdefault((*parts[::2], *rest), []).append(parts)
    for (*_, what, why), names in alike.items():
        columns = [dict.fromkeys(column) for column in zip(*names, strict=True)]
        shown = "".join(next(iter(c)) if len(c) == 1 else _range(c) for c in columns)
        yield shown if len(names) == 1 else f"{shown} ({len(names)})", what, why


def _range(numbers: Iterable[str]) -> str:
    """Returns the numbers in one place of several names."""
    values = sorted(map(int, numbers))
    if values == list(range(values[0], values[-1] + 1)):
        return f"{{{values[0]}..{values[-1]}}}"
    return f"{{{','.join(map(str, values))}}}"
