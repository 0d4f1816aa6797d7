"""The generated parts of README.md: tables and charts between markers, made from the files in
`results/`.

A part reads `<!-- generated: KIND from results/A.json,results/B.json -->` … `<!-- end -->`; those
of ladders and claims take files of `outblas profile` too. KIND is `suite`, `sustained`, `claims`,
`ladder NAME`, `ladder NAME N,N`, `sizes KERNEL`, `layouts KERNEL`, `phases`, `raster N`,
`conflicts`, `coalescing`, or `chart results/FILE.svg`, `climb NAME results/FILE.svg`, `orders N
results/FILE.svg`: their pictures are drawn anew too and carry the digest of their data. `tuned`
takes a shipped table of `autotune/tables/`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..bench.record import BASE
from ..shapes import SUITE, Shape, parse, to_text
from . import access_cases, accesses, evidence, ladder, page, phases, raster, sizes, text
from .evidence import Evidence
from .results import ROOT, Measurement, Measurements, in_checkout
from .tuning import shipped

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PART = re.compile(
    r"(<!-- generated: (?P<what>[^>]*?) from (?P<files>[^>]*?) -->\n)(?P<body>.*?)(<!-- end -->)",
    re.DOTALL,
)
_OPENING = "<!-- generated"
_SEAL = "<!-- drawn by outblas report readme, sha256 "


def render(root: Path = ROOT) -> list[str]:
    """Rewrites README.md and its charts; returns what was out of date. Raises ValueError for a part
    it cannot make.
    """
    text = _text(root)
    made = _rendered(root, text)
    changed = _outdated(root, text, made)
    for what, files in _charts(text):
        _draw(root, what, files)
    (root / "README.md").write_text(made, encoding="utf-8")
    return changed


def stale(root: Path = ROOT) -> list[str]:
    """Names of what the files in `results/` say differently: README.md, plotting. Raises ValueError
    as `render`.
    """
    text = _text(root)
    return _outdated(root, text, _rendered(root, text))


def _text(root: Path) -> str:
    if not in_checkout(root):
        raise ValueError(f"{root} is no checkout of outblas: README.md is made there")
    return (root / "README.md").read_text(encoding="utf-8")


def _outdated(root: Path, text: str, made: str) -> list[str]:
    found = [] if made == text else ["README.md"]
    return found + [
        _picture(what)
        for what, files in _charts(text)
        if not _is_current(root, _picture(what), files)
    ]


def _parts(text: str) -> list[tuple[str, list[str]]]:
    parts = [
        (m["what"], [name.strip() for name in m["files"].split(",")]) for m in _PART.finditer(text)
    ]
    if len(parts) != text.count(_OPENING):
        raise ValueError(
            "README.md: a generated part is not of the form <!-- generated: KIND from FILES --> … "
            "<!-- end -->"
        )
    return parts


def _charts(text: str) -> list[tuple[str, list[str]]]:
    return [(what, files) for what, files in _parts(text) if what.startswith(tuple(_FIGURES))]


def _picture(what: str) -> str:
    """The file of a part that is drawn."""
    return what.rpartition(" ")[2]


def _rendered(root: Path, text: str) -> str:
    made = iter([_make(root, what, files) for what, files in _parts(text)])
    return _PART.sub(lambda m: m[1] + next(made) + m[5], text)


def _make(root: Path, what: str, files: list[str]) -> str:
    kind, _, argument = what.partition(" ")
    if kind == "tuned":
        return shipped.table(root / files[0])
    if kind not in _KINDS:
        raise ValueError(
            f"README.md: a generated part is a {kind!r}, expected one of {', '.join(_KINDS)}"
        )
    return _KINDS[kind](evidence.load(root / name for name in files), argument)


def _suite(evidence: Evidence, argument: str) -> str:
    """A row a shape: cuBLAS's time, then every other provider's ratio with its spread, and what
    happens apart.
    """
    burst = _campaign(evidence.measurements, "burst")
    others = list(dict.fromkeys(m.label for m in burst if m.provider != BASE))
    shapes = sorted({m.shape for m in burst}, key=_order)
    lines = [
        f"| shape | cuBLAS µs | TFLOP/s | {' | '.join(f'{name} × cuBLAS' for name in others)} |"
    ]
    lines.append("|---" * (3 + len(others)) + "|")
    for shape in shapes:
        at = {m.label: m for m in burst if m.shape == shape}
        if BASE not in at:
            raise ValueError(
                f"{to_text(shape)} has no {BASE} in burst, expected it beside every other provider"
            )
        base = at[BASE]
        cells = [_ratio(at.get(name)) for name in others]
        lines.append(
            f"| {to_text(shape)} | {_us(base.us)} | {base.tflops:.0f} | {' | '.join(cells)} |"
        )
    note = (
        "burst (idle, one warm call, then 8 timed, or a CUDA graph of about 1 ms for calls under "
        "100 µs); "
        "10th–90th percentile of rounds in brackets; *apart*: with a foreign kernel between calls"
    )
    return _closed(lines, burst, note)


def _sustained(evidence: Evidence, argument: str) -> str:
    kept = _campaign(evidence.measurements, "sustained")
    lines = [
        "| shape | provider | TFLOP/s | × cuBLAS | SM clock, MHz | utilisation | W | pJ/FLOP |",
        "|---" * 8 + "|",
    ]
    for m in kept:
        figures = (
            (m.clock_mhz, ".0f"),
            (m.utilisation, ".3f"),
            (m.watts, ".0f"),
            (m.pj_per_flop, ".2f"),
        )
        cells = (
            to_text(m.shape),
            m.label,
            f"{m.tflops:.0f}",
            _ratio(m),
            *(text.figure(*each) for each in figures),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return _closed(
        lines,
        kept,
        "sustained (turns of 2 s, the first half discarded, cuBLAS before and after each)",
    )


def _campaign(measurements: Measurements, mode: str) -> list[Measurement]:
    """What was timed in a mode. Raises ValueError unless it is one campaign, on one GPU, in one
    dtype and layout.
    """
    found = [m for m in measurements if m.mode == mode and m.ratio is not None]
    conditions = {(m.device, m.dtype, m.layout) for m in found}
    if len(conditions) != 1:
        raise ValueError(
            f"a table of {mode} figures has {len(conditions)} kinds of GPU, dtype and layout, "
            "expected one"
        )
    if len({(m.label, m.shape) for m in found}) != len(found):
        raise ValueError(
            f"a table of {mode} figures has one provider and shape twice, expected one run"
        )
    return found


def _ladder(evidence: Evidence, argument: str) -> str:
    """The argument is the ladder's name and, after a space, the sizes if they are not its usual
    ones.
    """
    name, _, wanted = argument.partition(" ")
    edges = (
        tuple(shape[0] for shape in parse(wanted, "README.md: sizes of a ladder"))
        if wanted
        else None
    )
    rows = ladder.rows(
        evidence.measurements, name, edges or ladder.default_sizes(name), evidence.profiles
    )
    usual = rows[0].at[0].n
    measured = [m for row in rows for m in row.measured]
    columns = ladder.columns(name)
    counted = ", ".join(heading.replace("\n", " ") for heading in columns[-4:-1])
    ways = dict.fromkeys(way for row in rows for at in row.at for way in at.timed)
    meaning = {ladder.MIXED_OPERANDS: "bfloat16 operands, beside the rung's own float32"}
    beside = "".join(
        f"; {way}: {meaning.get(way, 'compiled for it, and loaded as PTX')}" for way in ways if way
    )
    note = (
        f"burst; a seed's figure is an H100's at {usual} where it does not say; {counted} by "
        f"ncu{beside}"
    )
    return _closed(_markdown(columns, [row.cells() for row in rows]), measured, note)


def _sizes(evidence: Evidence, kernel: str) -> str:
    rows = sizes.rows(evidence.measurements, kernel)
    note = (
        "burst (calls under 100 µs in a CUDA graph); *apart*: with a foreign kernel between calls"
    )
    return _closed(
        _markdown(sizes.COLUMNS, [row.cells() for row in rows]), [row.ours for row in rows], note
    )


def _layouts(evidence: Evidence, kernel: str) -> str:
    found = [m for m in evidence.measurements if m.provider == kernel and not m.config]
    cells = [
        (m.layout, text.number(m.us), text.number(m.tflops), text.ratio(m), m.check) for m in found
    ]
    lines = _markdown(("layout", "µs", "TFLOP/s", "× cuBLAS", "check"), cells)
    shapes = ", ".join(dict.fromkeys(to_text(m.shape) for m in found))
    return _closed(
        lines, found, f"{kernel} at {shapes}, burst, each layout in a campaign of its own"
    )


def _markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table whose first column is code; lines within a cell stay lines."""
    cells = [[f"`{first}`", *rest] for first, *rest in rows]
    lines = [" | ".join(row).replace("\n", "<br>") for row in (columns, *cells)]
    return [f"| {lines[0]} |", "|---" * len(columns) + "|", *(f"| {line} |" for line in lines[1:])]


