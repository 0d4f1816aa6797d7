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
    """Shows the winner, the best configs, the tiles, what failed and why, and what the model
    predicted against what was measured; also draws it. `texts` are options by their names.
    """
    from outblas.autotune import named_configs
    from outblas.bench import plotting
    from outblas.report import chart as sweep_chart
    from outblas.report import model, page, tables

    with usage_errors(OSError):
        check_files(save, html, chart)
        trials, winners = _load(store, source)
        selected = _selected(trials, texts)
        subjects = Counter((t.kernel, t.workload, t.gpu.model) for t in selected)
        subject = subjects.most_common(1)[0][0]
        group = [t for t in trials if (t.kernel, t.workload, t.gpu.model) == subject]
        kernel, workload, _ = subject
        result = model.build(
            group,
            winners,
            limits=lambda config: named_configs.limits(kernel, config, workload, group[0].gpu),
        )
        picture = sweep_chart.draw(result) if chart is not None else None
        written = page.html(result) if html is not None else ""

    def show() -> None:
        console.print(printable(result.title), markup=False, highlight=False, style="bold")
        for part in tables.tables(result):
            table(*part)
        for line in tables.notes(result):
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

    if store is not None and source is not None:
        raise ValueError("--store and --from are both given, expected one of them")
    for path, option in ((store, "--store"), (source, "--from")):
        if path is not None:
            check_length(path)
            if not path.is_file():
                raise ValueError(f"{option} is {str(path)!r}, expected a file")
    if source is not None:
        trials, winners = transfer.read(source)
    else:
        try:
            with Store(store, read_only=True) as opened:
                trials, winners, source = opened.trials(), opened.winners(), opened.path
        except StoreError as error:
            raise ValueError(str(error)) from None
    if not trials:
        raise ValueError(
            f"{source} has no trials: run outblas tune first, or name an export with --from"
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
        if value is None:
            continue
        present = {_field(trial, option) for trial in selected}
        if option == "gpu":
            parts = [name for name in present if value.lower() in name.lower()]
            value = parts[0] if len(parts) == 1 else value
        selected = [trial for trial in selected if _field(trial, option) == value]
        if not selected:
            raise ValueError(
                f"--{option} is {value!r}, expected one that has trials: "
                f"{', '.join(sorted(present))}"
            )
    return selected


def _field(trial: Trial, option: str) -> str:
    if option == "kernels":
        return trial.kernel
    if option == "gpu":
        return trial.gpu.name
    if option == "shapes":
        return to_text(trial.workload.shape)
    value: str = getattr(trial.workload, option)
    return value or "none"
