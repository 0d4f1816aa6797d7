"""What `outblas tune` shows: what a sweep would try (`--dry-run`), what `matmul` chooses
(`--explain`), what came of a sweep, and what the store has of one kernel and shape (`--report`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outblas.base.shapes import to_text
from outblas.cli.common import (
    NONE,
    check_files,
    check_length,
    console,
    give,
    note,
    one_shape,
    printable,
    split,
    table,
    usage_errors,
)

if TYPE_CHECKING:
    from outblas.autotune.lookup import TuningIndex
    from outblas.autotune.search.prune import Plan
    from outblas.autotune.store.records import BestConfig, Gpu, Trial, Workload
    from outblas.autotune.sweeps.options import SweepOptions
    from outblas.autotune.sweeps.outcome import Outcome, Sweep

SHOWN = 10


# ---- before a sweep
def gpu_of(name: str | None, gpus: str | None) -> Gpu:
    """The GPU by name, or the present one, or where there is none an H100."""
    import torch

    from outblas.autotune.search import gpu

    if name:
        return gpu.imagined(name)
    return gpu.current() if torch.cuda.is_available() or gpus == "cpu" else gpu.imagined("h100")


def default_kernels(arch: int, workload: Workload) -> list[str]:
    """The kernels that `matmul` chooses from on an architecture, for calls as of a workload; 0 is
    the CPU.
    """
    from outblas.autotune.search.prune import with_epilogues
    from outblas.call.default_kernel import candidates

    names = list(candidates(arch, workload.dtype)) if arch else ["portable"]
    return with_epilogues(names) if workload.epilogue else names


def dry_run(
    kernels: str, workloads: Sequence[Workload], gpu: Gpu, options: SweepOptions, *, quiet: bool
) -> dict[str, Any]:
    """What a sweep would try, in which order, and what each rule keeps it from trying."""
    from outblas.autotune.search.plan import plan
    from outblas.autotune.search.strategy import ModelRanked, strategy_of
    from outblas.autotune.search.target import of

    names = split(kernels) or default_kernels(gpu.arch, workloads[0])
    targets = [of(name) for name in names]
    strategy = strategy_of(options.strategy)
    ranked = isinstance(strategy, ModelRanked)
    order = "the model" if ranked else type(strategy).__name__
    records = []
    for workload in workloads:
        result = plan(targets, workload, gpu, trials=options.trials, strategy=strategy)
        records.append(_plan_record(result, workload, gpu))
        if not quiet:
            _show_plan(result, records[-1], workload, gpu, order)
    return {"gpu": gpu.name, "plans": records}


def _plan_record(plan: Plan, workload: Workload, gpu: Gpu) -> dict[str, Any]:
    from outblas.autotune.search.cost_model import predict
    from outblas.autotune.search.gpu import machine

    on = machine(gpu)
    return {
        "workload": str(workload),
        "generated": plan.generated,
        "valid": plan.valid,
        "pruned": [
            {"count": rule.count, "rule": rule.rule, "example": rule.example}
            for rule in plan.pruned
        ],
        "ranked": [
            {
                "kernel": candidate.target.name,
                "config": candidate.text,
                "predicted_us": candidate.predicted_us,
                "limits": (predict(candidate.footprint, workload, on).limits if on else ""),
            }
            for candidate in plan.ranked
        ],
    }


def _show_plan(
    plan: Plan, record: dict[str, Any], workload: Workload, gpu: Gpu, order: str
) -> None:
    from outblas.autotune.named_configs import short

    counts = f"{plan.generated} configs, {plan.valid} of them valid, {len(plan.ranked)} to measure"
    note(f"{workload} on {gpu.name}: {counts}.", None)
    table(
        "Configs that are not tried",
        ("configs", "why, for one of them"),
        [(rule.count, rule.example) for rule in plan.pruned],
    )
    rows = [
        (
            place,
            candidate["kernel"],
            short(candidate["kernel"], candidate["config"]).replace(",", ", ") or "its default",
            f"{candidate['predicted_us']:.1f}",
            candidate["limits"] or NONE,
        )
        for place, candidate in enumerate(record["ranked"][:SHOWN], 1)
    ]
    table(
        f"The first {len(rows)} in the order of {order}",
        ("", "kernel", "config", "predicted µs", "limits"),
        rows,
    )


def explain(
    workloads: Sequence[Workload], gpu: Gpu, store: Path | None, *, quiet: bool
) -> dict[str, Any]:
    """What `matmul` chooses for packed operands, and every place where it looks."""
    import os

    from outblas.autotune import lookup

    mode = lookup.mode(None, os.environ.get("OUTBLAS_TUNE"))
    index = lookup.TuningIndex(gpu, store)
    choices = [_explanation(index, workload, mode) for workload in workloads]
    if not quiet:
        for choice in choices:
            _show_explanation(choice, gpu)
    return {"gpu": gpu.name, "mode": mode, "choices": choices}


def _explanation(index: TuningIndex, workload: Workload, mode: str) -> dict[str, Any]:
    """What `matmul` chooses for a workload, the kernels that it passes over, and the places where
    it looks.
    """
    from outblas.autotune import named_configs
    from outblas.autotune.lookup import is_faster
    from outblas.autotune.search import prune
    from outblas.call import default_kernel, launcher

    gpu, looks_up = index.gpu, mode != "off"
    only_faster = workload.operand_dtype == "float32" and mode != "on"
    choice, passed_over = None, []
    for option in index.choices(workload) if looks_up else ():
        if only_faster and not is_faster(option.reason, workload):
            continue
        if reason := named_configs.unsupported_reason(option.kernel, option.config, workload, gpu):
            passed_over.append(f"{option.kernel} does not run here: {reason}")
        elif reason := index.pruned_reason(option.kernel, workload, prune.problem(workload)):
            passed_over.append(f"{option.kernel} would be slow here: {reason}")
        else:
            choice = option
            break
    if choice is None and only_faster:
        choice = named_configs.ChosenConfig("torch", "", launcher.SLOWER)
    if choice is None:
        rule = default_kernel.by_rule(prune.problem(workload), gpu.arch, gpu.sms)
        cause = "nothing that was tuned applies" if looks_up else "OUTBLAS_TUNE is off"
        choice = named_configs.ChosenConfig(rule, "", f"{cause}, so the fixed rule decides")
    steps = index.steps(workload) if looks_up else []
    return {
        "workload": str(workload),
        "kernel": choice.kernel,
        "config": choice.config,
        "why": choice.why,
        "steps": [{"place": place, "found": text} for place, text in steps],
        "passed_over": passed_over,
        "remarks": named_configs.remarks(choice.kernel, workload),
    }


def _show_explanation(choice: dict[str, Any], gpu: Gpu) -> None:
    from outblas.autotune.named_configs import short

    steps = [
        (step["place"], step["found"].replace(",", ", ").replace(",  ", ", "))
        for step in choice["steps"]
    ]
    table(f"{choice['workload']} on {gpu.name}", ("source", "what it says"), steps)
    for line in choice["passed_over"]:
        note(f"Passed over: {line}", None)
    kernel, config = choice["kernel"], short(choice["kernel"], choice["config"])
    if kernel != "torch":
        kernel = f"{kernel} with {config.replace(',', ', ') or 'its default config'}"
    note(f"matmul takes {kernel}: {choice['why']}.", None)
    for line in choice["remarks"]:
        note(f"{line}.", None)


# ---- after a sweep
def show_sweep(sweep: Sweep) -> None:
    """Prints the winners, and everything that went wrong."""
    for base in dict.fromkeys(map(_base, sweep.winners)):
        winners = [winner for winner in sweep.winners if _base(winner) == base]
        gpus = ", ".join(dict.fromkeys(winner.gpu.name for winner in winners))
        ratio = [f"× {base}"] if base else []
        columns = ("shape", "kernel", "config", "µs", *ratio, "lead", "confidence", "measured")
        table(f"Winners on {gpus}", columns, [_row(winner, base) for winner in winners])
        note(_explained(base))
    if not sweep.winners:
        note("There is no winner: no config reached the finals.", "yellow")

    for outcome in sweep.outcomes:
        _show_problems(outcome)
    for failure in sweep.failures:
        note(f"! {failure.workload}: {failure.reason}", "yellow")
    note(f"{sweep.seconds:.0f} s; the trials are in {sweep.store}")


def _base(winner: BestConfig) -> str:
    """What the ratio of a winner compares with; "" on a CPU, where it is not shown."""
    from outblas.autotune.store.records import base_name

    return base_name(winner.workload, on_gpu=winner.gpu.arch > 0)


def _explained(base: str) -> str:
    """What the columns of winners say, in words."""
    ratio = (
        f"× {base}: the time of {base} over it, with the 10th and 90th percentile of the rounds. "
        if base
        else "On a CPU a Triton kernel runs in the interpreter: its times say nothing of a GPU. "
    )
    return (
        f"µs: a call in the finals, median. {ratio}Lead: how much more time the next config takes, "
        "with a 95% interval."
    )


def _show_problems(outcome: Outcome) -> None:
    """Prints the trials of a workload that failed, and what was not measured or not locked."""
    from outblas.autotune.named_configs import short

    workload = outcome.job.workload
    failed = [trial for trial in outcome.trials if not trial.ok]
    for trial in failed[:SHOWN]:
        note(f"{trial.workload} {trial.kernel}: {trial.status}: {trial.reason}")
    if len(failed) > SHOWN:
        note(f"and {len(failed) - SHOWN} more, which `outblas cache show` lists", highlight=False)
    for left in outcome.unmeasured[:SHOWN]:
        config = short(left.kernel, left.config) or "default"
        note(
            f"{workload} {left.kernel}[{config}]: not measured ({left.reason}); the next sweep "
            "tries it again",
            "yellow",
        )
    if (more := len(outcome.unmeasured) - SHOWN) > 0:
        note(f"and {more} more that were not measured", "yellow")
    if outcome.unlocked:
        note(f"{workload}: measured without the lock on the GPU: {outcome.unlocked}", "yellow")


def _row(winner: BestConfig, base: str) -> tuple[str, ...]:
    from outblas.autotune.named_configs import short
    from outblas.report.tables import confidence, lead, ratio

    workload = winner.workload
    return (
        f"{to_text(workload.shape)} {workload.layout} {workload.conditions}".rstrip(),
        winner.kernel,
        short(winner.kernel, winner.config).replace(",", ", ") or "default",
        f"{winner.us:.1f}",
        *([ratio(winner.ratio, winner.ratio_low, winner.ratio_high)] if base else []),
        lead(winner),
        confidence(winner),
        f"{winner.screened} of {winner.valid} configs, {winner.rounds} rounds",
    )


def sweep_record(sweep: Sweep) -> dict[str, Any]:
    """A sweep as JSON has it."""
    return {
        "seconds": sweep.seconds,
        "store": str(sweep.store),
        "finished": sweep.finished,
        "winners": [asdict(winner) for winner in sweep.winners],
        "outcomes": [
            {
                "workload": str(outcome.job.workload),
                "gpu": outcome.gpu.name,
                "generated": outcome.plan.generated,
                "valid": outcome.plan.valid,
                "trials": len(outcome.trials),
                "new": outcome.new,
                "failed": sum(not trial.ok for trial in outcome.trials),
                "finished": outcome.finished,
                "unlocked": outcome.unlocked,
                "unmeasured": [asdict(left) for left in outcome.unmeasured],
            }
            for outcome in sweep.outcomes
        ],
        "failures": [
            {"workload": str(failure.workload), "reason": failure.reason}
            for failure in sweep.failures
        ],
    }


# ---- what is stored
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
