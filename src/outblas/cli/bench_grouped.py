"""`outblas bench --op grouped`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..core import grouped_shapes
from .common import check_one_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ..bench.campaign import Campaign, Task
    from ..bench.record import Record
    from .bench_asked import Asked, Start


def prepared(asked: Asked, others: Mapping[str, Any]) -> Start:
    """Checks the options of a campaign of grouped products. `others`: the values of options that
    such a campaign does not have.

    Raises ValueError.
    """
    from ..bench import grouped, scaled_groups
    from ..bench.operation import Operation
    from ..bench.record import GROUPED_BASE

    for option, value in others.items():
        if value:
            raise ValueError(f"{option} cannot be combined with --op grouped")
    workloads = grouped_shapes.parse(asked.shapes)
    check_one_of("--dtype", asked.dtype, (*grouped.PRECISIONS, scaled_groups.PRECISION))
    operation = Operation(asked.dtype)
    operation.check((), asked.layouts, backward=asked.backward)
    for letters in asked.layouts:
        if letters not in grouped_shapes.ROWS_LAYOUTS:
            raise ValueError(
                f"--layout has {letters!r}, expected nt or nn with --op grouped: the rows that "
                f"groups divide are contiguous; gradients of weights are always "
                f"{grouped_shapes.TERMS_LAYOUT}"
            )
    if asked.backward and any(workload.form == "terms" for workload in workloads):
        raise ValueError("--shapes has :terms, expected none with --backward, which times both")
    if operation.scaling:
        parse = scaled_groups.parse
    else:
        grouped.check_torch()
        parse = grouped.parse
    named = [parse(name) for name in asked.names]

    def start() -> tuple[Campaign, Iterator[Record]]:
        import torch

        from ..bench.campaign import Campaign

        device = torch.device("cuda", torch.cuda.current_device())
        chosen = named or [parse(name) for name in grouped.runnable(device)]
        made = Campaign([parse(GROUPED_BASE), *chosen], operation, asked.by_mode)
        tasks: Sequence[Task]
        if operation.scaling:
            tasks = scaled_groups.tasks(workloads)
        else:
            tasks = grouped.tasks(workloads, asked.layouts, asked.backward)
        return made, made.run_tasks(tasks, asked.modes)

    return start
