"""How the matrices of a product lie in memory where they are not packed, and the words for that in
a line of the files that packs are built from.
"""

from dataclasses import dataclass, fields
from typing import Any

ALIGNMENTS = (1, 2, 4, 8, 16)  # bytes; packed matrices begin at whole cache lines
_ALIGN = "align_"
WORDS = "lda:, ldb: or ldc:NUMBER, align-a:, align-b: or align-out:NUMBER"


@dataclass(frozen=True)
class Storage:
    """How the matrices of a product lie in memory; 0 for what is as in packed ones.

    Attributes:
        lda, ldb, ldc: How far the rows of A, of B and of C are apart, in elements, or the columns
            where these are contiguous.
        align_a, align_b, align_out: The largest power of two up to 16 that divides an address.
    """

    lda: int = 0
    ldb: int = 0
    ldc: int = 0
    align_a: int = 0
    align_b: int = 0
    align_out: int = 0

    @property
    def words(self) -> list[str]:
        """What stands in a line."""
        given = {each.name.replace("_", "-"): getattr(self, each.name) for each in fields(self)}
        return [f"{name}:{value}" for name, value in given.items() if value]


PACKED = Storage()


def field(word: str) -> tuple[str, Any] | None:
    """Returns what a word of a line says of the storage, and that; None for another word."""
    name, _, number = word.partition(":")
    known = {each.name.replace("_", "-"): each.name for each in fields(Storage)}
    if name not in known or not number.isdecimal() or not int(number):
        return None
    return known[name], int(number)


def check(storage: Storage, least: tuple[int, int, int], *, fp8: bool) -> None:
    """Raises ValueError for a storage that no product has. `least`: of lda, ldb and ldc. `fp8`:
    pairs of values are moved together.
    """
    for name, smallest in zip(("lda", "ldb", "ldc"), least, strict=True):
        value = getattr(storage, name)
        if value and value < smallest:
            raise ValueError(f"{name} is {value}, expected at least {smallest}")
        if fp8 and name != "ldc" and value % 2:
            raise ValueError(f"{name} is {value}, expected an even number with fp8")
    for each in fields(storage):
        value = getattr(storage, each.name)
        if each.name.startswith(_ALIGN) and value and value not in ALIGNMENTS:
            shown = each.name.replace("_", "-")
            raise ValueError(
                f"{shown} is {value}, expected one of {', '.join(map(str, ALIGNMENTS))}"
            )
