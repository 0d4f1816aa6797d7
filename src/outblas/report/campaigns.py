"""Parts of pages that show one campaign of `outblas bench`: the suite and its headline, calls with
cold weights, the layers of a language model, batch invariance, sustained load, and fp8.
"""

from collections.abc import Iterable, Sequence
from statistics import geometric_mean

from ..bench.record import BASE, BEST
from ..core.shapes import SUITE, Shape, to_text
from . import markdown, text
from .evidence import Evidence
from .results import Measurement, Measurements

OURS = "outblas"
_BURST = (
    "burst (idle, one warm call, then 8 timed, or a CUDA graph of about 1 ms for calls under "
    "100 µs); *× cuBLAS*: the time of cuBLAS over the time of the kernel, a median over rounds"
)
_SPREAD = "*spread*: from the 10th to the 90th percentile of rounds"
_APART = "*apart*: with a foreign kernel between calls, which only short calls are timed with"
# What `outblas bench --dtype fp8` times, by the name of the provider: the call, and its sums.
_FP8 = {
    BASE: ("torch._scaled_mm", "float32"),
    "cublas-fast-accum": ("torch._scaled_mm", "fast"),
    OURS: ("outblas.scaled_mm", "float32"),
    "deepgemm": ("deep_gemm", "float32"),
}
# Products whose rows have the same bits in every batch, by the names of their providers.
_INVARIANT = (OURS, "cublas-no-workspace", "triton-persistent")
# How the operands are scaled, by dtype.
FP8_SCALES = {
    "fp8": "one for each operand",
    "fp8-rowwise": "one scale for each row of A and column of B",
    "fp8-block": "one for each 1×128 block of A and 128×128 block of B",
}


def suite(evidence: Evidence, provider: str) -> str:
    """A row for each shape. The argument is a provider, which is compared with both bases where
    they were timed. Without one the table has every provider's ratio to cuBLAS.
    """
    burst = _campaign(evidence.measurements, "burst")
    return _of_provider(burst, provider) if provider else _of_all(burst)


def headline(evidence: Evidence, provider: str) -> str:
    """One sentence: the geometric means against cuBLAS and against the best of cuBLASLt's
    algorithms. The argument is the provider, `outblas` if there is none.
    """
    burst = _campaign(evidence.measurements, "burst")
    name = provider or OURS
    shapes = _shapes(burst)
    ours = [_at(burst, name, shape) for shape in shapes]
    first = ours[0]
    if missing := [to_text(m.shape) for m in ours if m.ratio_best is None]:
        raise ValueError(
            f"{name} was not timed beside {BEST} at {', '.join(missing)}, expected both bases at "
            "every shape"
        )
    called = "`outblas.matmul`" if name == OURS else f"`{name}`"
    what = f"the {len(shapes)} shapes of the suite" if _is_suite(shapes) else _named(shapes)
    date = str(first.environment.get("date", ""))[:10]
    return (
        f"On an {first.device}, {called} is "
        f"**{_mean([m.ratio or 0.0 for m in ours])} times as fast as `torch.mm`** "
        f"({_range(m.ratio for m in ours)} by shape) and "
        f"**{_mean([m.ratio_best or 0.0 for m in ours])} times as fast as the best of cuBLASLt's "
        f"algorithms** ({_range(m.ratio_best for m in ours)}): geometric means over {what}, "
        f"{first.dtype}, layout {first.layout}, burst, from one campaign of {date}.\n"
    )


