"""`outblas.enable`: torch's products, whoever calls them, run on kernels of outblas.

Where there is no GPU, the operators are overridden on the CPU, and Triton's interpreter runs the
kernel.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F

import outblas
from outblas.core.compiling import CompileForbidden
from outblas.runtime import dispatch, hooks, launcher
from outblas.torch_ops import aten, aten_choice
from outblas.torch_ops.aten import Enabled, Product, Rules

pytestmark = pytest.mark.interpreter

Tensor = torch.Tensor
OPERATORS = (
    "mm",
    "mm.out",
    "addmm",
    "addmm.out",
    "addmm_",
    "bmm",
    "bmm.out",
    "baddbmm",
    "baddbmm.out",
    "baddbmm_",
)


def rules(**changes: Any) -> Rules:
    """float32 products on the CPU run on `portable`, with these changes."""
    plain = Rules((torch.float32,), min_flops=0, min_gain=0, filter=None)
    return plain._replace(**{"key": "CPU", "kernel": "portable"} | changes)


@pytest.fixture(autouse=True)
def _nothing_stays_enabled() -> Iterator[None]:
    yield
    outblas.disable()


@pytest.fixture
def no_plans() -> None:
    """No call was planned yet."""
    dispatch.clear_cache()


def small(*shape: int) -> Tensor:
    """Small integers, whose products have one right result in float32."""
    return torch.randint(-4, 5, shape).float()


def kernels_now() -> list[str]:
    """Where the CPU's kernels of the overridden operators were registered."""
    return [str(torch.library.get_kernel(f"aten::{name}", "CPU")) for name in OPERATORS]


# ---- which products
class Operands(NamedTuple):
    """Matrices and batches of them that fit together, C the shape of a product."""

    a: Tensor
    b: Tensor
    c: Tensor
    batch_a: Tensor
    batch_b: Tensor
    batch_c: Tensor

    def to(self, device: str, dtype: torch.dtype) -> "Operands":
        return Operands(*(t.to(device, dtype) for t in self))


ON_CPU = Operands(
    small(6, 5), small(5, 4), small(6, 4), small(3, 6, 5), small(3, 5, 4), small(3, 6, 4)
)
A, B, C, BATCH_A, BATCH_B, BATCH_C = ON_CPU
ATTENTION = torch.nn.MultiheadAttention(8, 2, batch_first=True)
TOKENS = torch.randn(2, 3, 8)


def sevens(like: Tensor) -> Tensor:
    """An `out` that shows where nothing was written."""
    return torch.full_like(like, 7.0)


