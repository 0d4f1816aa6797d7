"""The provider of DeepGEMM, whose package a stub stands for."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outblas.bench import providers
from outblas.bench.block_scaled import BlockScaled
from outblas.bench.operation import Operation
from outblas.core.steps import Steps
from outblas.verify.cases import Case
from outblas.verify.kernels import Refused

SHAPE = (6, 256, 512)
OPERATION = Operation("fp8-block")


class Stub:
    """Computes in float64, and keeps what it was given."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any]] = []

    def __call__(self, left: Any, right: Any, out: torch.Tensor) -> None:
        self.calls.append((left, right))
        (a, scale_a), (weight, scale_of_weight) = left, right
        scaled = BlockScaled(a, weight.t(), scale_a, scale_of_weight.t())
        x, y = scaled.dequantised()
        out.copy_(x @ y)


@pytest.fixture(params=["gemm_fp8_fp8_bf16_nt", "fp8_gemm_nt"])
def stub(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Stub:
    made = Stub()
    monkeypatch.setitem(sys.modules, "deep_gemm", SimpleNamespace(**{request.param: made}))
    return made


def prepared(operation: Operation = OPERATION) -> Any:
    operands = operation.operands(SHAPE, "nt", "cpu")
    return providers.parse("deepgemm", operation).prepare(*operands)


def test_deepgemm_is_given_the_weight_as_it_is_stored(stub: Stub) -> None:
    _, b, _ = OPERATION.operands(SHAPE, "nt", "cpu")

    prepared()()

    ((_, (weight, scales)),) = stub.calls
    assert torch.equal(weight.float(), b.t().float())
    assert (weight.is_contiguous(), scales.is_contiguous()) == (True, True)
    assert scales.shape == (2, 4)


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


def test_a_call_takes_other_weights(stub: Stub) -> None:
    call = prepared()
    other = OPERATION.operands(SHAPE, "nt", "cpu")[1].clone()

    call(other)

    assert stub.calls[0][1][0].data_ptr() == other.data_ptr()


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


def in_memory_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the operands of checks on the CPU."""
    operands = Operation.operands
    monkeypatch.setattr(
        Operation,
        "operands",
        lambda self, shape, layout, device="cpu": operands(self, shape, layout, "cpu"),
    )
