"""`outblas tune`."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.live import Live

from ..shapes import LAYOUTS, to_text
from .common import (
    NO_GPU,
    JsonOption,
    LayoutOption,
    PrecisionOption,
    SaveOption,
    ShapesOption,
    check_writable,
    console,
    give,
    note,
    parse_shapes,
    split,
    table,
    usage_errors,
)

if TYPE_CHECKING:
    from ..autotune.progress import Progress
    from ..autotune.records import Gpu, Winner, Workload
    from ..autotune.subjects import Subject
    from ..autotune.sweeping import Sweep

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LINES_EVERY = 10.0  # seconds between plain lines, where there is no terminal
SHOWN = 10


def tune(
    kernels: Annotated[
        str, typer.Option(help="Kernels by name, comma-separated: they compete. Default: what matmul chooses from.")
    ] = "",
    shapes: ShapesOption = "4096",
    dtype: PrecisionOption = "bfloat16",
    out_dtype: Annotated[str, typer.Option(help="float32 for 16-bit operands with an fp32 product.")] = "",
    layout: LayoutOption = "nt",
    budget: Annotated[str, typer.Option(help="For all of it, 5s a shape at least: 20m, 8h. Default: until done.")] = "",
    trials: Annotated[
        int | None, typer.Option(min=1, help="Configs of each kernel at a shape, the ranker's best. All by default.")
    ] = None,
    top_k: Annotated[int, typer.Option(min=1, help="Configs in the finals.")] = 8,
    gpus: Annotated[str, typer.Option(help="all, indices such as 0,1, or cpu: the interpreter.")] = "0",
    engine: Annotated[str, typer.Option(help="local, or ray: one task a shape on a cluster.")] = "local",
    address: Annotated[str | None, typer.Option(help="Of the Ray cluster.")] = None,
    ranker: Annotated[str, typer.Option(help="model, or heuristics: NVIDIA's nvMatmulHeuristics.")] = "model",
    store: Annotated[Path | None, typer.Option(help="Another file of trials than the user's.")] = None,
    resume: Annotated[bool, typer.Option(help="Keep what the store has; --no-resume measures anew.")] = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be tried, and what not and why.")
    ] = False,
    explain: Annotated[str, typer.Option(help="MxNxK: what matmul chooses there, and how it comes to that.")] = "",
    gpu: Annotated[
        str, typer.Option(help="With --dry-run or --explain: T4, A100, H100, GH200, H200 in place of the GPU.")
    ] = "",
    json: JsonOption = False,
    save: SaveOption = None,
) -> None:
    """Finds the fastest configs of kernels on this GPU. Kill it at any moment: it goes on where it was.

    Exit code 1 if a shape could not be tuned, 3 without a GPU.
    """
    from ..autotune.store import StoreError

    with usage_errors(ImportError, ConnectionError, StoreError):
        check_writable(save)
        layouts = split(layout)
        for letters in layouts or [layout]:
            if letters not in LAYOUTS:
                raise ValueError(f"--layout is {letters!r}, expected of {', '.join(LAYOUTS)}")
        chosen = parse_shapes(explain or shapes, "--explain" if explain else "--shapes", least=1)
        seconds = parse_budget(budget)
        from ..autotune.records import Workload

        workloads = [Workload(*shape, dtype, out_dtype, letters) for letters in layouts for shape in chosen]
        if explain:
            value = _explain(workloads, _gpu(gpu, gpus), store, quiet=json)
        elif dry_run:
            target = _gpu(gpu, gpus)
            subjects = _subjects(kernels, target, workloads[0].dtype)
            value = _dry_run(subjects, workloads, target, trials, ranker, quiet=json)
        else:
            value = _sweep(
                kernels, workloads, quiet=json, budget=seconds, trials=trials, top_k=top_k, gpus=gpus, engine=engine,
                address=address, ranker=ranker, store=store, resume=resume,
            )  # fmt: skip
    give(value, lambda: None, json=json, save=save)
    raise typer.Exit(1 if value.get("failures") else 0)


def parse_budget(text: str) -> float | None:
    """`90s`, `20m`, `1.5h`, or seconds; None for an empty text. Raises ValueError."""
    if not text:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if not found or not float(found[1]):
        raise ValueError(f"--budget is {text!r}, expected a time such as 90s, 20m or 8h")
    return float(found[1]) * _UNITS[found[2] or "s"]


def _gpu(name: str, gpus: str) -> Gpu:
    """The GPU by name, or the present one, or where there is none an H100."""
    import torch

    from ..autotune import gpu

    if name:
        return gpu.imagined(name)
    return gpu.current() if torch.cuda.is_available() or gpus == "cpu" else gpu.imagined("h100")


def _subjects(kernels: str, gpu: Gpu, dtype: str) -> tuple[Subject, ...]:
    from ..autotune.subjects import of
    from ..choice import rivals

    names = split(kernels) or (["portable"] if gpu.arch == 0 else rivals(gpu.arch, dtype))
    return tuple(of(name) for name in names)


def _dry_run(
    subjects: tuple[Subject, ...], workloads: list[Workload], gpu: Gpu, trials: int | None, ranker: str, *, quiet: bool
) -> dict[str, Any]:
    """What a sweep would try, in which order, and what each rule keeps it from trying."""
    from ..autotune import model, prune, sweeping
    from ..autotune.choose import short
    from ..autotune.gpu import machine

    found, on = [], machine(gpu)
    for workload in workloads:
        plan = prune.plan(subjects, workload, gpu, trials=trials, ranker=sweeping.ranker_of(ranker))
        ranked = [
            {
                "kernel": c.subject.name, "config": c.text, "predicted_us": c.predicted_us,
                "limits": model.predict(c.footprint, workload, on).limits if on else "",
            }
            for c in plan.ranked
        ]  # fmt: skip
        pruned = [{"count": rule.count, "rule": rule.rule, "example": rule.example} for rule in plan.pruned]
        counts = {"generated": plan.generated, "valid": plan.valid}
        found.append({"workload": str(workload), **counts, "pruned": pruned, "ranked": ranked})
        if quiet:
            continue
        said = f"{plan.generated} configs generated, {plan.valid} valid, {len(plan.ranked)} to be measured"
        note(f"{workload} on {gpu.name}: {said}.", None)
        table("Not tried", ("configs", "reason, for one of them"), [(r.count, r.example) for r in plan.pruned])
        rows = [
            (i, r["kernel"], short(str(r["kernel"]), str(r["config"])), f"{r['predicted_us']:.1f}", r["limits"])
            for i, r in enumerate(ranked[:SHOWN], 1)
        ]
        table(f"The first {len(rows)} by {ranker}", ("", "kernel", "config", "µs expected", "limits"), rows)
    return {"gpu": gpu.name, "plans": found}


def _explain(workloads: list[Workload], gpu: Gpu, store: Path | None, *, quiet: bool) -> dict[str, Any]:
    """What `matmul` chooses for packed operands, and every place where it looks."""
    import os

    from .. import choice
    from ..autotune import choose, prune

    mode = choose.mode(None, os.environ.get("OUTBLAS_TUNE"))
    known = choose.Knowledge(gpu, store)
    found = []
    for workload in workloads:
        picked, passed = None, []
        for option in known.choices(workload) if mode != "off" else ():
            if reason := choose.refusal(option.kernel, option.config, workload, gpu):
                passed.append(f"{option.kernel} cannot: {reason}")
            elif reason := known.objection(option.kernel, workload, prune.problem(workload)):
                passed.append(f"{option.kernel} had better not: {reason}")
            else:
                picked = option
                break
        if picked is None:
            rule = choice.by_rule(prune.problem(workload), gpu.arch, gpu.sms)
            why = "OUTBLAS_TUNE=off: by rule" if mode == "off" else "nothing is known: by rule"
            picked = choose.Choice(rule, "", why)
        steps = known.steps(workload) if mode != "off" else []
        remarks = choose.remarks(picked.kernel, workload)
        found.append(
            {
                "workload": str(workload), "kernel": picked.kernel, "config": picked.config, "why": picked.why,
                "steps": [{"place": place, "found": text} for place, text in steps], "passed_over": passed,
                "remarks": remarks,
            }
        )  # fmt: skip
        if not quiet:
            table(f"{workload} on {gpu.name}", ("place", "what is known there"), steps)
            for line in passed:
                note(f"passed over: {line}", None)
            config = choose.short(picked.kernel, picked.config) if picked.config else "its own config"
            note(f"matmul takes {picked.kernel}, {config or 'its own config'}: {picked.why}.", None)
            for line in remarks:
                note(f"{line}.", None)
    return {"gpu": gpu.name, "mode": mode, "choices": found}


def _sweep(kernels: str, workloads: list[Workload], *, quiet: bool, gpus: str, **options: Any) -> dict[str, Any]:
    """Runs the sweep under a live view, and shows what came of it."""
    import torch

    from ..autotune.sweeping import sweep

    if gpus != "cpu" and options["engine"] == "local" and not torch.cuda.is_available():
        typer.echo(
            "No NVIDIA GPU that torch can use: --dry-run shows what would be tried, --gpus cpu tunes portable in the "
            "interpreter.", err=True,
        )  # fmt: skip
        raise typer.Exit(NO_GPU)
    names = split(kernels) or _default_kernels(gpus, options["engine"], workloads[0].dtype)
    with _View(quiet=quiet) as view:
        found = sweep(
            names, list(dict.fromkeys(w.shape for w in workloads)), dtype=workloads[0].dtype,
            out_dtype=workloads[0].out_dtype, layout=list(dict.fromkeys(w.layout for w in workloads)), gpus=gpus,
            progress=view, **options,
        )  # fmt: skip
    if not quiet:
        _show(found)
    return _record(found)


def _default_kernels(gpus: str, engine: str, dtype: str) -> list[str]:
    import torch

    from ..choice import rivals

    if gpus == "cpu" and engine == "local":
        return ["portable"]
    if not torch.cuda.is_available():
        raise ValueError("--kernels is empty, expected names: this machine has no GPU to choose them by")
    major, minor = torch.cuda.get_device_capability()
    return list(rivals(10 * major + minor, dtype))


class _View:
    """The live view of a sweep; plain lines now and then where there is no terminal."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._snapshots: dict[Workload, Progress] = {}
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self._render, transient=True)
        self._plain = not sys.stdout.isatty()
        self._last: dict[tuple[Workload, str], float] = {}

    def __enter__(self) -> _View:
        if not self._quiet and not self._plain:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def __call__(self, progress: Progress) -> None:
        from .tune_view import line

        self._snapshots[progress.workload] = progress
        key, now = (progress.workload, progress.stage), time.monotonic()
        if self._plain and progress.stage != "waiting" and now - self._last.get(key, 0.0) > _LINES_EVERY:
            self._last[key] = now
            typer.echo(line(progress), err=True)

    def _render(self) -> Any:
        from .tune_view import render

        return render(list(self._snapshots.values())) if self._snapshots else Group()