def into_its_addend(c: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.addmm(c, a, b, out=c)


PRODUCTS: dict[str, Callable[[Operands], Tensor]] = {
    "mm": lambda t: torch.mm(t.a, t.b),
    "mm of a transposed operand": lambda t: torch.mm(t.a, t.b.t().contiguous().t()),
    "mm out": lambda t: torch.mm(t.a, t.b, out=sevens(t.c)),
    "@": lambda t: t.a @ t.b,
    "addmm": lambda t: torch.addmm(t.c, t.a, t.b, alpha=0.5, beta=2),
    "addmm of a row": lambda t: torch.addmm(t.c[0], t.a, t.b),
    "addmm out": lambda t: torch.addmm(t.c, t.a, t.b, beta=0.5, out=sevens(t.c)),
    "addmm in place": lambda t: t.c.clone().addmm_(t.a, t.b, beta=2, alpha=0.5),
    "addmm in place of columns": lambda t: t.c.t().contiguous().t().addmm_(t.a, t.b),
    "addmm in place without its addend": lambda t: sevens(t.c).addmm_(t.a, t.b, beta=0),
    "addmm into its addend": lambda t: into_its_addend(t.c.clone(), t.a, t.b),
    "bmm": lambda t: torch.bmm(t.batch_a, t.batch_b),
    "bmm out": lambda t: torch.bmm(t.batch_a, t.batch_b, out=sevens(t.batch_c)),
    "baddbmm": lambda t: torch.baddbmm(t.batch_c, t.batch_a, t.batch_b),
    "baddbmm of a row": lambda t: torch.baddbmm(t.c[:1], t.batch_a, t.batch_b),
    "baddbmm without its addend": lambda t: torch.baddbmm(t.c, t.batch_a, t.batch_b, beta=0),
    "baddbmm out": lambda t: torch.baddbmm(t.batch_c, t.batch_a, t.batch_b, out=sevens(t.batch_c)),
    "baddbmm in place without its addend": lambda t: sevens(t.batch_c).baddbmm_(
        t.batch_a, t.batch_b, beta=0
    ),
    "linear": lambda t: F.linear(t.a, t.b.t(), t.c[0]),
    "linear without a bias": lambda t: F.linear(t.a, t.b.t()),
    "linear of a batch": lambda t: F.linear(t.batch_a, t.b.t(), t.c[0]),
    "einsum": lambda t: torch.einsum("bij,bjk->bik", t.batch_a, t.batch_b),
    "tensordot": lambda t: torch.tensordot(t.batch_a, t.b, dims=1),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_has_torchs_result(name: str) -> None:
    expected = PRODUCTS[name](ON_CPU)

    with aten._enable(rules()):
        got = PRODUCTS[name](ON_CPU)

    assert torch.equal(got, expected)


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_runs_on_a_kernel_of_outblas(name: str) -> None:
    with aten._enable(rules()) as enabled:
        PRODUCTS[name](ON_CPU)

    assert set(enabled.decisions.values()) == {aten.OURS}


def test_the_projections_of_attention_run_on_kernels_of_outblas() -> None:
    expected, _ = ATTENTION(TOKENS, TOKENS, TOKENS, need_weights=False)

    with aten._enable(rules()) as enabled:
        got, _ = ATTENTION(TOKENS, TOKENS, TOKENS, need_weights=False)

    torch.testing.assert_close(got, expected)
    assert set(enabled.decisions.values()) == {aten.OURS}


# Two calls of which one must not take the plan of the other.
ALIKE: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]] = {
    "beta": (
        lambda: torch.addmm(torch.full((6, 4), torch.nan), A, B, beta=0),
        lambda: torch.addmm(C, A, B),
    ),
    "alpha": (lambda: torch.addmm(C, A, B, alpha=0), lambda: torch.addmm(C, A, B)),
    "strides": (lambda: torch.mm(A, B), lambda: torch.mm(A.t().contiguous().t(), B)),
    "strides of the addend": (
        lambda: torch.addmm(C, A, B),
        lambda: torch.addmm(C[0].expand(6, 4), A, B),
    ),
    "out": (lambda: torch.mm(A, B), lambda: torch.mm(A, B, out=torch.empty(4, 6).t())),
    "in place": (lambda: torch.addmm(C, A, B), lambda: C.clone().addmm_(A, B)),
    "in place, another beta": (
        lambda: C.clone().addmm_(A, B),
        lambda: C.clone().addmm_(A, B, beta=0),
    ),
    "a residual": (lambda: torch.bmm(BATCH_A, BATCH_B), lambda: PRODUCTS["baddbmm"](ON_CPU)),
}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["as listed", "in turn"])
@pytest.mark.parametrize("name", ALIKE)
def test_calls_that_are_alike_take_plans_of_their_own(name: str, order: tuple[int, int]) -> None:
    calls = [ALIKE[name][i] for i in order]
    expected = [call() for call in calls]

    with aten._enable(rules()):
        got = [call() for call in calls]

    assert all(map(torch.equal, got, expected))


