"""One claim of a seed document, and what testing it found."""

from collections.abc import Callable
from dataclasses import dataclass

from outblas.report.evidence import Evidence

CONFIRMED, REFUTED, DIFFERS, OPEN = "confirmed", "refuted", "differs", "not yet measured"
VERDICTS = (CONFIRMED, REFUTED, DIFFERS, OPEN)


@dataclass(frozen=True)
class Finding:
    """What a test found: `ours` is our result in words with units, `value` the number behind it,
    `verdict` one of VERDICTS.

    A claim is "refuted" where the arithmetic, or a measurement under the claim's own conditions,
    says otherwise. It "differs" where ours is another number and the conditions (versions,
    rounding, meaning) can account for that.
    """

    ours: str
    verdict: str
    value: float | None = None


NOT_MEASURED = Finding("–", OPEN)


@dataclass(frozen=True)
class Claim:
    """A claim of a document.

    `source` is the document and its kernel, `text` the claim in our words, `how` the test in a few
    words.
    """

    source: str
    text: str
    how: str
    test: Callable[[Evidence], Finding]


ROUNDING = 0.03  # figures of the documents have two or three digits


def number(
    source: str,
    text: str,
    how: str,
    stated: float,
    compute: Callable[[], float],
    wording: str,
    within: float = ROUNDING,
    otherwise: str = REFUTED,
) -> Claim:
    """A claim of a number that arithmetic settles: it is confirmed if the computed number agrees to
    the share `within`, and gets the verdict `otherwise` if not.

    `wording` is our result in words, with {:} for the computed number.
    """

    def test(_: object) -> Finding:
        value = compute()
        agrees = abs(value - stated) <= within * abs(stated)
        return Finding(wording.format(value), CONFIRMED if agrees else otherwise, value)

    return Claim(source, text, how, test)
