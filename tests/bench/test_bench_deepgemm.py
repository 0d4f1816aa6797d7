"""The provider of DeepGEMM, whose package a stub stands for."""

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outblas.base.grouped_shapes import GroupedWorkload
from outblas.bench import grouped_providers, providers
from outblas.bench.operands import BlockScaled
from outblas.bench.operation import Operation
from outblas.bench.tasks import GroupedTask
from outblas.call.steps import Steps
from outblas.verify.cases import Case
from outblas.verify.kernels import Refused

SHAPE = (6, 256, 512)
OPERATION = Operation("fp8-block")


class Stub:
    """Computes in float64, by the group of each row where rows have groups, and keeps what it was
    given.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any]] = []
        self.groups: list[torch.Tensor | None] = []

    def __call__(
        self, left: Any, right: Any, out: torch.Tensor, groups: torch.Tensor | None = None
    ) -> None:
        self.calls.append((left, right))
        self.groups.append(groups)
        (a, scale_a), (weights, scales) = left, right
        if groups is None:
            groups, weights, scales = torch.zeros(a.shape[0]), weights[None], scales[None]
        for group, (weight, scale) in enumerate(zip(weights, scales, strict=True)):
            rows = groups == group
            x, y = BlockScaled(a[rows], weight.t(), scale_a[rows], scale.t()).dequantised()
            out[rows] = (x @ y).to(out.dtype)


INTERFACES = (
    ("gemm_fp8_fp8_bf16_nt", "m_grouped_gemm_fp8_fp8_bf16_nt_contiguous"),
    ("fp8_gemm_nt", "m_grouped_fp8_gemm_nt_contiguous"),
)


@pytest.fixture(params=INTERFACES, ids=["2025", "later"])
def stub(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Stub:
    stub = Stub()
    names = dict.fromkeys(request.param, stub)
    monkeypatch.setitem(sys.modules, "deep_gemm", SimpleNamespace(**names))
    return stub


def prepared(operation: Operation = OPERATION) -> Any:
    operands = operation.operands(SHAPE, "nt", "cpu")
    return providers.parse("deepgemm", operation).prepare(*operands)


def test_the_columns_of_the_scales_of_a_are_aligned(stub: Stub) -> None:
    prepared()()

    (((_, scales), _),) = stub.calls
    assert (scales.shape, scales.stride()) == ((6, 4), (1, 8))


def test_its_products_pass_the_check(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    in_memory_of_the_cpu(monkeypatch)
    provider = providers.parse("deepgemm", OPERATION)

    said = provider.fault(Case(*SHAPE, torch.bfloat16, layout="nt"))

    assert said is None
    assert provider.is_checked_exactly
    assert len(stub.calls) == 2, "on integers and on normal data"


@pytest.mark.parametrize(
    "operation", [Operation("fp8"), Operation("fp8-block", Steps(bias=True))], ids=str
)
def test_what_deepgemm_lacks_is_refused(stub: Stub, operation: Operation) -> None:
    with pytest.raises(Refused, match="deepgemm takes --dtype fp8-block without an epilogue"):
        prepared(operation)


def test_a_deepgemm_of_another_interface_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_gemm", SimpleNamespace())

    with pytest.raises(Refused, match="deep_gemm has neither gemm_fp8_fp8_bf16_nt nor fp8_gemm_nt"):
        prepared()


def test_without_the_package_there_is_an_import_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The campaign shows it as a refusal."""
    monkeypatch.setitem(sys.modules, "deep_gemm", None)

    with pytest.raises(ImportError, match="deep_gemm"):
        prepared()


# ---- groups
GROUPS = GroupedTask(GroupedWorkload(3, 384, 144, 256), "nt", has_scales=True)


def prepared_groups(task: GroupedTask = GROUPS) -> Any:
    return grouped_providers.parse("deepgemm", OPERATION).prepare(
        *task.case(OPERATION, "cpu").operands(integers=True)
    )


def test_the_products_of_groups_pass_the_check(stub: Stub) -> None:
    provider = grouped_providers.parse("deepgemm", OPERATION)

    assert provider.fault(GROUPS.case(OPERATION, "cpu")) is None
    assert len(stub.calls) == 2, "on integers and on normal data"
    assert [groups.dtype for groups in stub.groups if groups is not None] == [torch.int32] * 2


def test_groups_that_are_no_multiples_are_refused(stub: Stub) -> None:
    with pytest.raises(Refused, match="deepgemm takes groups of multiples of 128 rows, not 130"):
        prepared_groups(replace(GROUPS, workload=GroupedWorkload(3, 390, 144, 256)))


def test_groups_of_terms_are_refused(stub: Stub) -> None:
    with pytest.raises(Refused, match="deepgemm takes groups of rows, not of terms"):
        prepared_groups(replace(GROUPS, workload=GroupedWorkload(3, 384, 144, 256, form="terms")))


def in_memory_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the operands of checks on the CPU."""
    operands = Operation.operands
    monkeypatch.setattr(
        Operation,
        "operands",
        lambda self, shape, layout, device="cpu", **how: operands(
            self, shape, layout, "cpu", **how
        ),
    )
