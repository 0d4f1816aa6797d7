"""What the files of results/ hold: timings of `outblas bench`, and counters of `tools.counters`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from outblas.autotune.store.tables import TunedTable, read_table
from outblas.base.configs import items
from outblas.base.machines import of_device
from outblas.base.registry import layout_of
from outblas.base.shapes import Shape
from outblas.bench.record import Record

GPUS = ("H100", "GH200", "T4")  # of the documents, in the order in which tables prefer them


@dataclass(frozen=True, kw_only=True)
class Measurement(Record):
    """A record of `outblas bench`, with the environment of its campaign."""

    environment: dict[str, Any] = field(repr=False, hash=False)

    @property
    def device(self) -> str:
        """The GPU's own name: "NVIDIA H100 80GB HBM3"."""
        return str(self.environment["gpu"])

    @property
    def gpu(self) -> str:
        """The short name of the GPU: "H100", or the device's own where no table has it."""
        return getattr(of_device(self.device), "name", self.device)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """ncu's counts for one provider at one shape. `config` has the fields that were asked for, and
    `resolved` all fields of what ran where the file has them; `memory` has the sums over accesses,
    as in the file.
    """

    provider: str
    config: str
    shape: Shape
    dtype: str
    layout: str
    device: str
    resolved: str = ""
    l2_hit_rate: float | None = None
    dram_read_bytes: float | None = None
    registers: float | None = None
    occupancy: float | None = None
    fma_active: float | None = None
    tensor_active: float | None = None
    ipc: float | None = None
    addend: bool = False
    memory: list[dict[str, Any]] = field(default_factory=list, hash=False)

    @property
    def gpu(self) -> str:
        """The short name of the GPU."""
        return getattr(of_device(self.device), "name", self.device)

    @property
    def settings(self) -> dict[str, str]:
        """The fields of the config that ran: all of them, or those that were asked for."""
        return dict(items(self.resolved or self.config))


@dataclass(frozen=True)
class Results:
    """The records of files: timings, counters, cycles by phase with their GPU, shipped tables."""

    measurements: list[Measurement] = field(default_factory=list)
    profiles: list[Profile] = field(default_factory=list)
    phases: list[dict[str, Any]] = field(default_factory=list)
    tables: list[TunedTable] = field(default_factory=list)


def load(paths: Iterable[Path]) -> Results:
    """The records of all files, in order. Raises ValueError that names the file and the entry where
    a field is missing.
    """
    results = Results()
    names = {f.name for f in fields(Profile)}
    for path in paths:
        report = json.loads(path.read_text(encoding="utf-8"))
        if "environment" not in report:
            results.tables.append(read_table(path))
            continue
        environment, device = report["environment"], report["environment"]["gpu"]
        for i, entry in enumerate(report["results"]):
            values = {name: value for name, value in entry.items() if value is not None}
            try:
                values["shape"] = tuple(values["shape"])
                if "phases" in values:
                    results.phases.append({**values, "device": device})
                elif "l2_hit_rate" in entry:
                    values = {name: values[name] for name in names & values.keys()}
                    results.profiles.append(Profile(device=device, **values))
                else:
                    values = {"config": "", "environment": environment, **values}
                    results.measurements.append(Measurement(**values))
            except (KeyError, TypeError) as error:
                raise ValueError(f"{path}: results[{i}]: {error}") from error
    return results


def gpus_of(measurements: Iterable[Measurement]) -> list[str]:
    """The GPUs in the order in which a table takes figures from them: the H100 first, then the
    documents' other GPUs.
    """
    names = sorted({m.gpu for m in measurements})
    return sorted(names, key=lambda gpu: GPUS.index(gpu) if gpu in GPUS else len(GPUS))


def find(
    measurements: Iterable[Measurement],
    provider: str,
    shape: Shape,
    dtype: str,
    gpu: str,
    *,
    config: str = "",
    layout: str | None = None,
) -> Measurement | None:
    """The newest timing in burst of a provider's bare GEMM on a GPU, or None. `config` has the
    fields that differ from the defaults, in any order; the default `layout` is the ladder's.
    """
    key = provider, frozenset(items(config)), shape, dtype, gpu, layout or layout_of(provider)
    matching = [
        m
        for m in measurements
        if (m.provider, frozenset(items(m.config)), m.shape, m.dtype, m.gpu, m.layout) == key
        and m.mode == "burst"
        and m.ratio is not None
        and m.is_plain
    ]
    # Of equal dates the last one.
    return max(reversed(matching), key=lambda m: str(m.environment.get("date", "")), default=None)


def profiled(
    profiles: Sequence[Profile], provider: str, shape: Shape, dtype: str, gpu: str, layout: str
) -> Profile | None:
    """The last profile of a provider in its own config on a GPU, or None."""
    key = provider, "", shape, dtype, gpu, layout, False
    matching = (
        p
        for p in reversed(profiles)
        if (p.provider, p.config, p.shape, p.dtype, p.gpu, p.layout, p.addend) == key
    )
    return next(matching, None)
