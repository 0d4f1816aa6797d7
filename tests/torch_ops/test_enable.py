"""`outblas.enable`: torch's products, whoever calls them, run on kernels of outblas.

Where there is no GPU, the operators are overridden on the CPU, and Triton's interpreter runs the
kernel.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from support.causes import Tagged

import outblas
from outblas.base.compiling import CompileForbidden
from outblas.call import dispatch, hooks, launcher
from outblas.torch_ops import aten, aten_choice
from outblas.torch_ops.aten import Enabled, Product, Rules

pytestmark = pytest.mark.interpreter

Tensor = torch.Tensor


def rules(**changes: Any) -> Rules:
    """float32 products on the CPU run on `portable`, with these changes."""
    plain = Rules((torch.float32,), min_flops=0, min_gain=0, filter=None)
    return plain._replace(**{"key": "CPU", "kernel": "portable"} | changes)


def small(*shape: int) -> Tensor:
    """Small integers, whose products have one right result in float32."""
    return torch.randint(-4, 5, shape).float()


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
def test_a_product_has_torchs_result_by_a_kernel_of_outblas(name: str) -> None:
    expected = PRODUCTS[name](ON_CPU)

    with aten._enable(rules()) as enabled:
        got = PRODUCTS[name](ON_CPU)

    assert torch.equal(got, expected)
    assert set(enabled.decisions.values()) == {aten.OURS}


class Weight(torch.nn.Parameter):
    """As those of servers of models."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("kind", [Weight, Tagged])
def test_a_subclass_is_taken_and_results_have_torchs_types(kind: type[Tensor]) -> None:
    """Those of the backward pass, too."""

    def types() -> list[type]:
        weight = B.t().contiguous()
        weight = kind(weight) if kind is Weight else weight.requires_grad_().as_subclass(kind)
        a = A.clone().requires_grad_()
        y = F.linear(a, weight)
        return [type(y), *map(type, torch.autograd.grad(y.as_subclass(Tensor).sum(), [a, weight]))]

    expected = types()

    with aten._enable(rules()) as enabled:
        assert types() == expected
    assert set(enabled.decisions.values()) == {aten.OURS}


# ---- transforms and compilation
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_attention_and_compiled_programs_call_the_overridden_operators() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    tokens = torch.randn(2, 3, 8)
    expected, _ = attention(tokens, tokens, tokens, need_weights=False)
    compiled = torch.compile(lambda a, b: torch.relu(a @ b), backend="aot_eager")

    with aten._enable(rules()) as enabled:
        with FakeTensorMode() as mode:
            assert (mode.from_tensor(A) @ mode.from_tensor(B)).shape == (6, 4)
        assert enabled.decisions == {}, "a fake product is not computed"
        got, _ = attention(tokens, tokens, tokens, need_weights=False)
        assert torch.equal(compiled(A, B), torch.relu(A @ B))

    torch.testing.assert_close(got, expected)
    assert set(enabled.decisions.values()) == {aten.OURS}


# ---- what stays with torch
# A product, why it stays with torch ("" where no kernel has it), and changes of the rules.
STAYING: dict[str, tuple[Callable[[], Tensor], str, dict[str, Any]]] = {
    "another dtype": (
        lambda: A.double() @ B.double(),
        "torch.float64 is not among the dtypes",
        {},
    ),
    "complex numbers": (
        lambda: A.to(torch.complex64) @ B.to(torch.complex64),
        "torch.complex64 is not among the dtypes",
        {},
    ),
    "integers": (lambda: A.long() @ B.long(), "torch.int64 is not among the dtypes", {}),
    "no rows": (lambda: A[:0] @ B, "nothing is multiplied", {}),
    "no columns of A": (lambda: A[:, :0] @ B[:0], "nothing is multiplied", {}),
    "small": (lambda: A @ B, "its 240 FLOP are less than min_flops, 241", {"min_flops": 241}),
    "filtered": (
        lambda: A @ B,
        "the filter does not take it",
        {"filter": lambda product: product.M != 6},
    ),
    "out of another shape": (
        lambda: torch.mm(A, B, out=torch.empty(0)),
        r"out.shape is (0,)",
        {},
    ),
    "on a CPU": (lambda: A @ B, "CPU tensors", {"kernel": ""}),
    # Kernels have no other addend of a batch than a residual, over which they do not write.
    "a scaled batch": (lambda: torch.baddbmm(BATCH_C, BATCH_A, BATCH_B, alpha=2), "", {}),
    "a scaled addend": (lambda: torch.baddbmm(BATCH_C, BATCH_A, BATCH_B, beta=0.5), "", {}),
    "a batch in place": (lambda: BATCH_C.clone().baddbmm_(BATCH_A, BATCH_B), "", {}),
    "a vector": (lambda: torch.mv(A, B[:, 0]), "", {}),
    "two vectors": (lambda: torch.dot(A[0], B[:, 0]), "", {}),
    "a column by a row": (lambda: torch.addr(C, A[:, 0], B[0]), "", {}),
}


