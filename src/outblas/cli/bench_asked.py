"""What both kinds of campaigns of `outblas bench` are asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..bench.campaign import Campaign
    from ..bench.record import Record


class Asked(NamedTuple):
    """The options that both kinds of campaigns have: the names of providers, and the rest as
    given.
    """

    names: list[str]
    shapes: str
    dtype: str
    layouts: list[str]
    modes: list[str]
    backward: bool
    rounds: int | None

    @property
    def by_mode(self) -> Mapping[str, int]:
        """The minimum number of rounds in each mode."""
        from ..bench.campaign import ROUNDS

        return dict.fromkeys(ROUNDS, self.rounds) if self.rounds else ROUNDS


# Makes a campaign on the current GPU, and its records, which are measured as they are read.
Start: TypeAlias = "Callable[[], tuple[Campaign, Iterator[Record]]]"
