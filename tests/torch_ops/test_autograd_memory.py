"""What a call with gradients multiplies and keeps, and where its gradients lie in memory."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from support.gradients import COLD_THEN_WARM, stored_gradient

from outblas import addmm, linear, matmul
from outblas.call import dispatch
from outblas.call.epilogue import Activation
from outblas.torch_ops import ops

pytestmark = pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")

Tensor = torch.Tensor
Shape = tuple[int, ...]


# ---- what is multiplied and kept
@dataclass
class Products:
    """The products that plans of CPU tensors computed: the shapes of A and B, and of x where it
    was stored.
    """

    shapes: list[tuple[Shape, ...]] = field(default_factory=list)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Products:
    """Records every product that a plan has torch compute, in warm calls and backward passes
    too.
    """
    seen = Products()
    plan_of = dispatch._fallback_plan

    def recording_plan(*given: Any) -> Callable[..., Tensor]:
        run = plan_of(*given)

        def execute(*tensors: Any) -> Tensor:
            result: Tensor = run(*tensors)
            operands, stored = tensors[:2], tensors[8:]
            present = [t for t in (*operands, *stored) if t is not None]
            seen.shapes.append(tuple(tuple(t.shape) for t in present))
            return result

        return execute

    monkeypatch.setattr(dispatch, "_fallback_plan", recording_plan)
    return seen


NEEDED = [(), ("x",), ("w",), ("bias",), ("x", "w", "bias")]


def linear_operands(needed: tuple[str, ...]) -> list[Tensor]:
    """x, w and bias of a linear layer, of which those that are named need gradients."""
    tensors = {"x": torch.randn(2, 3, 4), "w": torch.randn(5, 4), "bias": torch.randn(5)}
    return [t.requires_grad_(name in needed) for name, t in tensors.items()]


@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("needed", NEEDED, ids=" ".join)
def test_a_call_keeps_and_multiplies_only_for_the_gradients_that_are_needed(
    needed: tuple[str, ...], activation: Activation | None, products: Products
) -> None:
    operands = linear_operands(needed)
    kept = [(2, 3, 5)] if activation and needed else []
    product_for = {"x": ((2, 3, 5), (5, 4)), "w": ((5, 6), (6, 4))}

    for call in COLD_THEN_WARM:
        products.shapes.clear()
        y = linear(*operands, activation=activation)
        forward = products.shapes.copy()
        products.shapes.clear()
        if needed:
            y.sum().backward()

        assert forward == [((2, 3, 4), (4, 5), *kept)], f"call {call}"
        expected = [product_for[name] for name in needed if name in product_for]
        assert products.shapes == expected, f"call {call}"


# ---- where gradients lie
PLACES: dict[str, tuple[Callable[..., Tensor], Shape, Shape]] = {
    "linear": (lambda x, w: linear(x, w), (2, 6, 5), (4, 5)),
    "linear gelu": (lambda x, w: linear(x, w, activation="gelu"), (6, 5), (4, 5)),
    "linear with one output": (lambda x, w: linear(x, w), (6, 5), (1, 5)),
    "matmul": (lambda x, w: matmul(x, w), (6, 5), (5, 4)),
    "matmul b.t()": (lambda x, w: matmul(x, w.t()), (6, 5), (4, 5)),
    "matmul a.t()": (lambda x, w: matmul(w.t(), x), (5, 6), (5, 4)),
    "batches b.mT": (lambda x, w: matmul(x, w.mT), (3, 6, 5), (3, 4, 5)),
    "batches a.mT": (lambda x, w: matmul(w.mT, x), (3, 5, 6), (3, 5, 4)),
    "a.mT by vectors": (lambda x, w: matmul(w.t(), x), (5,), (5, 4)),
    "shared b.mT": (lambda x, w: matmul(x, w.mT), (3, 6, 5), (4, 5)),
    "shared batch b.mT": (lambda x, w: matmul(x, w.mT), (2, 3, 6, 5), (3, 4, 5)),
    "batch of one b.mT": (lambda x, w: matmul(x, w.mT), (3, 6, 5), (1, 4, 5)),
    "addmm": (lambda x, w: addmm(x[:, :1], x, w.t(), alpha=0.5), (6, 5), (4, 5)),
    "ops.gemm": (
        lambda x, w: ops.gemm(x, w.t(), None, x[:, :1], None, 1, 1, "relu"),
        (6, 5),
        (4, 5),
    ),
}


def assert_written_in_place(call: Callable[[], Tensor], w: Tensor) -> None:
    """A backward pass leaves the gradient that reaches the leaf w in the memory where it was
    computed, and it lies as w does.
    """
    computed: list[tuple[int, tuple[int, ...]]] = []

    def note(gradient: Tensor) -> None:
        # Autograd copies a gradient that anyone else holds: the tensor itself must not be kept.
        computed.append((gradient.data_ptr(), gradient.stride()))

    handle = w.register_hook(note)
    w.grad = None

    call().square().sum().backward()

    handle.remove()
    ((address, strides),) = computed
    gradient = stored_gradient(w)
    assert gradient.data_ptr() == address
    # The stride of a dimension of one element says nothing.
    dimensions = [i for i, size in enumerate(w.shape) if size > 1]
    expected = [w.stride(i) for i in dimensions]
    assert [strides[i] for i in dimensions] == expected
    assert [gradient.stride(i) for i in dimensions] == expected


@pytest.mark.parametrize("name", PLACES)
def test_a_gradient_is_written_where_it_stays(name: str) -> None:
    call, shape_x, shape_w = PLACES[name]
    x, by_rows = torch.randn(shape_x), torch.randn(shape_w)
    for w in (by_rows, by_rows.mT.contiguous().mT):
        w.requires_grad_()

        for _ in COLD_THEN_WARM:
            assert_written_in_place(lambda w=w: call(x, w), w)  # type: ignore[misc]


def test_a_compiled_program_copies_no_gradient() -> None:
    torch._dynamo.reset()
    x, w = torch.randn(6, 5), torch.randn(4, 5).requires_grad_()
    compiled = torch.compile(
        lambda x, w: linear(x, w, activation="gelu"), backend="aot_eager", fullgraph=True
    )

    for _ in range(2):
        assert_written_in_place(lambda: compiled(x, w), w)


# ---- sums over a batch
@pytest.mark.parametrize("columns_first", [False, True], ids=["row-major", "column-major"])
def test_the_gradient_of_a_shared_a_is_one_sum(columns_first: bool) -> None:
    """Parts of it, of matrices of the batch, are beyond what fp16 holds, and it is not."""
    for shape in ((13, 32), (1, 13, 32), *([] if columns_first else [(32,)])):
        a = torch.ones(shape, dtype=torch.float16)
        a = (a.mT.contiguous().mT if columns_first else a).requires_grad_()
        b = torch.full((2, 32, 8), 100.0, dtype=torch.float16)
        y = matmul(a, b)
        grad = torch.full_like(y, 100.0)
        grad[1] = -99.0

        y.backward(grad)

        assert torch.equal(a.grad, torch.full_like(a, 800.0))
        assert a.grad.stride() == a.stride()
