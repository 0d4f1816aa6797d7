"""`outblas.accumulate_gradients`: products that add to `.grad` in place, and who must get the
gradient instead.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gradients import GRADIENT_KINDS
from torch.utils.checkpoint import checkpoint

import outblas
from outblas import accumulate_gradients
from outblas.call.context_flag import accumulation as context_flag
from outblas.torch_ops import accumulation, linear

pytest_plugins = ("support.eager_fixtures",)
pytestmark = [
    pytest.mark.usefixtures("cpu_plans_run"),
    pytest.mark.filterwarnings("ignore::outblas.FallbackWarning"),
]

Tensor = torch.Tensor
Loss = Callable[[Any, Tensor], Tensor]


@pytest.fixture(autouse=True)
def added(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each gradient of a weight that a backward pass computes within the context: whether the
    product added it to `.grad`. No context has been entered before.
    """
    found: list[bool] = []

    def noted(*given: Any) -> bool:
        found.append(accumulation.add_to_grad(*given))
        return found[-1]

    monkeypatch.setattr(linear, "add_to_grad", noted)
    monkeypatch.setattr(context_flag, "ever", False)
    return found


def integers(*shape: int) -> Tensor:
    """Small integers, whose sums have one right result in float32."""
    return torch.randint(-4, 5, shape).float()


def layer_of(columns: int, rows: int, activation: Any = None, bias: bool = True) -> outblas.Linear:
    layer = outblas.Linear(columns, rows, bias=bias, activation=activation)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(integers(*parameter.shape))
    return layer


def by_torch(layer: Any) -> Any:
    """The same layers as torch computes them."""
    theirs = copy.deepcopy(layer)
    modules: list[Any] = [m for m in theirs.modules() if isinstance(m, outblas.Linear)]
    for module in modules:
        module.__class__ = torch.nn.Linear
    return theirs


def weighted_sum(model: Any, x: Tensor) -> Tensor:
    y: Tensor = model(x)
    return (y * torch.arange(1.0, 1 + y.shape[-1])).sum()


