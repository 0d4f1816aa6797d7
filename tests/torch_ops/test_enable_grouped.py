"""`torch.nn.functional.grouped_mm` under `outblas.enable`.

Where there is no GPU, the operator is overridden on the CPU, and Triton's interpreter runs the
kernel.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F

import outblas
from outblas.kernels import grouped as portable
from outblas.runtime import dispatch
from outblas.torch_ops import aten, aten_choice, grouped_mm
from outblas.torch_ops.aten import Enabled, Product, Rules
from outblas.torch_ops.aten_grouped import SLOWER, Slower, padded_strides, slower_reason

pytestmark = pytest.mark.interpreter

Tensor = torch.Tensor
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, FP16, FP32)


def rules(**changes: Any) -> Rules:
    """Products on the CPU run on `portable`, with these changes."""
    plain = Rules(DTYPES, min_flops=0, min_gain=0, filter=None)
    return plain._replace(**{"key": "CPU", "kernel": "portable"} | changes)


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


def small(*shape: int) -> Tensor:
    """Small integers, whose products have one right result in each dtype."""
    return torch.randint(-3, 4, shape).to(BF16)


class Operands(NamedTuple):
    """Tokens, experts and their groups. The last rows belong to no group, and one group is
    empty.
    """

    tokens: Tensor  # (tokens, K)
    experts: Tensor  # (groups, K, N)
    others: Tensor  # (tokens, N)
    offs: Tensor

    def to(self, device: str, dtype: torch.dtype) -> "Operands":
        tokens, experts, others = (t.to(device, dtype) for t in self[:3])
        return Operands(tokens, experts, others, self.offs.to(device))


ENDS = torch.tensor([5, 5, 14], dtype=torch.int32)
ON_CPU = Operands(small(16, 8), small(3, 8, 24), small(16, 24), ENDS)


def columns(t: Tensor) -> Tensor:
    """The same matrices by columns."""
    return t.mT.contiguous().mT


PRODUCTS: dict[str, Callable[[Operands], Tensor]] = {
    "rows": lambda t: F.grouped_mm(t.tokens, t.experts, offs=t.offs),
    "rows, experts by columns": lambda t: F.grouped_mm(t.tokens, columns(t.experts), offs=t.offs),
    "rows, tokens by columns": lambda t: F.grouped_mm(columns(t.tokens), t.experts, offs=t.offs),
    "rows, a dtype of the result": lambda t: F.grouped_mm(
        t.tokens, t.experts, offs=t.offs, out_dtype=t.tokens.dtype
    ),
    "columns": lambda t: F.grouped_mm(t.experts.mT, t.tokens.mT, offs=t.offs),
    "terms": lambda t: F.grouped_mm(t.tokens.mT, t.others, offs=t.offs),
    "batches": lambda t: F.grouped_mm(t.experts.mT, t.experts),
    "the private name": lambda t: torch._grouped_mm(t.tokens, t.experts, t.offs),
    "ends with a stride": lambda t: F.grouped_mm(
        t.tokens, t.experts, offs=t.offs.repeat_interleave(2)[::2]
    ),
    # Of 20 columns, so that rows of the result are padded.
    "rows that are padded": lambda t: F.grouped_mm(
        t.tokens, columns(t.experts)[:, :, :20], offs=t.offs
    ),
    "batches that are padded": lambda t: F.grouped_mm(t.experts.mT, columns(t.experts)[:, :, :20]),
    "terms that are padded": lambda t: F.grouped_mm(t.tokens.mT, t.others[:, :20], offs=t.offs),
}


def found(enabled: Enabled) -> list[str]:
    """What became of the grouped products; torch computes one by products of its groups, which are
    not among them.
    """
    return [by for name, by in enabled.decisions.items() if name.startswith("_grouped_mm")]


def same(got: Tensor, expected: Tensor) -> bool:
    """Whether two results are the same, what was not written included."""
    return (
        got.dtype == expected.dtype
        and got.stride() == expected.stride()
        and torch.allclose(got, expected, rtol=0, atol=0, equal_nan=True)
    )


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


# ---- what stays with torch
@dataclass(frozen=True)
class Staying:
    """A product, the reason why it stays with torch, and changes of the rules."""

    make: Callable[[], Tensor]
    reason: str
    changes: dict[str, Any]


def rows_in_groups(tokens: int, groups: int) -> Tensor:
    a, b = torch.zeros(tokens, 8, dtype=BF16), torch.zeros(groups, 8, 8, dtype=BF16)
    return F.grouped_mm(a, b, offs=torch.full((groups,), tokens, dtype=torch.int32))


def terms_in_groups(terms: int, groups: int) -> Tensor:
    a, b = torch.zeros(terms, 8, dtype=BF16).mT, torch.zeros(terms, 8, dtype=BF16)
    return F.grouped_mm(a, b, offs=torch.full((groups,), terms, dtype=torch.int32))


BEST = {"kernel": "", "min_gain": 1.0}  # what `enable` has by default
STAYING = {
    "another dtype": Staying(
        lambda: PRODUCTS["rows"](ON_CPU), "torch.bfloat16 is not among", {"dtypes": (FP16,)}
    ),
    "no rows": Staying(lambda: rows_in_groups(0, 2), "nothing is multiplied", {}),
    "small": Staying(
        lambda: PRODUCTS["rows"](ON_CPU), "its 6144 FLOP are less", {"min_flops": 6145}
    ),
    "small batches": Staying(
        lambda: PRODUCTS["batches"](ON_CPU), "its 27648 FLOP are less", {"min_flops": 27649}
    ),
    "filtered": Staying(
        lambda: PRODUCTS["rows"](ON_CPU),
        "the filter does not take it",
        {"filter": lambda product: product.divided != "M"},
    ),
    "too many groups": Staying(lambda: rows_in_groups(1, 1024), "it has 1024 groups", {}),
    "groups of many rows": Staying(
        lambda: rows_in_groups(4098, 2),
        "groups of more than 2048 along M were 0.87 times as fast as torch's at worst, "
        "these have 2049 in the mean, and min_gain is 1",
        BEST,
    ),
    "groups of many terms": Staying(
        lambda: terms_in_groups(4098, 2),
        "groups of more than 2048 along K were 0.91 times as fast as torch's at worst, "
        "these have 2049 in the mean, and min_gain is 1",
        BEST,
    ),
    "on a CPU": Staying(lambda: PRODUCTS["rows"](ON_CPU), "CPU tensors", {"kernel": ""}),
}


@pytest.mark.parametrize("name", STAYING)
def test_a_product_that_is_not_covered_is_computed_by_torch(name: str) -> None:
    case = STAYING[name]
    expected = case.make()

    with aten._enable(rules(**case.changes)) as enabled:
        got = case.make()

    assert same(got, expected)
    (reason,) = found(enabled)
    assert case.reason in reason


def test_what_only_an_unmeasured_kernel_computes_stays_with_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grouped_mm, "_no_kernel_reason", lambda a: None)

    with aten._enable(rules(**BEST)) as enabled:
        PRODUCTS["rows"](ON_CPU)
    with aten._enable(rules(kernel="", min_gain=0)) as lenient:
        PRODUCTS["rows"](ON_CPU)

    (reason,) = found(enabled)
    assert reason == (
        "kernel 'hopper.grouped': needs an NVIDIA GPU, but was given tensors on cpu; no other "
        "kernel was compared with torch, and min_gain is 1"
    )
    assert found(lenient) == [aten.OURS]


def divided(dimension: str, mean: int, *, groups: int = 8) -> Product:
    """A product of which groups have `mean` rows, columns or terms in the mean."""
    M, N, K = (groups * mean if name == dimension else 64 for name in "MNK")
    return Product("_grouped_mm", 1, M, N, K, BF16, groups, dimension)


@pytest.mark.parametrize("known", SLOWER, ids=lambda known: known.divided)
def test_a_class_that_was_slower_is_taken_by_those_who_accept_its_gain(known: Slower) -> None:
    above, up_to = (divided(known.divided, known.above + more) for more in (1, 0))

    assert slower_reason(above, 1.0)
    assert slower_reason(above, known.gain) == ""
    assert slower_reason(above, 0) == ""
    assert slower_reason(up_to, 1.0) == ""


def test_a_class_is_one_of_a_dimension_that_is_divided() -> None:
    assert slower_reason(divided("N", 10_000), 1.0) == ""
    assert slower_reason(Product("_grouped_mm", 8, 10_000, 8, 8, BF16), 1.0) == ""


WRONG: dict[str, Callable[[], Tensor]] = {
    "inner sizes": lambda: F.grouped_mm(ON_CPU.tokens, ON_CPU.experts.mT, offs=ENDS),
    "no ends": lambda: F.grouped_mm(ON_CPU.tokens, ON_CPU.experts),
    "ends of batches": lambda: F.grouped_mm(ON_CPU.experts.mT, ON_CPU.experts, offs=ENDS),
    "ends of int64": lambda: F.grouped_mm(ON_CPU.tokens, ON_CPU.experts, offs=ENDS.long()),
    "too few ends": lambda: F.grouped_mm(ON_CPU.tokens, ON_CPU.experts, offs=ENDS[:2]),
    "a bias": lambda: F.grouped_mm(
        ON_CPU.tokens, ON_CPU.experts, offs=ENDS, bias=torch.zeros(3, 24, dtype=BF16)
    ),
    "a bias of batches": lambda: F.grouped_mm(
        ON_CPU.experts.mT, ON_CPU.experts, bias=torch.zeros(3, 24, dtype=BF16)
    ),
    "float32 out": lambda: F.grouped_mm(ON_CPU.tokens, ON_CPU.experts, offs=ENDS, out_dtype=FP32),
    "float32 out of batches": lambda: F.grouped_mm(
        ON_CPU.experts.mT, ON_CPU.experts, out_dtype=FP32
    ),
    "float64": lambda: F.grouped_mm(ON_CPU.tokens.double(), ON_CPU.experts.double(), offs=ENDS),
    "dimensions": lambda: F.grouped_mm(ON_CPU.tokens[0], ON_CPU.experts, offs=ENDS),
    "rows of 20": lambda: F.grouped_mm(
        ON_CPU.tokens, ON_CPU.experts[:, :, :20].contiguous(), offs=ENDS
    ),
    "batches of rows of 20": lambda: F.grouped_mm(
        ON_CPU.experts.mT, ON_CPU.experts[:, :, :20].contiguous()
    ),
    "an operand that repeats": lambda: F.grouped_mm(
        ON_CPU.tokens[:1].expand(16, 8), ON_CPU.experts, offs=ENDS
    ),
    "every other column": lambda: F.grouped_mm(ON_CPU.others[:, ::3], ON_CPU.experts, offs=ENDS),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_are_torchs(name: str) -> None:
    with pytest.raises(RuntimeError) as by_torch:
        WRONG[name]()

    with aten._enable(rules()), pytest.raises(RuntimeError) as mine:
        WRONG[name]()

    assert (mine.type, str(mine.value)) == (by_torch.type, str(by_torch.value))


def test_a_product_whose_kernel_fails_stays_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = PRODUCTS["rows"](ON_CPU)
    monkeypatch.setattr(portable, "run", Mock(side_effect=OSError("no compiler")))

    with (
        aten._enable(rules()) as enabled,
        pytest.warns(RuntimeWarning, match="M in 3 groups stays with torch: no compiler"),
    ):
        got = PRODUCTS["rows"](ON_CPU)

    assert same(got, expected)
    assert found(enabled) == ["no compiler"]


def test_a_product_that_is_first_met_in_a_capture_is_torchs_in_that_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = PRODUCTS["rows"](ON_CPU)
    with monkeypatch.context() as patched, aten._enable(rules()) as enabled:
        patched.setattr(aten_choice, "capturing", lambda device: True)
        captured = PRODUCTS["rows"](ON_CPU)
        in_capture = found(enabled)
        patched.setattr(aten_choice, "capturing", lambda device: False)
        PRODUCTS["rows"](ON_CPU)

    assert same(captured, expected)
    assert in_capture == []
    assert found(enabled) == [aten.OURS]


# ---- batch invariance
@pytest.mark.parametrize("name", ["rows", "columns", "terms", "float32 out of batches"])
def test_a_product_that_would_break_the_promise_is_refused(name: str) -> None:
    product = WRONG.get(name) or (lambda: PRODUCTS[name](ON_CPU))
    with (
        aten._enable(rules(batch_invariant=True)),
        pytest.raises(ValueError, match="batch_invariant is True"),
    ):
        product()
    with (
        aten._enable(rules()),
        outblas.batch_invariant(),
        pytest.raises(ValueError, match="batch_invariant is True"),
    ):
        product()


def test_nothing_that_is_multiplied_keeps_the_promise() -> None:
    with aten._enable(rules(batch_invariant=True)):
        assert rows_in_groups(0, 2).shape == (0, 8)


def test_a_row_of_a_batch_does_not_depend_on_others_where_that_is_promised() -> None:
    a, b = torch.randn(2, 6, 64), torch.randn(2, 64, 8)
    with aten._enable(rules(batch_invariant=True)) as enabled:
        alone, together = F.grouped_mm(a[:, :1], b), F.grouped_mm(a, b)

    assert torch.equal(alone, together[:, :1])
    assert set(enabled.decisions.values()) == {aten.OURS}


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
