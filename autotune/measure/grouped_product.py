"""A workload of groups in the measuring worker: its operands, torch's call, and a kernel's call,
which is checked before it is timed.
"""

import math
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch

from ...bench.grouped import GroupedCase, GroupedTask, operands, result_shape
from ...bench.turn import Call, WeightCall
from ...core.grouped import Form, describe
from ..store.records import Workload
from .unusable import UnusableConfig

Tensor = torch.Tensor


class GroupedProduct:
    """The products of all groups on one device.

    Without torch's own function, of torch 2.10, nothing can be timed: AttributeError says so.
    """

    def __init__(self, workload: Workload, device: str) -> None:
        groups = workload.grouped
        assert groups is not None, "the timer makes one for workloads of groups only"
        self.task = GroupedTask(groups, workload.layout)
        dtype, self.out_dtype = (
            getattr(torch, name) for name in (workload.operand_dtype, workload.out_dtype)
        )
        generator = torch.Generator(device).manual_seed(0)
        fill = partial(torch.Tensor.normal_, generator=generator)
        self.a, self.b, self.offs = operands(self.task, dtype, fill, fill, device)
        self.case = GroupedCase(self.task, dtype, device, self.out_dtype)

    @property
    def _options(self) -> dict[str, Any]:
        return {} if self.out_dtype == self.a.dtype else {"out_dtype": self.out_dtype}

    def by_torch(self, b: Tensor) -> Tensor:
        """Makes torch's call with these weights."""
        grouped: Callable[..., Tensor] = torch.nn.functional.grouped_mm
        return grouped(self.a, b, offs=self.offs, **self._options)

    def prepare(self, module: ModuleType, config: object) -> WeightCall:
        """Plans a config, and checks it. Raises UnusableConfig."""
        out = self._result()
        form: Form = "ragged_m" if self.task.workload.form == "rows" else "ragged_k"
        problem = describe(form, self.a, self.b, out, self.task.workload.experts)
        if reason := module.unsupported(problem, config):
            raise UnusableConfig("refused", reason)
        launch: Callable[..., None] = module.plan(problem, config)

        def checked(a: Tensor, b: Tensor, offs: Tensor) -> Call:
            found = self._result().fill_(math.nan)

            def call() -> Tensor:
                launch(a, b, found, offs)
                return found

            return call

        if fault := self.case.fault(checked):
            raise UnusableConfig("wrong", fault)
        return lambda b: launch(self.a, b, out, self.offs)

    def _result(self) -> Tensor:
        return torch.empty(result_shape(self.task), dtype=self.out_dtype, device=self.a.device)
