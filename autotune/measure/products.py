"""What a workload computes, in the measuring worker: its operands, torch's call, and a kernel's
call, which is checked before it is timed.
"""

import math
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch

from outblas.autotune.store.records import Status, Workload
from outblas.bench import turn
from outblas.bench.operands import normal
from outblas.bench.operation import Extras, Operation
from outblas.bench.tasks import GroupedCase, GroupedTask, result_shape
from outblas.call import problem
from outblas.call.epilogue import EpilogueArgs, glu_split
from outblas.call.grouped import Form, describe
from outblas.call.problem import Launch
from outblas.verify.cases import Case
from outblas.verify.oracle import Exact

Tensor = torch.Tensor


class UnusableConfig(Exception):
    """A config cannot be timed, and why."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status: Status = status


def product_of(workload: Workload, device: str) -> "PlainProduct | GroupedProduct":
    """Makes the operands of a workload on a device."""
    return (GroupedProduct if workload.grouping else PlainProduct)(workload, device)


class PlainProduct:
    """One product: the operands, cuBLAS's call, and the kernel's."""

    def __init__(self, workload: Workload, device: str) -> None:
        dtype, out_dtype = (
            getattr(torch, name) for name in (workload.operand_dtype, workload.out_dtype)
        )
        self.is_tf32 = workload.dtype == "tf32"
        self.tensors = normal(workload.shape, workload.layout, dtype, out_dtype, device)
        case = Case(*workload.shape, dtype, out_dtype, layout=workload.layout, tf32=self.is_tf32)
        self.exact = Exact(case, device)
        self.fused = FusedProduct(workload, self.tensors) if workload.epilogue else None
        self.b = self.tensors[1]

    def by_torch(self, b: Tensor) -> Tensor:
        if self.fused is not None:
            return self.fused.by_torch(b)
        a, _, out = self.tensors
        if out.dtype == a.dtype:
            return torch.mm(a, b, out=out)
        if a.device.type == "cpu":
            return out.copy_(a.float() @ b.float())
        return torch.mm(a, b, out.dtype, out=out)

    def prepare(self, module: ModuleType, config: object) -> turn.WeightCall:
        """Plans a config, and checks it. Raises UnusableConfig."""
        call = problem.problem(*self.tensors, tf32=self.is_tf32)
        if reason := module.unsupported(call, config):
            raise UnusableConfig("refused", reason)
        launch: Callable[..., None] = module.plan(call, config)
        result = self.exact(launch)
        if not result.ok:
            raise UnusableConfig("wrong", result.message)
        if self.fused is not None:
            return self.fused.prepare(module, config)
        a, _, out = self.tensors
        return lambda b: launch(a, b, None, out, 1.0, 0.0)


class FusedProduct:
    """A workload's product with its epilogue: the operands, torch's calls, and the kernel's."""

    def __init__(self, workload: Workload, tensors: tuple[Tensor, Tensor, Tensor]) -> None:
        a, b, x = tensors
        self.workload, self.a, self.b = workload, a, b
        self.operation = Operation(workload.dtype, workload.steps)
        split = glu_split(workload.steps.activation)
        self.out = x.new_empty(x.shape[0], x.shape[1] // split)
        self.extras = self.operation.extras(a, b, self.out)

    def by_torch(self, b: Tensor) -> Tensor:
        return self.operation.by_torch(self.a, b, self.out, self.extras)

    def prepare(self, module: ModuleType, config: object) -> turn.WeightCall:
        """Plans a config with the epilogue, and checks it. Raises UnusableConfig."""
        extra = EpilogueArgs(self.workload.steps.activation, self.extras.bias, self.extras.residual)
        tf32 = self.workload.dtype == "tf32"
        call = problem.problem(self.a, self.b, self.out, tf32=tf32, extra=extra)
        if reason := module.unsupported(call, config):
            raise UnusableConfig("refused", reason)
        launch: Launch = module.plan(call, config)
        fault = self.operation.fault(
            partial(self._checked_call, launch),
            self.workload.shape,
            self.a.device.type,
            self.workload.layout,
        )
        if fault is not None:
            raise UnusableConfig("wrong", f"{self.workload.epilogue}: {fault}")
        bias, residual = self.extras.bias, self.extras.residual
        a, out = self.a, self.out
        return lambda b: launch(a, b, None, out, 1.0, 0.0, bias, residual, None)

    def _checked_call(
        self, launch: Launch, a: Tensor, b: Tensor, out: Tensor, extras: Extras
    ) -> turn.Call:
        def call() -> Tensor:
            launch(a, b, None, out, 1.0, 0.0, extras.bias, extras.residual, None)
            return out

        return call


class GroupedProduct:
    """The products of all groups on one device: the operands, torch's call, and the kernel's."""

    def __init__(self, workload: Workload, device: str) -> None:
        groups = workload.grouped
        assert groups is not None, "the timer makes one for workloads of groups only"
        self.task = GroupedTask(groups, workload.layout)
        dtype, self.out_dtype = (
            getattr(torch, name) for name in (workload.operand_dtype, workload.out_dtype)
        )
        self.case = GroupedCase(self.task, dtype, device, self.out_dtype)
        self.a, self.b, self.offs = self.case.operands(integers=False)

    @property
    def _options(self) -> dict[str, Any]:
        return {} if self.out_dtype == self.a.dtype else {"out_dtype": self.out_dtype}

    def by_torch(self, b: Tensor) -> Tensor:
        """Makes torch's call with these weights."""
        grouped: Callable[..., Tensor] = torch.nn.functional.grouped_mm
        return grouped(self.a, b, offs=self.offs, **self._options)

    def prepare(self, module: ModuleType, config: object) -> turn.WeightCall:
        """Plans a config, and checks it. Raises UnusableConfig."""
        out = self._result()
        form: Form = "ragged_m" if self.task.workload.form == "rows" else "ragged_k"
        call = describe(form, self.a, self.b, out, self.task.workload.experts)
        if reason := module.unsupported(call, config):
            raise UnusableConfig("refused", reason)
        launch: Callable[..., None] = module.plan(call, config)

        def checked(a: Tensor, b: Tensor, offs: Tensor) -> turn.Call:
            out = self._result().fill_(math.nan)

            def call() -> Tensor:
                launch(a, b, out, offs)
                return out

            return call

        if fault := self.case.fault(checked):
            raise UnusableConfig("wrong", fault)
        return lambda b: launch(self.a, b, out, self.offs)

    def _result(self) -> Tensor:
        return torch.empty(result_shape(self.task), dtype=self.out_dtype, device=self.a.device)