# ---- autograd, transforms and compilation
def loss(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return torch.addmm(c, a, b).square().sum() + torch.bmm(a[None], b[None]).sum()


def test_gradients_are_torchs() -> None:
    leaves = [t.clone().requires_grad_() for t in (A, B, C)]
    expected = torch.autograd.grad(loss(*leaves), leaves)

    with aten._enable(rules()) as enabled:
        got = torch.autograd.grad(loss(*leaves), leaves)

    assert all(map(torch.equal, got, expected))
    assert enabled.decisions["mm 6x5x4 float32"] == aten.OURS  # the gradient of A


def test_second_derivatives_are_torchs() -> None:
    leaves = [t.clone().requires_grad_() for t in (A, B, C)]

    def second() -> tuple[Tensor, ...]:
        first = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
        return torch.autograd.grad(torch.stack([g.square().sum() for g in first]).sum(), leaves)

    expected = second()

    with aten._enable(rules()):
        got = second()

    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize(
    "transformed",
    [
        pytest.param(lambda: torch.vmap(torch.mm)(BATCH_A, BATCH_B), id="vmap"),
        pytest.param(lambda: torch.func.jvp(torch.mm, (A, B), (A, B))[1], id="jvp"),
        pytest.param(lambda: torch.func.grad(loss)(A, B, C), id="grad"),
    ],
)
def test_transforms_see_torchs_operators(transformed: Callable[[], Tensor]) -> None:
    expected = transformed()

    with aten._enable(rules()) as enabled:
        got = transformed()

    assert torch.equal(got, expected)
    assert set(enabled.decisions.values()) == {aten.OURS}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_compiled_program_calls_the_overridden_operators() -> None:
    compiled = torch.compile(lambda a, b: torch.relu(a @ b), backend="aot_eager")
    expected = torch.relu(A @ B)

    with aten._enable(rules()) as enabled:
        got = compiled(A, B)

    assert torch.equal(got, expected)
    assert enabled.decisions == {"mm 6x4x5 float32": aten.OURS}


def test_a_fake_product_is_not_computed() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with aten._enable(rules()) as enabled, FakeTensorMode() as mode:
        got = mode.from_tensor(A) @ mode.from_tensor(B)

    assert got.shape == (6, 4)
    assert enabled.decisions == {}


def test_threads_compute_at_the_same_time() -> None:
    operands = [(small(M, 5), small(5, 4)) for M in range(1, 9)]
    results: dict[int, Tensor] = {}

    def multiply(i: int) -> None:
        results[i] = operands[i][0] @ operands[i][1]

    with aten._enable(rules()) as enabled:
        threads = [threading.Thread(target=multiply, args=(i,), daemon=True) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert all(torch.equal(results[i], a @ b) for i, (a, b) in enumerate(operands))
    assert len(enabled.decisions) == 8


# ---- what stays with torch
@dataclass(frozen=True)
class Staying:
    """A product, the reason why it stays with torch, and changes of the rules."""

    make: Callable[[], Tensor]
    reason: str
    changes: dict[str, Any]


STAYING = {
    "another dtype": Staying(
        lambda: A.double() @ B.double(), "torch.float64 is not among the dtypes", {}
    ),
    "no rows": Staying(lambda: A[:0] @ B, "nothing is multiplied", {}),
    "no columns of A": Staying(lambda: A[:, :0] @ B[:0], "nothing is multiplied", {}),
    "small": Staying(
        lambda: A @ B, "its 240 FLOP are less than min_flops, 241", {"min_flops": 241}
    ),
    "filtered": Staying(
        lambda: A @ B, "the filter does not take it", {"filter": lambda product: product.M != 6}
    ),
    "out of another shape": Staying(
        lambda: torch.mm(A, B, out=torch.empty(0)), r"out.shape is (0,)", {}
    ),
    "on a CPU": Staying(lambda: A @ B, "CPU tensors", {"kernel": ""}),
}


@pytest.mark.parametrize("name", STAYING)
def test_a_product_that_is_not_covered_is_computed_by_torch(name: str) -> None:
    case = STAYING[name]
    expected = case.make()

    with aten._enable(rules(**case.changes)) as enabled:
        got = case.make()

    assert torch.equal(got, expected)
    (reason,) = enabled.decisions.values()
    assert case.reason in reason


@pytest.mark.parametrize(
    "scalars", [{"alpha": 2}, {"beta": 0.5}, {"alpha": 0.5, "beta": 2}], ids=str
)
def test_a_batch_whose_addend_is_scaled_is_computed_by_torch(scalars: dict[str, Any]) -> None:
    expected = torch.baddbmm(BATCH_C, BATCH_A, BATCH_B, **scalars)

    with aten._enable(rules()) as enabled:
        got = torch.baddbmm(BATCH_C, BATCH_A, BATCH_B, **scalars)

    assert torch.equal(got, expected)
    assert enabled.decisions == {}


def test_a_batch_that_is_added_to_its_addend_is_computed_by_torch() -> None:
    """Kernels have no other addend of a batch than a residual, over which they do not write."""
    expected = BATCH_C.clone().baddbmm_(BATCH_A, BATCH_B)

    with aten._enable(rules()) as enabled:
        got = BATCH_C.clone().baddbmm_(BATCH_A, BATCH_B)

    assert torch.equal(got, expected)
    assert enabled.decisions == {}


def test_a_product_in_place_is_recorded_by_autograd() -> None:
    def gradients() -> list[Tensor]:
        a, c = A.clone().requires_grad_(), C.clone().requires_grad_()
        (c * 1).addmm_(a, B, beta=2).square().sum().backward()
        assert a.grad is not None
        assert c.grad is not None
        return [a.grad, c.grad]

    expected = gradients()

    with aten._enable(rules()) as enabled:
        got = gradients()

    assert all(map(torch.equal, got, expected))
    assert set(enabled.decisions.values()) == {aten.OURS}


WRONG: dict[str, Callable[[], Tensor]] = {
    "sizes": lambda: A @ C,
    "dtypes": lambda: torch.mm(A, B.double()),
    "an addend": lambda: torch.addmm(C[:2, :3], A, B),
    "batches": lambda: torch.bmm(BATCH_A, BATCH_B[:2]),
    "a batch of one": lambda: torch.bmm(BATCH_A, BATCH_B[:1]),
    "one matrix for a batch": lambda: torch.bmm(BATCH_A, B),
    "an addend of a batch": lambda: torch.baddbmm(BATCH_C[:2], BATCH_A, BATCH_B),
    "dimensions": lambda: torch.mm(A, BATCH_B),
    "a dtype of out": lambda: torch.mm(A, B, out=torch.empty(6, 4, dtype=torch.int64)),
    "alpha": lambda: torch.addmm(C, A, B, alpha=1e39),
    "an addend in place of another shape": lambda: C[:1].clone().addmm_(A, B),
    "an addend in place of a narrower dtype": lambda: C.half().addmm_(A, B),
    "an addend in place of one row": lambda: C[0].expand(6, 4).addmm_(A, B),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_are_torchs(name: str) -> None:
    with pytest.raises(RuntimeError) as by_torch:
        WRONG[name]()

    with aten._enable(rules()), pytest.raises(RuntimeError) as found:
        WRONG[name]()

    assert (found.type, str(found.value)) == (by_torch.type, str(by_torch.value))


def test_an_operand_that_is_written_is_left_to_torch() -> None:
    def overlapping() -> Tensor:
        square = torch.eye(4)
        return torch.mm(square, square, out=square)

    expected = overlapping()

    with aten._enable(rules()):
        overlapping()  # the memory of `out` is fresh in the first call of a kind
        got = overlapping()

    assert torch.equal(got, expected)


def test_a_product_that_was_slower_in_a_sweep_stays_with_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tuner = Mock()
    tuner.measured_gain.return_value = 0.934
    monkeypatch.setattr(hooks.tuner, "_loaded", tuner)
    monkeypatch.setattr(launcher, "no_kernel_reason", lambda problem: None)

    with aten._enable(rules(kernel="", min_gain=1.0)) as enabled:
        A @ B

    assert enabled.decisions == {
        "mm 6x4x5 float32": "it is 0.934 times as fast as cuBLAS by a sweep, and min_gain is 1"
    }


def test_a_product_that_cannot_be_planned_stays_with_torch(
    no_plans: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch, "find_plan", Mock(side_effect=OSError("no compiler")))

    with (
        aten._enable(rules()) as enabled,
        pytest.warns(RuntimeWarning, match="mm 6x4x5 float32 stays with torch: no compiler"),
    ):
        got = A @ B

    assert torch.equal(got, A @ B)
    assert enabled.decisions == {"mm 6x4x5 float32": "no compiler"}


def test_a_product_that_is_first_met_in_a_capture_is_torchs_in_that_capture(
    no_plans: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patched, aten._enable(rules()) as enabled:
        patched.setattr(aten_choice, "capturing", lambda device: True)
        captured = A @ B
        in_capture = dict(enabled.decisions)
        patched.setattr(aten_choice, "capturing", lambda device: False)
        A @ B

    assert torch.equal(captured, A @ B)
    assert in_capture == {}
    assert enabled.decisions == {"mm 6x4x5 float32": aten.OURS}


def test_products_of_the_choice_belong_to_torch() -> None:
    """Else a filter that multiplies would be asked about its own products for ever."""

    def multiplies(product: Product) -> bool:
        return bool((A @ B).sum() == (A @ B).sum())

    with aten._enable(rules(filter=multiplies)) as enabled:
        A @ B

    assert enabled.decisions == {"mm 6x4x5 float32": aten.OURS}


@pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")
def test_what_outblas_hands_to_torch_comes_to_an_end() -> None:
    with aten._enable(rules()):
        got = outblas.matmul(A.double(), B.double())

    assert torch.equal(got, (A @ B).double())


# ---- batch invariance
def test_a_row_does_not_depend_on_others_where_that_is_promised() -> None:
    a, b = torch.randn(6, 64), torch.randn(64, 4)
    with aten._enable(rules()), outblas.batch_invariant():
        alone, together = a[:1] @ b, a @ b

    assert torch.equal(alone, together[:1])


@pytest.mark.parametrize(
    "product",
    [
        pytest.param(lambda: A.double() @ B.double(), id="another dtype"),
        pytest.param(lambda: torch.baddbmm(BATCH_C, BATCH_A, BATCH_B, alpha=2), id="scaled batch"),
        pytest.param(lambda: torch.addmm(C, A, B, alpha=1e39), id="a scalar"),
    ],
)
def test_a_product_that_would_break_the_promise_is_refused(
    product: Callable[[], Tensor],
) -> None:
    with (
        aten._enable(rules()),
        outblas.batch_invariant(),
        pytest.raises(ValueError, match="batch_invariant is True"),
    ):
        product()


def test_nothing_that_is_multiplied_keeps_the_promise() -> None:
    with aten._enable(rules(batch_invariant=True)):
        assert (A[:0] @ B).shape == (0, 4)
        assert torch.equal(A[:, :0] @ B[:0], torch.zeros(6, 4))


ROWS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "mm": lambda a, b, c: torch.mm(a, b),
    "addmm": lambda a, b, c: torch.addmm(c, a, b, beta=0.5),
    "addmm of a row": lambda a, b, c: torch.addmm(b[0], a, b),
    "linear": lambda a, b, c: F.linear(a, b.t(), b[0]),
    "linear of a batch": lambda a, b, c: F.linear(a[None], b.t())[0],
    "bmm": lambda a, b, c: torch.bmm(a[None], b[None])[0],
    "in place": lambda a, b, c: c[: len(a)].clone().addmm_(a, b),
    "einsum": lambda a, b, c: torch.einsum("mk,kn->mn", a, b),
}


@pytest.mark.parametrize("name", ROWS)
def test_every_thread_has_the_same_bits_in_every_batch(name: str) -> None:
    """Of 33 rows, alone and in parts, and in another thread, which has entered no context."""
    a, b, c = torch.randn(33, 96), torch.randn(96, 20), torch.randn(33, 20)
    product = ROWS[name]
    with aten._enable(rules(batch_invariant=True)) as enabled:
        whole = product(a, b, c)
        parts = [
            torch.cat([product(a[i : i + rows], b, c[i : i + rows]) for i in range(0, 33, rows)])
            for rows in (1, 2, 16)
        ]
        with ThreadPoolExecutor(1) as pool:
            elsewhere = pool.submit(product, a[:5], b, c[:5]).result()

    assert all(torch.equal(part, whole) for part in parts)
    assert torch.equal(elsewhere, whole[:5])
    assert set(enabled.decisions.values()) == {aten.OURS}


def test_a_compiled_program_has_the_same_bits_in_every_batch() -> None:
    a, b = torch.randn(33, 96), torch.randn(96, 20)
    compiled = torch.compile(lambda a: (a @ b).relu(), dynamic=True)
    with aten._enable(rules(batch_invariant=True)):
        whole = compiled(a)
        rows = [compiled(a[i : i + 3]) for i in range(0, 33, 3)]

    assert torch.equal(torch.cat(rows), whole)


def test_a_product_of_another_dtype_is_refused_in_the_process_that_promises() -> None:
    with (
        aten._enable(rules(batch_invariant=True)),
        pytest.raises(ValueError, match="batch_invariant is True"),
    ):
        A.double() @ B.double()


@pytest.mark.parametrize(
    "given",
    [{"min_flops": 1}, {"min_gain": 1.0}, {"filter": lambda product: True}],
    ids=["min_flops", "min_gain", "filter"],
)
def test_a_promise_of_all_products_leaves_none_out(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(ValueError, match=f"{name} is .* with batch_invariant=True, expected none"):
        outblas.enable(batch_invariant=True, **given)


def test_a_promise_of_all_products_takes_those_of_float32_too() -> None:
    plain, promised = outblas.enable(), outblas.enable(batch_invariant=True)

    assert plain._rules.dtypes == (torch.float16, torch.bfloat16)
    assert promised._rules.dtypes == (torch.float16, torch.bfloat16, torch.float32)
    assert (plain._rules.min_gain, promised._rules.min_gain) == (1.0, 0)


@pytest.mark.filterwarnings("ignore::outblas.FallbackWarning", "ignore::RuntimeWarning")
def test_a_product_that_torch_computed_for_matmul_stays_with_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its plan calls torch's product, which is overridden."""
    forbidden = Mock(side_effect=CompileForbidden("not in the cache"))
    monkeypatch.setattr(launcher, "no_kernel_reason", lambda problem: None)
    monkeypatch.setattr(launcher, "best_launcher", forbidden)
    dispatch.clear_cache()
    outblas.matmul(A, B)

    with aten._enable(rules(kernel="")) as enabled:
        for _ in range(2):
            assert torch.equal(torch.mm(A, B), outblas.matmul(A, B))
        assert torch.equal(torch.mm(A, B), (A.unsqueeze(-1) * B).sum(1))

    (decided,) = enabled.decisions.values()
    assert "not in the cache" in decided
    dispatch.clear_cache()


# ---- when it holds
def test_disable_gives_the_operators_back() -> None:
    before = kernels_now()
    aten._enable(rules())
    while_enabled = kernels_now()

    outblas.disable()

    assert all("aten.py" in name or "native" in name for name in while_enabled)
    assert kernels_now() == before


def test_disable_may_come_first() -> None:
    before = kernels_now()

    outblas.disable()

    assert kernels_now() == before


def test_a_block_ends_with_an_error() -> None:
    before = kernels_now()

    with pytest.raises(KeyError), aten._enable(rules()):
        raise KeyError

    assert kernels_now() == before


def test_an_inner_block_gives_way_to_the_outer_one() -> None:
    with aten._enable(rules()) as outer:
        with aten._enable(rules(min_flops=1e9)) as inner:
            A @ B
        assert outer.decisions == {}
        assert "min_flops" in inner.decisions["mm 6x4x5 float32"]

        A @ B

        assert outer.decisions == {"mm 6x4x5 float32": aten.OURS}


def test_the_last_of_two_calls_holds() -> None:
    first = aten._enable(rules(min_flops=1e9))
    second = aten._enable(rules())

    A @ B

    assert (first.decisions, len(second.decisions)) == ({}, 1)


@pytest.mark.filterwarnings("ignore:outblas. enable")
def test_it_takes_no_products_of_a_cpu() -> None:
    with outblas.enable() as enabled:
        got = torch.mm(A.half(), B.half())

    assert torch.equal(got, torch.mm(A.half(), B.half()))
    assert enabled.decisions == {}


def test_the_oldest_decisions_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "PLAN_LIMIT", 2)

    with aten._enable(rules()) as enabled:
        for M in (1, 2, 3):
            A[:M] @ B

    assert list(enabled.decisions) == ["mm 2x4x5 float32", "mm 3x4x5 float32"]


def test_a_filter_is_asked_once_for_each_kind_of_product() -> None:
    asked: list[Product] = []

    def note(product: Product) -> bool:
        asked.append(product)
        return True

    with aten._enable(rules(filter=note)):
        for _ in range(3):
            torch.bmm(BATCH_A, BATCH_B)

    assert asked == [Product("bmm", 3, 6, 4, 5, torch.float32)]
    assert asked[0].flops == 720


def test_a_product_of_a_matrix_with_itself_is_decided_once() -> None:
    square = C[:4]
    asked: list[Product] = []

    def note(product: Product) -> bool:
        asked.append(product)
        return True

    with aten._enable(rules(filter=note)):
        for _ in range(3):
            torch.mm(square, square)

    assert len(asked) == 1


# ---- arguments
@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"dtypes": torch.float16}, TypeError, "dtypes is torch.float16, expected a collection"),
        ({"dtypes": ["float16"]}, TypeError, "dtypes has 'float16', expected torch dtypes"),
        ({"dtypes": [torch.int8]}, ValueError, "dtypes has torch.int8, expected some of"),
        ({"min_flops": "1e6"}, TypeError, "min_flops is '1e6', expected a number"),
        ({"min_flops": -1}, ValueError, "min_flops is -1, expected 0 or more"),
        ({"min_gain": float("nan")}, ValueError, "min_gain is nan, expected 0 or more"),
        ({"filter": "mm"}, TypeError, "filter is 'mm', expected a function"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_argument_that_makes_no_sense_is_refused(
    given: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        outblas.enable(**given)

    assert aten._active is None


# ---- on a GPU
@pytest.fixture
def on_a_gpu() -> Iterator[Enabled]:
    with outblas.enable(min_gain=0) as enabled:
        yield enabled


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_on_a_gpu_are_exact(name: str, dtype: torch.dtype, on_a_gpu: Enabled) -> None:
    got = PRODUCTS[name](ON_CPU.to("cuda", dtype))

    assert torch.equal(got.cpu().float(), PRODUCTS[name](ON_CPU))
    assert set(on_a_gpu.decisions.values()) == {aten.OURS}


@pytest.mark.gpu
def test_a_layer_on_a_gpu_trains_as_torch_does(on_a_gpu: Enabled) -> None:
    layer = torch.nn.Linear(64, 32, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(16, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    layer(x).sum().backward()
    got = x.grad.clone(), layer.weight.grad.clone()
    x.grad = layer.weight.grad = None

    outblas.disable()
    layer(x).sum().backward()

    torch.testing.assert_close(got, (x.grad, layer.weight.grad))
    assert set(on_a_gpu.decisions.values()) == {aten.OURS}


@pytest.mark.gpu
def test_a_captured_graph_replays_a_product(on_a_gpu: Enabled) -> None:
    a, b = (torch.randint(-4, 5, (64, 64), device="cuda").half() for _ in range(2))
    a @ b  # loads the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = a @ b

    a.copy_(torch.eye(64))
    graph.replay()

    assert torch.equal(got, b)


@pytest.mark.gpu
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_compiled_layer_on_a_gpu_calls_the_operators(dynamic: bool, on_a_gpu: Enabled) -> None:
    layer = torch.nn.Linear(64, 32, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(16, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    compiled = torch.compile(lambda x: F.gelu(layer(x)), fullgraph=True, dynamic=dynamic)

    y = compiled(x)
    y.sum().backward()

    torch.testing.assert_close(y, F.gelu(layer(x)))
    assert "addmm 16x32x64 bfloat16" in on_a_gpu.decisions
    assert "mm 16x64x32 bfloat16" in on_a_gpu.decisions
    assert set(on_a_gpu.decisions.values()) == {aten.OURS}
