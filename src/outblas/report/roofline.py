"""The kernels of a ladder on the roofline of one machine: what memory allows, and what was
measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from ..core import progress, registry
from ..core.artifact import Artifact
from ..core.machines import Machine
from ..core.shapes import Shape
from ..inspect import Inspection, kept, read
from ..inspect import roofline as model
from ..inspect.inspection import compilable, compiled
from ..inspect.occupancy import Occupancy, occupancy
from . import text
from .lookup import find
from .results import Measurement, Measurements
from .seed_figures import Figure, of_rung

READERS = 4  # threads that read machine code, most of which wait for nvdisasm
COLUMNS = (
    "kernel",
    "operands",
    "CTAs, warps\nan SM",
    "FLOP/B, L2",
    "FLOP/B, DRAM",
    "L2 allows",
    "DRAM allows",
    "L1 allows",
    "shared allows",
    "bound",
    "measured",
    "seed",
)


@dataclass(frozen=True)
class Point:
    """A kernel's machine code on a machine, its burst timing there if there is one, and what the
    documents measured of its rung on the same model of GPU and the same operands.
    """

    inspection: Inspection
    machine: Machine
    ours: Measurement | None
    seeds: tuple[Figure, ...] = ()

    @property
    def resident(self) -> Occupancy:
        """The CTAs and warps that an SM of the machine holds."""
        i = self.inspection
        return occupancy(self.machine, i.registers, i.smem_bytes, i.threads)

    @property
    def bound(self) -> model.Bound:
        """The ceilings at the clock of the timing; at the data sheet's without a timing."""
        clock = self.ours.clock_mhz if self.ours else None
        intensity: dict[str, Any] = dict(self.inspection.intensity)
        return model.bound(self.machine, model.Intensity(**intensity), self.inspection.unit, clock)

    @property
    def clock_mhz(self) -> float:
        """The clock of `bound`."""
        measured = self.ours.clock_mhz if self.ours else None
        return measured or self.machine.boost_mhz

    def record(self) -> dict[str, Any]:
        """The point as a JSON object."""
        measured = self.ours.tflops if self.ours else None
        return {
            "kernel": self.inspection.kernel,
            "arch": self.inspection.arch,
            "config": self.inspection.config,
            "machine": self.machine.name,
            "dtype": self.inspection.dtype,
            **asdict(self.resident),
            "intensity": dict(self.inspection.intensity),
            "bound": asdict(self.bound),
            "clock_mhz": self.ours.clock_mhz if self.ours else None,
            "measured_tflops": measured,
            "seeds": [figure.record() for figure in self.seeds],
        }

    def cells(self) -> tuple[str, ...]:
        """The cells of the point's row, in the order of COLUMNS."""
        bound, intensity = self.bound, self.inspection.intensity
        clock = f" at {self.ours.clock_mhz:.0f} MHz" if self.ours and self.ours.clock_mhz else ""
        resident = self.resident
        return (
            self.inspection.kernel,
            self.inspection.dtype,
            f"{resident.ctas_per_sm}, {resident.warps_per_sm} ({resident.share:.0%}), "
            f"{resident.limiter}",
            *(_show(intensity[level]) for level in ("l2", "dram")),
            *(_show(bound.ceilings.get(level)) for level in ("l2", "dram", "l1", "shared")),
            f"{_show(bound.tflops)} ({bound.by})",
            _show(self.ours.tflops if self.ours else None) + clock,
            "\n".join(f"{text.span(f.tflops, text.number)} at {f.n}" for f in self.seeds)
            or _show(None),
        )


def points(
    ladder: str | None,
    machine: Machine,
    dtype: str | None,
    shape: Shape,
    measured: Measurements,
) -> list[Point]:
    """A point for every kernel that compiles for the machine and takes the dtype (None: the dtype
    in which documents measure its ladder). Raises ValueError if there is none.
    """
    kernels = [
        (k, own)
        for k in registry.ladder(ladder)
        if machine.arch in compilable(k) and (own := dtype or registry.dtype_of(k.name)) in k.dtypes
    ]
    if not kernels:
        wanted = dtype or registry.dtype_of(ladder or "")
        raise ValueError(
            f"no kernel of {ladder or 'any ladder'} takes {wanted} on sm_{machine.arch} "
            f"({machine.name})"
        )
    requests = [kept.Request(k.name, machine.arch, own, shape) for k, own in kernels]
    return [
        _point(inspection, request, machine, measured)
        for request, inspection in zip(requests, _inspections(requests), strict=True)
    ]


def _inspections(requests: Sequence[kept.Request]) -> list[Inspection]:
    """The inspections that were asked for, as kept on disk, or made.

    Kernels are compiled one after the other, while threads read the machine code of those before.
    """

    def make(request: kept.Request, artifact: Artifact) -> Inspection:
        made = read(artifact, request.shape)
        kept.keep(request, made)
        return made

    found: list[Inspection | Future[Inspection]] = []
    with ThreadPoolExecutor(READERS) as readers:
        for request in progress.counted(requests, lambda each: each.kernel):
            known = kept.find(request)
            if known is None:
                artifact = compiled(
                    request.kernel, arch=request.arch, dtype=request.dtype, shape=request.shape
                )
                found.append(readers.submit(make, request, artifact))
            else:
                found.append(known)
        return [each.result() if isinstance(each, Future) else each for each in found]


def _point(
    inspection: Inspection, request: kept.Request, machine: Machine, measured: Measurements
) -> Point:
    return Point(
        inspection,
        machine,
        find(measured, request.kernel, request.shape, request.dtype, machine.name),
        tuple(
            f
            for f in of_rung(request.kernel)
            if f.gpu == machine.name and f.dtype == request.dtype and f.n and f.tflops
        ),
    )


def missing(ladder: str | None, machine: Machine) -> list[str]:
    """The kernels that do not run on the machine."""
    return [k.name for k in registry.ladder(ladder) if machine.arch not in compilable(k)]


def _show(value: float | None) -> str:
    """A figure with three digits, and with all digits before the point."""
    return text.figure(value, ".3g" if value and value < 1000 else ".0f")
