"""What a launch of the production kernel is given: copies of operands, counters that are zero."""

from types import SimpleNamespace

import pytest
import torch

from outblas.base import configs
from outblas.core.problem import problem
from outblas.hopper import gemm
from outblas.hopper.gemm import workspace
from outblas.hopper.parts import compile, tile_order

CONFIG = configs.from_text(
    gemm.Config,
    "tile_m=64,tile_n=16,consumers=1,producer_registers=0,consumer_registers=0,stages=16,"
    "epilogue_stages=1,cluster_m=1,gpc_local=False",
)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """What launches hand to a compiled kernel, which is a stand-in: A, B, C, and others."""
    given: list[tuple] = []
    monkeypatch.setattr(tile_order, "clusters", lambda *_: 132)
    monkeypatch.setattr(compile, "load", lambda *_: lambda *arguments: given.append(arguments))
    return given


@pytest.mark.parametrize("copied", [0, 1], ids=["A", "B"])
def test_an_operand_that_tma_cannot_load_is_handed_over_as_a_copy(
    copied: int, launches: list[tuple]
) -> None:
    operands = [torch.rand(64, 72).bfloat16(), torch.rand(72, 40).bfloat16()]
    rows, columns = operands[copied].shape
    odd = torch.zeros(rows, columns + 1).bfloat16()[:, :columns].copy_(operands[copied])
    operands[copied] = odd
    out = torch.empty(64, 40).bfloat16()

    a, b = operands
    gemm.plan(problem(a, b, out), CONFIG)(a, b, None, out, 1.0, 0.0)

    (handed,) = launches
    assert torch.equal(handed[copied], odd)
    assert handed[copied].stride(0) % 8 == 0, "TMA strides over multiples of 16 bytes"
    assert handed[1 - copied] is operands[1 - copied]


def test_counters_begin_at_zero_whatever_the_memory_held(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(
        device=lambda *_: torch.device("cpu"),
        cuda=SimpleNamespace(
            current_stream=lambda index: None, is_current_stream_capturing=lambda: True
        ),
        **{name: getattr(torch, name) for name in ("empty", "zeros", "float32", "int32")},
    )
    monkeypatch.setattr(workspace, "torch", memory)
    torch.use_deterministic_algorithms(True)  # new memory is filled then, with other than zeros
    try:
        lent = workspace.get_workspace(0, floats=8, counters=64)
    finally:
        torch.use_deterministic_algorithms(False)

    assert lent.counters.tolist() == [0] * 64