def cold(evidence: Evidence, provider: str) -> str:
    """A row for each shape: a provider's time with cold weights, its bandwidth, and its ratios to
    both bases. The argument is the provider.
    """
    found = _campaign(evidence.measurements, "cold")
    columns = ("shape", "µs", "GB/s", "of copy", "× cuBLAS", "spread", "× best", "warm")
    warm = {m.shape: m for m in evidence.measurements if (m.label, m.mode) == (provider, "burst")}
    ours = sorted((m for m in found if m.label == provider), key=lambda m: _order(m.shape))
    rows = [
        (
            to_text(m.shape),
            _us(m.us),
            text.figure(m.gbs, ".0f"),
            text.figure(m.bandwidth_share, ".0%"),
            text.figure(m.ratio, ".3f"),
            text.spread(m),
            text.figure(m.ratio_best, ".3f"),
            text.figure(warm[m.shape].ratio, ".3f") if m.shape in warm else text.NONE,
        )
        for m in ours
    ]
    copies = dict.fromkeys(m.environment.get("copy_gbs") for m in ours)
    bandwidth = " and ".join(text.figure(each, ".0f") for each in copies)
    note = (
        f"{provider} in bursts over copies of the weights whose sum is twice L2; *of copy*: the "
        f"share of the {bandwidth} GB/s that a copy of a gigabyte reaches; {_SPREAD}; *× best*: "
        f"compared with {BEST}, the fastest of cuBLASLt's algorithms; *warm*: the ratio to cuBLAS "
        "with the weights in L2"
    )
    return markdown.closed(_plain(columns, rows), found, note)


def layers(evidence: Evidence, provider: str) -> str:
    """A row for each number of rows and a column for each layer of a language model that decodes:
    a provider's ratios to both bases with cold weights, and its bandwidth. The argument is the
    provider.
    """
    found = _campaign(evidence.measurements, "cold")
    weights = list(dict.fromkeys(m.shape[1:] for m in found))
    all_rows = sorted({m.shape[0] for m in found})
    ours = {(M, each): _at(found, provider, (M, *each)) for M in all_rows for each in weights}
    columns = ("rows", *(f"{N}×{K}, {2 * N * K / 1e6:.0f} MB" for N, K in weights))
    rows = [[str(M), *(_ratios_and_share(ours[M, each]) for each in weights)] for M in all_rows]
    rows.append(["geometric mean", *(_two_means([ours[M, w] for M in all_rows]) for w in weights)])
    spans = f"of all: {_two_means(list(ours.values()))}"
    copies = dict.fromkeys(m.environment.get("copy_gbs") for m in ours.values())
    bandwidth = " and ".join(text.figure(each, ".0f") for each in copies)
    note = (
        f"{provider} with weights N×K that are not in L2: × cuBLAS / × the fastest of cuBLASLt's "
        f"algorithms, and the share of the {bandwidth} GB/s that a copy of a gigabyte reaches "
        f"({spans})"
    )
    return markdown.closed(_plain(columns, rows), found, note)


def invariance(evidence: Evidence, _: str) -> str:
    """A row for each number of rows: what batch invariance costs, and what other batch-invariant
    products do, as geometric means over the layers that were timed. With cold weights where these
    were timed, because few rows then wait for weights.
    """
    cold_shapes = {m.shape for m in evidence.measurements if m.mode == "cold"}
    found = _of_one_campaign(
        [
            m
            for m in evidence.measurements
            if m.ratio is not None and (m.mode == "cold") == (m.shape in cold_shapes)
        ],
        "batch-invariant",
    )
    all_rows = sorted({m.shape[0] for m in found})
    columns = ("rows", "weights", "of plain calls", "least", *(f"{n} × cuBLAS" for n in _INVARIANT))
    rows = []
    for M in all_rows:
        shapes = sorted({m.shape for m in found if m.shape[0] == M})
        ratios = {
            name: [_at(found, name, shape).ratio or 0.0 for shape in shapes]
            for name in (*_INVARIANT, "outblas-plain")
        }
        costs = [
            ours / plain for ours, plain in zip(ratios[OURS], ratios["outblas-plain"], strict=True)
        ]
        where = "from DRAM" if cold_shapes.issuperset(shapes) else "warm"
        means = [_mean(ratios[name]) for name in _INVARIANT]
        rows.append([str(M), where, _mean(costs), f"{min(costs):.3f}", *means])
    note = (
        f"geometric means over {len({m.shape[1:] for m in found})} layers; *of plain calls*: the "
        "time of a call that promises nothing over that of a batch-invariant one, and the *least* "
        "of a layer; others: the time of `torch.mm`, which promises nothing, over the call's"
    )
    return markdown.closed(_plain(columns, rows), found, note)


def _ratios_and_share(m: Measurement) -> str:
    share = text.figure(m.bandwidth_share, ".0%")
    return f"{text.figure(m.ratio, '.2f')} / {text.figure(m.ratio_best, '.2f')}, {share}"


