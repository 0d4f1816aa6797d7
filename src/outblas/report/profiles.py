"""Result files of `outblas profile`: read and held to their format."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..machines import short_name
from ..shapes import Shape
from .results import LARGEST, contents, in_checkout, is_profile, parsed, saved, shape_of, texts

FIGURES = ("us", "l2_hit_rate", "dram_read_bytes", "l2_to_sm_bytes", "registers")
MOST = {"l2_hit_rate": 1.0}


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What ncu counted of one provider at one shape: time in µs, the hit rate as a fraction. None: not collected.

    `config` is as asked ("": the kernel's own), `resolved` every field of the configuration that ran, "" if not known.
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

    @property
    def gpu(self) -> str:
        """The short name of the GPU: "H100", or the device's own where no table has it."""
        return short_name(self.device)

    @property
    def settings(self) -> dict[str, str]:
        """Fields of the configuration that ran, as text: all of them, or those asked for where more is not known."""
        return dict(_items(self.resolved or self.config))


Profiles = tuple[Profile, ...]


def default_files() -> list[Path]:
    """Every profile of the checkout; none outside one. Raises ValueError for a file that cannot be read."""
    return [path for path in saved() if is_profile(parsed(path))] if in_checkout() else []


def load(paths: Iterable[Path]) -> Profiles:
    """Profiles of all files, in order. Raises ValueError that names file and field where one is malformed."""
    found = []
    for path in paths:
        environment, entries = contents(path, "outblas profile")
        found += [_profile(environment["gpu"], entry, where) for where, entry in entries]
    return tuple(found)


def _profile(device: str, entry: dict[str, Any], where: str) -> Profile:
    texts(entry, where, ("provider", "dtype", "layout"), ("config", "resolved"))
    if "l2_hit_rate" not in entry:
        raise ValueError(f"{where} has no l2_hit_rate, expected what outblas profile writes")
    config, resolved = (_settings(entry.get(name) or "", f"{where}.{name}") for name in ("config", "resolved"))
    figures = {name: _figure(entry.get(name), f"{where}.{name}", MOST.get(name, LARGEST)) for name in FIGURES}
    return Profile(
        provider=entry["provider"],
        config=config,
        resolved=resolved,
        shape=shape_of(entry, where),
        dtype=entry["dtype"],
        layout=entry["layout"],
        device=device,
        **figures,
    )


def _settings(text: str, where: str) -> str:
    if any(not (name and value) for name, value in _items(text)):
        raise ValueError(f"{where} is {text!r}, expected name=value,...")
    return text


def _items(text: str) -> list[tuple[str, str]]:
    """Names and values of a configuration; a value is empty where "=" is missing."""
    pairs = [item.partition("=") for item in text.split(",") if item]
    return [(name, value) for name, _, value in pairs]


def _figure(value: Any, where: str, most: float) -> float | None:
    if value is None:
        return None
    known = isinstance(value, int | float) and not isinstance(value, bool)
    if not known or not 0 <= value <= most:  # NaN is neither
        raise ValueError(f"{where} is {value!r}, expected a number from 0 to {most:g} or null")
    return float(value)
