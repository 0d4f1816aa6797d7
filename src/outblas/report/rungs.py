"""Every rung of the ladders in order of the climb, with what the seeds measured on it."""

from dataclasses import dataclass

from ..core import registry
from .seed_figures import Figure, of_rung

LADDERS = tuple(registry.LADDERS)
# Ladders whose rungs are also measured on other operands, with fp32 accumulators: their dtype.
MIXED = {"simt": "bfloat16"}
# Ladders whose rungs are also measured with code for an older GPU: its name, the config that
# selects it.
OLDER = {"turing": ("sm_75", "arch=75")}


@dataclass(frozen=True)
class Rung:
    """A rung of a ladder, described by its kernel; `figures` are what the documents measured."""

    name: str
    idea: str
    parent: str | None
    figures: tuple[Figure, ...]

    @property
    def ladder(self) -> str:
        return self.name.partition(".")[0]


def climb(ladder: str | None = None) -> tuple[Rung, ...]:
    """All rungs, or the rungs of one ladder, from the first up. Raises ValueError for an unknown
    ladder.
    """
    if ladder is not None and ladder not in LADDERS:
        raise ValueError(f"--ladder is {ladder!r}, expected one of {', '.join(LADDERS)}")
    return tuple(Rung(k.name, k.idea, k.parent, of_rung(k.name)) for k in registry.ladder(ladder))


def names(ladder: str | None = None) -> tuple[str, ...]:
    """The names of all rungs, or of one ladder's. Raises ValueError for an unknown ladder."""
    return tuple(rung.name for rung in climb(ladder))
