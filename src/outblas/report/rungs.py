"""Every rung of the ladders in order of the climb, with what the seeds measured on it."""

from dataclasses import dataclass

from .. import registry
from .seed_figures import Figure, of_rung

LADDERS = tuple(registry.LADDERS)
MIXED = {"simt": "bfloat16"}  # operands of a second climb on the same rungs, fp32 accumulators
OLDER = {
    "turing": ("sm_75", "arch=75")
}  # a second climb on code for an older GPU: its name, the config of each rung


@dataclass(frozen=True)
class Rung:
    """A rung as its kernel says; `figures` are the seeds'."""

    name: str
    idea: str
    parent: str | None
    figures: tuple[Figure, ...]

    @property
    def ladder(self) -> str:
        return self.name.partition(".")[0]


def climb(ladder: str | None = None) -> tuple[Rung, ...]:
    """All rungs, or those of one ladder, from the ground up. Raises ValueError for no ladder."""
    if ladder is not None and ladder not in LADDERS:
        raise ValueError(f"--ladder is {ladder!r}, expected one of {', '.join(LADDERS)}")
    return tuple(Rung(k.name, k.idea, k.parent, of_rung(k.name)) for k in registry.ladder(ladder))


def names(ladder: str | None = None) -> tuple[str, ...]:
    """Of all rungs, or of one ladder's. Raises ValueError for no ladder."""
    return tuple(rung.name for rung in climb(ladder))
