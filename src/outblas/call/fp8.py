"""The formats of fp8 operands and how their scales divide them, in the text that `Problem.formats`
and the traits of kernels have.
"""

import functools
from typing import NamedTuple

BLOCK = 128  # terms that share a scale where scales vary along K
RECIPES = {"1x128": 1, "128x128": BLOCK}  # rows of A, or columns of B, that share one


class Formats(NamedTuple):
    """The formats of a product of fp8 operands.

    Attributes:
        a: the format of A, "e4m3" or "e5m2".
        b: that of B.
        promoted: whether the sum of every 128 products is added up in fp32 outside of the tensor
            cores.
        block_a: rows of A that share a scale, where scales vary along K: 1 or 128; else 0.
        block_b: columns of B that do.
    """

    a: str
    b: str
    promoted: bool = False
    block_a: int = 0
    block_b: int = 0

    def transposed(self) -> "Formats":
        """Returns the formats of B^T A^T."""
        return Formats(self.b, self.a, self.promoted, self.block_b, self.block_a)

    def __str__(self) -> str:
        words = [self.a, self.b]
        if self.promoted:
            words.append("promoted")
        if self.block_a:
            names = {rows: name for name, rows in RECIPES.items()}
            words += [names[self.block_a], names[self.block_b]]
        return " ".join(words)


@functools.cache
def formats(text: str) -> Formats:
    """Parses formats such as "e4m3 e5m2", "e4m3 e5m2 promoted" or, where scales vary along K,
    "e4m3 e4m3 promoted 1x128 128x128". Raises ValueError for another text.
    """
    words = text.split()
    promoted = words[2:3] == ["promoted"]
    blocks = words[3:] if promoted else words[2:]
    is_pair = len(words) >= 2 and {*words[:2]} <= {"e4m3", "e5m2"}
    has_recipes = promoted and len(blocks) == 2 and {*blocks} <= {*RECIPES}
    if not is_pair or (blocks and not has_recipes):
        raise ValueError(
            f"formats is {text!r}, expected two of e4m3 and e5m2, then 'promoted' or nothing, and "
            f"after 'promoted' two of {', '.join(RECIPES)} or nothing"
        )
    return Formats(words[0], words[1], promoted, *(RECIPES[word] for word in blocks))
