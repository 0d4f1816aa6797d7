"""The generated parts of README.md: tables and charts between markers, made from the files in `results/`.

A part reads `<!-- generated: KIND from results/A.json,results/B.json -->` … `<!-- end -->`. KIND is `suite`,
`sustained`, `claims`, `ladder NAME`, or `chart results/FILE.svg`, whose picture is drawn anew too and carries the
digest of its data.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ..bench.record import BASE
from ..shapes import SUITE, Shape, to_text
from . import claims, ladder, page
from .results import ROOT, Measurement, Measurements, in_checkout, load

_PART = re.compile(
    r"(<!-- generated: (?P<what>[^>]*?) from (?P<files>[^>]*?) -->\n)(?P<body>.*?)(<!-- end -->)", re.DOTALL
)
_OPENING = "<!-- generated"
_SEAL = "<!-- drawn by outblas report readme, sha256 "


def render(root: Path = ROOT) -> list[str]:
    """Rewrites README.md and its charts; returns what was out of date. Raises ValueError for a part it cannot make."""
    changed = stale(root)
    readme = root / "README.md"
    text = readme.read_text(encoding="utf-8")
    made = _rendered(root, text)
    for name, files in _charts(text):
        _draw(root, name, files)
    readme.write_text(made, encoding="utf-8")
    return changed


def stale(root: Path = ROOT) -> list[str]:
    """Names of what the files in `results/` say differently: README.md, charts. Raises ValueError as `render`."""
    if not in_checkout(root):
        raise ValueError(f"{root} is no checkout of outblas: README.md is made there")
    text = (root / "README.md").read_text(encoding="utf-8")
    found = [] if _rendered(root, text) == text else ["README.md"]
    return found + [name for name, files in _charts(text) if not _is_current(root, name, files)]


def _parts(text: str) -> list[tuple[str, list[str]]]:
    parts = [(m["what"], [name.strip() for name in m["files"].split(",")]) for m in _PART.finditer(text)]
    if len(parts) != text.count(_OPENING):
        raise ValueError(
            "README.md: a generated part is not of the form <!-- generated: KIND from FILES --> … <!-- end -->"
        )
    return parts


def _charts(text: str) -> list[tuple[str, list[str]]]:
    return [(what.removeprefix("chart "), files) for what, files in _parts(text) if what.startswith("chart ")]


def _rendered(root: Path, text: str) -> str:
    made = iter([_make(root, what, files) for what, files in _parts(text)])
    return _PART.sub(lambda m: m[1] + next(made) + m[5], text)


def _make(root: Path, what: str, files: list[str]) -> str:
    kind, _, argument = what.partition(" ")
    if kind not in _KINDS:
        raise ValueError(f"README.md: a generated part is a {kind!r}, expected one of {', '.join(_KINDS)}")
    return _KINDS[kind](load(root / name for name in files), argument)


def _suite(measurements: Measurements, argument: str) -> str:
    """A row a shape: cuBLAS's time, then every other provider's ratio with its spread, and what happens apart."""
    burst = _campaign(measurements, "burst")
    others = list(dict.fromkeys(m.label for m in burst if m.provider != BASE))
    shapes = sorted({m.shape for m in burst}, key=_order)
    lines = [f"| shape | cuBLAS µs | TFLOP/s | {' | '.join(f'{name} × cuBLAS' for name in others)} |"]
    lines.append("|---" * (3 + len(others)) + "|")
    for shape in shapes:
        at = {m.label: m for m in burst if m.shape == shape}
        if BASE not in at:
            raise ValueError(f"{to_text(shape)} has no {BASE} in burst, expected it beside every other provider")
        base = at[BASE]
        cells = [_ratio(at.get(name)) for name in others]
        lines.append(f"| {to_text(shape)} | {_us(base.us)} | {base.tflops:.0f} | {' | '.join(cells)} |")
    note = (
        "burst (idle, one warm call, then 8 timed, or a CUDA graph of about 1 ms for calls under 100 µs); "
        "10th–90th percentile of rounds in brackets; *apart*: with a foreign kernel between calls"
    )
    return _closed(lines, burst, note)


def _sustained(measurements: Measurements, argument: str) -> str:
    kept = _campaign(measurements, "sustained")
    lines = ["| shape | provider | TFLOP/s | × cuBLAS | SM clock, MHz | utilisation | W | pJ/FLOP |", "|---" * 8 + "|"]
    for m in kept:
        cells = (
            to_text(m.shape),
            m.label,
            f"{m.tflops:.0f}",
            _ratio(m),
            _show(m.clock_mhz, 0),
            _show(m.utilisation, 3),
        )
        lines.append(f"| {' | '.join(cells)} | {_show(m.watts, 0)} | {_show(m.pj_per_flop, 2)} |")
    return _closed(lines, kept, "sustained (turns of 2 s, the first half discarded, cuBLAS before and after each)")


def _campaign(measurements: Measurements, mode: str) -> list[Measurement]:
    """What was timed in a mode. Raises ValueError unless it is one campaign, on one GPU, in one dtype and layout."""
    found = [m for m in measurements if m.mode == mode and m.ratio is not None]
    conditions = {(m.device, m.dtype, m.layout) for m in found}
    if len(conditions) != 1:
        raise ValueError(
            f"a table of {mode} figures has {len(conditions)} kinds of GPU, dtype and layout, expected one"
        )
    if len({(m.label, m.shape) for m in found}) != len(found):
        raise ValueError(f"a table of {mode} figures has one provider and shape twice, expected one run")
    return found


def _ladder(measurements: Measurements, name: str) -> str:
    rows = ladder.rows(measurements, name, 4096)
    lines = ["| rung | seed: TFLOP/s, × its cuBLAS | ours: TFLOP/s | × cuBLAS |", "|---" * 4 + "|"]
    for row in rows:
        cells = row.cells()
        lines.append(f"| `{cells[0]}` | {cells[2]}, {cells[3]} | {cells[5] if row.ours else cells[4]} | {cells[6]} |")
    measured = [row.ours for row in rows if row.ours is not None]
    return _closed(lines, measured, "4096³, burst")


def _claims(measurements: Measurements, argument: str) -> str:
    found = claims.settled(measurements)
    refuted = [s for s in found if s.finding.verdict == claims.REFUTED]
    lines = ["| claim | source | what came out |", "|---" * 3 + "|"]
    lines += [f"| {s.claim.text} | {s.claim.source} | {s.finding.ours} |" for s in refuted]
    return "\n".join([f"{claims.count(found)}. Refuted:", "", *lines]) + "\n"


def _chart(measurements: Measurements, name: str) -> str:
    gpus = ", ".join(dict.fromkeys(m.device for m in measurements))
    return f"![Ratio to cuBLAS by shape, and TFLOP/s against N: {gpus}]({name})\n"


_KINDS: dict[str, Callable[[Measurements, str], str]] = {
    "suite": _suite,
    "sustained": _sustained,
    "ladder": _ladder,
    "claims": _claims,
    "chart": _chart,
}


def _draw(root: Path, name: str, files: list[str]) -> None:
    from .. import charts
    from ..bench import chart

    charts.check_chart(root / name)
    measurements = load(root / file for file in files)
    if not measurements:
        raise ValueError(f"{', '.join(files)}: no results, expected some to draw")
    results = [{**m.record(), "shape": list(m.shape)} for m in measurements]
    report: dict[str, Any] = {"environment": measurements[0].environment, "results": results}
    charts.save(chart.figure(report), root / name, note=_digest(root, files))
    with (root / name).open("a", encoding="utf-8") as file:
        file.write(_seal((root / name).read_text(encoding="utf-8")))


def _is_current(root: Path, name: str, files: list[str]) -> bool:
    """Whether a chart is whole, as it was drawn, and drawn from these files."""
    text = (root / name).read_text(encoding="utf-8") if (root / name).is_file() else ""
    body, mark, rest = text.rpartition(_SEAL)
    return _digest(root, files) in body and _seal(body) == mark + rest


def _seal(text: str) -> str:
    return f"{_SEAL}{hashlib.sha256(text.encode()).hexdigest()} -->\n"


def _digest(root: Path, files: Iterable[str]) -> str:
    data = b"".join((root / name).read_bytes() for name in files)
    return f"data sha256 {hashlib.sha256(data).hexdigest()}"


def _closed(lines: list[str], measurements: Sequence[Measurement], note: str) -> str:
    kinds = ", ".join(dict.fromkeys(f"{m.dtype}, {m.layout}" for m in measurements))
    where = "; ".join(page.environment_notes(m.environment for m in measurements))
    return "\n".join([*lines, "", f"{kinds}, {note}. {where}."]) + "\n"


def _ratio(m: Measurement | None) -> str:
    if m is None or m.ratio is None:
        return "–"
    apart = f", apart {m.ratio_apart:.3f}" if m.ratio_apart is not None else ""
    return f"{m.ratio:.3f} ({m.ratio_low:.3f}–{m.ratio_high:.3f}){apart}"


def _us(us: float | None) -> str:
    return "–" if us is None else f"{us:.0f}" if us >= 1000 else f"{us:.3g}"


def _show(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _order(shape: Shape) -> tuple[int, Shape]:
    return (SUITE.index(shape) if shape in SUITE else len(SUITE)), shape
