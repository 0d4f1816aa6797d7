"""`torch.nn.functional.grouped_mm` under `outblas.enable`.

Where there is no GPU, the operator is overridden on the CPU, and Triton's interpreter runs the
kernel.
"""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from support.torch_grouped_calls import (
    BF16,
    DTYPES,
    FP16,
    FP32,
    ON_CPU,
    PRODUCTS,
    Operands,
    found,
    rules,
    same,
    small,
)

import outblas
from outblas.runtime import dispatch
from outblas.torch_ops import aten
from outblas.torch_ops.aten import Enabled, Product
from outblas.torch_ops.aten_grouped import padded_strides

pytestmark = pytest.mark.interpreter

Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def _nothing_stays_enabled() -> Iterator[None]:
    yield
    outblas.disable()


@pytest.fixture(autouse=True)
def _nothing_is_left_in_new_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """New memory is NaN, so that what no group covers can be compared."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_has_torchs_result_and_strides(name: str, dtype: torch.dtype) -> None:
    given = ON_CPU.to("cpu", dtype)
    expected = PRODUCTS[name](given)

    with aten._enable(rules()) as enabled:
        got = [PRODUCTS[name](given) for _ in range(2)]

    assert all(same(each, expected) for each in got)
    assert found(enabled) == [aten.OURS]


def test_rows_of_no_group_are_not_written() -> None:
    with aten._enable(rules()):
        got = PRODUCTS["rows"](ON_CPU)

    assert got[:14].isfinite().all()
    assert got[14:].isnan().all()


def test_what_a_product_is_called_says_its_groups() -> None:
    with aten._enable(rules()) as enabled:
        for name in ("rows", "columns", "terms", "batches"):
            PRODUCTS[name](ON_CPU)

    assert list(enabled.decisions) == [
        "_grouped_mm 16x24x8 bfloat16, M in 3 groups",
        "_grouped_mm 24x16x8 bfloat16, N in 3 groups",
        "_grouped_mm 8x24x16 bfloat16, K in 3 groups",
        "_grouped_mm 3x24x24x8 bfloat16",
    ]


def test_a_filter_is_asked_once_whatever_the_sizes_of_groups_are() -> None:
    asked: list[Product] = []

    def note(product: Product) -> bool:
        asked.append(product)
        return True

    with aten._enable(rules(filter=note)):
        for ends in ((5, 5, 14), (16, 16, 16), (0, 1, 2)):
            offs = torch.tensor(ends, dtype=torch.int32)
            F.grouped_mm(ON_CPU.tokens, ON_CPU.experts, offs=offs)

    assert asked == [Product("_grouped_mm", 1, 16, 24, 8, BF16, groups=3, divided="M")]
    assert asked[0].flops == 2 * 16 * 24 * 8


# Two calls of which one must not take the plan of the other.
ALIKE: dict[str, tuple[str, str]] = {
    "strides of experts": ("rows", "rows, experts by columns"),
    "strides of tokens": ("rows", "rows, tokens by columns"),
    "padding": ("rows", "rows that are padded"),
}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["as listed", "in turn"])
@pytest.mark.parametrize("name", ALIKE)
def test_calls_that_are_alike_take_plans_of_their_own(name: str, order: tuple[int, int]) -> None:
    calls = [PRODUCTS[ALIKE[name][i]] for i in order]
    expected = [call(ON_CPU) for call in calls]

    with aten._enable(rules()):
        got = [call(ON_CPU) for call in calls * 2]

    assert all(map(same, got, expected * 2))


def test_an_address_that_torch_refuses_does_not_take_the_plan_of_one_that_it_accepts() -> None:
    room = small(16 * 8 + 1)
    aligned, elsewhere = room[:-1].view(16, 8), room[1:].view(16, 8)
    with aten._enable(rules()) as enabled:
        for tokens in (aligned, elsewhere, aligned):
            F.grouped_mm(tokens, ON_CPU.experts, offs=ON_CPU.offs)

    taken, left = found(enabled)
    assert taken == aten.OURS
    assert left == "mat_a does not begin at a multiple of 16 bytes"


# ---- autograd, transforms and compilation
def gradients(t: Operands, *, of_second_order: bool = False) -> tuple[Tensor, ...]:
    """The gradients of tokens and experts, of rows that all belong to a group."""
    leaves = [each.detach().clone().requires_grad_() for each in t[:2]]
    offs = torch.tensor([5, 5, 16], dtype=torch.int32, device=t.offs.device)
    y = F.grouped_mm(leaves[0], leaves[1], offs=offs)
    first = torch.autograd.grad(y.square().sum(), leaves, create_graph=of_second_order)
    if not of_second_order:
        return first
    return torch.autograd.grad(torch.stack([g.square().sum() for g in first]).sum(), leaves)


def test_gradients_are_torchs_and_run_on_kernels_of_outblas() -> None:
    given = ON_CPU.to("cpu", FP32)
    expected = gradients(given)

    with aten._enable(rules()) as enabled:
        got = gradients(given)

    assert all(map(same, got, expected))
    assert enabled.decisions == {
        "_grouped_mm 16x24x8 float32, M in 3 groups": aten.OURS,
        "_grouped_mm 16x8x24 float32, M in 3 groups": aten.OURS,  # of tokens
        "_grouped_mm 8x24x16 float32, K in 3 groups": aten.OURS,  # of experts
    }


def test_second_derivatives_are_torchs() -> None:
    given = ON_CPU.to("cpu", FP32)
    expected = gradients(given, of_second_order=True)

    with aten._enable(rules()) as enabled:
        got = gradients(given, of_second_order=True)

    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert set(enabled.decisions.values()) == {aten.OURS}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_sees_torchs_operator() -> None:
    tokens = torch.stack([ON_CPU.tokens, 2 * ON_CPU.tokens])
    mapped = torch.vmap(lambda x: F.grouped_mm(x, ON_CPU.experts, offs=ON_CPU.offs))
    expected = mapped(tokens)

    with aten._enable(rules()) as enabled:
        got = mapped(tokens)

    assert same(got, expected)
    assert set(enabled.decisions.values()) == {aten.OURS}


def test_autocast_casts_nothing() -> None:
    given = ON_CPU.to("cpu", FP32)
    with aten._enable(rules()), torch.autocast("cpu", dtype=BF16):
        for name in ("rows", "batches"):
            assert PRODUCTS[name](given).dtype == FP32


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["rows", "rows that are padded", "batches that are padded"])
def test_a_compiled_program_calls_the_overridden_operator(name: str) -> None:
    compiled = torch.compile(lambda t: torch.relu(PRODUCTS[name](t)), backend="aot_eager")
    expected = torch.relu(PRODUCTS[name](ON_CPU))

    with aten._enable(rules()) as enabled:
        got = compiled(ON_CPU)

    assert same(got, expected)
    assert found(enabled) == [aten.OURS]


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_fake_product_is_not_computed_and_has_the_strides(name: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with aten._enable(rules()) as enabled:
        with FakeTensorMode() as mode:
            fake = PRODUCTS[name](Operands(*map(mode.from_tensor, ON_CPU)))
        assert enabled.decisions == {}

    shape = tuple(fake.shape)
    assert padded_strides(shape, 2) == PRODUCTS[name](ON_CPU).stride()
    assert torch.version.cuda is None or fake.stride() == padded_strides(shape, 2)


# ---- when it holds
def test_disable_gives_the_operator_back() -> None:
    def registered() -> str:
        return str(torch.library.get_kernel("aten::_grouped_mm", "CPU"))

    before = registered()
    aten._enable(rules())
    while_enabled = registered()

    outblas.disable()

    assert "aten.py" in while_enabled
    assert registered() == before


# ---- on a GPU
@pytest.fixture
def on_a_gpu() -> Iterator[Enabled]:
    torch.use_deterministic_algorithms(False)
    dispatch.clear_cache()
    with outblas.enable(min_gain=0) as enabled:
        yield enabled


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_on_a_gpu_are_exact(name: str, dtype: torch.dtype, on_a_gpu: Enabled) -> None:
    got = PRODUCTS[name](ON_CPU.to("cuda", dtype))

    torch.use_deterministic_algorithms(True)  # what is written to no row is NaN then
    expected = PRODUCTS[name](ON_CPU.to("cpu", dtype))
    written = expected.isfinite()
    assert got.stride() == expected.stride()
    assert torch.equal(got.cpu()[written], expected[written])
    assert set(on_a_gpu.decisions.values()) == {aten.OURS}


@pytest.mark.gpu
def test_gradients_on_a_gpu_are_torchs(on_a_gpu: Enabled) -> None:
    got = gradients(ON_CPU.to("cuda", BF16))

    outblas.disable()

    for mine, theirs in zip(got, gradients(ON_CPU.to("cuda", BF16)), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert set(on_a_gpu.decisions.values()) == {aten.OURS}


@pytest.mark.gpu
def test_a_captured_graph_replays_a_product_with_other_groups(on_a_gpu: Enabled) -> None:
    given = ON_CPU.to("cuda", BF16)
    PRODUCTS["rows"](given)  # loads the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = PRODUCTS["rows"](given)

    given.offs.copy_(torch.tensor([1, 9, 16]))
    graph.replay()

    expected = PRODUCTS["rows"](ON_CPU._replace(offs=torch.tensor([1, 9, 16], dtype=torch.int32)))
    assert torch.equal(got.cpu(), expected)


@pytest.mark.gpu
@pytest.mark.sm90
def test_products_of_few_rows_run_on_hopper_grouped_by_default() -> None:
    with outblas.enable() as enabled:
        PRODUCTS["rows"](ON_CPU.to("cuda", BF16))

    assert found(enabled) == [aten.OURS]
