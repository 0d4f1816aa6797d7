"""Chooses the config of a grouped product: from results tuned on this GPU, or from shipped
tables.
"""

import math
import os
from collections.abc import Iterable

from ..core.configs import from_text
from ..core.epilogue import NONE
from ..core.grouped import GroupedProblem
from ..core.grouped_shapes import Grouping
from ..runtime import fallback
from . import lookup
from .lookup import REACH
from .search.target import HOPPER_GROUPED
from .tuned_entries import COUSIN, TunedEntry

_NARROW = ("bfloat16", "float16")


def config(problem: GroupedProblem) -> str:
    """Returns the config of `hopper.grouped`, as text, that was tuned for a product of as many
    groups with the same weights, and with about as many rows; "" where there is none, and for a
    product with an epilogue, gather, scatter or scales, which sweeps do not measure.

    The sizes of groups are not known here. Of two results that differ in them alone, that of
    balanced groups is taken. With counts of rows, that for as many rows as are likely is.
    """
    if not is_measured(problem):
        return ""
    try:
        if lookup.mode(None, os.environ.get("OUTBLAS_TUNE")) == "off":
            return ""
        device = problem.device.index
        if device is None:
            return ""
        index = lookup.packed_index_of_groups(device, problem) or lookup.tuning_index(device)
        return chosen(index.grouped, problem)
    except Exception as error:  # costs only speed: the caller has a rule
        fallback.warn_once(f"no tuning result of groups is used: {error}")
        return ""


def is_measured(problem: GroupedProblem) -> bool:
    """Returns whether sweeps measure products like this one."""
    is_plain = problem.epilogue == NONE and problem.scales is None
    return is_plain and not problem.gathers and not problem.scatters


def chosen(entries: Iterable[TunedEntry], problem: GroupedProblem) -> str:
    """Returns the config of the nearest entry that the kernel can run with; "" for none.

    Results that wait for DRAM to take them are written best by other tiles where DRAM is faster, so
    those of another model say nothing about them.
    """
    near = []
    for place, entry in enumerate(entries):
        if entry.origin == COUSIN and problem.writes_more_than_it_reads:
            continue
        far = distance(entry, problem)
        if far <= REACH:
            grouping = Grouping.parse(entry.workload.grouping)
            is_skewed = grouping.distribution != "balanced"
            order = (entry.origin == COUSIN, round(far, 9), is_skewed, entry.workload, place)
            near.append((order, entry.config))
    return next((text for _, text in sorted(near) if _runs(problem, text)), "")


def distance(entry: TunedEntry, problem: GroupedProblem) -> float:
    """Returns how far apart the numbers of rows are, in binary orders of magnitude; infinity for
    results that say nothing about this product.
    """
    known = entry.workload.grouped
    if entry.kernel != HOPPER_GROUPED.name or known is None:
        return math.inf
    is_rows = problem.form == "ragged_m"
    rows = problem.expected_rows if is_rows else problem.K
    depth = problem.K if is_rows else problem.M
    widens = entry.workload.out_dtype == "float32"
    same = (
        (known.form == "rows") == is_rows
        and (known.experts, known.N, known.K) == (problem.groups, problem.N, depth)
        and (problem.out_dtype.itemsize == 4) == widens
        and entry.workload.operand_dtype in _NARROW
        and problem.dtype.itemsize == 2
    )
    return abs(math.log2(known.rows / rows)) if same and rows else math.inf


def _runs(problem: GroupedProblem, text: str) -> bool:
    module = HOPPER_GROUPED.load()
    try:
        return module.unsupported(problem, from_text(module.Config, text)) is None
    except ValueError:  # a field that the kernel no longer has
        return False
