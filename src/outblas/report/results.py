"""Reads and checks result files of `outblas bench`, and defines what result files of all commands
share.

A result file is a JSON object with `environment` (GPU, versions, date) and `results`, a list with
one object per record. `legacy` reads the packed form of earlier versions.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..bench.record import BASE, BOUNDED, EXACT, MODES, UNCHECKED, Record
from ..core.grouped_shapes import DISTRIBUTIONS, FORMS
from ..core.machines import Machine, of_device, short_name
from ..core.shapes import Shape
from . import legacy

ROOT = Path(__file__).parents[3]  # the root of the checkout, where this runs from one
FIGURES = (
    "ratio",
    "ratio_low",
    "ratio_high",
    "ratio_best",
    "ratio_apart",
    "us_apart",
    "tflops",
    "gbs",
    "bandwidth_share",
    "us",
    "host_us",
    "clock_mhz",
    "utilisation",
    "watts",
    "joules",
    "pj_per_flop",
)
CHECKED = (EXACT, BOUNDED, UNCHECKED)
LARGEST = 1e18  # a figure above this is damage


@dataclass(frozen=True, kw_only=True)
class Measurement(Record):
    """A record of `outblas bench` as read from a file, with the environment of its campaign."""

    environment: dict[str, Any] = field(repr=False, hash=False)

    @property
    def device(self) -> str:
        """The GPU's own name: "NVIDIA H100 80GB HBM3"."""
        return str(self.environment["gpu"])

    @property
    def machine(self) -> Machine | None:
        """The GPU model, if the table of machines has it."""
        return of_device(self.device)

    @property
    def gpu(self) -> str:
        """The short name of the GPU: "H100", or the device's own where no table has it."""
        return short_name(self.device)

    def record(self) -> dict[str, Any]:
        """The record as a JSON object, without the environment."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "environment"}


Measurements = tuple[Measurement, ...]


def in_checkout(root: Path = ROOT) -> bool:
    """Whether a folder is the root of a checkout of outblas."""
    return (root / "src" / "outblas").is_dir() and (root / "results").is_dir()


def own_folder(package: Path) -> Path:
    """The folder of the project's own results, for the folder of the package `outblas`.

    In a checkout it is `results` in the root. A wheel carries the same files as package data.
    """
    root = package.parents[1]
    return root / "results" if in_checkout(root) else package / "results"


FOLDER = own_folder(Path(__file__).parents[1])


def default_files() -> list[Path]:
    """The project's own files of `outblas bench`. Raises ValueError where there are none."""
    found = [path for path in saved() if _is_bench(parsed(path))]
    if not found:
        raise ValueError(
            "--results is missing, expected files that `outblas bench --save FILE` wrote: "
            f"{FOLDER} has none"
        )
    return found


def saved() -> list[Path]:
    """Every JSON file among the project's own results."""
    return sorted(FOLDER.glob("*.json"))


@dataclass(frozen=True)
class Files:
    """The paths of result files by the command that wrote them: `outblas bench`, `outblas profile`
    and `outblas profile --phases`.
    """

    bench: list[Path]
    profiles: list[Path]
    phases: list[Path]


def by_kind(paths: Iterable[Path]) -> Files:
    """Sorts the files by their contents. A file without counters or phases counts as timings; a
    file of host-side figures, which no report shows, is left out.
    """
    files = Files([], [], [])
    for path in paths:
        report = parsed(path)
        if is_host_record(report):
            continue
        kind = (
            files.profiles
            if is_profile(report)
            else files.phases
            if has_phases(report)
            else files.bench
        )
        kind.append(path)
    return files


def is_host_record(report: Any) -> bool:
    """Whether a file's JSON came from `outblas bench-host`, which has figures and no results."""
    return isinstance(report, dict) and "figures" in report and "results" not in report


def is_profile(report: Any) -> bool:
    """Whether a file's JSON came from `outblas profile`: only its entries have L2's hit rate."""
    return _has(report, "l2_hit_rate")


def has_phases(report: Any) -> bool:
    """Whether a file's JSON came from `outblas profile --phases`."""
    return _has(report, "phases")


def _is_bench(report: Any) -> bool:
    """Whether a file's JSON is of the form that `outblas bench` writes."""
    return _is_report(report) and not is_profile(report) and not has_phases(report)


def _has(report: Any, field: str) -> bool:
    entries = report["results"] if _is_report(report) else None
    return isinstance(entries, list) and any(
        isinstance(entry, dict) and field in entry for entry in entries
    )


def load(paths: Iterable[Path]) -> Measurements:
    """The measurements of all files, in order. Raises ValueError that names file and field where
    one is malformed.
    """
    return tuple(measurement for path in paths for measurement in _load(path))


def environments(measurements: Measurements) -> list[dict[str, Any]]:
    """The environments of the measurements, each once."""
    found: list[dict[str, Any]] = []
    for measurement in measurements:
        if measurement.environment not in found:
            found.append(measurement.environment)
    return found


