"""`outblas tune --dry-run` and `--explain`: what a sweep would try, and what `matmul` chooses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outblas.cli.common import NONE, note, split, table

if TYPE_CHECKING:
    from outblas.autotune.lookup import TuningIndex
    from outblas.autotune.search.plan import Plan
    from outblas.autotune.store.records import Gpu, Workload
    from outblas.autotune.sweeps.options import SweepOptions

SHOWN = 10


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
    from outblas.runtime.default_kernel import candidates

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
    from outblas.runtime import default_kernel, launcher

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