def gradients(model: Any) -> list[Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


def steps(model: Any, inputs: list[Tensor], loss: Loss) -> None:
    for x in inputs:
        loss(model, x).backward()


# ---- what is added
def summed(model: Any, x: Tensor) -> Tensor:
    y: Tensor = model(x)
    return y.sum()


def tied(model: Any, x: Tensor) -> Tensor:
    """Two calls of a weight, and a use that is not ours, whose gradient autograd adds."""
    y: Tensor = model(model(x))
    return y.sum() + model.weight.sum()


def by_checkpoint(model: Any, x: Tensor, reentrant: bool = False) -> Tensor:
    y: Any = checkpoint(model, x, use_reentrant=reentrant)
    return y.sum()


def by_checkpoint_reentrant(model: Any, x: Tensor) -> Tensor:
    return by_checkpoint(model, x.requires_grad_(), reentrant=True)


# A layer, the shape of inputs, the loss, and which of the gradients of three steps are added.
STEPS: dict[str, tuple[Callable[[], Any], tuple[int, ...], Loss, list[bool]]] = {
    "no bias": (lambda: layer_of(5, 4, bias=False), (6, 5), summed, [False, True, True]),
    "batch": (lambda: layer_of(5, 4), (2, 1, 3, 5), summed, [False, True, True]),
    "one row": (lambda: layer_of(5, 4), (1, 5), summed, [False, True, True]),
    "activation": (lambda: layer_of(5, 4, activation="relu"), (6, 5), summed, [False, True, True]),
    "two calls": (lambda: layer_of(4, 4), (6, 4), tied, [False] * 2 + [True] * 4),
    "checkpoint": (lambda: layer_of(5, 4), (6, 5), by_checkpoint, [False, True, True]),
    "reentrant": (lambda: layer_of(5, 4), (6, 5), by_checkpoint_reentrant, [False, True, True]),
}


@pytest.mark.parametrize("name", STEPS)
def test_micro_batches_add_up_to_the_gradients_of_torch(name: str, added: list[bool]) -> None:
    layer_that, shape, loss, expected = STEPS[name]
    layer, inputs = layer_that(), [integers(*shape) for _ in range(3)]
    without = copy.deepcopy(layer)

    with accumulate_gradients():
        steps(layer, inputs, loss)
    seen = list(added)

    theirs = without if layer.activation else by_torch(without)
    steps(theirs, [x.detach() for x in inputs], tied if loss is tied else summed)
    torch.testing.assert_close(gradients(layer), gradients(theirs), rtol=0, atol=0)
    assert seen == expected


def test_the_gradient_stays_the_same_tensor_and_counts_as_written(added: list[bool]) -> None:
    layer = layer_of(5, 4)
    weight = layer.weight
    weight.grad = integers(4, 5)
    grad, before, version = weight.grad, weight.grad.clone(), weight.grad._version
    x = integers(6, 5)

    with accumulate_gradients():
        layer(x).sum().backward()

    assert weight.grad is grad
    assert grad._version > version
    assert torch.equal(grad, before + torch.ones(6, 4).t() @ x)
    assert added == [True]


@pytest.mark.parametrize("cpu_plans_run", ["portable"], indirect=True)
def test_the_sum_of_16_bit_gradients_is_rounded_once(added: list[bool]) -> None:
    torch.manual_seed(0)
    layer = outblas.Linear(64, 16, bias=False, dtype=torch.bfloat16)
    x, g = (torch.randn(96, n).bfloat16() for n in (64, 16))
    before = torch.randn(16, 64).bfloat16()
    layer.weight.grad = before.clone()

    with accumulate_gradients():
        layer(x).backward(g)

    exact = g.double().t() @ x.double() + before.double()
    assert layer.weight.grad is not None
    error = (layer.weight.grad.double() - exact).abs()
    half_a_unit = 2.0 ** (exact.abs().log2().floor() - 8)
    assert (error <= 1.001 * half_a_unit).all()
    assert added == [True]


# ---- whose gradient autograd gets
def test_nothing_is_added_outside_of_the_context(added: list[bool]) -> None:
    layer, x = layer_of(5, 4), integers(6, 5)
    layer.weight.grad = torch.zeros(4, 5)

    layer(x).sum().backward()
    with accumulate_gradients(), accumulate_gradients(False):
        layer(x).sum().backward()
    with pytest.raises(TypeError, match="enabled is int, expected a bool"):
        accumulate_gradients(1)  # type: ignore[arg-type]

    assert added == []
    assert torch.equal(layer.weight.grad, 2 * torch.ones(6, 4).t() @ x)


def test_autograd_grad_returns_gradients_and_adds_none(added: list[bool]) -> None:
    for leaves in ("weight", "x", "both", "output"):
        layer, x = layer_of(5, 4), integers(6, 5).requires_grad_()
        before = layer.weight.grad = integers(4, 5)
        unchanged = before.clone()
        with accumulate_gradients():
            y = layer(x)
        of = {"weight": [layer.weight], "x": [x], "both": [x, layer.weight], "output": [y]}[leaves]

        returned = dict(zip(map(id, of), torch.autograd.grad(y.sum(), of), strict=True))

        assert torch.equal(before, unchanged)
        assert True not in added
        if leaves in ("weight", "both"):
            assert torch.equal(returned[id(layer.weight)], torch.ones(6, 4).t() @ x)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("activation", [None, "silu"])
def test_a_recorded_sum_is_another_tensor(activation: Any, added: list[bool]) -> None:
    """As autograd makes it, even where nothing of the sum depends on what needs a gradient."""
    layer, x = layer_of(5, 4, bias=False, activation=activation), integers(6, 5)
    before = layer.weight.grad = integers(4, 5)
    unchanged = before.clone()
    without = copy.deepcopy(layer)
    without.weight.grad = unchanged.clone()

    with accumulate_gradients():
        layer(x).sum().backward(create_graph=True)
    without(x).sum().backward(create_graph=True)

    assert torch.equal(before, unchanged)
    torch.testing.assert_close(layer.weight.grad, without.weight.grad)
    assert layer.weight.grad.requires_grad == without.weight.grad.requires_grad
    assert added == [False]


Seen = list[Tensor | None]


def with_tensor_hook(weight: Tensor, seen: Seen) -> None:
    weight.register_hook(lambda grad: seen.append(None if grad is None else grad.clone()))


def with_hook_after_the_sum(weight: Tensor, seen: Seen) -> None:
    def note(parameter: Tensor) -> None:
        assert parameter.grad is not None
        seen.append(parameter.grad.clone())

    weight.register_post_accumulate_grad_hook(note)


@pytest.mark.parametrize("hook", [with_tensor_hook, with_hook_after_the_sum])
def test_hooks_of_a_weight_see_what_they_see_without_us(
    hook: Callable[[Tensor, Seen], None], added: list[bool]
) -> None:
    layer = layer_of(5, 4)
    theirs, inputs = by_torch(layer), [integers(6, 5) for _ in range(2)]
    ours_seen: Seen = []
    theirs_seen: Seen = []
    hook(layer.weight, ours_seen)
    hook(theirs.weight, theirs_seen)

    with accumulate_gradients():
        steps(layer, inputs, weighted_sum)

    steps(theirs, inputs, weighted_sum)
    torch.testing.assert_close(ours_seen, theirs_seen, rtol=0, atol=0)
    assert len(ours_seen) == 2
    assert added == [False, False]


# A gradient that a weight has, by its value and the input.
STORED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "by columns": lambda grad, x: grad.t().contiguous().t(),
    "sparse": lambda grad, x: grad.to_sparse(),
    "in the memory of an operand": lambda grad, x: x[:4].copy_(grad),
}


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
@pytest.mark.parametrize("stored", STORED)
def test_a_gradient_in_other_memory_is_left_to_autograd(stored: str, added: list[bool]) -> None:
    layer, x, before = layer_of(5, 4), integers(6, 5), integers(4, 5)
    layer.weight.grad = STORED[stored](before.clone(), x)
    expected = before + torch.ones(6, 4).t() @ x

    with accumulate_gradients():
        layer(x).sum().backward()

    assert layer.weight.grad is not None
    assert torch.equal(layer.weight.grad.to_dense(), expected)
    assert added == [False]