@pytest.mark.parametrize("name", STAYING)
def test_a_product_that_is_not_covered_is_computed_by_torch(name: str) -> None:
    product, why, changes = STAYING[name]
    expected = product()

    with aten._enable(rules(**changes)) as enabled:
        got = product()

    assert torch.equal(got, expected)
    reasons = list(enabled.decisions.values())
    assert len(reasons) == bool(why)
    assert all(why in reason for reason in reasons)


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
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with aten._enable(rules()) as enabled:
        with monkeypatch.context() as patched:
            patched.setattr(aten_choice, "capturing", lambda device: True)
            captured = A @ B
            assert enabled.decisions == {}
        A @ B

    assert torch.equal(captured, A @ B)
    assert enabled.decisions == {"mm 6x4x5 float32": aten.OURS}


def test_a_filter_is_asked_once_for_each_kind_and_its_own_products_belong_to_torch() -> None:
    """Else it would be asked about those for ever."""
    asked: list[Product] = []

    def note(product: Product) -> bool:
        asked.append(product)
        return bool((A @ B).sum() == (A @ B).sum())

    with aten._enable(rules(filter=note)) as enabled:
        for _ in range(3):
            torch.bmm(BATCH_A, BATCH_B)

    assert asked == [Product("bmm", 3, 6, 4, 5, torch.float32)]
    assert asked[0].flops == 720
    assert enabled.decisions == {"bmm 3x6x4x5 float32": aten.OURS}


@pytest.mark.filterwarnings("ignore::outblas.FallbackWarning", "ignore::RuntimeWarning")
def test_a_product_that_torch_computed_for_matmul_stays_with_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its plan calls torch's product, which is overridden."""
    forbidden = Mock(side_effect=CompileForbidden("not in the cache"))
    monkeypatch.setattr(launcher, "no_kernel_reason", lambda problem: None)
    monkeypatch.setattr(launcher, "best_launcher", forbidden)
    outblas.matmul(A, B)

    with aten._enable(rules(kernel="")) as enabled:
        for _ in range(2):
            assert torch.equal(torch.mm(A, B), outblas.matmul(A, B))
        assert torch.equal(torch.mm(A, B), (A.unsqueeze(-1) * B).sum(1))

    (decided,) = enabled.decisions.values()
    assert "not in the cache" in decided


# ---- arguments
WRONG_ARGUMENTS: dict[str, tuple[type[Exception], dict[str, Any]]] = {
    "dtypes is torch.float16, expected a collection": (TypeError, {"dtypes": torch.float16}),
    "dtypes has 'float16', expected torch dtypes": (TypeError, {"dtypes": ["float16"]}),
    "dtypes has torch.int8, expected some of": (ValueError, {"dtypes": [torch.int8]}),
    "min_flops is '1e6', expected a number": (TypeError, {"min_flops": "1e6"}),
    "min_flops is -1, expected 0 or more": (ValueError, {"min_flops": -1}),
    "min_gain is nan, expected 0 or more": (ValueError, {"min_gain": float("nan")}),
    "filter is 'mm', expected a function": (TypeError, {"filter": "mm"}),
    # A promise of all products leaves none out.
    "min_flops is .* with batch_invariant=True, expected none": (
        ValueError,
        {"batch_invariant": True, "min_flops": 1},
    ),
    "min_gain is .* with batch_invariant=True, expected none": (
        ValueError,
        {"batch_invariant": True, "min_gain": 1.0},
    ),
    "filter is .* with batch_invariant=True, expected none": (
        ValueError,
        {"batch_invariant": True, "filter": lambda product: True},
    ),
    r"dtypes has torch\.float8_e4m3fn with batch": (
        ValueError,
        {"batch_invariant": True, "dtypes": [torch.float8_e4m3fn]},
    ),
}


@pytest.mark.parametrize("message", WRONG_ARGUMENTS)
def test_an_argument_that_makes_no_sense_is_refused(message: str) -> None:
    error, given = WRONG_ARGUMENTS[message]

    with pytest.raises(error, match=message):
        outblas.enable(**given)

    assert aten._active is None


@pytest.mark.filterwarnings("ignore:outblas. enable")
def test_what_is_taken_by_default() -> None:
    plain, promised = outblas.enable(), outblas.enable(batch_invariant=True)

    assert plain._rules.dtypes == (torch.float16, torch.bfloat16)
    assert promised._rules.dtypes == (torch.float16, torch.bfloat16, torch.float32)
    assert (plain._rules.min_gain, promised._rules.min_gain) == (1.0, 0)
    assert outblas.enable(dtypes=[torch.float8_e5m2])._rules.dtypes == (torch.float8_e5m2,)


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