def _two_means(measurements: Sequence[Measurement]) -> str:
    """The geometric means of the ratios to both bases."""
    first = _mean([m.ratio or 0.0 for m in measurements])
    best = [m.ratio_best for m in measurements if m.ratio_best is not None]
    return f"{first} / {_mean(best) if len(best) == len(measurements) else text.NONE}"


def sustained(evidence: Evidence, _: str) -> str:
    """A row for each shape and provider: speed, clock and power in calls without pause."""
    kept = _campaign(evidence.measurements, "sustained")
    columns = (
        "shape",
        "provider",
        "TFLOP/s",
        "× cuBLAS",
        "MHz",
        "utilisation",
        "W",
        "pJ/FLOP",
    )
    rows = [
        (
            to_text(m.shape),
            f"`{m.label}`",
            f"{m.tflops:.0f}",
            text.ratio(m),
            text.figure(m.clock_mhz, ".0f"),
            text.figure(m.utilisation, ".3f"),
            text.figure(m.watts, ".0f"),
            text.figure(m.pj_per_flop, ".2f"),
        )
        for m in kept
    ]
    note = (
        "sustained (turns of 2 s, the first half discarded, cuBLAS before and after each); "
        "10th–90th percentile of turns in brackets; *MHz*: the clock of the SMs; *utilisation*: "
        "the share of what the tensor cores can do at that clock"
    )
    return markdown.closed(_plain(columns, rows), kept, note)


def fp8(evidence: Evidence, _: str) -> str:
    """A row for each shape and provider of a campaign in fp8, beside `torch._scaled_mm`."""
    found = _campaign(evidence.measurements, "burst")
    columns = ("shape", "call", "sums", "µs", "TFLOP/s", "× torch", "spread", "apart")
    named = {m.label: _FP8.get(m.label, (m.label, text.NONE)) for m in found}
    rows = [
        (
            to_text(m.shape),
            f"`{named[m.label][0]}`",
            named[m.label][1],
            text.number(m.us),
            text.number(m.tflops),
            text.figure(m.ratio, ".3f"),
            text.spread(m),
            text.figure(m.ratio_apart, ".3f"),
        )
        for m in sorted(found, key=lambda m: _order(m.shape))
    ]
    behind = f"with {found[0].epilogue} behind the product; " if found[0].epilogue else ""
    note = (
        f"scales: {FP8_SCALES[found[0].dtype]}; {behind}burst (calls in a CUDA graph); "
        "*fast*: `use_fast_accum=True`; *× torch*: the time of `torch._scaled_mm` with float32 "
        f"sums over the time of the call, a median over rounds; {_SPREAD}; {_APART}"
    )
    return markdown.closed(_plain(columns, rows), found, note)


def _campaign(measurements: Measurements, mode: str) -> list[Measurement]:
    """The timings in a mode. Raises ValueError unless they are of one campaign, on one GPU, in one
    dtype and layout.
    """
    return _of_one_campaign(
        [m for m in measurements if m.mode == mode and m.ratio is not None], mode
    )


def _of_one_campaign(found: list[Measurement], what: str) -> list[Measurement]:
    """Returns timings. Raises ValueError unless they are of one campaign, on one GPU, in one dtype
    and layout, with one epilogue.
    """
    conditions = {(m.device, m.dtype, m.layout, m.epilogue, m.is_plain) for m in found}
    if len(conditions) != 1:
        raise ValueError(
            f"a table of {what} figures has {len(conditions)} kinds of GPU, dtype, layout and "
            "operation, expected one"
        )
    if len({(m.label, m.shape) for m in found}) != len(found):
        raise ValueError(
            f"a table of {what} figures has one provider and shape twice, expected one run"
        )
    return found


