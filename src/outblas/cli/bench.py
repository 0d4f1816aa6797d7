"""`outblas bench`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..bench.plotting import check_chart
from ..core import registry
from ..core.shapes import LAYOUTS, Shape, to_text
from .common import (
    NO_GPU,
    NONE,
    JsonOption,
    LayoutOption,
    PrecisionOption,
    ShapesOption,
    check_one_of,
    check_runs,
    check_writable,
    console,
    figure,
    make_table,
    parse_shapes,
    print_json,
    save_json,
    split,
    usage_errors,
    without_nulls,
)

if TYPE_CHECKING:
    from ..bench.campaign import Campaign
    from ..bench.providers import Provider
    from ..bench.record import Record

COLUMNS = (
    "shape",
    "layout",
    "mode",
    "provider",
    "check",
    "µs",
    "TFLOP/s",
    "× cuBLAS",
    "apart",
    "verdict",
    "host µs",
    "MHz",
    "util.",
    "W",
    "pJ/FLOP",
)


def bench(
    kernels: Annotated[
        str,
        typer.Option(
            help="Kernels by name, NAME\\[k=v,...] for a config; outblas (what matmul takes), "
            "cublas (against itself), cublaslt-best, torch.compile. "
            "Default: all kernels that run here."
        ),
    ] = "",
    ladder: Annotated[str | None, typer.Option(help="The kernels of one ladder.")] = None,
    shapes: ShapesOption = "4096",
    dtype: PrecisionOption = "bfloat16",
    layout: LayoutOption = "nt",
    mode: Annotated[str, typer.Option(help="burst, sustained, or both.")] = "burst",
    rounds: Annotated[
        int | None,
        typer.Option(
            min=2, help="Rounds of burst, at least (15 by default); passes of sustained (3)."
        ),
    ] = None,
    json: JsonOption = False,
    save: Annotated[
        Path | None, typer.Option(help="Write the JSON to a file, renewed with every figure.")
    ] = None,
    chart: Annotated[
        Path | None, typer.Option(help="Draw the figures: .png, .svg or .pdf.")
    ] = None,
) -> None:
    """Times kernels beside cuBLAS, in turns on one GPU.

    Every kernel is checked before it is timed. Exit code 1 if a kernel is wrong, 3 without a GPU.
    """
    import torch

    from ..bench.providers import OPERANDS, parse
    from ..bench.record import MODES

    with usage_errors(ImportError, options={"kernel": "--kernels", "name": "--ladder"}):
        check_writable(save)
        check_writable(chart, "--chart")
        check_chart(chart)
        chosen = parse_shapes(shapes, least=1)
        modes, layouts = _choice("--mode", mode, MODES), _choice("--layout", layout, LAYOUTS)
        check_one_of("--dtype", dtype, tuple(OPERANDS))
        if ladder is not None:
            registry.ladder(ladder)
        named = [parse(name) for name in split_names(kernels)]
        if not torch.cuda.is_available():
            typer.echo("No NVIDIA GPU that torch can use: there is nothing to time here.", err=True)
            raise typer.Exit(NO_GPU)
        campaign = _campaign(named, ladder, dtype, rounds)
    report, passed = _run(campaign, chosen, layouts, modes, save, quiet=json)
    if json:
        print_json(report)
    if chart is not None:
        from ..bench.chart import draw

        try:
            draw(report, chart)
        except ValueError as error:
            typer.echo(f"no chart: {error}", err=True)
    raise typer.Exit(0 if passed else 1)


def split_names(text: str) -> list[str]:
    """`a,b[k=v,k=v]` → a and b[k=v,k=v]: commas inside brackets do not separate."""
    return [
        part.strip() for part in re.findall(r"[^,\[]+(?:\[[^\]]*\]?)?[^,]*", text) if part.strip()
    ]


def _choice(option: str, text: str, allowed: tuple[str, ...]) -> list[str]:
    found = split(text)
    for value in found or [text]:
        if value not in allowed:
            raise ValueError(f"{option} is {value!r}, expected of {', '.join(allowed)}")
    return found


def _campaign(
    named: list[Provider], ladder: str | None, dtype: str, rounds: int | None
) -> Campaign:
    import torch

    from ..bench import providers
    from ..bench.campaign import ROUNDS, Campaign
    from ..bench.record import BASE

    device = torch.device("cuda", torch.cuda.current_device())
    chosen = list(named)
    if ladder is not None or not named:
        chosen += providers.runnable(device, dtype, ladder)
    _check_kernels(chosen, device, dtype)
    by_mode = dict.fromkeys(ROUNDS, rounds) if rounds else ROUNDS
    return Campaign([providers.parse(BASE), *chosen], dtype, by_mode)


def _check_kernels(chosen: list[Provider], device: Any, dtype: str) -> None:
    """Raises ValueError for kernels that the device or the dtype rules out."""
    from ..bench.providers import LIBRARIES, OPERANDS

    for provider in chosen:
        if provider.name in LIBRARIES:
            continue
        kernel = registry.find(provider.name)
        check_runs(kernel, device)
        if OPERANDS[dtype] not in kernel.dtypes:
            raise ValueError(
                f"--dtype is {dtype!r}, expected for {kernel.name}: {', '.join(kernel.dtypes)}"
            )


def _run(
    campaign: Campaign,
    shapes: list[Shape],
    layouts: list[str],
    modes: list[str],
    save: Path | None,
    *,
    quiet: bool,
) -> tuple[dict[str, Any], bool]:
    """Runs the campaign under a live table, and says whether every product was right.

    An interrupted campaign leaves what is done in `save` and on the screen.
    """
    from ..bench import environment

    report: dict[str, Any] = {"environment": environment(), "results": []}
    rows: list[tuple[str, ...]] = []
    passed = True

    def view(doing: str = "") -> Group:
        status = [Text(doing, style="dim")] if doing else []
        return Group(_view(report["environment"]["gpu"], campaign.dtype, rows), *status)

    with Live(view(), console=console, refresh_per_second=4, transient=quiet) as live:
        campaign.progress = lambda doing: live.update(view(doing))
        for record in campaign.run(shapes, layouts, modes):
            report["results"].append(record.record())
            rows.append(row(record))
            passed &= record.passed
            live.update(view())
            if save is not None:
                records = [without_nulls(each) for each in report["results"]]
                save_json(save, {**report, "results": records})
        live.update(Group() if quiet else view())
    return report, passed


def _view(gpu: str, dtype: str, rows: list[tuple[str, ...]]) -> Table:
    """A table without the columns in which nothing was measured; layout and mode go to the title if
    all share them.
    """
    title, kept = f"{gpu}, {dtype}", []
    for i, column in enumerate(COLUMNS):
        values = {row[i] for row in rows}
        if column in ("layout", "mode") and len(values) == 1:
            title += f", {values.pop()}"
        elif values != {NONE}:
            kept.append(i)
    cells = ([row[i] for i in kept] for row in rows)
    return make_table(
        f"{title}; × cuBLAS is its time over the provider's", [COLUMNS[i] for i in kept], cells
    )


def row(record: Record) -> tuple[str, ...]:
    """The cells of one record; a dash where nothing was measured."""
    r = record
    spread = (
        f"{r.ratio:.3f} ({r.ratio_low:.3f}–{r.ratio_high:.3f})" if r.ratio is not None else NONE
    )
    return (
        to_text(r.shape),
        r.layout,
        r.mode,
        r.label,
        r.check,
        figure(r.us, ".1f" if r.us is None or r.us >= 100 else ".2f"),
        figure(r.tflops, ".0f" if r.tflops is None or r.tflops >= 100 else ".1f"),
        spread,
        figure(r.ratio_apart, ".3f"),
        r.verdict or NONE,
        figure(r.host_us, ".1f"),
        figure(r.clock_mhz, ".0f"),
        figure(r.utilisation, ".3f"),
        figure(r.watts, ".0f"),
        figure(r.pj_per_flop, ".3f"),
    )
