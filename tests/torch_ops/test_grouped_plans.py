"""Plans of grouped products: a call like one before is not checked and described again, has the
same result as if it were, and is still seen by whoever observes operators.
"""

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import outblas
from outblas.core import grouped
from outblas.core.compiling import CompileForbidden
from outblas.core.errors import OperandError
from outblas.kernels import grouped as portable
from outblas.runtime import dispatch

pytestmark = pytest.mark.interpreter

Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def _no_plans() -> None:
    torch.manual_seed(0)
    dispatch.clear_cache()


def integers(*shape: int) -> Tensor:
    return torch.randint(-3, 4, shape).float()


def ends(*given: int) -> Tensor:
    return torch.tensor(given, dtype=torch.int32)


TOKENS, EXPERTS, OFFS = integers(10, 8), integers(3, 8, 16), ends(4, 4, 10)
BIAS, RESIDUAL = integers(3, 16), integers(10, 16)
ORDER = torch.randperm(10)
WEIGHTS = torch.tensor([0.5, 1, 2, 0.25, 4, 1, 0.5, 2, 1, 1])


def multiply(tokens: Tensor = TOKENS, experts: Tensor = EXPERTS, **named: Any) -> Tensor:
    given: dict[str, Any] = {"offs": OFFS, "kernel": "portable"} | named
    return outblas.grouped_mm(tokens, experts, **given)


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Counts the calls that were checked and described."""
    counter = Mock(wraps=grouped.describe)
    monkeypatch.setattr(grouped, "describe", counter)
    return counter


CALLS: dict[str, Callable[[], Tensor]] = {
    "bare": multiply,
    "everything": lambda: multiply(
        bias=BIAS,
        activation="relu",
        residual=RESIDUAL,
        a_index=ORDER,
        scatter_index=ORDER.flip(0),
        scatter_weights=WEIGHTS,
    ),
    "columns": lambda: outblas.grouped_mm(EXPERTS.mT, TOKENS.mT, offs=OFFS, kernel="portable"),
    "terms": lambda: outblas.grouped_mm(TOKENS.mT, RESIDUAL, offs=OFFS, kernel="portable"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_described_once(name: str, described: Mock) -> None:
    results = [CALLS[name]() for _ in range(3)]

    assert described.call_count == 1
    assert all(torch.equal(each, results[0]) for each in results)


def test_other_sizes_of_groups_take_the_same_plan(described: Mock) -> None:
    for given in ((4, 4, 10), (0, 10, 10), (1, 2, 10)):
        got = multiply(offs=ends(*given))

        begins = (0, *given[:-1])
        parts = [TOKENS[i:j] @ expert for i, j, expert in zip(begins, given, EXPERTS, strict=True)]
        assert torch.equal(got, torch.cat(parts))
    assert described.call_count == 1


def test_products_of_gradients_take_plans(described: Mock) -> None:
    leaf = EXPERTS.clone().requires_grad_()
    for _ in range(3):
        (multiply(experts=leaf) * 2).sum().backward()

    assert described.call_count == 2  # the product, and the gradient of experts


# Two calls of which one must not take the plan of the other.
MISALIGNED = integers(81)[1:].view(10, 8)
ALIKE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "strides": ({}, {"experts": EXPERTS.mT.contiguous().mT}),
    "an address": ({}, {"tokens": MISALIGNED}),
    "a dtype": ({}, {"tokens": TOKENS.half(), "experts": EXPERTS.half()}),
    "the dtype of the result": (
        {"tokens": TOKENS.half(), "experts": EXPERTS.half()},
        {"tokens": TOKENS.half(), "experts": EXPERTS.half(), "out_dtype": torch.float32},
    ),
    "an activation": ({}, {"activation": "relu"}),
    "a gate": ({}, {"activation": "reglu"}),
    "a bias": ({}, {"bias": BIAS}),
    "strides of a bias": ({"bias": BIAS}, {"bias": BIAS.t().contiguous().t()}),
    "a residual for a bias": ({"residual": RESIDUAL}, {"bias": BIAS}),
    "a gather for a scatter": ({"a_index": ORDER}, {"scatter_index": ORDER}),
    "the dtype of an index": ({"a_index": ORDER}, {"a_index": ORDER.int()}),
    "rows that are gathered": ({"a_index": ORDER}, {"a_index": ORDER[:4], "offs": ends(1, 3, 4)}),
    "ends with a stride": ({}, {"offs": OFFS.repeat_interleave(2)[::2]}),
}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["as listed", "in turn"])
@pytest.mark.parametrize("name", ALIKE)
def test_calls_that_are_alike_take_plans_of_their_own(
    name: str, order: tuple[int, int], described: Mock
) -> None:
    calls = [ALIKE[name][i] for i in order]
    expected = []
    for each in calls:
        dispatch.clear_cache()
        expected.append(multiply(**each))

    dispatch.clear_cache()
    described.reset_mock()
    got = [multiply(**each) for each in calls * 2]

    assert [each.dtype for each in got] == [each.dtype for each in expected * 2]
    assert all(map(torch.equal, got, expected * 2))
    assert described.call_count == 2


def test_a_tensor_that_is_given_twice_is_computed_as_ever() -> None:
    for _ in range(3):
        got = multiply(a_index=ORDER, scatter_index=ORDER)

    assert torch.equal(got[ORDER], multiply(TOKENS[ORDER]))


@pytest.mark.filterwarnings("ignore:torch takes this call")
def test_a_call_of_torchs_takes_no_plan_of_a_kernel(described: Mock) -> None:
    """Without a kernel's name torch computes products of CPU tensors."""
    kernels = [multiply(kernel=name) for name in ("portable", None, "portable", None)]

    assert all(torch.equal(each, kernels[0]) for each in kernels)
    assert described.call_count == 1


