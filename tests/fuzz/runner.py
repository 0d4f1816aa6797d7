"""Makes a run of calls in this process, and compares each with torch's."""

import collections
import functools
import inspect
import logging
import os
import traceback

import torch

import outblas
from outblas.runtime import dispatch

from . import calls, compare, known, spec

OUTCOMES = "same", "both raise", "listed", "differs", "not there yet", "left out"
TORCH_NAMES = "torch's names of arguments"


@functools.cache
def missing() -> tuple[str, ...]:
    """What is drawn, and outblas has not yet."""
    parameters = inspect.signature(outblas.matmul).parameters
    if "input" in parameters:
        return ()
    one = torch.ones(1, 1)
    try:
        outblas.matmul(input=one, other=one)
    except TypeError:
        return (TORCH_NAMES,)
    return ()


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
    rows, lacking = [], set()
    for index in range(low, high):
        made = spec.make(seed, index, device)
        name = made["call"]
        if made.get("names") == "torch" and TORCH_NAMES in missing():
            lacking.add(TORCH_NAMES)
            outcomes[name, "not there yet"] += 1
        elif light and spec.is_heavy(made):
            outcomes[name, "left out"] += 1
        else:
            outcome, found = judged(made)
            outcomes[name, outcome] += 1
            if low + 1 < high and any(_lost(row["detail"]) for row in found):
                os._exit(
                    3
                )  # the GPU is lost to this process: the driver looks for the call that did it
            rows += [row | {"index": index, "call": name} for row in found]
    return {
        "count": high - low,
        "outcomes": list(outcomes.items()),
        "rows": rows,
        "missing": sorted(lacking),
    }


def _lost(detail: str) -> bool:
    """Whether a difference tells of a fault of the GPU, and not of what cuBLASLt refuses."""
    return "CUDA error" in detail and "CUBLAS_STATUS_NOT_SUPPORTED" not in detail


def judged(made: dict) -> tuple[str, list[dict]]:
    """One of OUTCOMES, and the differences."""
    ours, _, rows = once(made)
    if any(row["known"] is None for row in rows):
        dispatch.clear_cache()  # does it differ alone?
        again = {(row["kind"], row["cause"]) for row in once(made)[2]}
        return "differs", [row | {"alone": (row["kind"], row["cause"]) in again} for row in rows]
    if rows:
        return "listed", rows
    return ("both raise" if ours.error is not None else "same"), rows


def note(found: dict, made: dict, ours, theirs, difference: compare.Difference) -> None:
    entry = known.explained(made, ours, theirs, difference)
    row = {"kind": difference.kind, "cause": difference.cause, "detail": difference.detail}
    found[row["kind"], row["cause"]] = row | {"known": entry and entry.name, "alone": True}


def once(made: dict) -> tuple[calls.Outcome, calls.Outcome, list[dict]]:
    """The outcomes of a call, outblas's of the last of its repetitions, and the
    differences of all.
    """
    try:
        theirs = calls.make(made, calls.by_torch)
        found: dict[tuple, dict] = {}
        for _ in range(made.get("repeat", 1)):
            ours = calls.make(made, calls.by_outblas)
            for difference in compare.differences(made, ours, theirs):
                note(found, made, ours, theirs, difference)
            if (
                theirs.error is not None
                and ours.error is None
                and made["call"].endswith("scaled_mm")
            ):
                # Torch takes fewer calls than its operators could: are the values right?
                composed = calls.make(made | {"composed": True}, calls.by_torch)
                for difference in compare.differences(made, ours, composed):
                    note(found, made, ours, composed, difference)
        return ours, theirs, list(found.values())
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}"
        text = f"{type(error).__name__} {error} at {where}"
        row = {
            "kind": "fault of the fuzz",
            "cause": text,
            "detail": text,
            "known": None,
            "alone": True,
        }
        return calls.Outcome(), calls.Outcome(), [row]
