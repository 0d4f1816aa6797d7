"""The persistent Triton kernel that `outblas bench` times, on the CPU."""

import pytest
import torch

from outblas.bench import providers, triton_persistent
from outblas.bench.operation import Operation
from outblas.call.steps import Steps
from outblas.device import language
from outblas.verify.kernels import Refused


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device of fewer SMs than there are tiles."""
    monkeypatch.setattr(triton_persistent, "sm_count", lambda device: 3)
    kernel = language.interpreted(triton_persistent._product)
    monkeypatch.setattr(triton_persistent, "_product", kernel)


@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
@pytest.mark.parametrize(("M", "N", "K"), [(1, 8, 16), (300, 260, 100), (129, 513, 64)])
def test_every_tile_is_computed(M: int, N: int, K: int, layout: str) -> None:
    a = torch.randint(-3, 4, (M, K)).float()
    b = torch.randint(-3, 4, (K, N)).float()
    stored_a = a.t().contiguous().t() if layout[0] == "t" else a
    stored_b = b.t().contiguous().t() if layout[1] == "t" else b
    guarded = torch.full((M + 2, N), torch.nan)
    out = guarded[1:-1]

    call = triton_persistent.prepared(stored_a, stored_b, out)
    call()

    assert torch.equal(out, a @ b)
    assert guarded[0].isnan().all()
    assert guarded[-1].isnan().all()


def test_a_call_takes_other_weights() -> None:
    a, out, weights = torch.eye(16), torch.empty(16, 16), torch.randn(16, 16)
    call = triton_persistent.prepared(a, torch.eye(16), out)

    call(weights)

    assert torch.equal(out, weights)


@pytest.mark.parametrize("name", ["triton-persistent", "cublas-no-workspace"])
@pytest.mark.parametrize("operation", [Operation("fp8"), Operation(steps=Steps(bias=True))])
def test_other_operations_are_refused(name: str, operation: Operation) -> None:
    with pytest.raises(Refused, match="bare products"):
        providers.parse(name, operation).prepare(*operation.operands((8, 8, 8), "nt", "cpu"))
