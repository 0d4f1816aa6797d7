"""The tables of grouped GEMMs compared with torch's, for each GPU and kind of GEMM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import geometric_mean

from outblas.base.grouped_shapes import DISTRIBUTIONS, FORMS, GroupedWorkload, model_of
from outblas.bench.record import GROUPED_BASE
from tools.pages import campaigns
from tools.pages.results import Measurement, Results
from tools.pages.tables import closed, figure, listed, number, percent, plain, spread

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
# The last column, by mode: what only calls in that mode have, and what a note says of it.
_LAST: dict[str, tuple[str, Callable[[Measurement], str], str]] = {
    "burst": (
        "apart",
        lambda m: figure(m.ratio_apart, ".3f"),
        "*apart*: with a foreign kernel between calls, which only short calls have",
    ),
    "cold": (
        "of copy",
        lambda m: percent(m.bandwidth_share),
        "over copies of the weights whose sum is twice L2; *of copy*: the share of the bandwidth "
        "that a copy of a gigabyte reaches",
    ),
    "sustained": ("W", lambda m: figure(m.watts, ".0f"), "calls without pause"),
}
_RATIO = _COLUMNS.index("× torch")
# How operands in fp8 are scaled, by form.
_SCALES = {
    "rows": campaigns.FP8_SCALES["fp8-block"],
    "terms": "one for each 1×128 block of A and 128×1 block of B, in groups of whole blocks",
}
OUTBLAS = "outblas"
# Whose time over that of outblas `means` has: torch is the base of every ratio.
_COMPARED = {GROUPED_BASE: "torch", "deepgemm": "DeepGEMM"}
_HEADINGS = {
    ("rows", ""): "Forward",
    ("rows", "dA"): "Gradients of rows",
    ("terms", ""): "Gradients of weights",
    ("terms", "dB"): "Gradients of weights",
}


def tables(results: Results, argument: str) -> str:
    """A table for each GPU and kind of GEMM, each with the geometric mean of its ratios and the
    least. The argument is the provider and, after a space, the mode where it is not burst. The
    table of another provider than outblas also has the mean of outblas over the same rows.

    Raises ValueError where the provider was not timed, or twice at one workload.
    """
    provider, _, mode = argument.partition(" ")
    mode = mode or "burst"
    grouped = _grouped(results, mode)
    timed = _of(provider, grouped, mode)
    return "\n".join(_table(heading, rows, grouped) for heading, rows in _by_heading(timed).items())


def means(results: Results, argument: str) -> str:
    """A row for each kind of GEMM, GPU and provider that outblas is compared with: over how many
    workloads, the geometric mean of the ratios, and the least.

    Raises ValueError where outblas was not timed in burst.
    """
    grouped = _grouped(results, "burst")
    cells = []
    for heading, rows in _by_heading(_of(OUTBLAS, grouped, "burst")).items():
        kind, device, dtype, _ = heading.split(", ")
        for provider, name in _COMPARED.items():
            ratios = [ratio for m in rows if (ratio := _over(provider, m, grouped)) is not None]
            if ratios:
                base = name if provider != GROUPED_BASE else _torch_call(dtype)
                mean, least = (f"{value:.3f}" for value in (geometric_mean(ratios), min(ratios)))
                gpu = device.removeprefix("NVIDIA ")
                cells.append((f"{dtype}, {kind.lower()}", gpu, base, str(len(ratios)), mean, least))
    columns = ("experts", "GPU", "compared with", "GEMMs", "geometric mean", "least")
    return "\n".join(plain(columns, sorted(cells))) + "\n"


def _torch_call(dtype: str) -> str:
    if dtype in campaigns.FP8_SCALES:
        return "one `torch._scaled_mm` for each group"
    return "torch's `grouped_mm`"


def _grouped(results: Results, mode: str) -> list[Measurement]:
    timed = [m for m in results.measurements if m.mode == mode and m.ratio is not None]
    return [m for m in timed if m.workload is not None]


def _of(provider: str, grouped: Sequence[Measurement], mode: str) -> list[Measurement]:
    timed = [m for m in grouped if m.label == provider]
    if not timed:
        raise ValueError(f"{provider} was not timed at grouped GEMMs in {mode}")
    return timed


def _over(provider: str, m: Measurement, grouped: Sequence[Measurement]) -> float | None:
    """The provider's time over that of the call: torch's by rounds, others' by medians."""
    if provider == GROUPED_BASE:
        return m.ratio
    other = _beside(provider, m, grouped)
    return other.us / m.us if other and other.us and m.us else None


