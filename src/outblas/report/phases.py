"""Results of `outblas profile --phases`: the cycles of each role of a kernel, and what 001 says of
its kernel 3.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.machines import short_name
from ..core.shapes import Shape
from .results import LARGEST, contents, has_phases, parsed, saved, shape_of, texts
from .seed_figures import PHASES

# The phases whose cycles are counted for each step along K, and for each tile.
STEP, TILE = ("wait", "load", "tensor"), ("store", "total")
COLUMNS = ("kernel", "role", *(f"{phase} / K step" for phase in STEP), "store / tile", "all / tile")


@dataclass(frozen=True)
class Role:
    """The mean SM cycles of one warpgroup, by the phases of STEP and TILE."""

    name: str
    cycles: dict[str, float]


@dataclass(frozen=True)
class Counted:
    """The cycles of a kernel's roles, in one configuration ("": its own) at one shape."""

    provider: str
    config: str
    shape: Shape
    dtype: str
    device: str
    roles: tuple[Role, ...]

    @property
    def gpu(self) -> str:
        """The short name of the GPU: "H100", or the device's own where no table has it."""
        return short_name(self.device)


def default_files() -> list[Path]:
    """The project's own files of `outblas profile --phases`. Raises ValueError for a file that
    cannot be read.
    """
    return [path for path in saved() if has_phases(parsed(path))]


def load(paths: Iterable[Path]) -> tuple[Counted, ...]:
    """The records of all files, in order. Raises ValueError that names file and field where one is
    malformed.
    """
    found = []
    for path in paths:
        environment, entries = contents(path, "outblas profile --phases")
        found += [counted(environment["gpu"], entry, where) for where, entry in entries]
    return tuple(found)


def rows(found: Iterable[Counted]) -> list[tuple[str, ...]]:
    """A row for each role, in the order of COLUMNS; 001's cycles follow those of its kernel 3."""
    cells = []
    for kernel in found:
        name = f"{kernel.provider}[{kernel.config}]" if kernel.config else kernel.provider
        cells += [
            (name, role.name, *(_cell(role.cycles[phase]) for phase in STEP + TILE))
            for role in kernel.roles
        ]
        if kernel.provider in PHASES and not kernel.config:
            source, cycles = PHASES[kernel.provider]
            cells.append((source, "all", *(_cell(cycles.get(phase, 0.0)) for phase in STEP + TILE)))
    return cells


def _cell(cycles: float) -> str:
    return f"{cycles:,.0f}" if cycles else "–"


def counted(device: str, entry: dict[str, Any], where: str) -> Counted:
    """The record of one entry of a file. Raises ValueError that names `where` and the field if the
    entry is malformed.
    """
    texts(entry, where, ("provider", "dtype"), ("config",))
    roles = entry.get("phases")
    if not isinstance(roles, list) or not roles:
        raise ValueError(f"{where}.phases is {roles!r}, expected a list of roles")
    return Counted(
        provider=entry["provider"],
        config=entry.get("config") or "",
        shape=shape_of(entry, where),
        dtype=entry["dtype"],
        device=device,
        roles=tuple(_role(role, f"{where}.phases[{i}]") for i, role in enumerate(roles)),
    )


def _role(entry: Any, where: str) -> Role:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise ValueError(f"{where} is {entry!r}, expected a role with a name")
    for phase in STEP + TILE:
        value = entry.get(phase)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 <= value < LARGEST
        ):
            raise ValueError(f"{where}.{phase} is {value!r}, expected cycles")
    return Role(entry["name"], {phase: float(entry[phase]) for phase in STEP + TILE})