# ---- who observes or records
def test_gradients_are_recorded_after_a_call_without_them() -> None:
    leaf = EXPERTS.clone().requires_grad_()
    with torch.no_grad():
        for _ in range(2):
            assert not multiply(experts=leaf).requires_grad

    assert multiply(experts=leaf).requires_grad


class Seen(TorchDispatchMode):
    """Notes the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_a_mode_sees_the_operator_of_a_call_that_has_a_plan() -> None:
    expected = [multiply() for _ in range(2)]

    with Seen() as seen:
        got = multiply()

    assert torch.equal(got, expected[0])
    assert seen.names[0] == "outblas.grouped_mm.default"


def test_a_mode_of_fake_tensors_computes_nothing_of_a_call_that_has_a_plan() -> None:
    for _ in range(2):
        multiply()

    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(multiply(), FakeTensor)


def test_a_tracer_records_the_operator_of_a_call_that_has_a_plan() -> None:
    for _ in range(2):
        multiply()

    graph = make_fx(lambda: multiply())()

    assert "outblas.grouped_mm.default" in {str(node.target) for node in graph.graph.nodes}


def test_a_call_that_has_a_plan_is_counted() -> None:
    for _ in range(2):
        multiply()

    with FlopCounterMode(display=False) as counter:
        multiply()

    assert counter.get_total_flops() == 2 * 10 * 16 * 8


def test_the_profiler_records_the_operator_of_a_call_that_has_a_plan() -> None:
    for _ in range(2):
        multiply()

    with torch.profiler.profile() as profile:
        multiply()

    assert "outblas::grouped_mm" in {each.key for each in profile.key_averages()}


def test_a_function_mode_sees_a_call_that_has_a_plan() -> None:
    class Replaced(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if function is outblas.grouped_mm:
                return torch.zeros(())
            return function(*args, **(kwargs or {}))

    for _ in range(2):
        multiply()

    with Replaced():
        assert multiply().shape == ()


def test_a_tangent_is_refused_after_a_call_that_has_a_plan() -> None:
    for _ in range(2):
        multiply()

    with forward_ad.dual_level(), pytest.raises(OperandError, match="forward-mode gradient"):
        multiply(forward_ad.make_dual(TOKENS, TOKENS))


def test_vmap_maps_a_call_that_has_a_plan() -> None:
    tokens = torch.stack([TOKENS, 2 * TOKENS])
    expected = torch.stack([multiply(), 2 * multiply()])

    assert torch.equal(torch.vmap(multiply)(tokens), expected)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_compiled_program_has_the_operator_in_its_graph() -> None:
    for _ in range(2):
        multiply()
    names: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        names.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    compiled = torch.compile(multiply, backend=backend, fullgraph=True)

    assert torch.equal(compiled(TOKENS), multiply())
    assert any("grouped_mm" in name for name in names)


def test_autocast_casts_nothing_of_a_call_that_has_a_plan() -> None:
    expected = [multiply() for _ in range(2)]

    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = [multiply() for _ in range(2)]

    assert [each.dtype for each in got] == [torch.float32] * 2
    assert all(map(torch.equal, got, expected))


def test_inference_mode_has_results_of_its_own() -> None:
    expected = multiply()

    with torch.inference_mode():
        got = [multiply() for _ in range(3)]

    assert all(each.is_inference() and torch.equal(each, expected) for each in got)
    assert not multiply().is_inference()


# ---- what is wrong is told each time
def test_operands_that_do_not_fit_are_refused_after_a_call_that_has_a_plan() -> None:
    for _ in range(2):
        multiply()

    for _ in range(2):
        with pytest.raises(OperandError, match=r"mat_b.shape\[0\] is 2 but offs has 3 elements"):
            multiply(experts=EXPERTS[:2])


def test_a_kernel_that_may_not_be_compiled_any_more_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for _ in range(2):
        multiply()
    monkeypatch.setattr(portable, "run", Mock(side_effect=CompileForbidden("not in the cache")))

    with pytest.raises(CompileForbidden, match="not in the cache"):
        multiply()