def _of_all(burst: Sequence[Measurement]) -> str:
    """A row for each shape: cuBLAS's time, then every other provider's ratio."""
    others = list(dict.fromkeys(m.label for m in burst if m.provider != BASE))
    shapes = _shapes(burst)
    each = [[f"{name} × cuBLAS", f"{name} apart"] for name in others]
    columns = ("shape", "cuBLAS µs", "cuBLAS TFLOP/s", *(head for heads in each for head in heads))
    rows = []
    for shape in shapes:
        base = _at(burst, BASE, shape)
        row = [to_text(shape), _us(base.us), f"{base.tflops:.0f}"]
        for name in others:
            m = _find(burst, name, shape)
            row += [
                text.NONE if m is None else text.ratio(m),
                text.NONE if m is None else text.figure(m.ratio_apart, ".3f"),
            ]
        rows.append(row)
    means = [cell for name in others for cell in (_bold_mean(burst, name, shapes), "")]
    rows.append(["geometric mean", "", "", *means])
    note = f"{_BURST}; 10th–90th percentile of rounds in brackets; {_APART}"
    return markdown.closed(_plain(columns, rows), burst, note)


def _of_provider(burst: Sequence[Measurement], provider: str) -> str:
    """A row for each shape: one provider's speed, and its ratios to both bases."""
    shapes = _shapes(burst)
    ours = [m for shape in shapes if (m := _find(burst, provider, shape))]
    if not ours:
        raise ValueError(f"{provider} was not timed in burst, expected it in the file")
    both = provider != BEST and any(m.ratio_best is not None for m in ours)
    columns = ["shape", "µs", "cuBLAS µs", "TFLOP/s", "× cuBLAS", "spread", "apart"]
    rows = [
        [
            to_text(m.shape),
            _us(m.us),
            _us(_at(burst, BASE, m.shape).us),
            f"{m.tflops:.0f}",
            text.figure(m.ratio, ".3f"),
            text.spread(m),
            text.figure(m.ratio_apart, ".3f"),
            *([text.figure(m.ratio_best, ".3f")] if both else []),
        ]
        for m in ours
    ]
    note = f"{provider} in {_BURST}; {_SPREAD}; {_APART}"
    mean = ["geometric mean", "", "", "", _bold_mean(burst, provider, shapes), "", ""]
    if both:
        columns.append("× best")
        note += f"; *× best*: compared with {BEST}, the fastest of cuBLASLt's algorithms"
        best = [m.ratio_best for m in ours if m.ratio_best is not None]
        mean.append(f"**{_mean(best)}**" if len(best) == len(shapes) else text.NONE)
    used = [m for m in burst if m.label in (BASE, provider)]
    return markdown.closed(_plain(columns, [*rows, mean]), used, note)


def _bold_mean(burst: Sequence[Measurement], name: str, shapes: Sequence[Shape]) -> str:
    """The geometric mean of a provider's ratios; a dash where it lacks a shape."""
    ratios = [m.ratio for m in burst if m.label == name and m.ratio is not None]
    return f"**{_mean(ratios)}**" if len(ratios) == len(shapes) else text.NONE


def _plain(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = (" | ".join(row) for row in (columns, *rows))
    head, *body = (f"| {line} |" for line in lines)
    return [head, "|---" * len(columns) + "|", *body]


def _find(found: Sequence[Measurement], label: str, shape: Shape) -> Measurement | None:
    return next((m for m in found if (m.label, m.shape) == (label, shape)), None)


def _at(found: Sequence[Measurement], label: str, shape: Shape) -> Measurement:
    m = _find(found, label, shape)
    if m is None:
        mode = found[0].mode
        raise ValueError(
            f"{to_text(shape)} has no {label} in {mode}, expected it beside every other provider"
        )
    return m


def _shapes(found: Sequence[Measurement]) -> list[Shape]:
    return sorted({m.shape for m in found}, key=_order)


def _is_suite(shapes: Sequence[Shape]) -> bool:
    return set(shapes) == set(SUITE)


def _named(shapes: Sequence[Shape]) -> str:
    return markdown.listed(map(to_text, shapes))


def _mean(ratios: Sequence[float]) -> str:
    return f"{geometric_mean(ratios):.3f}"


def _range(ratios: Iterable[float | None]) -> str:
    known = [ratio for ratio in ratios if ratio is not None]
    return f"{min(known):.3f} to {max(known):.3f}"


def _us(us: float | None) -> str:
    return text.figure(us, ".0f" if us and us >= 1000 else ".3g")


def _order(shape: Shape) -> tuple[int, Shape]:
    """A key that sorts shapes in the order of the suite, others after them."""
    return (SUITE.index(shape) if shape in SUITE else len(SUITE)), shape
