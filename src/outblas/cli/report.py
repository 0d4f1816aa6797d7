"""`outblas report`: what was measured, beside what the seed documents claim."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..charts import check_chart
from .common import JsonOption, check_writable, console, parse_shapes, print_json, save_json, split, table, usage_error

if TYPE_CHECKING:
    from ..report.results import Measurements

app = typer.Typer(help="Ladders, rooflines and the README's tables from measured results.", no_args_is_help=True)

ResultsOption = Annotated[
    str, typer.Option(help="Files of outblas bench, comma-separated. Default: those in the checkout's results/.")
]
SaveOption = Annotated[Path | None, typer.Option(help="Write the JSON to a file.")]
HtmlOption = Annotated[Path | None, typer.Option(help="Write one self-contained HTML page.")]
ChartOption = Annotated[Path | None, typer.Option(help="Draw a chart: .png, .svg or .pdf.")]


@app.command()
def ladder(
    ladder: Annotated[str | None, typer.Option(help="simt, portable, turing or hopper; all by default.")] = None,
    shapes: Annotated[str, typer.Option(help="N of the square product.")] = "4096",
    results: ResultsOption = "",
    json: JsonOption = False,
    save: SaveOption = None,
    html: HtmlOption = None,
    chart: ChartOption = None,
) -> None:
    """Every rung in order of the climb, the seed's figure beside ours, then the claims and what came of them."""
    from ..report import claims, page
    from ..report import ladder as report

    try:
        _check_files(save, html, chart)
        M, N, K = _one_shape(shapes)
        if not M == N == K:
            raise ValueError(f"--shapes is {shapes!r}, expected one N: the seeds measured square products")
        measurements = _load(results, required=True)
        rows = report.rows(measurements, ladder, N)
    except ValueError as error:
        raise usage_error(error) from None
    found = claims.settled(measurements)
    columns = ("source", "claim", "ours", "verdict")
    cells = [(s.claim.source, s.claim.text, s.finding.ours, s.finding.verdict) for s in found]
    value = {"n": N, "rungs": [row.record() for row in rows], "claims": [s.record() for s in found]}
    if save is not None:
        save_json(save, value)
    if json:
        print_json(value)
    else:
        table(f"Rungs at {N}³, burst", report.COLUMNS, [row.cells() for row in rows])
        table(f"Claims: {claims.count(found)}", columns, cells)
    if html is not None:
        notes = [
            "Burst: idle, one warm call, 8 timed; the ratio is cuBLAS's time over the kernel's in the same rounds."
        ]
        notes += page.environment_notes(m.environment for m in measurements)
        parts = [
            page.chart(report.draw(rows, N)),
            page.table(f"Rungs at {N}³", (*report.COLUMNS, "idea"), [(*row.cells(), row.rung.idea) for row in rows]),
            page.table(f"Claims: {claims.count(found)}", columns, cells),
        ]
        html.write_text(page.page("outblas: the ladder", notes, parts), encoding="utf-8")
    if chart is not None:
        _save_chart(report.draw(rows, N), chart)


@app.command()
def roofline(
    ladder: Annotated[str | None, typer.Option(help="The kernels of one ladder; all by default.")] = None,
    gpu: Annotated[str, typer.Option(help="T4, A100, H100, GH200 or H200.")] = "H100",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16, float32.")] = "bfloat16",
    shapes: Annotated[str, typer.Option(help="N or MxNxK, one.")] = "4096",
    results: ResultsOption = "",
    json: JsonOption = False,
    save: SaveOption = None,
    html: HtmlOption = None,
    chart: ChartOption = None,
) -> None:
    """All kernels of a ladder on one roofline: what memory allows them, and what was measured. Needs no GPU."""
    from .. import machines, registry
    from ..report import page
    from ..report import roofline as report

    try:
        _check_files(save, html, chart)
        shape = _one_shape(shapes)
        machine = machines.find(gpu)
        if ladder is not None:
            registry.ladder(ladder)
        if dtype not in ("bfloat16", "float16", "float32"):
            raise ValueError(f"--dtype is {dtype!r}, expected bfloat16, float16 or float32")
        measurements = _load(results, required=False)
        with console.status("compiling"):
            points = report.points(ladder, machine, dtype, shape, measurements)
    except (ValueError, ImportError) as error:
        raise usage_error(error) from None
    value = [point.record() for point in points]
    cells = [point.cells() for point in points]
    if save is not None:
        save_json(save, value)
    if json:
        print_json(value)
    else:
        table(f"{machine.name}, {dtype}: TFLOP/s", report.COLUMNS, cells)
    if html is not None:
        notes = [f"{machine.name}: {machine.source}", *page.environment_notes(m.environment for m in measurements)]
        parts = [page.chart(report.draw(points, shape)), page.table("TFLOP/s by level", report.COLUMNS, cells)]
        html.write_text(page.page(f"outblas: roofline of an {machine.name}", notes, parts), encoding="utf-8")
    if chart is not None:
        _save_chart(report.draw(points, shape), chart)


@app.command()
def readme(
    check: Annotated[
        bool, typer.Option("--check", help="Only say what is out of date; exit code 1 if anything is.")
    ] = False,
) -> None:
    """Makes the generated parts of README.md and its charts anew from results/."""
    from ..report import readme as report

    try:
        changed = report.stale() if check else report.render()
    except (ValueError, OSError) as error:
        raise usage_error(error) from None
    for name in changed:
        typer.echo(f"{name}: {'out of date: run outblas report readme' if check else 'made anew'}", err=check)
    raise typer.Exit(1 if check and changed else 0)


def _check_files(save: Path | None, html: Path | None, chart: Path | None) -> None:
    """Raises ValueError for a file that could not be written once the work is done."""
    for path, option in ((save, "--save"), (html, "--html"), (chart, "--chart")):
        check_writable(path, option)
    check_chart(chart)
    if html is not None:
        check_chart(html.with_suffix(".svg"), "--html")


def _one_shape(text: str) -> tuple[int, int, int]:
    found = parse_shapes(text, least=1)
    if len(found) != 1:
        raise ValueError(f"--shapes is {text!r}, expected one shape")
    return found[0]


def _load(text: str, *, required: bool) -> Measurements:
    from ..report import results

    paths = [Path(name) for name in split(text)]
    try:
        return results.load(paths or results.default_files())
    except ValueError:
        if required or paths:
            raise
        return ()


def _save_chart(figure: Any, path: Path) -> None:
    from .. import charts

    charts.save(figure, path)
