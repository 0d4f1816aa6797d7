"""`outblas tune --report`: what the store has of one kernel at one shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from outblas.base.shapes import to_text
from outblas.cli.common import (
    check_files,
    check_length,
    console,
    give,
    note,
    one_shape,
    printable,
    table,
    usage_errors,
)

if TYPE_CHECKING:
    from outblas.autotune.store.records import BestConfig, Trial


def report(
    texts: Mapping[str, str | None],
    store: Path | None,
    source: Path | None,
    *,
    json: bool,
    save: Path | None,
    html: Path | None,
    chart: Path | None,
) -> None:
    """Shows the winner, the best configs, the tiles and stages, what failed and why, and what the
    model predicted against what was measured; also draws it. `texts` are options by their names.
    """
    from outblas.autotune import named_configs
    from outblas.bench import plotting
    from outblas.report.tuning import chart as tune_chart
    from outblas.report.tuning import model, page
    from outblas.report.tuning import tables as tune_tables

    with usage_errors(OSError):
        check_files(save, html, chart)
        trials, winners = _load(store, source)
        selected = _selected(trials, texts)
        kernel, workload, gpu = Counter(
            (trial.kernel, trial.workload, trial.gpu.name) for trial in selected
        ).most_common(1)[0][0]
        facts = next(trial.gpu for trial in selected if trial.gpu.name == gpu)
        result = model.build(
            trials,
            winners,
            kernel=kernel,
            workload=workload,
            gpu_name=gpu,
            limits=lambda config: named_configs.limits(kernel, config, workload, facts),
        )
        picture = tune_chart.draw(result) if chart is not None else None
        written = page.html(result) if html is not None else ""

    def show() -> None:
        console.print(printable(result.title), markup=False, highlight=False, style="bold")
        for part in tune_tables.tables(result):
            table(*part)
        for line in tune_tables.notes(result):
            note(line, highlight=False)

    give(result.record(), show, json=json, save=save)
    if html is not None:
        html.write_text(written, encoding="utf-8")
    if chart is not None and picture is not None:
        plotting.save(picture, chart)


def _load(store: Path | None, source: Path | None) -> tuple[list[Trial], list[BestConfig]]:
    """Raises ValueError for a file that is not there, is something else or has no trials."""
    from outblas.autotune.store import transfer
    from outblas.autotune.store.store import Store, StoreError

    for path, option in ((store, "--store"), (source, "--from")):
        if path is not None:
            check_length(path)
            if not path.is_file():
                raise ValueError(f"{option} is {str(path)!r}, expected a file")
    if store is not None and source is not None:
        raise ValueError("--store and --from are both given, expected one of them")
    if source is not None:
        trials, winners = transfer.read(source)
        where = source
    else:
        try:
            with Store(store, read_only=True) as opened:
                trials, winners, where = opened.trials(), opened.winners(), opened.path
        except StoreError as error:
            raise ValueError(str(error)) from None
    if not trials:
        raise ValueError(
            f"{where} has no trials: run outblas tune first, or name an export with --from"
        )
    return trials, winners


def _selected(trials: Sequence[Trial], texts: Mapping[str, str | None]) -> list[Trial]:
    """The trials that fit the options. Raises ValueError that names the option which leaves
    nothing.
    """
    shapes = texts["shapes"]
    values = {**texts, "shapes": to_text(one_shape(shapes)) if shapes else None}
    selected = list(trials)
    for option in ("kernels", "shapes", "dtype", "layout", "weights", "epilogue", "gpu"):
        value = values[option]
        present = {_field(trial, option) for trial in selected}
        if value is not None and value not in present and option == "gpu":
            parts = [name for name in present if value.lower() in name.lower()]
            value = parts[0] if len(parts) == 1 else value
        if value is not None:
            selected = [trial for trial in selected if _field(trial, option) == value]
        if not selected:
            raise ValueError(
                f"--{option} is {value!r}, expected one that has trials: "
                f"{', '.join(sorted(present))}"
            )
    return selected


def _field(trial: Trial, option: str) -> str:
    workload = trial.workload
    return {
        "kernels": trial.kernel,
        "shapes": to_text(workload.shape),
        "dtype": workload.dtype,
        "layout": workload.layout,
        "weights": workload.weights,
        "epilogue": workload.epilogue or "none",
        "gpu": trial.gpu.name,
    }[option]
