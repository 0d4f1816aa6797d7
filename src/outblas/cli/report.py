"""`outblas report`: what was measured, as tables, charts and pages."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import progress_line
from .common import (
    ChartOption,
    HtmlOption,
    JsonOption,
    SaveOption,
    check_files,
    check_writable,
    give,
    note,
    one_shape,
    parse_shapes,
    split,
    table,
    usage_errors,
)

if TYPE_CHECKING:
    from ..report.evidence import Evidence
    from ..report.profiles import Profiles
    from ..report.results import Measurements

app = typer.Typer(
    help="Makes reports from recorded results: ladders, sizes, rooflines, sweeps.",
    no_args_is_help=True,
)

ResultsOption = Annotated[
    str,
    typer.Option(
        help="Files that outblas bench saved, comma-separated. Default: results of this project."
    ),
]
ProfilesOption = Annotated[
    str,
    typer.Option(
        help="Files that outblas profile saved, comma-separated. Default: results of this project."
    ),
]


@app.command()
def ladder(
    ladder: Annotated[
        str | None, typer.Option(help="simt, portable, turing or hopper. Default: all.")
    ] = None,
    shapes: Annotated[
        str,
        typer.Option(
            help="Sizes of square products. Default: 4096,8192; 2048,4096 for simt and turing."
        ),
    ] = "",
    results: ResultsOption = "",
    profiles: ProfilesOption = "",
    json: JsonOption = False,
    save: SaveOption = None,
    html: HtmlOption = None,
    chart: ChartOption = None,
) -> None:
    """Shows every rung of a ladder beside the figure of its source document."""
    from ..report import ladder as report
    from ..report import ladder_chart, page, sizes
    from ..report.table import Table

    with usage_errors():
        check_files(save, html, chart)
        edges = _squares(shapes) if shapes else report.default_sizes(ladder)
        measurements = _load(results, required=True)
        evidence = _evidence(measurements, profiles)
        rows = report.rows(measurements, ladder, edges, evidence.profiles)
        last = sizes.last(measurements, ladder)
        sweep = sizes.rows(measurements, last) if last else []
        picture: Any = (
            ladder_chart.draw(rows, edges) if html is not None or chart is not None else None
        )
    rungs = Table(report.title(rows), report.columns(ladder), [row.cells() for row in rows])
    others = []
    if last:
        cells = [row.cells() for row in sweep]
        others.append(Table(sizes.title(last, sweep), sizes.COLUMNS, cells))
    value = {
        "sizes": edges,
        "rungs": [row.record() for row in rows],
        "sweep": {"kernel": last, "sizes": [row.record() for row in sweep]},
    }

    def show() -> None:
        for each in (rungs, *others):
            table(*each)

    give(value, show, json=json, save=save)
    if html is not None:
        notes = [report.NOTE, *page.environment_notes(m.environment for m in measurements)]
        ideas = [(*row.cells(), row.rung.idea) for row in rows]
        parts = [page.chart(picture), page.table(rungs.heading, (*rungs.columns, "idea"), ideas)]
        parts += [page.table(*each) for each in others]
        html.write_text(page.page("outblas: the ladder", notes, parts), encoding="utf-8")
    if chart is not None:
        _save_chart(picture, chart)


@app.command()
def sizes(
    kernel: Annotated[str, typer.Argument(help="Name of a rung.")],
    results: ResultsOption = "",
    json: JsonOption = False,
    save: SaveOption = None,
) -> None:
    """Shows one kernel at square products from 512 to 16384.

    The figures of its source document stand beside ours.
    """
    from ..report import sizes as report

    with usage_errors():
        check_writable(save)
        rows = report.rows(_load(results, required=True), kernel)
        if not rows:
            raise ValueError(f"--results holds no square product of {kernel}")
    value = {"kernel": kernel, "sizes": [row.record() for row in rows]}
    shown = report.title(kernel, rows), report.COLUMNS, [row.cells() for row in rows]
    give(value, lambda: table(*shown), json=json, save=save)


@app.command()
def roofline(
    ladder: Annotated[
        str | None, typer.Option(help="simt, portable, turing or hopper. Default: all.")
    ] = None,
    gpu: Annotated[str, typer.Option(help="GPU: T4, A100, H100, GH200 or H200.")] = "H100",
    dtype: Annotated[
        str,
        typer.Option(
            help="bfloat16, float16 or float32. Default: the dtype that the seed documents measure."
        ),
    ] = "",
    shapes: Annotated[str, typer.Option(help="One shape: N or MxNxK.")] = "4096",
    results: ResultsOption = "",
    json: JsonOption = False,
    save: SaveOption = None,
    html: HtmlOption = None,
    chart: ChartOption = None,
) -> None:
    """Shows the roofline of every kernel; needs no GPU.

    It compiles each kernel and shows how many CTAs fit on an SM, which rate each level of memory
    allows, and the rates that were measured here and in the seed documents.
    """
    from ..core import machines, registry
    from ..report import page, roofline_chart
    from ..report import roofline as report

    with usage_errors(ImportError, options={"name": "--ladder", "machine": "--gpu"}):
        check_files(save, html, chart)
        shape = one_shape(shapes)
        machine = machines.find(gpu)
        if ladder is not None:
            registry.ladder(ladder)
        if dtype not in ("", "bfloat16", "float16", "float32"):
            raise ValueError(f"--dtype is {dtype!r}, expected bfloat16, float16 or float32")
        measurements = _load(results, required=False)
        with progress_line.shown():
            points = report.points(ladder, machine, dtype or None, shape, measurements)
    cells = [point.cells() for point in points]

    def show() -> None:
        table(f"{machine.name}: TFLOP/s", report.COLUMNS, cells)
        if missing := report.missing(ladder, machine):
            note(f"These kernels do not run on sm_{machine.arch}: {', '.join(missing)}.")

    give([point.record() for point in points], show, json=json, save=save)
    if html is not None:
        notes = [
            f"{machine.name}: {machine.source}",
            *page.environment_notes(m.environment for m in measurements),
        ]
        parts = [
            page.chart(roofline_chart.draw(points, shape)),
            page.table("TFLOP/s by level", report.COLUMNS, cells),
        ]
        html.write_text(
            page.page(f"outblas: roofline of an {machine.name}", notes, parts), encoding="utf-8"
        )
    if chart is not None:
        _save_chart(roofline_chart.draw(points, shape), chart)


@app.command()
def raster(
    shapes: Annotated[str, typer.Option(help="One shape: N or MxNxK.")] = "8192",
    tile: Annotated[str, typer.Option(help="Tile of one CTA, along M and N.")] = "128x256",
    cluster: Annotated[
        str,
        typer.Option(help="CTAs of a cluster along M and N, which share operands by multicast."),
    ] = "1x1",
    sms: Annotated[int, typer.Option(help="Number of CTAs that run at a time.")] = 128,
    group: Annotated[
        str,
        typer.Option(
            help="Tiles of a group along M and N, for grouped; serpentine uses the first."
        ),
    ] = "16x8",
    results: ProfilesOption = "",
    json: JsonOption = False,
    save: SaveOption = None,
    chart: ChartOption = None,
) -> None:
    """Compares tile orders under a model of an H100's L2 cache; needs no GPU.

    The hit rates that ncu measured stand beside those that the model predicts.
    """
    from ..report import raster as report
    from ..report import raster_chart

    with usage_errors():
        check_files(save, None, chart)
        setting = report.Setting(
            one_shape(shapes), _pair(tile, "--tile"), _pair(cluster, "--cluster"), sms
        )
        measured = _load_profiles(results)
        with progress_line.shown():
            found = report.report(setting, _pair(group, "--group"), measured)

    def show() -> None:
        table(found.title, report.COLUMNS, [row.cells() for row in found.rows])
        if any(agreement.orders for agreement in found.agreements):
            table(
                "The model and ncu",
                report.AGREEMENT_COLUMNS,
                [each.cells() for each in found.agreements],
            )
        for line in found.notes():
            note(line)

    give(found.record(), show, json=json, save=save)
    if chart is not None:
        _save_chart(raster_chart.draw(found), chart)


@app.command()
def accesses(
    results: ProfilesOption = "", json: JsonOption = False, save: SaveOption = None
) -> None:
    """Predicts bank conflicts and coalescing of the CUDA-core kernels; needs no GPU.

    The predictions follow from the kernels' layouts; the counters of ncu stand beside them.
    """
    from ..report import accesses as report

    with usage_errors(ImportError):
        check_writable(save)
        profiles = _load_profiles(results)
        with progress_line.shown():
            conflicts, coalescing = report.conflicts(profiles), report.coalescing(profiles)
    value = {
        "within": report.WITHIN,
        "conflicts": [row.record() for row in conflicts],
        "coalescing": [row.record() for row in coalescing],
    }

    def show() -> None:
        table("Bank conflicts of simt.vectorized", report.SQUARE_COLUMNS, report.square(conflicts))
        table("Bank conflicts", report.CONFLICT_COLUMNS, [row.cells() for row in conflicts])
        note(f"{report.CONFLICTS_NOTE}.")
        table("Coalescing", report.COALESCING_COLUMNS, [row.cells() for row in coalescing])
        note(f"{report.COALESCING_NOTE}.")

    give(value, show, json=json, save=save)


@app.command()
def readme(
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Change nothing: list what is out of date, and exit with code 1 if anything is.",
        ),
    ] = False,
) -> None:
    """Makes the generated tables and charts of README.md and docs/ anew from results/.

    A part of a page stands between <!-- generated: KIND from FILES --> and <!-- end -->.
    """
    from ..report import readme as report

    with usage_errors(OSError), progress_line.shown():
        changed = report.stale() if check else report.render()
    for name in changed:
        typer.echo(
            f"{name}: {'out of date: run outblas report readme' if check else 'made anew'}",
            err=check,
        )
    raise typer.Exit(1 if check and changed else 0)


def _squares(text: str) -> tuple[int, ...]:
    found = parse_shapes(text, least=1)
    if any(len(set(shape)) > 1 for shape in found):
        raise ValueError(
            f"--shapes is {text!r}, expected N,...: the seed documents measured square products"
        )
    return tuple(dict.fromkeys(shape[0] for shape in found))


def _pair(text: str, option: str) -> tuple[int, int]:
    first, _, second = text.partition("x")
    if not (first.isdecimal() and second.isdecimal() and int(first) and int(second)):
        raise ValueError(f"{option} is {text!r}, expected two sizes above 0 such as 2x1")
    return int(first), int(second)


def _load(text: str, *, required: bool) -> Measurements:
    from ..report import results

    paths = [Path(name) for name in split(text)]
    try:
        return results.load(paths or results.default_files())
    except ValueError:
        if required or paths:
            raise
        return ()


def _load_profiles(text: str) -> Profiles:
    from ..report import profiles

    return profiles.load([Path(name) for name in split(text)] or profiles.default_files())


def _evidence(measurements: Measurements, text: str) -> Evidence:
    """The timings, with the counters and cycles from the files of --profiles (default: from the
    project's own results).
    """
    from ..report import phases, profiles, results
    from ..report.evidence import Evidence

    paths = [
        Path(name) for name in split(text)
    ] or profiles.default_files() + phases.default_files()
    of = results.by_kind(paths)
    return Evidence(measurements, profiles.load(of.bench + of.profiles), phases.load(of.phases))


def _save_chart(figure: Any, path: Path) -> None:
    from ..bench import plotting

    plotting.save(figure, path)
