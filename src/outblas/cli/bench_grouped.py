"""`outblas bench --op grouped`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..core import grouped_shapes
from .common import check_one_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..bench.campaign import Campaign
    from ..bench.record import Record
    from .bench_asked import Asked, Start


def prepared(asked: Asked, others: Mapping[str, Any]) -> Start:
    """Checks the options of a campaign of grouped products. `others`: the values of options that
    such a campaign does not have.

    Raises ValueError.
    """
    from ..bench import grouped
    from ..bench.record import GROUPED_BASE

    for option, value in others.items():
        if value:
            raise ValueError(f"{option} cannot be combined with --op grouped")
    workloads = grouped_shapes.parse(asked.shapes)
    check_one_of("--dtype", asked.dtype, grouped.PRECISIONS)
    for letters in asked.layouts:
        if letters not in grouped_shapes.ROWS_LAYOUTS:
            raise ValueError(
                f"--layout has {letters!r}, expected nt or nn with --op grouped: the rows that "
                f"groups divide are contiguous; gradients of weights are always "
                f"{grouped_shapes.TERMS_LAYOUT}"
            )
    if asked.backward and any(workload.form == "terms" for workload in workloads):
        raise ValueError("--shapes has :terms, expected none with --backward, which times both")
    grouped.check_torch()
    named = [grouped.parse(name) for name in asked.names]

    def start() -> tuple[Campaign, Iterator[Record]]:
        import torch

        from ..bench.campaign import Campaign
        from ..bench.operation import Operation

        device = torch.device("cuda", torch.cuda.current_device())
        chosen = named or grouped.runnable(device)
        base = grouped.parse(GROUPED_BASE)
        made = Campaign([base, *chosen], Operation(asked.dtype), asked.by_mode)
        tasks = grouped.tasks(workloads, asked.layouts, asked.backward)
        return made, made.run_tasks(tasks, asked.modes)

    return start
