"""What `outblas.patch` and `outblas.unpatch` report."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Report:
    """What `patch` or `unpatch` did with each linear layer of a model.

    Layers are named as in `torch.nn.Module.named_modules`; "(root)" is the model itself. `str`
    makes a table of one row per layer, followed by the notes.

    Attributes:
        swapped: The linear layers that have the new class now, and fp8 layers that have the new
            forward, including those that had it before.
        kept: The layers that were left as they are, with the reason for each.
        remarks: The swapped layers and experts that outblas's kernels do not compute for the time
            being, with the reason for each: because they are on the CPU, for example.
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

    def __str__(self) -> str:
        swaps, fuses = ("would swap", "would fuse") if self.dry_run else ("swapped", "fused")
        rows = [(name, swaps, self._said_of(name)) for name in self.swapped]
        rows += [(name, "kept", why) for name, why in self.kept.items()]
        rows += [
            (name, swaps, "; ".join(filter(None, (what, self.remarks.get(name)))))
            for name, what in self.experts.items()
        ]
        rows += [(name, fuses, what) for name, what in self.fused.items()]
        rows += [(name, "unreached", why) for name, why in self.unreached.items()]
        width = max((len(name) for name, *_ in rows), default=0)
        words = max((len(what) for _, what, _ in rows), default=0)
        lines = [f"{name:{width}}  {what:{words}}  {why}".rstrip() for name, what, why in rows]
        counts = [f"{len(self.swapped)} {swaps}", f"{len(self.kept)} kept"]
        if self.experts:
            counts.append(f"{len(self.experts)} {swaps} with experts")
        if self.fused:
            counts.append(f"{len(self.fused)} {fuses}")
        if self.unreached:
            counts.append(f"{len(self.unreached)} unreached")
        return "\n".join([", ".join(counts), *lines, *self.notes])

    def _said_of(self, name: str) -> str:
        """Returns the remark on a swapped layer and its gains, for a row of the table."""
        gains = [f"{gain:.3f} at {rows}" for rows, gain in sorted(self.gains.get(name, {}).items())]
        measured = f"× cuBLAS by rows: {', '.join(gains)}" if gains else ""
        return "; ".join(filter(None, (self.remarks.get(name, ""), measured)))
