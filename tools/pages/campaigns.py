"""Parts of pages that show one campaign of `outblas bench`: the suite and its headline, calls with
cold weights, the layers of a language model, batch invariance, sustained load, and fp8.
"""

from collections.abc import Callable, Iterable, Sequence
from statistics import geometric_mean

from outblas.base.shapes import SUITE, Shape, to_text
from outblas.bench.record import BASE, BEST
from tools.pages.results import Measurement, Results
from tools.pages.tables import NONE, closed, figure, listed, number, plain, ratio, spread

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


# The cells of a timing, by the headings of their columns.
_CELLS: dict[str, Callable[[Measurement], str]] = {
    "shape": lambda m: to_text(m.shape),
    "layout": lambda m: m.layout,
    "µs": lambda m: number(m.us),
    "TFLOP/s": lambda m: number(m.tflops),
    "GB/s": lambda m: figure(m.gbs, ".0f"),
    "of copy": lambda m: figure(m.bandwidth_share, ".0%"),
    "× cuBLAS": lambda m: figure(m.ratio, ".3f"),
    "× torch": lambda m: figure(m.ratio, ".3f"),
    "spread": spread,
    "apart": lambda m: figure(m.ratio_apart, ".3f"),
    "× best": lambda m: figure(m.ratio_best, ".3f"),
    "provider": lambda m: f"`{m.label}`",
    "call": lambda m: f"`{_FP8.get(m.label, (m.label, NONE))[0]}`",
    "sums": lambda m: _FP8.get(m.label, (m.label, NONE))[1],
    "ratio": ratio,
    "MHz": lambda m: figure(m.clock_mhz, ".0f"),
    "utilisation": lambda m: figure(m.utilisation, ".3f"),
    "W": lambda m: figure(m.watts, ".0f"),
    "pJ/FLOP": lambda m: figure(m.pj_per_flop, ".2f"),
}


def rows_of(timed: Iterable[Measurement], columns: Sequence[str]) -> list[list[str]]:
    """The cells of timings in these columns."""
    return [[_CELLS[column](m) for column in columns] for m in timed]


def suite(results: Results, provider: str) -> str:
    """A row for each shape: one provider's speed, and its ratios to both bases where they were
    timed. The argument is the provider.
    """
    burst = _campaign(results.measurements, "burst")
    shapes = _shapes(burst)
    ours = [m for shape in shapes if (m := _find(burst, provider, shape))]
    if not ours:
        raise ValueError(f"{provider} was not timed in burst, expected it in the file")
    both = provider != BEST and any(m.ratio_best is not None for m in ours)
    columns = ["shape", "µs", "TFLOP/s", "× cuBLAS", "spread", "apart"] + ["× best"] * both
    note = f"{provider} in {_BURST}; {_SPREAD}; {_APART}"
    ratios = [m.ratio or 0.0 for m in ours]
    of_all = f"**{_mean(ratios)}**" if len(ratios) == len(shapes) else NONE
    mean = ["geometric mean", "", "", of_all, "", ""]
    if both:
        note += f"; *× best*: compared with {BEST}, the fastest of cuBLASLt's algorithms"
        best = [m.ratio_best for m in ours if m.ratio_best is not None]
        mean.append(f"**{_mean(best)}**" if len(best) == len(shapes) else NONE)
    used = [m for m in burst if m.label in (BASE, provider)]
    return closed(plain(columns, [*rows_of(ours, columns), mean]), used, note)


def headline(results: Results, _: str) -> str:
    """One sentence: the geometric means of outblas compared with cuBLAS and with the best of
    cuBLASLt's algorithms.
    """
    burst = _campaign(results.measurements, "burst")
    shapes = _shapes(burst)
    ours = [_at(burst, OURS, shape) for shape in shapes]
    first = ours[0]
    if missing := [to_text(m.shape) for m in ours if m.ratio_best is None]:
        raise ValueError(
            f"{OURS} was not timed beside {BEST} at {', '.join(missing)}, expected both bases at "
            "every shape"
        )
    what = (
        f"the {len(shapes)} shapes of the suite"
        if set(shapes) == set(SUITE)
        else listed(map(to_text, shapes))
    )
    date = str(first.environment.get("date", ""))[:10]
    return (
        f"On an {first.device}, `outblas.matmul` is "
        f"**{_mean([m.ratio or 0.0 for m in ours])} times as fast as `torch.mm`** "
        f"({_range(m.ratio for m in ours)} by shape) and "
        f"**{_mean([m.ratio_best or 0.0 for m in ours])} times as fast as the best of cuBLASLt's "
        f"algorithms** ({_range(m.ratio_best for m in ours)}): geometric means over {what}, "
        f"{first.dtype}, layout {first.layout}, burst, from one campaign of {date}.\n"
    )


