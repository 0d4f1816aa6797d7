"""The page docs/claims.md."""

from collections.abc import Iterable, Sequence

from outblas.report.evidence import Evidence
from outblas.report.page import environment_notes

from .claim import REFUTED
from .table import Settled, count, settled

DOCUMENTS = {
    "000": "an H100 SGEMM worklog",
    "001": "a climb on an H100's tensor cores to 107% of cuBLAS",
    "002": "SGEMM on a GH200",
    "003": "a T4, from CUDA cores to tensor cores",
    "004": "a retelling of 001",
}

_INTRODUCTION = """\
<!-- Written by: make claims -->
# The seed documents, checked

The rungs of the ladders implement kernels of five published worklogs, which
[the page of sources](learn/sources.md) describes. This page has every claim of theirs that can be
tested, and what came of it, for readers who met a figure or an explanation there and want to know
whether it holds. A claim is tested by arithmetic, or by a measurement.

| verdict | meaning |
|---|---|
| confirmed | the number agrees, or the comparison came out as claimed |
| refuted | arithmetic, or a measurement under the claim's own conditions, says otherwise |
| differs | our number is another one, and conditions (versions, rounding) can account for it |
| not yet measured | no file of `results/` has what the test needs |

`make claims` writes this page from the files of `results/`. `outblas report ladder` shows the same
findings beside the table of a ladder.
"""


def page(evidence: Evidence) -> str:
    """The whole page in Markdown: the refuted claims first, then all of them by document."""
    found = settled(evidence)
    environments = (m.environment for m in evidence.measurements)
    notes = "".join(f"- {note}\n" for note in environment_notes(environments))
    refuted = [s for s in found if s.finding.verdict == REFUTED]
    parts = [
        _INTRODUCTION,
        f"{len(found)} claims: {count(found)}. Measured on:\n\n{notes}",
        "## Refuted\n",
        _table(
            ("claim", "source", "what came out"),
            ((s.claim.text, s.claim.source, s.finding.ours) for s in refuted),
        ),
    ]
    for number, about in DOCUMENTS.items():
        own = [s for s in found if s.claim.source.startswith(number)]
        parts += [f"## {number}: {about}\n", f"{count(own)}.\n", _claims(own)]
    return "\n".join(parts)


def _claims(found: Iterable[Settled]) -> str:
    return _table(
        ("where", "claim", "tested by", "ours", "verdict"),
        (
            (
                s.claim.source.partition(" ")[2] or "–",
                s.claim.text,
                s.claim.how,
                s.finding.ours,
                s.finding.verdict,
            )
            for s in found
        ),
    )


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)
