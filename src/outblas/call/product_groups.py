"""How groups divide a product, and the words for that in a line of the files that packs are built
from.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from outblas.call.scaling import BY_ROWS, Scaling

# What is divided: rows that follow one another, terms of the sums, or rows that each group has
# places for, of which `counts` says how many are there.
Form = Literal["rows", "terms", "masked"]
FORMS: tuple[Form, ...] = get_args(Form)
_COUNT, _TOP = "groups:", "top:"
_FLAGS = {
    "gathered": "gathers",
    "scattered": "scatters",
    "weighted": "weighted",
    "zero-tail": "zero_tail",
}
WORDS = (
    f"{_COUNT}NUMBER, {_COUNT}NUMBER:terms or {_COUNT}NUMBER:masked, {', '.join(_FLAGS)}, "
    f"{_TOP}NUMBER"
)


@dataclass(frozen=True)
class Groups:
    """How groups divide a product.

    Attributes:
        count: How many there are.
        form: What is divided.
        gathers, scatters, weighted: Whether there are `a_index`, `scatter_index` and
            `scatter_weights`.
        zero_tail: Whether rows beyond the last group become zeros, as in gradients.
        top: How many groups each token chooses, where `moe_mlp` multiplies its rows first; else 0.
    """

    count: int
    form: Form = "rows"
    gathers: bool = False
    scatters: bool = False
    weighted: bool = False
    zero_tail: bool = False
    top: int = 0

    @property
    def words(self) -> tuple[str, ...]:
        """What stands in a line."""
        form = "" if self.form == "rows" else f":{self.form}"
        flags = [word for word, name in _FLAGS.items() if getattr(self, name)]
        flags += [f"{_TOP}{self.top}"] if self.top else []
        return (f"{_COUNT}{self.count}{form}", *flags)


def field(word: str) -> tuple[str, Any] | None:
    """Returns what a word of a line says of groups, and that; None for another word."""
    if word in _FLAGS:
        return _FLAGS[word], True
    chosen = word.removeprefix(_TOP)
    if word.startswith(_TOP) and chosen.isdecimal() and int(chosen):
        return "top", int(chosen)
    number, _, form = word.removeprefix(_COUNT).partition(":")
    if not word.startswith(_COUNT) or not number.isdecimal() or not int(number):
        return None
    return next(
        (("groups", (int(number), each)) for each in FORMS if each == (form or "rows")), None
    )


def of_fields(fields: dict[str, Any]) -> Groups | None:
    """Returns the groups that the words of a line describe; None for a line without any. Raises
    ValueError.
    """
    if not fields:
        return None
    count, form = fields.pop("groups", (0, "rows"))
    found = Groups(count, form, **fields)
    words = found.words[1:]
    if not count or (form != "rows" and words):
        raise ValueError(f"{', '.join(words)} given, expected {_COUNT}NUMBER beside it")
    if found.weighted and not found.scatters:
        raise ValueError("weighted is given without scattered, expected both")
    return found


def check_scaling(groups: Groups, scaling: Scaling) -> None:
    """Raises ValueError for a scaling that no product of groups has."""
    by_row = "1x128", BY_ROWS
    of_b = by_row if groups.form == "terms" else ("128x128",)
    if scaling.a not in by_row or scaling.b not in of_b:
        raise ValueError(
            f"the recipes are {scaling.a} and {scaling.b}, expected {by_row[0]} and {of_b[0]} with "
            f"{_COUNT}{groups.count}"
        )
    if scaling.in_fp8:
        raise ValueError(f"the result is {scaling.result}, expected 16 bits or float32 with groups")
