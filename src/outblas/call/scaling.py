"""How the fp8 operands of a product are scaled and what becomes of it, and the words for that in a
line of the files that packs are built from.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

# The dtypes of a line whose operands are fp8, and the formats of A and B.
FP8_DTYPES = {
    "fp8-e4m3": ("e4m3", "e4m3"),
    "fp8-e4m3-e5m2": ("e4m3", "e5m2"),
    "fp8-e5m2-e4m3": ("e5m2", "e4m3"),
    "fp8-e5m2": ("e5m2", "e5m2"),
}
WHOLE = ("tensorwise", "rowwise")
# Scales of 1x128 lie by columns, as `outblas.quantize` and torch make them, so that TMA can load
# them. Those of 1x128-rows lie by rows.
BY_ROWS = "1x128-rows"
BLOCKS = ("1x128", BY_ROWS, "128x128")
RESULTS = ("bfloat16", "float16", "float32", "e4m3", "e4m3-pow2")
FAST = "fast-accum"
WORDS = f"the recipes of scales (such as tensorwise, rowwise, 1x128:128x128), {FAST}, to-DTYPE"


@dataclass(frozen=True)
class Scaling:
    """How the fp8 operands of a product are scaled, and what becomes of it.

    Attributes:
        a, b: The recipes of both scales, of `WHOLE` or of `BLOCKS`.
        fast: Whether the tensor cores add up all of K (`use_fast_accum`).
        result: Its dtype, of `RESULTS`. "e4m3" has a scale for 128 columns of a row, and
            "e4m3-pow2" such scales that are powers of two.
    """

    a: str
    b: str
    fast: bool = False
    result: str = RESULTS[0]

    @property
    def in_blocks(self) -> bool:
        """Whether scales vary along K."""
        return self.a in BLOCKS

    @property
    def in_fp8(self) -> bool:
        """Whether the result is fp8."""
        return self.result.startswith("e4m3")

    @property
    def in_powers_of_two(self) -> bool:
        """Whether the scales of a result in fp8 are powers of two."""
        return self.result.endswith("pow2")

    @property
    def words(self) -> tuple[str, ...]:
        """What stands in a line."""
        recipes = self.a if self.a == self.b else f"{self.a}:{self.b}"
        result = () if self.result == RESULTS[0] else (f"to-{self.result}",)
        return (recipes, *[FAST] * self.fast, *result)


def field(word: str) -> tuple[str, Any] | None:
    """Returns what a word of a line says of the scaling, and that; None for another word."""
    if word == FAST:
        return "fast", True
    if word.removeprefix("to-") in RESULTS and word.startswith("to-"):
        return "result", word.removeprefix("to-")
    recipes = word.split(":")
    if len(recipes) <= 2 and {*recipes} <= {*WHOLE, *BLOCKS}:
        return "recipes", (recipes[0], recipes[-1])
    return None


def of_fields(dtype: str, fields: dict[str, Any]) -> Scaling | None:
    """Returns the scaling that the words of a line describe; None for operands that are not fp8.
    Raises ValueError.
    """
    if dtype not in FP8_DTYPES:
        if fields:
            raise ValueError(f"{_listed(fields)} given, expected a dtype of {_listed(FP8_DTYPES)}")
        return None
    recipes = fields.pop("recipes", None)
    if recipes is None:
        raise ValueError(f"the dtype is {dtype}, expected {WORDS} beside it")
    found = Scaling(*recipes, **fields)
    if found.in_blocks != (found.b in BLOCKS):
        raise ValueError(
            f"the recipes are {found.a} and {found.b}, expected both of {_listed(WHOLE)} or both "
            f"of {_listed(BLOCKS)}"
        )
    if found.in_blocks and found.fast:
        raise ValueError(f"{FAST} is given, expected scales of {_listed(WHOLE)} beside it")
    return found


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