def cold(results: Results, provider: str) -> str:
    """A row for each shape: a provider's time with cold weights, its bandwidth, and its ratios to
    both bases. The argument is the provider.
    """
    timed = _campaign(results.measurements, "cold")
    columns = ("shape", "µs", "GB/s", "of copy", "× cuBLAS", "spread", "× best")
    warm = {m.shape: m for m in results.measurements if (m.label, m.mode) == (provider, "burst")}
    ours = sorted((m for m in timed if m.label == provider), key=lambda m: _order(m.shape))
    warm_ratios = [figure(warm[m.shape].ratio, ".3f") if m.shape in warm else NONE for m in ours]
    pairs = zip(rows_of(ours, columns), warm_ratios, strict=True)
    rows = [[*row, warm_ratio] for row, warm_ratio in pairs]
    copies = dict.fromkeys(m.environment.get("copy_gbs") for m in ours)
    bandwidth = " and ".join(figure(gbs, ".0f") for gbs in copies)
    note = (
        f"{provider} in bursts over copies of the weights whose sum is twice L2; *of copy*: the "
        f"share of the {bandwidth} GB/s that a copy of a gigabyte reaches; {_SPREAD}; *× best*: "
        f"compared with {BEST}, the fastest of cuBLASLt's algorithms; *warm*: the ratio to cuBLAS "
        "with the weights in L2"
    )
    return closed(plain((*columns, "warm"), rows), timed, note)


def layers(results: Results, provider: str) -> str:
    """A row for each number of rows and a column for each layer of a language model that decodes:
    a provider's ratios to both bases with cold weights, and its bandwidth. The argument is the
    provider.
    """
    timed = _campaign(results.measurements, "cold")
    weights = list(dict.fromkeys(m.shape[1:] for m in timed))
    all_rows = sorted({m.shape[0] for m in timed})
    ours = {(M, w): _at(timed, provider, (M, *w)) for M in all_rows for w in weights}
    columns = ("rows", *(f"{N}×{K}, {2 * N * K / 1e6:.0f} MB" for N, K in weights))
    rows = [[str(M), *(_ratios_and_share(ours[M, w]) for w in weights)] for M in all_rows]
    rows.append(["geometric mean", *(_two_means([ours[M, w] for M in all_rows]) for w in weights)])
    spans = f"of all: {_two_means(list(ours.values()))}"
    copies = dict.fromkeys(m.environment.get("copy_gbs") for m in ours.values())
    bandwidth = " and ".join(figure(gbs, ".0f") for gbs in copies)
    note = (
        f"{provider} with weights N×K that are not in L2: × cuBLAS / × the fastest of cuBLASLt's "
        f"algorithms, and the share of the {bandwidth} GB/s that a copy of a gigabyte reaches "
        f"({spans})"
    )
    return closed(plain(columns, rows), timed, note)


def invariance(results: Results, _: str) -> str:
    """A row for each number of rows: what batch invariance costs, and what other batch-invariant
    products do, as geometric means over the layers that were timed. With cold weights where these
    were timed, because few rows then wait for weights.
    """
    cold_shapes = {m.shape for m in results.measurements if m.mode == "cold"}
    timed = _of_one_campaign(
        [
            m
            for m in results.measurements
            if m.ratio is not None and (m.mode == "cold") == (m.shape in cold_shapes)
        ],
        "batch-invariant",
    )
    all_rows = sorted({m.shape[0] for m in timed})
    columns = ("rows", "weights", "of plain calls", "least", *(f"{n} × cuBLAS" for n in _INVARIANT))
    rows = []
    for M in all_rows:
        shapes = sorted({m.shape for m in timed if m.shape[0] == M})
        ratios = {
            name: [_at(timed, name, shape).ratio or 0.0 for shape in shapes]
            for name in (*_INVARIANT, "outblas-plain")
        }
        costs = [
            ours / plain for ours, plain in zip(ratios[OURS], ratios["outblas-plain"], strict=True)
        ]
        where = "from DRAM" if cold_shapes.issuperset(shapes) else "warm"
        means = [_mean(ratios[name]) for name in _INVARIANT]
        rows.append([str(M), where, _mean(costs), f"{min(costs):.3f}", *means])
    note = (
        f"geometric means over {len({m.shape[1:] for m in timed})} layers; *of plain calls*: the "
        "time of a call that promises nothing over that of a batch-invariant one, and the *least* "
        "of a layer; others: the time of `torch.mm`, which promises nothing, over the call's"
    )
    return closed(plain(columns, rows), timed, note)


