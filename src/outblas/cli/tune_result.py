"""What came of a sweep, as `outblas tune` shows it and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..core.shapes import to_text
from ..report.text import confidence
from .common import console, note, table

if TYPE_CHECKING:
    from ..autotune.store.records import BestConfig
    from ..autotune.sweeps.outcome import Sweep
    from ..autotune.sweeps.tuner import Outcome

SHOWN = 10


def show(found: Sweep) -> None:
    """Prints the winners, and everything that went wrong."""
    from ..autotune.sweeps.sweep import lost_results

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
    title = f"Winners on {gpus}" if gpus else "Winners"
    table(title, columns, [_row(winner) for winner in found.winners])

    for outcome in found.outcomes:
        _show_problems(outcome)
    for failure in found.failures:
        note(f"! {failure.workload}: {failure.reason}", "yellow")
    if found.unsaved:
        note(f"! {lost_results(found.unsaved, found.store, found.rescued)}", "red")
        note(f"{found.seconds:.0f} s")
    else:
        note(f"{found.seconds:.0f} s; trials in {found.store}")


def _show_problems(outcome: Outcome) -> None:
    """Prints the trials of a workload that failed, and what was not measured or not locked."""
    from ..autotune.lookup import short

    workload = outcome.job.workload
    failed = [trial for trial in outcome.trials if not trial.ok]
    for trial in failed[:SHOWN]:
        note(f"{trial.workload} {trial.kernel}: {trial.status}: {trial.reason}")
    if len(failed) > SHOWN:
        console.print(f"and {len(failed) - SHOWN} more; outblas cache show has all", style="dim")

    for left in outcome.unmeasured[:SHOWN]:
        config = short(left.kernel, left.config) or "its own"
        note(
            f"{workload} {left.kernel}[{config}]: not measured, and tried again by the next sweep: "
            f"{left.reason}",
            "yellow",
        )
    if (more := len(outcome.unmeasured) - SHOWN) > 0:
        note(f"and {more} more that were not measured", "yellow")
    if outcome.unlocked:
        note(f"{workload}: measured without the lock on the GPU: {outcome.unlocked}", "yellow")


def _row(winner: BestConfig) -> tuple[str, ...]:
    from ..autotune.lookup import short

    workload = winner.workload
    lead = "–"
    if winner.lead is not None and winner.lead_low is not None and winner.lead_high is not None:
        lead = f"{winner.lead - 1:+.2%} ({winner.lead_low - 1:+.2%} to {winner.lead_high - 1:+.2%})"
    return (
        f"{to_text(workload.shape)} {workload.layout} {workload.conditions}".rstrip(),
        winner.kernel,
        short(winner.kernel, winner.config) or "its own",
        f"{winner.us:.1f}",
        f"{winner.ratio:.3f} ({winner.ratio_low:.3f}–{winner.ratio_high:.3f})",
        lead,
        _confidence(winner),
        f"{winner.screened} of {winner.valid}, {winner.rounds} rounds",
    )


def _confidence(winner: BestConfig) -> str:
    if winner.confidence is None or not winner.runner_up:
        return "–"
    return confidence(winner.confidence, separated=winner.separated)


def record(found: Sweep) -> dict[str, Any]:
    """A sweep as JSON has it."""
    from ..autotune.store.records import to_record

    return {
        "seconds": found.seconds,
        "store": str(found.store),
        "unsaved": found.unsaved,
        "rescued": None if found.rescued is None else str(found.rescued),
        "finished": found.finished,
        "winners": [to_record(winner) for winner in found.winners],
        "outcomes": [_outcome_record(outcome) for outcome in found.outcomes],
        "failures": [
            {"workload": str(failure.workload), "reason": failure.reason}
            for failure in found.failures
        ],
    }


def _outcome_record(outcome: Outcome) -> dict[str, Any]:
    return {
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