def _chart(evidence: Evidence, name: str) -> str:
    gpus = ", ".join(dict.fromkeys(m.device for m in evidence.measurements))
    return f"![Ratio to cuBLAS by shape, and TFLOP/s against N: {gpus}]({name})\n"


def _climb(evidence: Evidence, argument: str) -> str:
    """The argument is the ladder's name and the picture's file."""
    name, _, file = argument.partition(" ")
    gpus = ", ".join(dict.fromkeys(m.device for m in evidence.measurements))
    return (
        f"![Ratio to cuBLAS by rung of the {name} ladder, the seed's beside ours: {gpus}]({file})\n"
    )


def _phases(evidence: Evidence, argument: str) -> str:
    gpus = ", ".join(dict.fromkeys(counted.device for counted in evidence.phases))
    shapes = ", ".join(dict.fromkeys(to_text(counted.shape) for counted in evidence.phases))
    lines = _markdown(phases.COLUMNS, phases.rows(evidence.phases))
    return (
        "\n".join(
            [*lines, "", f"SM cycles by clock64 in an instrumented compile, {shapes}, {gpus}."]
        )
        + "\n"
    )


def _conflicts(evidence: Evidence, argument: str) -> str:
    gpus = _accessed(evidence)
    rows = accesses.conflicts(evidence.profiles)
    lines = [*_markdown(accesses.SQUARE_COLUMNS, accesses.square(rows)), ""]
    lines += _markdown(accesses.CONFLICT_COLUMNS, (row.cells() for row in rows))
    return "\n".join([*lines, "", f"{accesses.CONFLICTS_NOTE}. {gpus}, ncu."]) + "\n"


