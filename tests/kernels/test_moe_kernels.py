"""The passes between the products of experts: Triton's kernels in the interpreter beside torch's
functions, and what they are compiled to.
"""

import itertools
from typing import Any

import pytest
import torch
from support.covering import covering

from outblas.base.compat import triton_private
from outblas.call.epilogue import ACTIVATIONS, GATED
from outblas.kernels import moe as kernels
from outblas.kernels.passes import compile_for
from outblas.torch_ops import moe_passes as passes

Tensor = torch.Tensor

SHAPES = {
    "one of each": (1, 1, 1, 1, 1),
    "more slots than a block": (13, 3, 5, 40, 24),
    "more columns than a program": (6, 2, 7, 1030, 19),
    "more experts than slots": (3, 8, 200, 16, 8),
}
shapes = pytest.mark.parametrize("shape", [pytest.param(v, id=k) for k, v in SHAPES.items()])


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def routing(tokens: int, k: int, experts: int) -> Tensor:
    """Returns (T, k) experts; some are -1 or E, which do not exist."""
    return torch.stack([torch.randperm(max(experts, k) + 2)[:k] - 1 for _ in range(tokens)])


# ---- routing
@pytest.mark.interpreter
@pytest.mark.oldest_triton
@pytest.mark.parametrize(
    ("shape", "dtype"),
    list(zip(SHAPES.values(), [torch.int32, torch.int64] * 2, strict=True)),
    ids=SHAPES,
)
def test_slots_are_sorted_by_expert_in_their_order(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tokens, k, experts, *_ = shape
    index = routing(tokens, k, experts).to(dtype)

    for found in (kernels.route(index, experts), passes.route(index, experts)):
        offs, row_of_slot, slot_of_row = found

        wanted = [slot for e in range(experts) for slot in (index.flatten() == e).nonzero()[:, 0]]
        counts = torch.stack([(index == e).sum() for e in range(experts)])
        assert all(t.dtype == torch.int32 for t in found)
        assert offs.tolist() == counts.cumsum(0).tolist()
        assert slot_of_row[: len(wanted)].tolist() == [int(slot) for slot in wanted]
        assert sorted(slot_of_row.tolist()) == list(range(tokens * k))
        for row, slot in enumerate(slot_of_row.tolist()):
            assert row_of_slot.flatten()[slot] == (row if row < len(wanted) else -1)


@pytest.mark.interpreter
@pytest.mark.parametrize("extreme", [-(2**63), -(2**32), 2**31, 2**32, 2**63 - 1])
def test_indices_that_32_bits_cannot_hold_name_no_expert(extreme: int) -> None:
    index = torch.tensor([[0, extreme], [extreme, 1]])

    offs, row_of_slot, _ = kernels.route(index, 2)

    assert offs.tolist() == [1, 2]
    assert row_of_slot.tolist() == [[0, -1], [-1, 1]]


# ---- rows
@pytest.mark.interpreter
@pytest.mark.oldest_triton
@shapes
def test_tokens_are_copied_to_the_rows_of_their_experts(shape: tuple[int, ...]) -> None:
    tokens, k, experts, columns, _ = shape
    offs, row_of_slot, slot_of_row = passes.route(routing(tokens, k, experts), experts)
    x = torch.randn(tokens, columns).bfloat16()

    for found in (kernels.dispatch(x, row_of_slot), passes.dispatch(x, row_of_slot)):
        assert torch.equal(found[: offs[-1]], x[slot_of_row[: offs[-1]] // k])


@pytest.mark.interpreter
def test_rows_beyond_the_last_expert_are_not_written() -> None:
    out = torch.full((4, 3), torch.nan)
    row_of_slot = torch.tensor([[-1, 1], [0, -1]], dtype=torch.int32)
    kernel = kernels._PASSES.interpreted[kernels.dispatch_kernel]

    kernel[(2, 1)](torch.ones(2, 3), out, row_of_slot, 3, K=2, COLUMNS=16)

    assert (out[:2] == 1).all()
    assert out[2:].isnan().all()


@pytest.mark.interpreter
@pytest.mark.oldest_triton
@pytest.mark.parametrize(
    ("shape", "dtype", "weight_dtype"),
    covering(
        SHAPES,
        {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32},
        {"none": None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64},
        of=2,
    ),
)
def test_the_rows_of_a_token_are_weighted_and_summed(
    shape: tuple[int, ...], dtype: torch.dtype, weight_dtype: torch.dtype | None
) -> None:
    tokens, k, experts, columns, _ = shape
    offs, row_of_slot, _ = passes.route(routing(tokens, k, experts), experts)
    rows = torch.randint(-8, 9, (tokens * k, columns)).to(dtype)
    weights = None if weight_dtype is None else torch.randint(1, 9, (tokens, k)).to(weight_dtype)
    exists = row_of_slot >= 0
    shares = exists.double() if weights is None else weights.double().where(exists, 0)
    chosen = rows.double()[row_of_slot.clamp(min=0).long()]
    wanted = (chosen * shares.unsqueeze(2)).sum(1).to(dtype)
    # What does not exist adds nothing, whatever memory holds.
    rows[offs[-1] :] = torch.nan
    if weights is not None:
        weights[~exists] = torch.inf

    assert torch.equal(kernels.combine(rows, row_of_slot, weights), wanted)
    assert torch.equal(passes.combine(rows, row_of_slot, weights), wanted)


# ---- the activation
@pytest.mark.interpreter
@pytest.mark.oldest_triton
@pytest.mark.parametrize(
    ("shape", "activation"),
    list(zip(itertools.cycle(SHAPES.values()), ACTIVATIONS, strict=False)),
)
def test_gradients_of_an_activation_and_of_weights(shape: tuple[int, ...], activation: str) -> None:
    tokens, k, experts, _, columns = shape
    offs, _, slot_of_row = passes.route(routing(tokens, k, experts), experts)
    end, slots = int(offs[-1]), slot_of_row.long()
    x = torch.randn(tokens * k, columns * (1 + (activation in GATED)))
    grad, weights = torch.randn(tokens * k, columns), torch.rand(tokens, k)
    leaf, shares = x.double().requires_grad_(), weights.double().requires_grad_()
    h = passes.composed(leaf, activation, None) * shares.flatten()[slots].unsqueeze(1)
    h[:end].backward(grad[:end].double())
    x[end:] = grad[end:] = torch.nan
    assert leaf.grad is not None

    for module in (kernels, passes):
        found = module.activation_backward(grad, x, weights, slot_of_row, offs, activation)

        got = found[0][:end], found[1][:end], found[2]
        want = leaf.grad[:end], h[:end].detach(), shares.grad
        if end == 0:
            want = leaf.grad[:end], h[:end].detach(), torch.zeros(tokens, k)
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one.double(), other.double(), atol=1e-5, rtol=1e-5)


# ---- machine code
I32 = "i32"
ROUTING = {"slots": I32, "experts": I32, "blocks": I32}
TILE = kernels._COMPILED
COMPILED: dict[str, tuple[Any, dict[str, str], dict[str, Any]]] = {
    "count": (
        kernels.count_kernel,
        {"expert": "*i64", "counts": "*i32"} | ROUTING,
        {"SLOTS": TILE.slots, "BUCKETS": 256},
    ),
    "rank": (
        kernels.rank_kernel,
        {"expert": "*i64", "ends": "*i32", "row_of_slot": "*i32", "slot_of_row": "*i32"} | ROUTING,
        {"SLOTS": TILE.slots, "CHUNK": TILE.chunk},
    ),
    "dispatch": (
        kernels.dispatch_kernel,
        {"x": "*bf16", "out": "*bf16", "row_of_slot": "*i32", "columns": I32},
        {"K": 8, "COLUMNS": kernels.COLUMNS},
    ),
    "combine": (
        kernels.combine_kernel,
        {"rows": "*bf16", "weights": "*fp32", "out": "*bf16", "row_of_slot": "*i32"}
        | {"columns": I32},
        {"K": 8, "WEIGHTED": True, "COLUMNS": kernels.COLUMNS},
    ),
    "activation": (
        kernels.activation_kernel,
        {"grad": "*bf16", "x": "*bf16", "weights": "*fp32", "grad_x": "*bf16"}
        | {"weighted": "*bf16", "grad_weights": "*fp32", "slot_of_row": "*i32", "offs": "*i32"}
        | {"experts": I32, "rows": I32},
        {"COLUMNS": 768, "FUNCTION": "silu", "GATE": True}
        | {"ROWS": TILE.rows, "INNER": TILE.columns},
    ),
}


@pytest.mark.compile
@pytest.mark.oldest_triton
@pytest.mark.parametrize(("name", "arch"), [("activation", 75), *((name, 90) for name in COMPILED)])
def test_every_kernel_compiles_without_spills(name: str, arch: int) -> None:
    kernel, types, constants = COMPILED[name]
    if arch < 80:
        types = {n: t.replace("bf16", "fp16") for n, t in types.items()}

    compiled = compile_for(kernel, types, constants, arch)

    _, log = triton_private.assemble(compiled.asm["ptx"], compiled.metadata._asdict(), arch)
    assert "0 bytes spill stores, 0 bytes spill loads" in log
