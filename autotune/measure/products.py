"""What a workload computes, in the measuring worker: its operands, torch's call, and a kernel's
call, which is checked before it is timed.
"""

import math
from collections.abc import Callable
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


def _planned(module: ModuleType, config: object, call: Any) -> Callable[..., None]:
    """Returns the launch of a config for a problem. Raises UnusableConfig."""
    if reason := module.unsupported(call, config):
        raise UnusableConfig("refused", reason)
    launch: Callable[..., None] = module.plan(call, config)
    return launch


class PlainProduct:
    """One product, with its epilogue if it has one: the operands, torch's calls, and the
    kernel's.
    """

    def __init__(self, workload: Workload, device: str) -> None:
        dtype, out_dtype = (
            getattr(torch, name) for name in (workload.operand_dtype, workload.out_dtype)
        )
        self.workload, self.is_tf32 = workload, workload.dtype == "tf32"
        self.a, self.b, self.product = normal(
            workload.shape, workload.layout, dtype, out_dtype, device
        )
        case = Case(*workload.shape, dtype, out_dtype, layout=workload.layout, tf32=self.is_tf32)
        self.exact = Exact(case, device)
        self.operation = Operation(workload.dtype, workload.steps)
        columns = workload.N // glu_split(workload.steps.activation)
        self.out = self.product.new_empty(workload.M, columns) if workload.steps else self.product
        self.extras = self.operation.extras(self.a, self.b, self.out)

    def by_torch(self, b: Tensor) -> Tensor:
        a, out = self.a, self.out
        if self.workload.steps:
            return self.operation.by_torch(a, b, out, self.extras)
        if out.dtype == a.dtype:
            return torch.mm(a, b, out=out)
        if a.device.type == "cpu":
            return out.copy_(a.float() @ b.float())
        return torch.mm(a, b, out.dtype, out=out)

    def prepare(self, module: ModuleType, config: object) -> turn.WeightCall:
        """Plans a config, and checks it, without its epilogue first. Raises UnusableConfig."""
        a, out, workload = self.a, self.out, self.workload
        bare = problem.problem(a, self.b, self.product, tf32=self.is_tf32)
        launch = _planned(module, config, bare)
        result = self.exact(launch)
        if not result.ok:
            raise UnusableConfig("wrong", result.message)
        if not workload.steps:
            return lambda b: launch(a, b, None, out, 1.0, 0.0)
        bias, residual = self.extras.bias, self.extras.residual
        extra = EpilogueArgs(workload.steps.activation, bias, residual)
        call = problem.problem(a, self.b, out, tf32=self.is_tf32, extra=extra)
        fused = _planned(module, config, call)

        def checked(a: Tensor, b: Tensor, out: Tensor, extras: Extras) -> turn.Call:
            def call() -> Tensor:
                fused(a, b, None, out, 1.0, 0.0, extras.bias, extras.residual, None)
                return out

            return call

        fault = self.operation.fault(checked, workload.shape, a.device.type, workload.layout)
        if fault is not None:
            raise UnusableConfig("wrong", f"{workload.epilogue}: {fault}")
        return lambda b: fused(a, b, None, out, 1.0, 0.0, bias, residual, None)


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
        launch = _planned(module, config, call)

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
