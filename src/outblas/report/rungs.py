"""All rungs of the ladders in order, with the figures that the seed documents give for them."""

from dataclasses import dataclass

from ..core import registry
from .seed_figures import Figure, of_rung

LADDERS = tuple(registry.LADDERS)
# Ladders whose rungs are also measured with other operands and fp32 accumulators, and their dtype.
MIXED = {"simt": "bfloat16"}
# Ladders whose rungs are also measured with code for an older GPU: its architecture, and the config
# that selects it.
OLDER = {"turing": ("sm_75", "arch=75")}


@dataclass(frozen=True)
class Rung:
    """A rung of a ladder, described by its kernel. `figures` are those of the documents."""

    name: str
    idea: str
    parent: str | None
    figures: tuple[Figure, ...]

    @property
    def ladder(self) -> str:
        return self.name.partition(".")[0]


def climb(ladder: str | None = None) -> tuple[Rung, ...]:
    """Returns all rungs, or the rungs of one ladder, from the first to the last. Raises ValueError
    for an unknown ladder.
    """
    if ladder is not None and ladder not in LADDERS:
        raise ValueError(f"--ladder is {ladder!r}, expected one of {', '.join(LADDERS)}")
    return tuple(Rung(k.name, k.idea, k.parent, of_rung(k.name)) for k in registry.ladder(ladder))


def names(ladder: str | None = None) -> tuple[str, ...]:
    """Returns the names of all rungs, or of one ladder's. Raises ValueError for an unknown
    ladder.
    """
    return tuple(rung.name for rung in climb(ladder))
