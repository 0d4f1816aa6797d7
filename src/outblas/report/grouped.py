"""The tables of grouped products beside torch's, for each GPU and kind of product."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import geometric_mean

from ..bench.record import GROUPED_BASE, MODES
from ..core.grouped_shapes import DISTRIBUTIONS, FORMS, GroupedWorkload, model_of
from . import campaigns, markdown, text
from .evidence import Evidence
from .results import Measurement

_COLUMNS = (
    "experts",
    "N×K",
    "rows",
    "groups",
    "µs",
    "torch µs",
    "TFLOP/s",
    "GB/s",
    "× torch",
    "spread",
)
# The last column, by mode: what only calls in that mode have.
_LAST = {"burst": "apart", "cold": "of copy", "sustained": "W"}
_NOTES = {
    "burst": "*apart*: with a foreign kernel between calls, which only short calls have",
    "cold": "over copies of the weights whose sum is twice L2; *of copy*: the share of the "
    "bandwidth that a copy of a gigabyte reaches",
    "sustained": "calls without pause",
}
_RATIO = _COLUMNS.index("× torch")
# How operands in fp8 are scaled, by form.
_SCALES = {
    "rows": campaigns.FP8_SCALES["fp8-block"],
    "terms": "one for each 1×128 block of A and 128×1 block of B, in groups of whole blocks",
}
_HEADINGS = {
    ("rows", ""): "Forward",
    ("rows", "dA"): "Gradients of rows",
    ("terms", ""): "Gradients of weights",
    ("terms", "dB"): "Gradients of weights",
}


def tables(evidence: Evidence, argument: str) -> str:
    """A table for each GPU and kind of product, each with the geometric mean of its ratios and the
    least. The argument is the provider and, after a space, the mode where it is not burst.

    Raises ValueError where the provider was not timed, or twice at one workload.
    """
    provider, _, mode = argument.partition(" ")
    mode = mode or "burst"
    if mode not in MODES:
        raise ValueError(f"a table of grouped products is in {mode!r}, expected {', '.join(MODES)}")
    timed = [m for m in evidence.measurements if m.mode == mode and m.ratio is not None]
    grouped = [m for m in timed if m.workload is not None]
    ours = [m for m in grouped if m.label == provider]
    if not ours:
        raise ValueError(f"{provider} was not timed at grouped products in {mode}")
    made = [
        _table(heading, found, [m for m in grouped if m.label == GROUPED_BASE])
        for heading, found in _by_heading(ours).items()
    ]
    return "\n".join(made)


def _by_heading(ours: Sequence[Measurement]) -> dict[str, list[Measurement]]:
    found: dict[str, list[Measurement]] = {}
    for m in sorted(ours, key=lambda m: (m.device, FORMS.index(m.form or "rows"))):
        kind = _HEADINGS.get((m.form or "rows", m.product), m.product)
        found.setdefault(f"{kind}, {m.device}, {m.dtype}, {m.layout}", []).append(m)
    return found


def _table(heading: str, ours: Sequence[Measurement], base: Sequence[Measurement]) -> str:
    rows = sorted(ours, key=lambda m: _order(_workload(m)))
    if len({_workload(m) for m in rows}) != len(rows):
        raise ValueError(f"{heading}: a workload was timed twice, expected one campaign")
    cells = [_cells(m, _torch_us(m, base)) for m in rows]
    ratios = [m.ratio for m in rows if m.ratio is not None]
    cells += [_summary("geometric mean", geometric_mean(ratios)), _summary("least", min(ratios))]
    head = f"**{heading}**"
    mode = rows[0].mode
    columns = (*_COLUMNS, _LAST[mode])
    lines = [f"| {' | '.join(row)} |" for row in (columns, *cells)]
    lines.insert(1, "|---" * len(columns) + "|")
    note = (
        f"{rows[0].label} in {mode}; {_ratio_note(rows[0])} over the time of the call, a median "
        "over rounds; *spread*: from the 10th to the 90th percentile of rounds; "
        f"{_NOTES[mode]}; *zipf*: the i-th most popular expert has a share of rows in proportion "
        f"to 1/i; checked: {markdown.listed(dict.fromkeys(m.check for m in rows))}"
    )
    return "\n".join([head, "", markdown.closed(lines, rows, note)])


def _ratio_note(m: Measurement) -> str:
    """What the time of torch is that of, and how its operands are scaled."""
    if m.dtype not in campaigns.FP8_SCALES:
        return "*× torch*: the time of torch's `grouped_mm`"
    return (
        f"scales: {_SCALES[m.form or 'rows']}; *torch*: one `torch._scaled_mm` for each group, for "
        "torch has no grouped product with such scales; results in bfloat16; *× torch*: the time "
        "of all these"
    )


def _cells(m: Measurement, torch_us: float | None) -> list[str]:
    w = _workload(m)
    named = model_of(w)
    return [
        f"{w.experts}, {named}" if named else str(w.experts),
        f"{w.N}×{w.K}",
        str(w.rows),
        w.distribution,
        text.number(m.us),
        text.number(torch_us),
        text.number(m.tflops),
        text.figure(m.gbs, ".0f"),
        text.figure(m.ratio, ".3f"),
        text.spread(m),
        _last(m),
    ]


def _last(m: Measurement) -> str:
    match m.mode:
        case "burst":
            return text.figure(m.ratio_apart, ".3f")
        case "cold":
            return text.percent(m.bandwidth_share)
    return text.figure(m.watts, ".0f")


def _summary(name: str, ratio: float) -> list[str]:
    cells = [name, *[""] * len(_COLUMNS)]
    cells[_RATIO] = f"**{ratio:.3f}**"
    return cells


def _torch_us(m: Measurement, base: Sequence[Measurement]) -> float | None:
    """The time of torch in the same campaign."""
    return next(
        (
            each.us
            for each in base
            if (each.workload, each.product, each.dtype, each.layout, each.environment)
            == (m.workload, m.product, m.dtype, m.layout, m.environment)
        ),
        None,
    )


def _workload(m: Measurement) -> GroupedWorkload:
    assert m.workload is not None, "`tables` chooses grouped products"
    return m.workload


def _order(w: GroupedWorkload) -> tuple[int, ...]:
    """A key that sorts workloads by experts, the sizes of their weights, rows and distribution."""
    return w.experts, -w.N * w.K, -w.N, w.rows, DISTRIBUTIONS.index(w.distribution)