@pytest.mark.parametrize("kind", ["collective", "wrapper"])
def test_a_gradient_in_a_wrapper_is_left_to_autograd(kind: str, added: list[bool]) -> None:
    layer, x = layer_of(5, 4), integers(6, 5)
    theirs = by_torch(layer)

    for model in (layer, theirs):
        for _ in range(2):
            with accumulate_gradients():
                y = model(x)
            y.backward(GRADIENT_KINDS[kind](torch.ones(6, 4)))

    assert added == [False, False]
    for got, want in zip(gradients(layer), gradients(theirs), strict=True):
        assert type(got) is type(want)
        assert str(got) == str(want)


def test_compiled_programs_and_other_weights_have_the_gradients_of_torch(
    added: list[bool],
) -> None:
    layer = layer_of(5, 4)
    theirs, inputs = by_torch(layer), [integers(6, 5) for _ in range(2)]
    compiled = torch.compile(layer, backend="aot_eager")
    leaf = integers(4, 5).requires_grad_()
    leaf.grad = torch.zeros(4, 5)

    with accumulate_gradients():
        steps(compiled, inputs, summed)
        outblas.linear(inputs[0], 2 * leaf).sum().backward()  # of a weight that is no leaf

    steps(theirs, inputs, summed)
    torch.testing.assert_close(gradients(layer), gradients(theirs), rtol=0, atol=0)
    assert torch.equal(leaf.grad, 2 * torch.ones(6, 4).t() @ inputs[0])
    assert True not in added


# ---- torch's data parallelism, which hooks the nodes that accumulate
@pytest.mark.parametrize("cpu_plans_run", ["torch's product"], indirect=True)
@pytest.mark.parametrize("views", [False, True])
def test_data_parallel_layers_average_what_was_added(
    views: bool, tmp_path: Path, added: list[bool]
) -> None:
    distributed = torch.distributed

    def note(
        reduced: list[Tensor], bucket: torch.distributed.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        reduced.append(bucket.buffer().clone())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    layer, inputs = layer_of(5, 4), [integers(6, 5) for _ in range(3)]
    theirs = by_torch(layer)
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        parallel = torch.nn.parallel.DistributedDataParallel(layer, gradient_as_bucket_view=views)
        reduced: list[Tensor] = []
        parallel.register_comm_hook(reduced, note)
        with accumulate_gradients():
            with parallel.no_sync():
                steps(parallel, inputs[:2], lambda model, x: model(x).sum())
            parallel(inputs[2]).sum().backward()
    finally:
        distributed.destroy_process_group()

    steps(theirs, inputs, lambda model, x: model(x).sum())
    torch.testing.assert_close(gradients(layer), gradients(theirs), rtol=0, atol=0)
    wanted = torch.cat([g.flatten() for g in gradients(theirs) if g is not None])
    assert len(reduced) == 1
    assert torch.equal(reduced[0].sort().values, wanted.sort().values)
    assert added == [False, True, True]
