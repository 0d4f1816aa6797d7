"""Everything that was measured: timings, counters of ncu, and cycles by phase."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from . import phases, profiles, results
from .phases import Counted
from .profiles import Profiles
from .results import Measurements


@dataclass(frozen=True)
class Evidence:
    """The records of result files, by the command that wrote them."""

    measurements: Measurements = ()
    profiles: Profiles = ()
    phases: tuple[Counted, ...] = ()


def load(paths: Iterable[Path]) -> Evidence:
    """The records of all files, in order. Raises ValueError that names file and field where one is
    malformed.
    """
    files = results.by_kind(paths)
    return Evidence(
        results.load(files.bench), profiles.load(files.profiles), phases.load(files.phases)
    )
