"""What came of a sweep, as `outblas tune` shows it and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from outblas.base.shapes import to_text
from outblas.cli.common import NONE, note, table
from outblas.report.tables import confidence

if TYPE_CHECKING:
    from outblas.autotune.store.records import BestConfig
    from outblas.autotune.sweeps.outcome import Outcome, Sweep

SHOWN = 10


def show(sweep: Sweep) -> None:
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

    workload = winner.workload
    lead = NONE
    if winner.lead is not None and winner.lead_low is not None and winner.lead_high is not None:
        lead = f"{winner.lead - 1:+.2%} ({winner.lead_low - 1:+.2%} to {winner.lead_high - 1:+.2%})"
    return (
        f"{to_text(workload.shape)} {workload.layout} {workload.conditions}".rstrip(),
        winner.kernel,
        short(winner.kernel, winner.config).replace(",", ", ") or "default",
        f"{winner.us:.1f}",
        *([f"{winner.ratio:.3f} ({winner.ratio_low:.3f}–{winner.ratio_high:.3f})"] if base else []),
        lead,
        _confidence(winner),
        f"{winner.screened} of {winner.valid} configs, {winner.rounds} rounds",
    )


def _confidence(winner: BestConfig) -> str:
    if winner.confidence is None or not winner.runner_up:
        return NONE
    return confidence(winner.confidence, separated=winner.separated)


def record(sweep: Sweep) -> dict[str, Any]:
    """A sweep as JSON has it."""
    return {
        "seconds": sweep.seconds,
        "store": str(sweep.store),
        "finished": sweep.finished,
        "winners": [asdict(winner) for winner in sweep.winners],
        "outcomes": [_outcome_record(outcome) for outcome in sweep.outcomes],
        "failures": [
            {"workload": str(failure.workload), "reason": failure.reason}
            for failure in sweep.failures
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
        "unmeasured": [asdict(left) for left in outcome.unmeasured],
    }