def _by_heading(ours: Sequence[Measurement]) -> dict[str, list[Measurement]]:
    by_heading: dict[str, list[Measurement]] = {}
    for m in sorted(ours, key=lambda m: (m.device, FORMS.index(m.form or "rows"))):
        kind = _HEADINGS.get((m.form or "rows", m.product), m.product)
        by_heading.setdefault(f"{kind}, {m.device}, {m.dtype}, {m.layout}", []).append(m)
    return by_heading


def _table(heading: str, timed: Sequence[Measurement], grouped: Sequence[Measurement]) -> str:
    rows = sorted(timed, key=lambda m: _order(_workload(m)))
    if len({_workload(m) for m in rows}) != len(rows):
        raise ValueError(f"{heading}: a workload was timed twice, expected one campaign")
    cells = [_cells(m, _beside(GROUPED_BASE, m, grouped)) for m in rows]
    cells += _summaries("", rows)
    if rows[0].label != OUTBLAS:
        same = [_beside(OUTBLAS, m, grouped) for m in rows]
        cells += _summaries("outblas in these rows, ", [m for m in same if m is not None])
    head = f"**{heading}**"
    mode = rows[0].mode
    last, _, note_on_last = _LAST[mode]
    note = (
        f"{rows[0].label} in {mode}; {_ratio_note(rows[0])} over the time of the call, a median "
        "over rounds; *spread*: from the 10th to the 90th percentile of rounds; "
        f"{note_on_last}; *zipf*: the i-th most popular expert has a share of rows in proportion "
        f"to 1/i; checked: {listed(dict.fromkeys(m.check for m in rows))}"
    )
    return "\n".join([head, "", closed(plain((*_COLUMNS, last), cells), rows, note)])


def _ratio_note(m: Measurement) -> str:
    """What the time of torch is that of, and how its operands are scaled."""
    if m.dtype not in campaigns.FP8_SCALES:
        return "*× torch*: the time of torch's `grouped_mm`"
    return (
        f"scales: {_SCALES[m.form or 'rows']}; *torch*: one `torch._scaled_mm` for each group, "
        "because torch has no grouped GEMM with such scales; results in bfloat16; *× torch*: the "
        "time of all these"
    )


def _cells(m: Measurement, torch: Measurement | None) -> list[str]:
    w = _workload(m)
    named = model_of(w)
    _, last, _ = _LAST[m.mode]
    return [
        f"{w.experts}, {named}" if named else str(w.experts),
        f"{w.N}×{w.K}",
        str(w.rows),
        w.distribution,
        number(m.us),
        number(torch.us if torch else None),
        number(m.tflops),
        figure(m.gbs, ".0f"),
        figure(m.ratio, ".3f"),
        spread(m),
        last(m),
    ]


def _summaries(whose: str, rows: Sequence[Measurement]) -> list[list[str]]:
    ratios = [m.ratio for m in rows if m.ratio is not None]
    if not ratios:
        return []
    summaries = {"geometric mean": geometric_mean(ratios), "least": min(ratios)}
    before, after = [""] * (_RATIO - 1), [""] * (len(_COLUMNS) - _RATIO)
    return [
        [f"{whose}{name}", *before, f"**{ratio:.3f}**", *after] for name, ratio in summaries.items()
    ]


def _beside(provider: str, m: Measurement, grouped: Sequence[Measurement]) -> Measurement | None:
    """The timing of a provider at the same workload in the same campaign."""
    key = (m.workload, m.product, m.dtype, m.layout, m.environment)
    return next(
        (
            other
            for other in grouped
            if other.label == provider
            and (other.workload, other.product, other.dtype, other.layout, other.environment) == key
        ),
        None,
    )


def _workload(m: Measurement) -> GroupedWorkload:
    assert m.workload is not None, "`tables` chooses grouped products"
    return m.workload


def _order(w: GroupedWorkload) -> tuple[int, ...]:
    """A key that sorts workloads by experts, the sizes of their weights, rows and distribution."""
    return w.experts, -w.N * w.K, -w.N, w.rows, DISTRIBUTIONS.index(w.distribution)