def parsed(path: Path) -> Any:
    """The file's JSON, in the plain form where it is packed. Raises ValueError that names the
    file.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is not JSON: {error}") from None
    if not (_is_report(report) and legacy.is_packed(report)):
        return report
    try:
        return legacy.unpack(report)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def contents(path: Path, command: str) -> tuple[dict[str, Any], list[tuple[str, dict[str, Any]]]]:
    """The environment of a file that `command` writes, and its entries, each after the place where
    it stands ("FILE: results[3]"). Raises ValueError.
    """
    report = parsed(path)
    if not _is_report(report):
        raise ValueError(
            f"{path}: expected an object with environment and results, as {command} writes"
        )
    environment, results = report["environment"], report["results"]
    if not isinstance(environment, dict):
        raise ValueError(f"{path}: environment is {_kind(environment)}, expected an object")
    if not isinstance(environment.get("gpu"), str):
        raise ValueError(
            f"{path}: environment.gpu is {environment.get('gpu')!r}, expected the name of a GPU"
        )
    if not isinstance(results, list):
        raise ValueError(f"{path}: results is {_kind(results)}, expected a list")
    entries = [(f"{path}: results[{i}]", entry) for i, entry in enumerate(results)]
    for where, entry in entries:
        if not isinstance(entry, dict):
            raise ValueError(f"{where} is {_kind(entry)}, expected an object")
    return environment, entries


def texts(
    entry: dict[str, Any], where: str, names: Iterable[str], optional: Iterable[str] = ()
) -> None:
    """Raises ValueError unless the fields in `names` are text, and the fields in `optional` are
    text, null or missing.
    """
    for name in names:
        if not isinstance(entry.get(name), str):
            raise ValueError(f"{where}.{name} is {entry.get(name)!r}, expected text")
    for name in optional:
        if not isinstance(entry.get(name), str | None):
            raise ValueError(f"{where}.{name} is {entry[name]!r}, expected text")


def shape_of(entry: dict[str, Any], where: str) -> Shape:
    """The entry's (M, N, K). Raises ValueError."""
    shape = entry.get("shape")
    if not (
        isinstance(shape, list)
        and len(shape) == 3
        and all(type(size) is int and size > 0 for size in shape)
    ):
        raise ValueError(f"{where}.shape is {shape!r}, expected [M, N, K]")
    return shape[0], shape[1], shape[2]


def _is_report(report: Any) -> bool:
    return isinstance(report, dict) and "environment" in report and "results" in report


def _load(path: Path) -> list[Measurement]:
    environment, entries = contents(path, "outblas bench")
    return [_measurement(environment, entry, where) for where, entry in entries]


def _measurement(environment: dict[str, Any], entry: dict[str, Any], where: str) -> Measurement:
    texts(entry, where, ("provider", "dtype", "layout", "mode", "check"), ("config", "verdict"))
    if entry["mode"] not in MODES:
        raise ValueError(f"{where}.mode is {entry['mode']!r}, expected one of {', '.join(MODES)}")
    shape = shape_of(entry, where)
    figures: dict[str, Any] = {
        name: _figure(entry.get(name), f"{where}.{name}") for name in FIGURES
    }
    spread = [figures[name] for name in ("ratio_low", "ratio", "ratio_high")]
    if len({value is None for value in spread}) > 1:
        raise ValueError(
            f"{where}.ratio, ratio_low and ratio_high are {spread}, expected all three or none"
        )
    if figures["ratio"] is not None:
        if entry["check"] not in CHECKED:
            raise ValueError(
                f"{where} has figures although its check is {entry['check']!r}, expected exact"
            )
        if figures["us"] is None or figures["tflops"] is None:
            raise ValueError(f"{where} has a ratio and no us or tflops, expected both")
    return Measurement(
        environment=environment,
        # The first result files wrote the base as torch users do.
        provider=BASE if entry["provider"] == "cuBLAS" else entry["provider"],
        config=entry.get("config") or "",
        shape=shape,
        verdict=entry.get("verdict"),
        dtype=entry["dtype"],
        layout=entry["layout"],
        mode=entry["mode"],
        check=entry["check"],
        **_operation(entry, where),
        **_groups(entry, where),
        **figures,
    )


def _operation(entry: dict[str, Any], where: str) -> dict[str, Any]:
    """Returns how the operation differs from a bare product of the forward pass; older files do not
    say.
    """
    texts(entry, where, (), ("epilogue", "product"))
    invariant = entry.get("batch_invariant") or False
    if not isinstance(invariant, bool):
        raise ValueError(f"{where}.batch_invariant is {invariant!r}, expected true or false")
    return {
        "epilogue": entry.get("epilogue") or "",
        "product": entry.get("product") or "",
        "batch_invariant": invariant,
    }


def _groups(entry: dict[str, Any], where: str) -> dict[str, Any]:
    """Returns what a record says of groups; {} for one that is no grouped product."""
    found = {name: entry.get(name) for name in ("experts", "form", "distribution")}
    if set(found.values()) == {None}:
        return {}
    experts, form, distribution = found.values()
    for name, value, allowed in (
        ("form", form, FORMS),
        ("distribution", distribution, DISTRIBUTIONS),
    ):
        if value not in allowed:
            raise ValueError(f"{where}.{name} is {value!r}, expected one of {', '.join(allowed)}")
    if type(experts) is not int or experts < 1:
        raise ValueError(f"{where}.experts is {experts!r}, expected an integer of at least 1")
    return found


def _figure(value: Any, where: str) -> float | None:
    if value is None:
        return None
    known = isinstance(value, int | float) and not isinstance(value, bool)
    if not known or not 0 < value < LARGEST:  # NaN is neither
        raise ValueError(f"{where} is {value!r}, expected a number above 0 or null")
    return float(value)


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__
