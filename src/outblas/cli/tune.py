"""`outblas tune`."""

from __future__ import annotations

import re
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.live import Live

from ..core.shapes import LAYOUTS, to_text
from ..report.text import confidence
from . import interrupts
from .common import (
    NO_GPU,
    JsonOption,
    LayoutOption,
    PrecisionOption,
    SaveOption,
    ShapesOption,
    check_given,
    check_one_of,
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
    from ..autotune.measure.progress import Progress
    from ..autotune.search.target import Subject
    from ..autotune.store.records import BestConfig, Gpu, Workload
    from ..autotune.sweeps.outcome import Sweep

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LINES_EVERY = 10.0  # seconds between plain lines, where there is no terminal
SHOWN = 10


def tune(
    kernels: Annotated[
        str | None,
        typer.Option(
            help=(
                "Kernels by name, comma-separated: they compete. Default: what matmul chooses from."
            )
        ),
    ] = None,
    shapes: ShapesOption = "4096",
    dtype: PrecisionOption = "bfloat16",
    out_dtype: Annotated[
        str | None, typer.Option(help="float32 for 16-bit operands with an fp32 product.")
    ] = None,
    layout: LayoutOption = "nt",
    budget: Annotated[
        str | None,
        typer.Option(help="For all of it, 5s a shape at least: 20m, 8h. Default: until done."),
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option(
            min=1, help="Configs of each kernel at a shape, the ranker's best. All by default."
        ),
    ] = None,
    top_k: Annotated[int, typer.Option(min=1, help="Configs in the finals.")] = 8,
    gpus: Annotated[
        str | None,
        typer.Option(help="all, indices such as 0,1, or cpu: the interpreter. Default: 0."),
    ] = None,
    engine: Annotated[
        str, typer.Option(help="local, or ray: one task a shape on a cluster.")
    ] = "local",
    address: Annotated[str | None, typer.Option(help="Of the Ray cluster.")] = None,
    ranker: Annotated[
        str, typer.Option(help="model, or heuristics: NVIDIA's nvMatmulHeuristics.")
    ] = "model",
    store: Annotated[
        Path | None, typer.Option(help="Another file of trials than the user's.")
    ] = None,
    resume: Annotated[
        bool, typer.Option(help="Keep what the store has; --no-resume measures anew.")
    ] = True,
    retry_failed: Annotated[
        bool,
        typer.Option(
            "--retry-failed",
            help="Measure anew what has failed, other than by being wrong or refused.",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be tried, and what not and why.")
    ] = False,
    explain: Annotated[
        str | None, typer.Option(help="MxNxK: what matmul chooses there, and how it comes to that.")
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="With --dry-run or --explain: T4, A100, H100, GH200, H200 in place of the GPU."
        ),
    ] = None,
    json: JsonOption = False,
    save: SaveOption = None,
) -> None:
    """Finds the fastest configs of kernels on this GPU. Kill it at any moment: it goes on where it
    was.

    Exit code 1 if a shape could not be tuned or a result not be stored, 3 without a GPU, 130 after
    Ctrl-C.
    """
    from ..autotune.store.store import StoreError

    with usage_errors(
        ImportError,
        ConnectionError,
        StoreError,
        options={"kernel": "--kernels", "machine": "--gpu"},
    ):
        check_writable(save)
        for option, text in (
            ("--kernels", kernels),
            ("--out-dtype", out_dtype),
            ("--budget", budget),
            ("--gpus", gpus),
            ("--explain", explain),
            ("--gpu", gpu),
            ("--address", address),
        ):
            check_given(option, text)
        seconds = parse_budget(budget or "")
        _check_engine(engine, address, gpus)
        _check_preview(dry_run, explain, gpu)
        _check_gpus(gpus, preview=dry_run or explain is not None)
        _check_ranker(ranker)
        _check_store(store)
        workloads = _workloads(explain, shapes, dtype, out_dtype, layout)
        _check_kernels(kernels)
        if explain is not None:
            value = _explain(workloads, _gpu(gpu, gpus), store, quiet=json)
        elif dry_run:
            target = _gpu(gpu, gpus)
            subjects = _subjects(kernels, target, workloads[0].dtype)
            value = _dry_run(subjects, workloads, target, trials, ranker, quiet=json)
        else:
            value = _interruptible_sweep(
                kernels,
                workloads,
                quiet=json,
                budget=seconds,
                trials=trials,
                top_k=top_k,
                gpus=gpus or "0",
                engine=engine,
                address=address,
                ranker=ranker,
                store=store,
                resume=resume,
                retry_failed=retry_failed,
            )
    give(value, lambda: None, json=json, save=save)
    raise typer.Exit(1 if value.get("failures") or value.get("unsaved") else 0)


def _check_engine(engine: str, address: str | None, gpus: str | None) -> None:
    """Raises ValueError, as all below, before anything is started."""
    from ..autotune.sweeps.sweep import ENGINES

    check_one_of("--engine", engine, ENGINES)
    if engine == "ray" and gpus is not None:
        raise ValueError(
            f"--gpus is {gpus!r}, expected none with --engine ray, which takes all GPUs of the "
            "cluster"
        )
    if engine != "ray" and address is not None:
        raise ValueError(f"--address is {address!r}, expected none without --engine ray")


def _check_preview(dry_run: bool, explain: str | None, gpu: str | None) -> None:
    if dry_run and explain is not None:
        raise ValueError("--dry-run and --explain are both given, expected one of them")
    if gpu is not None and not dry_run and explain is None:
        raise ValueError(
            f"--gpu is {gpu!r}, expected none without --dry-run or --explain: --gpus says what to "
            "tune on"
        )


def _check_gpus(gpus: str | None, *, preview: bool) -> None:
    """Where nothing is measured, a machine without a GPU may name the first one, or all."""
    import torch

    from ..autotune.sweeps.sweep import visible_gpus

    if gpus is None or gpus in ("cpu", "all"):
        return
    if not all(part.strip().isdecimal() for part in gpus.split(",")):
        raise ValueError(f"--gpus is {gpus!r}, expected all, cpu, or indices such as 0,1")
    there = torch.cuda.is_available()
    if there or (preview and gpus != "0"):
        visible_gpus(gpus)


def _check_ranker(ranker: str) -> None:
    from ..autotune.sweeps.sweep import RANKERS

    check_one_of("--ranker", ranker, RANKERS)


def _check_store(store: Path | None) -> None:
    if store is not None and store.is_dir():
        raise ValueError(f"--store is {str(store)!r}, expected a file, and it is a folder")


def _check_kernels(kernels: str | None) -> None:
    from ..autotune.search.target import of

    for name in split(kernels or ""):
        of(name)


def _workloads(
    explain: str | None, shapes: str, dtype: str, out_dtype: str | None, layout: str
) -> list[Workload]:
    from ..autotune.store.records import Workload

    layouts = split(layout)
    for letters in layouts or [layout]:
        if letters not in LAYOUTS:
            raise ValueError(f"--layout is {letters!r}, expected of {', '.join(LAYOUTS)}")
    parse_shapes(shapes, least=1)
    chosen = (
        parse_shapes(explain, "--explain", least=1)
        if explain is not None
        else parse_shapes(shapes, least=1)
    )
    return [
        Workload(*shape, dtype, out_dtype or "", letters) for letters in layouts for shape in chosen
    ]


def parse_budget(text: str) -> float | None:
    """`90s`, `20m`, `1.5h`, or seconds; None for an empty text. Raises ValueError."""
    if not text:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if not found or not float(found[1]):
        raise ValueError(f"--budget is {text!r}, expected a time such as 90s, 20m or 8h")
    return float(found[1]) * _UNITS[found[2] or "s"]


def _gpu(name: str | None, gpus: str | None) -> Gpu:
    """The GPU by name, or the present one, or where there is none an H100."""
    import torch

    from ..autotune.search import gpu

    if name:
        return gpu.imagined(name)
    return gpu.current() if torch.cuda.is_available() or gpus == "cpu" else gpu.imagined("h100")


def _subjects(kernels: str | None, gpu: Gpu, dtype: str) -> tuple[Subject, ...]:
    from ..autotune.search.target import of
    from ..runtime.default_kernel import rivals

    names = split(kernels or "") or (["portable"] if gpu.arch == 0 else rivals(gpu.arch, dtype))
    return tuple(of(name) for name in names)


def _dry_run(
    subjects: tuple[Subject, ...],
    workloads: list[Workload],
    gpu: Gpu,
    trials: int | None,
    ranker: str,
    *,
    quiet: bool,
) -> dict[str, Any]:
    """What a sweep would try, in which order, and what each rule keeps it from trying."""
    from ..autotune.lookup import short
    from ..autotune.search import cost_model, prune
    from ..autotune.search.gpu import machine
    from ..autotune.sweeps import sweep as sweeping

    found, on = [], machine(gpu)
    for workload in workloads:
        plan = prune.plan(subjects, workload, gpu, trials=trials, ranker=sweeping.ranker_of(ranker))
        ranked = [
            {
                "kernel": c.subject.name,
                "config": c.text,
                "predicted_us": c.predicted_us,
                "limits": cost_model.predict(c.footprint, workload, on).limits if on else "",
            }
            for c in plan.ranked
        ]
        pruned = [
            {"count": rule.count, "rule": rule.rule, "example": rule.example}
            for rule in plan.pruned
        ]
        counts = {"generated": plan.generated, "valid": plan.valid}
        found.append({"workload": str(workload), **counts, "pruned": pruned, "ranked": ranked})
        if quiet:
            continue
        said = (
            f"{plan.generated} configs generated, {plan.valid} valid, {len(plan.ranked)} to be "
            "measured"
        )
        note(f"{workload} on {gpu.name}: {said}.", None)
        table(
            "Not tried",
            ("configs", "reason, for one of them"),
            [(r.count, r.example) for r in plan.pruned],
        )
        rows = [
            (
                i,
                r["kernel"],
                short(str(r["kernel"]), str(r["config"])),
                f"{r['predicted_us']:.1f}",
                r["limits"],
            )
            for i, r in enumerate(ranked[:SHOWN], 1)
        ]
        table(
            f"The first {len(rows)} by {ranker}",
            ("", "kernel", "config", "µs expected", "limits"),
            rows,
        )
    return {"gpu": gpu.name, "plans": found}


def _explain(
    workloads: list[Workload], gpu: Gpu, store: Path | None, *, quiet: bool
) -> dict[str, Any]:
    """What `matmul` chooses for packed operands, and every place where it looks."""
    import os

    from ..autotune import lookup
    from ..autotune.search import prune
    from ..runtime import default_kernel

    mode = lookup.mode(None, os.environ.get("OUTBLAS_TUNE"))
    known = lookup.Knowledge(gpu, store)
    found = []
    for workload in workloads:
        picked, passed = None, []
        for option in known.choices(workload) if mode != "off" else ():
            if reason := lookup.refusal(option.kernel, option.config, workload, gpu):
                passed.append(f"{option.kernel} cannot: {reason}")
            elif reason := known.objection(option.kernel, workload, prune.problem(workload)):
                passed.append(f"{option.kernel} had better not: {reason}")
            else:
                picked = option
                break
        if picked is None:
            rule = default_kernel.by_rule(prune.problem(workload), gpu.arch, gpu.sms)
            why = "OUTBLAS_TUNE=off: by rule" if mode == "off" else "nothing is known: by rule"
            picked = lookup.Choice(rule, "", why)
        steps = known.steps(workload) if mode != "off" else []
        remarks = lookup.remarks(picked.kernel, workload)
        found.append(
            {
                "workload": str(workload),
                "kernel": picked.kernel,
                "config": picked.config,
                "why": picked.why,
                "steps": [{"place": place, "found": text} for place, text in steps],
                "passed_over": passed,
                "remarks": remarks,
            }
        )
        if not quiet:
            table(f"{workload} on {gpu.name}", ("place", "what is known there"), steps)
            for line in passed:
                note(f"passed over: {line}", None)
            config = (
                lookup.short(picked.kernel, picked.config) if picked.config else "its own config"
            )
            note(f"matmul takes {picked.kernel}, {config or 'its own config'}: {picked.why}.", None)
            for line in remarks:
                note(f"{line}.", None)
    return {"gpu": gpu.name, "mode": mode, "choices": found}


def _interruptible_sweep(
    kernels: str | None, workloads: list[Workload], **options: Any
) -> dict[str, Any]:
    """A sweep that Ctrl-C and SIGTERM end in order: it says then how to go on."""
    from ..core import cache

    with interrupts.handled() as received:
        try:
            return _sweep(kernels, workloads, **options)
        except (KeyboardInterrupt, SystemExit) as error:
            if (
                isinstance(error, SystemExit) and error.code != signal.SIGTERM
            ):  # as Ray has it, which takes the signal
                raise
            received.signal = received.signal or (
                signal.SIGTERM if isinstance(error, SystemExit) else signal.SIGINT
            )
            kept = options["store"] or cache.directory() / "tuning.sqlite"
            for line in getattr(error, "__notes__", ()):
                typer.echo(f"! {line}", err=True)
            typer.echo(
                f"Interrupted: what was measured is in {kept}. The same command goes on from "
                "there:",
                err=True,
            )
            typer.echo(f"  {interrupts.same_command(without='--no-resume')}", err=True)
            raise typer.Exit(received.exit_code) from None


def _sweep(
    kernels: str | None, workloads: list[Workload], *, quiet: bool, gpus: str, **options: Any
) -> dict[str, Any]:
    """Runs the sweep under a live view, and shows what came of it."""
    import torch

    from ..autotune.sweeps.sweep import sweep

    if gpus != "cpu" and options["engine"] == "local" and not torch.cuda.is_available():
        typer.echo(
            "No NVIDIA GPU that torch can use: --dry-run shows what would be tried, --gpus cpu "
            "tunes portable in the "
            "interpreter.",
            err=True,
        )
        raise typer.Exit(NO_GPU)
    names = split(kernels or "") or _default_kernels(gpus, options["engine"], workloads[0].dtype)
    with _View(quiet=quiet) as view:
        found = sweep(
            names,
            list(dict.fromkeys(w.shape for w in workloads)),
            dtype=workloads[0].dtype,
            out_dtype=workloads[0].out_dtype,
            layout=list(dict.fromkeys(w.layout for w in workloads)),
            gpus=gpus,
            progress=view,
            **options,
        )
    if not quiet:
        _show(found)
    return _record(found)


def _default_kernels(gpus: str, engine: str, dtype: str) -> list[str]:
    import torch

    from ..runtime.default_kernel import rivals

    if gpus == "cpu" and engine == "local":
        return ["portable"]
    if not torch.cuda.is_available():
        raise ValueError(
            "--kernels is empty, expected names: this machine has no GPU to choose them by"
        )
    major, minor = torch.cuda.get_device_capability()
    return list(rivals(10 * major + minor, dtype))


class _View:
    """The live view of a sweep; plain lines now and then where there is no terminal."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._snapshots: dict[Workload, Progress] = {}
        self._live = Live(
            console=console, refresh_per_second=4, get_renderable=self._render, transient=True
        )
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
        if (
            self._plain
            and progress.stage != "waiting"
            and now - self._last.get(key, 0.0) > _LINES_EVERY
        ):
            self._last[key] = now
            typer.echo(line(progress), err=True)

    def _render(self) -> Any:
        from .tune_view import render

        return render(list(self._snapshots.values())) if self._snapshots else Group()


def _show(found: Sweep) -> None:
    from ..autotune.lookup import short
    from ..autotune.sweeps.sweep import lost_results

    rows = [_row(winner) for winner in found.winners]
    columns = (
        "shape",
        "kernel",
        "config",
        "µs",
        "× cuBLAS",
        "ahead of the next",
        "confidence",
        "measured",
    )
    gpus = ", ".join(dict.fromkeys(winner.gpu.name for winner in found.winners))
    table(f"Winners on {gpus}" if gpus else "Winners", columns, rows)
    for outcome in found.outcomes:
        failed = [trial for trial in outcome.trials if not trial.ok]
        for trial in failed[:SHOWN]:
            note(f"{trial.workload} {trial.kernel}: {trial.status}: {trial.reason}")
        if len(failed) > SHOWN:
            console.print(
                f"and {len(failed) - SHOWN} more; outblas cache show has all", style="dim"
            )
        for left in outcome.unmeasured[:SHOWN]:
            where = (
                f"{outcome.job.workload} "
                f"{left.kernel}[{short(left.kernel, left.config) or 'its own'}]"
            )
            note(
                f"{where}: not measured, and tried again by the next sweep: {left.reason}", "yellow"
            )
        if (more := len(outcome.unmeasured) - SHOWN) > 0:
            note(f"and {more} more that were not measured", "yellow")
        if outcome.unlocked:
            note(
                f"{outcome.job.workload}: measured without the lock on the GPU: {outcome.unlocked}",
                "yellow",
            )
    for failure in found.failures:
        note(f"! {failure.workload}: {failure.reason}", "yellow")
    if found.unsaved:
        note(f"! {lost_results(found.unsaved, found.store, found.rescued)}", "red")
        note(f"{found.seconds:.0f} s")
    else:
        note(f"{found.seconds:.0f} s; trials in {found.store}")


def _row(w: BestConfig) -> tuple[str, ...]:
    from ..autotune.lookup import short

    lead = "–"
    if w.lead is not None and w.lead_low is not None and w.lead_high is not None:
        lead = f"{w.lead - 1:+.2%} ({w.lead_low - 1:+.2%} to {w.lead_high - 1:+.2%})"
    return (
        f"{to_text(w.workload.shape)} {w.workload.layout}",
        w.kernel,
        short(w.kernel, w.config) or "its own",
        f"{w.us:.1f}",
        f"{w.ratio:.3f} ({w.ratio_low:.3f}–{w.ratio_high:.3f})",
        lead,
        _confidence(w),
        f"{w.screened} of {w.valid}, {w.rounds} rounds",
    )


def _confidence(w: BestConfig) -> str:
    if w.confidence is None or not w.runner_up:
        return "–"
    return confidence(w.confidence, separated=w.separated)


def _record(found: Sweep) -> dict[str, Any]:
    from ..autotune.store.records import to_record

    return {
        "seconds": found.seconds,
        "store": str(found.store),
        "unsaved": found.unsaved,
        "rescued": None if found.rescued is None else str(found.rescued),
        "finished": found.finished,
        "winners": [to_record(winner) for winner in found.winners],
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
                "unmeasured": [
                    {"kernel": left.kernel, "config": left.config, "reason": left.reason}
                    for left in outcome.unmeasured
                ],
            }
            for outcome in found.outcomes
        ],
        "failures": [
            {"workload": str(failure.workload), "reason": failure.reason}
            for failure in found.failures
        ],
    }