def _show(found: Sweep) -> None:
    rows = [_row(winner) for winner in found.winners]
    columns = ("shape", "kernel", "config", "µs", "× cuBLAS", "ahead of the next", "confidence", "measured")
    gpus = ", ".join(dict.fromkeys(winner.gpu.name for winner in found.winners))
    table(f"Winners on {gpus}" if gpus else "Winners", columns, rows)
    for outcome in found.outcomes:
        failed = [trial for trial in outcome.trials if not trial.ok]
        for trial in failed[:SHOWN]:
            note(f"{trial.workload} {trial.kernel}: {trial.status}: {trial.reason}")
        if len(failed) > SHOWN:
            console.print(f"and {len(failed) - SHOWN} more; outblas cache show has all", style="dim")
    for failure in found.failures:
        note(f"! {failure.workload}: {failure.reason}", "yellow")
    note(f"{found.seconds:.0f} s; trials in {found.store}")


def _row(w: Winner) -> tuple[str, ...]:
    from ..autotune.choose import short

    lead = "–"
    if w.lead is not None and w.lead_low is not None and w.lead_high is not None:
        lead = f"{w.lead - 1:+.2%} ({w.lead_low - 1:+.2%} to {w.lead_high - 1:+.2%})"
    return (
        f"{to_text(w.workload.shape)} {w.workload.layout}", w.kernel, short(w.kernel, w.config) or "its own",
        f"{w.us:.1f}", f"{w.ratio:.3f} ({w.ratio_low:.3f}–{w.ratio_high:.3f})", lead, _confidence(w),
        f"{w.screened} of {w.valid}, {w.rounds} rounds",
    )  # fmt: skip


def _confidence(w: Winner) -> str:
    if w.confidence is None or not w.runner_up:
        return "–"
    sure = "over 99.9%" if w.confidence > 0.999 else f"{w.confidence:.1%}"
    return sure if w.separated else f"{sure}, not separated"


def _record(found: Sweep) -> dict[str, Any]:
    from ..autotune.records import to_record

    return {
        "seconds": found.seconds,
        "store": str(found.store),
        "finished": found.finished,
        "winners": [to_record(winner) for winner in found.winners],
        "outcomes": [
            {
                "workload": str(outcome.job.workload), "gpu": outcome.gpu.name, "generated": outcome.plan.generated,
                "valid": outcome.plan.valid, "trials": len(outcome.trials), "new": outcome.new,
                "failed": sum(not trial.ok for trial in outcome.trials), "finished": outcome.finished,
            }
            for outcome in found.outcomes
        ],
        "failures": [{"workload": str(failure.workload), "reason": failure.reason} for failure in found.failures],
    }  # fmt: skip