def _coalescing(evidence: Evidence, argument: str) -> str:
    gpus = _accessed(evidence)
    direct = {kernel for kernel, _ in accesses.DIRECT}
    rows = [row for row in accesses.coalescing(evidence.profiles) if row.case.kernel in direct]
    lines = _markdown(accesses.COALESCING_COLUMNS, (row.cells() for row in rows))
    return "\n".join([*lines, "", f"{accesses.COALESCING_NOTE}. {gpus}, ncu."]) + "\n"


def _accessed(evidence: Evidence) -> str:
    """The GPUs. Raises ValueError where no profile says what the memory instructions of a CUDA-core
    kernel did.
    """
    found = access_cases.profiled(evidence.profiles)
    if not found:
        raise ValueError(
            "README.md: no profile of simt.* made with --instructions, expected one at least"
        )
    return ", ".join(dict.fromkeys(profile.device for profile in found))


def _raster(evidence: Evidence, n: str) -> str:
    found = _orders_report(evidence, n)
    lines = _markdown(raster.COLUMNS, (row.cells() for row in found.rows))
    lines += ["", *_markdown(raster.AGREEMENT_COLUMNS, (a.cells() for a in found.agreements))]
    return "\n".join([*lines, "", f"{found.title}. {' '.join(found.notes())}"]) + "\n"


