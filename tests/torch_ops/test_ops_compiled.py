"""Compiled and exported programs keep our operators, in one graph, for sizes that vary."""

import types
from collections.abc import Callable

import pytest
import torch
from torch import vmap
from torch.func import grad
from torch.nn.functional import ScalingType

from outblas import (
    FP8Linear,
    addmm,
    grouped_mm,
    linear,
    matmul,
    moe_mlp,
    quantize,
    scaled_mm,
)
from outblas.base.compat.torch_private import dataclasses_are_constants
from outblas.base.configs import to_text
from outblas.call.dispatch import Call
from outblas.kernels import portable
from outblas.torch_ops import ops

pytestmark = pytest.mark.filterwarnings(
    "ignore::outblas.FallbackWarning", "ignore::DeprecationWarning"
)

Tensor = torch.Tensor


class Perceptron(torch.nn.Module):
    """A gated layer, a residual one, and an addmm of a matmul."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 32), torch.nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = linear(x, self.up.weight, self.up.bias, activation="swiglu")
        x = linear(hidden, self.down.weight, self.down.bias, residual=x)
        square = matmul(self.down.weight[:, :8], self.up.weight[:8])
        return addmm(self.down.bias, x, square, alpha=0.5)


@pytest.mark.parametrize("dynamic", [None, True], ids=["static first", "dynamic"])
def test_compiled_training_is_one_graph(dynamic: bool | None) -> None:
    """On a GPU Inductor generates code for it."""
    torch._dynamo.reset()
    model = Perceptron()
    parameters = list(model.parameters())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)

    for rows in (6, 9):
        x = torch.randn(rows, 8)
        got, want = compiled(x), model(x)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(
            torch.autograd.grad(got.square().mean(), parameters),
            torch.autograd.grad(want.square().mean(), parameters),
        )


SMALL_TILES = portable.Config(block_m=32, block_n=32)


# torch 2.11 breaks the graph at a call with a config.
takes_configs = pytest.mark.skipif(
    not dataclasses_are_constants, reason="Dynamo takes no config for a constant"
)


@pytest.mark.parametrize(
    "fullgraph", [False, pytest.param(True, marks=takes_configs)], ids=["graphs", "one graph"]
)
def test_a_compiled_call_takes_another_config(
    fullgraph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    taken: list[str] = []

    def recorded(call: Call) -> Tensor:
        taken.append(call.config)
        return call.a @ call.b

    monkeypatch.setattr(ops, "run", recorded)
    named = types.SimpleNamespace(config=SMALL_TILES)
    compiled = torch.compile(
        lambda x: matmul(x, x, kernel="portable", config=named.config),
        backend="aot_eager",
        fullgraph=fullgraph,
    )

    compiled(torch.randn(8, 8))
    named.config = portable.Config(block_m=64)
    compiled(torch.randn(8, 8))

    assert taken == list(map(to_text, (SMALL_TILES, named.config)))


def test_a_compiled_call_of_no_kernel_raises_the_eager_error() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: matmul(x, x, kernel="portble"), backend="aot_eager")

    with pytest.raises(ValueError, match="did you mean 'portable'"):
        compiled(torch.randn(8, 8))


A, W, BIAS = torch.randn(6, 5), torch.randn(4, 5).requires_grad_(), torch.randn(4).requires_grad_()


def layer(x: Tensor) -> Tensor:
    return linear(x, W, BIAS, activation="gelu")


def layer_under_autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return layer(x)


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(layer_under_autocast, id="autocast"),
        pytest.param(vmap(layer), id="vmap"),
        pytest.param(grad(lambda x: layer(x).sum()), id="grad"),
    ],
)
def test_compiled_transforms_give_what_eager_ones_give(
    function: Callable[[Tensor], Tensor],
) -> None:
    torch._dynamo.reset()

    compiled = torch.compile(lambda x: function(x), backend="aot_eager", fullgraph=True)

    torch.testing.assert_close(compiled(A), function(A))


# ---- sizes that only a run tells
EXPERTS, DOWN = torch.randn(3, 16, 16), torch.randn(3, 8, 16)
SQUARE, ROW = torch.randn(16, 16), torch.randn(16)
FP8_LAYER = FP8Linear.from_linear(torch.nn.Linear(16, 8))
OFFS = torch.tensor([1, 2, 5], dtype=torch.int32)
NARROW = torch.randn(16, 16).to(torch.float8_e4m3fn)
ONE = torch.ones(())


def quantized_product(x: Tensor) -> Tensor:
    values, scale = quantize(x, "1x128")
    recipes = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    return scaled_mm(values, NARROW.t(), scale, recipes[0], ONE.view(1, 1), recipes[1])


# Functions of a tensor of a size that the graph does not know, (u, 16), and of another one. Those
# of a group are one program, because each program takes a second.
UNBACKED: dict[str, dict[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "products": {
        "inner size": lambda x, y: matmul(x.t(), y),
        "columns": lambda x, y: matmul(SQUARE, x.t(), bias=y[:, 0]),
        "batch": lambda x, y: matmul(x.view(-1, 4, 4), y.view(-1, 4, 4)),
        "batch and one": lambda x, y: matmul(x.view(-1, 4, 4), SQUARE[None, :4, :4]),
        "residual": lambda x, y: matmul(x, SQUARE, residual=y),
        "column bias": lambda x, y: matmul(x, SQUARE, bias=y[:, :1], activation="gelu"),
        "gated pairs": lambda x, y: matmul(SQUARE, torch.cat((x, x)).t(), activation="swiglu"),
        "addend": lambda x, y: addmm(y, x, SQUARE, beta=2),
        "addend of one": lambda x, y: addmm(x.sum()[None, None], x, SQUARE),
        "linear": lambda x, y: linear(x[None], SQUARE, ROW, activation="relu", residual=y),
    },
    "results written": {
        "out": lambda x, y: matmul(
            x.detach(), SQUARE, residual=y.detach(), out=torch.empty_like(x)
        ),
        "addmm out": lambda x, y: addmm(y.detach(), x.detach(), SQUARE, out=torch.empty_like(x)),
        "aux": lambda x, y: matmul(x.detach(), SQUARE, activation="relu", aux=torch.empty_like(x)),
    },
    "groups": {
        "groups": lambda x, y: grouped_mm(x, EXPERTS, offs=OFFS, residual=y, bias=EXPERTS[0, :3]),
        "groups of terms": lambda x, y: grouped_mm(x.t(), y, offs=OFFS),
        "a_index": lambda x, y: grouped_mm(
            x, EXPERTS, offs=OFFS, a_index=torch.arange(y.shape[0]).clamp(max=2)
        ),
        "scatter_index": lambda x, y: grouped_mm(
            x,
            EXPERTS,
            offs=OFFS,
            scatter_index=torch.arange(y.shape[0]),
            scatter_weights=y[:, 0],
            residual=y,
        ),
        "moe_mlp": lambda x, y: moe_mlp(
            x, EXPERTS, DOWN, torch.arange(y.shape[0])[:, None] % 3, y[:, :1]
        ),
    },
    "fp8": {
        "fp8 layer": lambda x, y: FP8_LAYER(x),
        "scaled_mm": lambda x, y: scaled_mm(
            *(x.detach().to(NARROW.dtype), NARROW.t()),
            *(ONE, ScalingType.TensorWise, ONE, ScalingType.TensorWise),
            residual=y.bfloat16(),
        ),
        "scales of blocks": lambda x, y: quantized_product(x.detach()),
    },
}


@pytest.mark.parametrize("group", UNBACKED)
def test_sizes_that_no_graph_knows_need_no_guard(group: str) -> None:
    torch._dynamo.reset()
    functions = UNBACKED[group]

    def program(x: Tensor, y: Tensor) -> list[Tensor]:
        x, y = x[x[:, 0] > 0], y[y[:, 0] > 0]
        return [function(x, y) for function in functions.values()]

    compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for chosen in ((0, 3, 4, 5, 8), (1, 2, 3, 4, 6)):
            x, y = torch.randn(9, 16), torch.randn(10, 16)
            for t in (x, y):
                t[:, 0] = -1
                t[list(chosen), 0] = 1
                t.requires_grad_()
            got, want = compiled(x, y), program(x, y)
            torch.testing.assert_close(got, want)
            if any(t.requires_grad for t in want):
                losses = [
                    torch.stack([t.sum().float() for t in found]).sum() for found in (got, want)
                ]
                torch.testing.assert_close(*(torch.autograd.grad(t, (x, y)) for t in losses))


def test_sizes_that_a_run_tells_to_differ_are_refused() -> None:
    torch._dynamo.reset()

    def call(x: Tensor, y: Tensor) -> Tensor:
        return matmul(x[x[:, 0] > 0], SQUARE, residual=y[y[:, 0] > 0])

    x, y = torch.ones(3, 16), torch.ones(4, 16)
    with (
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
        pytest.raises(RuntimeError, match=r"Runtime assertion failed|expected"),
    ):
        torch.compile(call, backend="aot_eager", fullgraph=True)(x, y)


# ---- exported programs
def test_an_exported_program_keeps_our_operators_and_takes_other_sizes() -> None:
    model, rows = Perceptron(), torch.export.Dim("rows", min=2, max=4096)
    x = torch.randn(31, 8)

    program = torch.export.export(model, (torch.randn(6, 8),), dynamic_shapes={"x": {0: rows}})

    targets = [str(node.target) for node in program.graph.nodes]
    for operator, calls in (("gemm", 2), ("addmm", 1), ("matmul", 1)):
        assert targets.count(f"outblas.{operator}.default") == calls
    torch.testing.assert_close(program.module()(x), model(x))
    torch.testing.assert_close(program.run_decompositions().module()(x), model(x))
