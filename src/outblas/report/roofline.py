"""The kernels of a ladder on the roofline of one machine: what memory allows, and what was
measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..bench import plotting
from ..core import progress, registry
from ..core.machines import Machine
from ..core.shapes import Shape, to_text
from ..inspect import Inspection, inspect
from ..inspect import roofline as model
from ..inspect.inspection import compilable
from ..inspect.occupancy import Occupancy, occupancy
from . import text
from .lookup import find
from .results import Measurement, Measurements
from .seed_figures import Figure, of_rung

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

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
_LEVELS = {"compute": "compute", "dram": "DRAM", "l2": "L2", "l1": "L1", "shared": "shared memory"}
# A marker for each ladder, since colours repeat where there are many kernels.
_MARKERS = {"simt": "o", "portable": "^", "turing": "s", "hopper": "o"}
INSIDE = 10  # kernels for which a legend within the axes has room


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
    def roof(self) -> tuple[float, str]:
        """The lowest ceiling in TFLOP/s, and the level of memory (or compute) that sets it.

        It is taken at the clock of the data sheet, as the drawn roofs are.
        """
        ceilings = self.inspection.bound[self.machine.name]["ceilings"]
        level = min(ceilings, key=lambda level: float(ceilings[level]))
        return float(ceilings[level]), _LEVELS[level]

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
    ladder: str | None, machine: Machine, dtype: str | None, shape: Shape, measured: Measurements
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
    return [
        Point(
            inspect(k.name, arch=machine.arch, dtype=own, shape=shape),
            machine,
            find(measured, k.name, shape, own, machine.name),
            tuple(
                f
                for f in of_rung(k.name)
                if f.gpu == machine.name and f.dtype == own and f.n and f.tflops
            ),
        )
        for k, own in progress.counted(kernels, lambda pair: pair[0].name)
    ]


def missing(ladder: str | None, machine: Machine) -> list[str]:
    """The kernels that do not run on the machine."""
    return [k.name for k in registry.ladder(ladder) if machine.arch not in compilable(k)]


def draw(found: Sequence[Point], shape: Shape) -> Canvas:
    """A log-log chart: roofs of DRAM, L2 and compute (of every unit that a kernel uses), and each
    kernel at its L2 intensity, hollow where its lowest ceiling would put it and filled where it was
    measured.
    """
    machine = found[0].machine
    crowded = len(found) > INSIDE
    figure, (axis,) = plotting.canvas(1, (12.0 if crowded else 8.5, 5.2))
    peaks = sorted({machine.peak_tflops(p.inspection.unit) for p in found}, reverse=True)
    dram = machine.dram_gbs / 1e3  # TB/s, and TFLOP/s at one FLOP per byte
    intensities = [
        float(p.inspection.intensity[level] or 1) for p in found for level in ("l2", "dram")
    ]
    low, high = min(1.0, *intensities) / 2, max(peaks[0] / dram, *intensities) * 2

    _draw_roofs(axis, machine, peaks, (low, high))
    _draw_points(axis, found)
    _draw_compulsory(axis, found, height=low * dram * 2)

    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlim(low, high)
    axis.set_xlabel("FLOP per byte")
    axis.set_ylabel("TFLOP/s")
    beside = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
    axis.legend(frameon=False, fontsize="small", **(beside if crowded else {"loc": "lower right"}))
    dtypes = " and ".join(dict.fromkeys(p.inspection.dtype for p in found))
    axis.set_title(f"{machine.name}, {dtypes}, {to_text(shape)}", loc="left", fontsize="medium")
    return figure


def _draw_roofs(
    axis: Any, machine: Machine, peaks: Sequence[float], span: tuple[float, float]
) -> None:
    """The slopes of DRAM and L2 up to the highest peak, then a level for each peak, over a span of
    intensities.
    """
    low, high = span
    compute = peaks[0]
    dram = machine.dram_gbs / 1e3
    l2 = machine.l2_bytes_per_clock * machine.boost_mhz / 1e6
    slopes = (
        (dram, f"DRAM {dram:.2f} TB/s", "-"),
        (l2, f"L2 {l2:.1f} TB/s, if nothing merges", "--"),
    )
    for slope, name, style in slopes:
        intensities, tflops = [low, compute / slope, high], [low * slope, compute, compute]
        axis.plot(intensities, tflops, style, color="#9a9a9a", linewidth=1.4)
        axis.annotate(
            name,
            (low * 1.3, low * 1.3 * slope),
            xytext=(-8, 8),
            textcoords="offset points",
            rotation=36,
            rotation_mode="anchor",
            fontsize="small",
            color="#666",
            va="bottom",
        )
    for peak in peaks:
        axis.plot([peak / l2, high], [peak, peak], "-", color="#9a9a9a", linewidth=1.4)
        axis.annotate(
            f"{peak:.0f} TFLOP/s",
            (high, peak),
            ha="right",
            va="bottom",
            fontsize="small",
            color="#666",
        )


def _draw_points(axis: Any, found: Sequence[Point]) -> None:
    """The kernels, and the documents' figures on them as diamonds."""
    colours = plotting.colours([p.inspection.kernel for p in found])
    diamond = {"marker": "D", "linestyle": "none", "markersize": 5, "markeredgecolor": "black"}
    for p in found:
        name, x = p.inspection.kernel, float(p.inspection.intensity["l2"] or 1)
        marker = _MARKERS[name.partition(".")[0]]
        roof, level = p.roof
        axis.plot([x], [roof], marker, markerfacecolor="none", color=colours[name], markersize=8)
        label = f"{name}: {level} allows {_show(roof)}"
        if p.ours is not None and p.ours.tflops is not None:
            axis.plot([x], [p.ours.tflops], marker, color=colours[name], markersize=8)
            label += f", measured {p.ours.tflops:.0f}"
        for seed in p.seeds:
            assert seed.tflops is not None
            axis.plot([x], [sum(seed.tflops) / 2], color=colours[name], **diamond)
            label += f", seed {text.span(seed.tflops, text.number)} at {seed.n}"
        axis.plot([], [], marker, color=colours[name], label=label)
    if any(p.seeds for p in found):
        axis.plot([], [], color="white", label="the seed's figure", **diamond)


def _draw_compulsory(axis: Any, found: Sequence[Point], height: float) -> None:
    """A line at the intensity of A, B and C moved once, with its name at a height in TFLOP/s."""
    intensities = sorted({float(p.inspection.intensity["dram"] or 1) for p in found})
    for intensity in intensities:
        axis.axvline(intensity, color="#bbbbbb", linestyle=":", linewidth=1.2)
    axis.annotate(
        "A, B, C once\nthrough DRAM",
        (intensities[0], height),
        fontsize="small",
        color="#666",
        ha="right",
    )


def _show(value: float | None) -> str:
    return text.figure(value, ".3g" if value and value < 1000 else ".0f")
