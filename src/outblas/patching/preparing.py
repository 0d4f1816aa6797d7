"""Compiles the kernels of a patched model before its calls need them: some beside the caller while
`patch` returns, all that it takes up to a number of rows by `Report.prepare`.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from outblas.base import compile_worker, compiling, progress
from outblas.call import default_kernel, dispatch, recorded_shapes
from outblas.call.dispatch import Call
from outblas.call.problem import DTYPES
from outblas.patching import activated, experts, fp8_linears, fp8_mlps, gated, linears, replaced
from outblas.patching.functions import tensor_of
from outblas.torch_ops import ops
from outblas.torch_ops.call import is_plain_type

Tensor = torch.Tensor
Module = torch.nn.Module

# The numbers of rows whose kernels `patch` has compiled: each batch that decodes and each length of
# a prompt is near one of them, and the kernels between them are mostly the same.
ROWS = tuple(2**i for i in range(14))
TOP = 2  # experts of a token, where a module of experts does not say


class LayerProduct(NamedTuple):
    """activation(x weightᵀ + bias) for any x."""

    weight: Tensor
    bias: Tensor | None
    activation: str

    @property
    def key(self) -> tuple[Any, ...]:
        """What the kernels depend on."""
        return self.activation, *map(_layout, self[:2])

    def plan(self, rows: Iterable[int]) -> None:
        """Plans calls with these numbers of rows. Raises as `dispatch.find_plan`."""
        K = self.weight.shape[1]
        x = self.weight.new_empty(2, K)
        extra = ops.epilogue(self.activation, self.bias, None)
        plan = dispatch.find_plan(
            Call(x, self.weight.t(), None, None, None, 1, 0, "", "", extra=extra)
        )
        for count in rows:
            dispatch.at_rows(plan, torch.Size((count, K)))


def _is_usual(t: Any) -> bool:
    return is_plain_type(type(t)) and t.dtype in DTYPES and is_on_gpu(t)


def is_on_gpu(t: Tensor) -> bool:
    """Returns whether a kernel may multiply by a weight where it is."""
    return t.is_cuda


def _layout(t: Tensor | None) -> Any:
    return None if t is None else (t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % 16)


def products(model: Module, kind: type[Module]) -> list[LayerProduct]:
    """Returns the different products of a patched model on GPUs, without those of fp8 layers and of
    experts. `kind`: the class of its linear layers.
    """
    distinct: dict[tuple[Any, ...], LayerProduct] = {}
    for module in model.modules():
        for weight, bias, activation in _of_module(module, kind):
            tensors = [weight] if bias is None else [weight, bias]
            if all(map(_is_usual, tensors)) and weight.dim() == 2 and weight.numel():
                product = LayerProduct(weight.detach(), bias, activation or "")
                distinct.setdefault(product.key, product)
    return [*distinct.values()]


def _of_module(module: Any, kind: type[Module]) -> Iterator[tuple[Any, Any, str | None]]:
    """Yields weights, biases and activations of a module's products."""
    is_ours = isinstance(module, kind)
    if is_ours or replaced.arguments(module, linears.forward) is not None:
        activation = module.activation if is_ours else None
        yield tensor_of(module, "weight"), tensor_of(module, "bias"), activation
    for layer, function in activated.pairs_of(module):
        yield tensor_of(layer, "weight"), tensor_of(layer, "bias"), function
    if found := replaced.arguments(module, gated.forward):
        names, halves = found
        gate, up = (module._modules[name] for name in names[:2])
        matrix = halves.matrix(gate.weight, up.weight)
        bias = None if gate.bias is None else torch.cat((gate.bias, up.bias)).detach()
        yield matrix, bias, names.activation


def begin(model: Module, kind: type[Module]) -> None:
    """Begins to compile kernels of a patched model, if calls would not wait for them."""
    if compiling.mode() != compiling.BACKGROUND or recorded_shapes.is_recording():
        return
    if os.environ.get("OUTBLAS_TUNE") == "on":  # which measures what it plans
        return
    with compiling.ahead():
        for product in products(model, kind):
            with contextlib.suppress(Exception):  # its calls will say what is wrong with it
                product.plan(ROWS)


def prepare(model: Module, kind: type[Module], rows: int) -> None:
    """Compiles and loads what the calls of a patched model take with up to `rows` rows. Raises
    CompileForbidden where OUTBLAS_COMPILE forbids it.
    """
    compiling.check_allowed("the kernels of a model")
    numbers, dense = row_numbers(rows), products(model, kind)
    with progress.heard(_show):
        with compiling.ahead():
            for product in progress.counted(dense, lambda product: "layers are planned"):
                product.plan(numbers)
        compile_worker.await_all(lambda left: progress.say(f"{left} kernels to compile"))
        with compiling.waiting(), torch.inference_mode():
            for product in progress.counted(dense, lambda product: "layers are loaded"):
                product.plan(numbers)
            for run in progress.counted([*_runs(model)], lambda run: "others are loaded"):
                for count in numbers:
                    run(count)
    _show("")


def row_numbers(rows: int) -> list[int]:
    """Returns numbers of rows at which every kernel is met that calls with 1 to `rows` take: where
    configs begin and end, and what divides them by each power of two.
    """
    numbers, begin = {1, rows}, 2
    while begin <= rows:
        end = default_kernel.rows_of_choice(begin)
        numbers |= {begin, begin + 1, begin + 3, end}
        begin = end + 1
    return sorted(number for number in numbers if number <= rows)


def _runs(model: Module) -> Iterator[Callable[[int], Any]]:
    """Yields functions that run the different fp8 layers and experts of a model with a number of
    rows.
    """
    seen: set[tuple[Any, ...]] = set()
    module: Any
    for module in model.modules():
        of_mlp = replaced.arguments(module, fp8_mlps.forward)
        of_experts = replaced.arguments(module, experts.forward)
        if of_mlp is of_experts is replaced.arguments(module, fp8_linears.forward):
            continue  # none of them
        parameters = [*module.parameters()]
        key = replaced.kind_of(module), *map(_layout, parameters)
        if key in seen or not all(map(is_on_gpu, parameters)):
            continue
        seen.add(key)
        if of_experts:
            yield _run_of_experts(module, *of_experts)
        else:
            layer = module._modules[of_mlp[0].gate] if of_mlp else module
            yield _run_of_layer(module, tensor_of(layer, "weight"))


def _run_of_layer(module: Module, weight: Tensor) -> Callable[[int], Any]:
    K, device = weight.shape[1], weight.device
    return lambda rows: module(torch.zeros(rows, K, dtype=torch.bfloat16, device=device))


def _run_of_experts(module: Any, names: experts.Names) -> Callable[[int], Any]:
    down = tensor_of(module, names.down)
    hidden = down.shape[2 if names.is_transposed else 1]
    top = getattr(getattr(module, "config", None), "num_experts_per_tok", None) or TOP

    def run(rows: int) -> None:
        if rows in ROWS:
            index = torch.arange(rows * top, device=down.device).view(rows, top) % names.experts
            module(down.new_zeros(rows, hidden), index, down.new_ones(rows, top))

    return run


def _show(text: str) -> None:
    """Says on a terminal what is done, in one line."""
    if sys.stderr.isatty():
        print(f"\r{text}\x1b[K", end="", file=sys.stderr, flush=True)
