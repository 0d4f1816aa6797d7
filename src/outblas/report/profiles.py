"""Reads and checks result files of `outblas profile`, which contain ncu's counters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..core import configs
from ..core.machines import short_name
from ..core.shapes import Shape
from .results import LARGEST, contents, is_profile, parsed, saved, shape_of, texts

# The largest values of fractions. ncu collects some counters in several passes, so they can exceed
# 1.
MOST = {
    "l2_hit_rate": 1.0,
    "l1_hit_rate": 1.0,
    "ffma_reuse": 1.0,
    "fma_active": 1.1,
    "tensor_active": 1.1,
    "occupancy": 1.1,
}


@dataclass(frozen=True)
class Total:
    """The sums over the accesses of one `operation` to one operand (None: not known) in one memory
    `space` in one launch, in the units of `instructions.Counts`.

    None stands for a count that does not exist for such accesses.
    """

    operand: str | None
    space: str
    operation: str
    requests: float | None = None
    transactions: float | None = None
    sectors: float | None = None
    efficiency: float | None = None
    wavefronts: float | None = None
    ideal: float | None = None


@dataclass(frozen=True)
class Passes:
    """The loads, or the stores, of shared memory.

    The counters of L1 give `wavefronts` and `excess`, the fraction of them that they attribute to
    bank conflicts; for stores they count a few per cent more than the instructions take. The
    instructions themselves give `requests` of warps and `added`, the fraction of wavefronts beyond
    the ideal number (None: profiled without --instructions).
    """

    wavefronts: float | None = None
    excess: float | None = None
    requests: float | None = None
    added: float | None = None

    @property
    def ways(self) -> float | None:
        """Wavefronts per request. ncu calls 5 a 5-way conflict, even where 128-bit accesses need
        several wavefronts without any conflict.
        """
        return (
            self.wavefronts / self.requests
            if self.wavefronts is not None and self.requests
            else None
        )


@dataclass(frozen=True, kw_only=True)
class Profile:
    """ncu's counts for one provider at one shape, in the units of `Counters`; None stands for a
    counter that was not collected.

    `config` is the requested one ("": the kernel's default), `resolved` has every field of the
    configuration that ran ("": not known). `not_selected` is the fraction of a warp's time between
    two of its instructions in which it could issue but the scheduler selected another warp. `loads`
    and `stores` are those of shared memory. `memory` is None without --instructions. `addend` means
    that the launch computed alpha A B + beta C.
    """

    provider: str
    config: str
    resolved: str
    shape: Shape
    dtype: str
    layout: str
    device: str
    us: float | None
    l2_hit_rate: float | None
    dram_read_bytes: float | None
    l2_to_sm_bytes: float | None
    registers: float | None
    l1_hit_rate: float | None = None
    l1_load_bytes: float | None = None
    dram_gbs: float | None = None
    ffma: float | None = None
    ffma_reuse: float | None = None
    ipc: float | None = None
    fma_active: float | None = None
    tensor_active: float | None = None
    occupancy: float | None = None
    global_load_requests: float | None = None
    not_selected: float | None = None
    loads: Passes = Passes()
    stores: Passes = Passes()
    memory: tuple[Total, ...] | None = None
    addend: bool = False

    @property
    def gpu(self) -> str:
        """The short name of the GPU: "H100", or the device's own where no table has it."""
        return short_name(self.device)

    @property
    def settings(self) -> dict[str, str]:
        """Returns the fields of the configuration that ran, as text: all of them, or the requested
        ones where the others are not known.
        """
        return dict(configs.items(self.resolved or self.config))


Profiles = tuple[Profile, ...]
FIGURES, TOTALS = (
    [f.name for f in fields(kind) if f.type == "float | None"] for kind in (Profile, Total)
)
FIGURES.remove("not_selected")  # its field has another name


def default_files() -> list[Path]:
    """The project's own files of `outblas profile`. Raises ValueError for a file that cannot be
    read.
    """
    return [path for path in saved() if is_profile(parsed(path))]


def load(paths: Iterable[Path]) -> Profiles:
    """The profiles of all files, in order. Raises ValueError that names file and field where one is
    malformed.
    """
    found = []
    for path in paths:
        environment, entries = contents(path, "outblas profile")
        found += [_profile(environment["gpu"], entry, where) for where, entry in entries]
    return tuple(found)


def _profile(device: str, entry: dict[str, Any], where: str) -> Profile:
    texts(entry, where, ("provider", "dtype", "layout"), ("config", "resolved"))
    if "l2_hit_rate" not in entry:
        raise ValueError(f"{where} has no l2_hit_rate, expected what outblas profile writes")
    config, resolved = (
        _settings(entry.get(name) or "", f"{where}.{name}") for name in ("config", "resolved")
    )
    figures = {
        name: _figure(entry.get(name), f"{where}.{name}", MOST.get(name, LARGEST))
        for name in FIGURES
    }
    memory = _memory(entry.get("memory"), f"{where}.memory")
    return Profile(
        provider=entry["provider"],
        config=config,
        resolved=resolved,
        shape=shape_of(entry, where),
        dtype=entry["dtype"],
        layout=entry["layout"],
        device=device,
        not_selected=_figure(entry.get("not_selected_share"), f"{where}.not_selected_share", 1.0),
        loads=_passes(entry, where, "ld", _of_shared(memory, "load")),
        stores=_passes(entry, where, "st", _of_shared(memory, "store")),
        memory=memory,
        addend=bool(entry.get("addend", False)),
        **figures,
    )


def _object(entry: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    """The object in a field; {} where it is missing or null."""
    value = entry.get(name)
    if not isinstance(value, dict | None):
        raise ValueError(f"{where}.{name} is {value!r}, expected an object")
    return value or {}


def _passes(entry: dict[str, Any], where: str, key: str, totals: tuple[Total, ...]) -> Passes:
    counted = _object(_object(entry, "shared", where), key, f"{where}.shared")
    wavefronts = sum(total.wavefronts or 0.0 for total in totals)
    return Passes(
        _figure(counted.get("wavefronts"), f"{where}.shared.{key}.wavefronts", LARGEST),
        _figure(counted.get("excess"), f"{where}.shared.{key}.excess", 1.0),
        sum(total.requests or 0.0 for total in totals) if totals else None,
        1 - sum(total.ideal or 0.0 for total in totals) / wavefronts if wavefronts else None,
    )


def _memory(totals: Any, where: str) -> tuple[Total, ...] | None:
    if totals is None:
        return None
    if not isinstance(totals, list) or not all(isinstance(total, dict) for total in totals):
        raise ValueError(f"{where} is {totals!r}, expected a list of objects")
    return tuple(_total(total, f"{where}[{i}]") for i, total in enumerate(totals))


def _total(entry: dict[str, Any], where: str) -> Total:
    figures = {name: _figure(entry.get(name), f"{where}.{name}", LARGEST) for name in TOTALS}
    texts(entry, where, ("space", "operation"), ("operand",))
    return Total(entry.get("operand"), entry["space"], entry["operation"], **figures)


def _of_shared(memory: tuple[Total, ...] | None, operation: str) -> tuple[Total, ...]:
    """The totals of one operation on shared memory, of all operands and launches."""
    return tuple(
        total for total in memory or () if (total.space, total.operation) == ("shared", operation)
    )


def _settings(text: str, where: str) -> str:
    if any(not (name and value) for name, value in configs.items(text)):
        raise ValueError(f"{where} is {text!r}, expected name=value,...")
    return text


def _figure(value: Any, where: str, most: float) -> float | None:
    if value is None:
        return None
    known = isinstance(value, int | float) and not isinstance(value, bool)
    if not known or not 0 <= value <= most:  # NaN is neither
        raise ValueError(f"{where} is {value!r}, expected a number from 0 to {most:g} or null")
    return float(value)