def _orders(evidence: Evidence, argument: str) -> str:
    """The argument is the edge of the product and the picture's file."""
    n, _, file = argument.partition(" ")
    return f"![Tiles of C at {n}³ by the wave in which they run, for each order]({file})\n"


def _orders_report(evidence: Evidence, n: str) -> raster.Report:
    (shape,) = parse(n, "raster", least=1)
    return raster.report(raster.Setting(shape), raster.GROUPS[-1], evidence.profiles)


_KINDS: dict[str, Callable[[Evidence, str], str]] = {
    "suite": _suite,
    "sustained": _sustained,
    "ladder": _ladder,
    "sizes": _sizes,
    "layouts": _layouts,
    "chart": _chart,
    "climb": _climb,
    "phases": _phases,
    "conflicts": _conflicts,
    "coalescing": _coalescing,
    "raster": _raster,
    "orders": _orders,
}


def _draw(root: Path, what: str, files: list[str]) -> None:
    from ..bench import plotting

    path = root / _picture(what)
    plotting.check_chart(path)
    found = evidence.load(root / file for file in files)
    if not (found.measurements or found.profiles):
        raise ValueError(f"{', '.join(files)}: no results, expected some to draw")
    kind, name, *_ = what.split(" ")
    plotting.save(_FIGURES[f"{kind} "](found, name), path, note=_digest(root, files))
    with path.open("a", encoding="utf-8") as file:
        file.write(_seal(path.read_text(encoding="utf-8")))


def _chart_figure(evidence: Evidence, _: str) -> Figure:
    from ..bench import chart

    measurements = evidence.measurements
    results = [{**m.record(), "shape": list(m.shape)} for m in measurements]
    return chart.figure({"environment": measurements[0].environment, "results": results})


def _climb_figure(evidence: Evidence, name: str) -> Figure:
    from . import ladder_chart

    edges = ladder.default_sizes(name)
    return ladder_chart.draw(ladder.rows(evidence.measurements, name, edges), edges)


def _orders_figure(evidence: Evidence, n: str) -> Figure:
    return raster.draw(_orders_report(evidence, n))


# What a part that is drawn begins with.
_FIGURES: dict[str, Callable[[Evidence, str], Figure]] = {
    "chart ": _chart_figure,
    "climb ": _climb_figure,
    "orders ": _orders_figure,
}


def _is_current(root: Path, name: str, files: list[str]) -> bool:
    """Whether a chart is whole, as it was drawn, and drawn from these files."""
    text = (root / name).read_text(encoding="utf-8") if (root / name).is_file() else ""
    body, mark, rest = text.rpartition(_SEAL)
    return _digest(root, files) in body and _seal(body) == mark + rest


def _seal(text: str) -> str:
    return f"{_SEAL}{hashlib.sha256(text.encode()).hexdigest()} -->\n"


def _digest(root: Path, files: Iterable[str]) -> str:
    data = b"".join((root / name).read_bytes() for name in files)
    return f"data sha256 {hashlib.sha256(data).hexdigest()[:16]}"


def _closed(lines: list[str], measurements: Sequence[Measurement], note: str) -> str:
    kinds = dict.fromkeys((m.dtype, m.layout) for m in measurements)
    dtypes, layouts = (_listed(dict.fromkeys(of)) for of in zip(*kinds, strict=True))
    where = "; ".join(page.environment_notes(m.environment for m in measurements))
    return "\n".join([*lines, "", f"{dtypes}, {layouts}, {note}. {where}."]) + "\n"


def _listed(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def _ratio(m: Measurement | None) -> str:
    if m is None or m.ratio is None:
        return text.NONE
    apart = f", apart {m.ratio_apart:.3f}" if m.ratio_apart is not None else ""
    return f"{text.ratio(m)}{apart}"


def _us(us: float | None) -> str:
    return text.figure(us, ".0f" if us and us >= 1000 else ".3g")


def _order(shape: Shape) -> tuple[int, Shape]:
    return (SUITE.index(shape) if shape in SUITE else len(SUITE)), shape
