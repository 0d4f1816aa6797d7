"""`outblas report tune`: what a sweep found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..core.shapes import LAYOUTS, to_text
from .common import (
    ChartOption,
    HtmlOption,
    JsonOption,
    LayoutOption,
    SaveOption,
    check_files,
    check_length,
    check_one_of,
    console,
    give,
    note,
    one_shape,
    printable,
    table,
    usage_errors,
)

if TYPE_CHECKING:
    from ..autotune.store.records import BestConfig, Trial, Workload


def tune(
    kernel: Annotated[
        str, typer.Option(help="The name of a kernel. Default: the one with the most trials.")
    ] = "",
    shapes: Annotated[
        str, typer.Option(help="One shape, N or MxNxK. Default: the one with the most trials.")
    ] = "",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16, float32 or tf32.")] = "",
    layout: LayoutOption = "",
    weights: Annotated[
        str, typer.Option(help="warm or cold. Default: the one with the most trials.")
    ] = "",
    epilogue: Annotated[
        str,
        typer.Option(
            help="An epilogue such as bias+gelu, or none. Default: the one with the most trials."
        ),
    ] = "",
    gpu: Annotated[
        str,
        typer.Option(
            help="The name of a GPU, or a part of it. Default: the one with the most trials."
        ),
    ] = "",
    store: Annotated[
        Path | None,
        typer.Option(
            help="The file with the results. Default: tuning.sqlite in the cache directory."
        ),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option("--from", help="A file that outblas cache export wrote, instead of a store."),
    ] = None,
    json: JsonOption = False,
    save: SaveOption = None,
    html: HtmlOption = None,
    chart: ChartOption = None,
) -> None:
    """Reports what a sweep measured of one kernel at one shape; needs no GPU.

    It shows the winner, the best configs, the tiles and stages, what failed and why, and what the
    model predicted against what was measured. --html and --chart also draw it.
    """
    from ..autotune import named_configs
    from ..bench import plotting
    from ..report.tuning import chart as tune_chart
    from ..report.tuning import model, page
    from ..report.tuning import tables as tune_tables

    with usage_errors(OSError):
        check_files(save, html, chart)
        trials, winners = _load(store, source)
        own, workload, name = _choose(trials, kernel, shapes, dtype, layout, weights, epilogue, gpu)
        gpu_of = next(trial.gpu for trial in trials if trial.gpu.name == name)
        found = model.build(
            trials,
            winners,
            kernel=own,
            workload=workload,
            gpu_name=name,
            limits=lambda config: named_configs.limits(own, config, workload, gpu_of),
        )
        picture = tune_chart.draw(found) if chart is not None else None
        written = page.html(found) if html is not None else ""

    def show() -> None:
        console.print(printable(found.title), markup=False, highlight=False, style="bold")
        for each in tune_tables.tables(found):
            table(*each)
        for line in tune_tables.notes(found):
            note(line, highlight=False)

    give(found.record(), show, json=json, save=save)
    if html is not None:
        html.write_text(written, encoding="utf-8")
    if chart is not None and picture is not None:
        plotting.save(picture, chart)


def _load(store: Path | None, source: Path | None) -> tuple[list[Trial], list[BestConfig]]:
    """Raises ValueError for a file that is not there, is something else or has no trials."""
    from ..autotune.store import transfer
    from ..autotune.store.store import Store, StoreError

    for path, option in ((store, "--store"), (source, "--from")):
        if path is None:
            continue
        check_length(path)
        if not path.is_file():
            raise ValueError(f"{option} is {str(path)!r}, expected a file")
    if source is not None:
        if store is not None:
            raise ValueError("--store and --from are both given, expected one of them")
        trials, winners = transfer.read(source)
        where = source
    else:
        try:
            with Store(store, read_only=True) as kept:
                trials, winners, where = kept.trials(), kept.winners(), kept.path
        except StoreError as error:
            raise ValueError(str(error)) from None
    if not trials:
        raise ValueError(
            f"{where} has no trials: run outblas tune first, or name an export with --from"
        )
    return trials, winners


def _choose(
    trials: Sequence[Trial],
    kernel: str,
    shapes: str,
    dtype: str,
    layout: str,
    weights: str,
    epilogue: str,
    gpu: str,
) -> tuple[str, Workload, str]:
    """Kernel, workload and GPU: as the options say, otherwise those with the most trials. Raises
    ValueError that names the option which leaves nothing.
    """
    if layout:
        check_one_of("--layout", layout, LAYOUTS)
    shape = to_text(one_shape(shapes)) if shapes else ""
    left = _keep(trials, "--kernel", kernel, lambda t: t.kernel)
    left = _keep(left, "--shapes", shape, lambda t: to_text(t.workload.shape))
    left = _keep(left, "--dtype", dtype, lambda t: t.workload.dtype)
    left = _keep(left, "--layout", layout, lambda t: t.workload.layout)
    left = _keep(left, "--weights", weights, lambda t: t.workload.weights)
    left = _keep(left, "--epilogue", epilogue, lambda t: t.workload.epilogue or "none")
    left = _keep(left, "--gpu", _gpu(left, gpu), lambda t: t.gpu.name)
    name = Counter(t.gpu.name for t in left).most_common(1)[0][0]
    left = [t for t in left if t.gpu.name == name]
    own = Counter(t.kernel for t in left).most_common(1)[0][0]
    workload = Counter(t.workload for t in left if t.kernel == own).most_common(1)[0][0]
    return own, workload, name


def _keep(
    trials: Sequence[Trial], option: str, wanted: str, key: Callable[[Trial], str]
) -> list[Trial]:
    kept = [t for t in trials if not wanted or key(t) == wanted]
    if not kept:
        there = ", ".join(sorted({key(t) for t in trials}))
        raise ValueError(f"{option} is {wanted!r}, expected one that has trials: {there}")
    return kept


def _gpu(trials: Sequence[Trial], wanted: str) -> str:
    """The full name, where `wanted` is a part of one name only."""
    names = {t.gpu.name for t in trials}
    like = [name for name in names if wanted.lower() in name.lower()]
    return like[0] if wanted and wanted not in names and len(like) == 1 else wanted
