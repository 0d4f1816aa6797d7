"""Makes a run of calls in this process, and compares each with torch's."""

import collections
import logging
import os
import traceback

import torch

from outblas.call import dispatch

from . import calls, compare, known, spec

OUTCOMES = "same", "both raise", "listed", "differs", "left out"


def prepare() -> None:
    """Of a process that does nothing else: it is one of several, and fake tensors log what they
    refuse.
    """
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)


def run(seed: int, low: int, high: int, device: str, light: bool = False) -> dict:
    """Calls `low` to `high` of a seed. Plans are those of this run alone, so that it can be made
    again.
    """
    dispatch.clear_cache()
    outcomes: collections.Counter = collections.Counter()
    rows: list[dict] = []
    for index in range(low, high):
        description = spec.make(seed, index, device)
        name = description["call"]
        if light and spec.is_heavy(description):
            outcomes[name, "left out"] += 1
        else:
            outcome, differences = judged(description)
            outcomes[name, outcome] += 1
            if low + 1 < high and any(_lost(r["detail"]) for r in differences):
                os._exit(3)  # this process lost the GPU: the driver looks for the call that did it
            rows += [r | {"index": index, "call": name} for r in differences]
    return {"count": high - low, "outcomes": list(outcomes.items()), "rows": rows}


def _lost(detail: str) -> bool:
    """Whether a difference tells of a fault of the GPU, and not of what cuBLASLt refuses."""
    return "CUDA error" in detail and "CUBLAS_STATUS_NOT_SUPPORTED" not in detail


def judged(description: dict) -> tuple[str, list[dict]]:
    """One of OUTCOMES, and the differences."""
    ours, _, rows = once(description)
    if any(r["known"] is None for r in rows):
        dispatch.clear_cache()  # does it differ alone?
        again = {(r["kind"], r["cause"]) for r in once(description)[2]}
        return "differs", [r | {"alone": (r["kind"], r["cause"]) in again} for r in rows]
    if rows:
        return "listed", rows
    return ("both raise" if ours.error is not None else "same"), rows


def row(kind: str, cause: str, detail: str, entry: str | None = None) -> dict:
    """A difference, with the name of the entry that explains it; it was seen alone, or is taken
    for that.
    """
    return {"kind": kind, "cause": cause, "detail": detail, "known": entry, "alone": True}


def once(description: dict) -> tuple[calls.Outcome, calls.Outcome, list[dict]]:
    """The outcomes of a call, outblas's of the last of its repetitions, and the differences of
    all.
    """
    rows: dict[tuple, dict] = {}

    def note(ours: calls.Outcome, theirs: calls.Outcome) -> None:
        for d in compare.differences(description, ours, theirs):
            entry = known.explained(description, d)
            name = entry.name if entry else None
            rows[d.kind, d.cause] = row(d.kind, d.cause, d.detail, name)

    try:
        theirs = calls.make(description, calls.by_torch)
        for _ in range(description.get("repeat", 1)):
            ours = calls.make(description, calls.by_outblas)
            note(ours, theirs)
            only_torch_raises = theirs.error is not None and ours.error is None
            if only_torch_raises and description["call"].endswith("scaled_mm"):
                # Torch takes fewer calls than its operators could: are the values right?
                note(ours, calls.make(description | {"composed": True}, calls.by_torch))
        return ours, theirs, list(rows.values())
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}"
        text = f"{type(error).__name__} {error} at {where}"
        return calls.Outcome(), calls.Outcome(), [row("fault of the fuzz", text, text)]