def _ratios_and_share(m: Measurement) -> str:
    share = figure(m.bandwidth_share, ".0%")
    return f"{figure(m.ratio, '.2f')} / {figure(m.ratio_best, '.2f')}, {share}"


def _two_means(measurements: Sequence[Measurement]) -> str:
    """The geometric means of the ratios to both bases."""
    first = _mean([m.ratio or 0.0 for m in measurements])
    best = [m.ratio_best for m in measurements if m.ratio_best is not None]
    return f"{first} / {_mean(best) if len(best) == len(measurements) else NONE}"


def sustained(results: Results, _: str) -> str:
    """A row for each shape and provider: speed, clock and power in calls without pause."""
    timed = _campaign(results.measurements, "sustained")
    columns = ("shape", "provider", "TFLOP/s", "ratio", "MHz", "utilisation", "W", "pJ/FLOP")
    note = (
        "sustained (turns of 2 s, the first half discarded, cuBLAS before and after each); "
        "10th–90th percentile of turns in brackets; *MHz*: the clock of the SMs; *utilisation*: "
        "the share of what the tensor cores can do at that clock"
    )
    headings = [column.replace("ratio", "× cuBLAS") for column in columns]
    return closed(plain(headings, rows_of(timed, columns)), timed, note)


def fp8(results: Results, _: str) -> str:
    """A row for each shape and provider of a campaign in fp8, beside `torch._scaled_mm`."""
    timed = _campaign(results.measurements, "burst")
    columns = ("shape", "call", "sums", "µs", "TFLOP/s", "× torch", "spread", "apart")
    rows = rows_of(sorted(timed, key=lambda m: _order(m.shape)), columns)
    behind = f"with {timed[0].epilogue} behind the product; " if timed[0].epilogue else ""
    note = (
        f"scales: {FP8_SCALES[timed[0].dtype]}; {behind}burst (calls in a CUDA graph); "
        "*fast*: `use_fast_accum=True`; *× torch*: the time of `torch._scaled_mm` with float32 "
        f"sums over the time of the call, a median over rounds; {_SPREAD}; {_APART}"
    )
    return closed(plain(columns, rows), timed, note)


def _campaign(measurements: Sequence[Measurement], mode: str) -> list[Measurement]:
    """The timings in a mode. Raises ValueError unless they are of one campaign, on one GPU, in one
    dtype and layout.
    """
    return _of_one_campaign(
        [m for m in measurements if m.mode == mode and m.ratio is not None], mode
    )


def _of_one_campaign(timed: list[Measurement], what: str) -> list[Measurement]:
    """Returns timings. Raises ValueError unless they are of one campaign, on one GPU, in one dtype
    and layout, with one epilogue.
    """
    conditions = {(m.device, m.dtype, m.layout, m.epilogue, m.is_plain) for m in timed}
    if len(conditions) != 1:
        raise ValueError(
            f"a table of {what} figures has {len(conditions)} kinds of GPU, dtype, layout and "
            "operation, expected one"
        )
    if len({(m.label, m.shape) for m in timed}) != len(timed):
        raise ValueError(
            f"a table of {what} figures has one provider and shape twice, expected one run"
        )
    return timed


def _find(timed: Sequence[Measurement], label: str, shape: Shape) -> Measurement | None:
    return next((m for m in timed if (m.label, m.shape) == (label, shape)), None)


def _at(timed: Sequence[Measurement], label: str, shape: Shape) -> Measurement:
    m = _find(timed, label, shape)
    if m is None:
        mode = timed[0].mode
        raise ValueError(
            f"{to_text(shape)} has no {label} in {mode}, expected it beside every other provider"
        )
    return m


def _shapes(timed: Sequence[Measurement]) -> list[Shape]:
    return sorted({m.shape for m in timed}, key=_order)


def _mean(ratios: Sequence[float]) -> str:
    return f"{geometric_mean(ratios):.3f}"


def _range(ratios: Iterable[float | None]) -> str:
    measured = [ratio for ratio in ratios if ratio is not None]
    return f"{min(measured):.3f} to {max(measured):.3f}"


def _order(shape: Shape) -> tuple[int, Shape]:
    """A key that sorts shapes in the order of the suite, others after them."""
    return (SUITE.index(shape) if shape in SUITE else len(SUITE)), shape
