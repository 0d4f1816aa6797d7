"""A layer of experts as one call, `moe_mlp`: routing, both products, and the sum over the experts
of each token, forward and backward. Each permutation of rows is a single pass over memory.

Forward: tokens are copied to the rows of their experts (`dispatch`); rows times `gate_up`, with
the activation; times `down`; the rows of each token are weighted and summed (`combine`).

Backward: the gradient of the weighted sum is a dispatch, and that of the dispatch a sum. A weight w
multiplies whole rows, so it commutes with the product: d = g down^T needs no weights, the gradient
of w is the sum of d h over a row's F columns, and the gradient of `down` is (w h)^T g. Thus the
rows that `combine` summed, which are the largest of all, are neither kept nor read again.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch.overrides import handle_torch_function

from outblas.base.compat.torch_private import any_autocast, autocast_off, has_override
from outblas.base.compiling import CompileForbidden
from outblas.call import fallback, hooks, invariance, moe, recorded_shapes
from outblas.call.epilogue import ACTIVATIONS, Activation
from outblas.call.grouped import GATHERING_COLUMNS
from outblas.call.moe import Layer
from outblas.call.problem import check_name
from outblas.torch_ops import moe_passes, ops
from outblas.torch_ops.autograd_levels import (
    record_gradients,
    refuse_gradients,
    unseen_by_types,
    within_forward,
)
from outblas.torch_ops.flop_formulas import register_if_counted
from outblas.torch_ops.schema import ARGUMENTS, fake, implement

Tensor = torch.Tensor
T = TypeVar("T")

_autocast_off = autocast_off("cpu", "cuda")
_product = ops.grouped_mm


def moe_mlp(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    expert_index: Tensor,
    expert_weights: Tensor,
    *,
    activation: Activation = "swiglu",
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """Compute the experts of a mixture: for each token the weighted sum of what its experts return.

    Token t, for the experts e = expert_index[t, j] with weights w = expert_weights[t, j]:

        out[t] = sum over j of w * (f(x[t] @ gate_up[e] + gate_up_bias[e]) @ down[e] + down_bias[e])

    where f is the activation: a gated one multiplies the second half of its columns by a function
    of the first half.

    The routing stays on the device: a call waits for nothing, and a CUDA graph that captured it may
    be replayed with other indices. Sums are in one order, so that equal calls have equal bits.
    Without a CUDA device torch computes the products expert by expert, with a `FallbackWarning`.

    x, both matrices, both biases and the weights have first gradients; second ones and those in
    forward mode are refused. Autocast casts nothing, as in `grouped_mm`. What gradients need is
    kept: the tokens in the order of experts and the rows before the activation, T k (H + W)
    elements.

    Args:
        x: (T, H), the tokens: bfloat16, float16 or float32.
        gate_up: (E, H, W), of the same dtype and any strides; W is 2 F for a gated activation, the
            columns of the gate first, else F. Checkpoints hold it as (E, W, H): pass its `mT`.
        down: (E, F, H), of the same dtype and any strides.
        expert_index: (T, k), int32 or int64: the experts of each token. Indices outside of
            0 to E - 1, such as those of experts that other ranks have, contribute nothing.
        expert_weights: (T, k), of any floating-point dtype.
        activation: As in `matmul`: "swiglu", "geglu", "geglu_tanh", "reglu", or one that is not
            gated.
        gate_up_bias: (E, W), of the dtype of x.
        down_bias: (E, H), of the dtype of x.

    Returns:
        (T, H), of the dtype of x, contiguous.

    Raises:
        TypeError: An argument has the wrong type.
        OperandError: The operands do not fit together, or carry forward-mode gradients.
        ValueError: `activation` is unknown.
        RuntimeError: As in `matmul`, for CUDA graphs and OUTBLAS_STRICT; a second gradient is
            asked for.

    Example:
        Six tokens, each with two of four experts:

        >>> import torch, outblas
        >>> x, gate_up, down = torch.ones(6, 8), torch.ones(4, 8, 32), torch.ones(4, 16, 8)
        >>> weights, index = torch.rand(6, 4).topk(2)
        >>> outblas.moe_mlp(x, gate_up, down, index, weights).shape
        torch.Size([6, 8])
    """
    tensors = x, gate_up, down, expert_index, expert_weights
    biases = gate_up_bias, down_bias
    if not torch.compiler.is_dynamo_compiling() and has_override(*tensors, *biases):
        result: Tensor = handle_torch_function(
            moe_mlp,
            (*tensors, *biases),
            *tensors,
            activation=activation,
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
        )
        return result
    name = check_name("activation", activation, ACTIVATIONS, "")
    if not name:
        raise TypeError("activation is None, expected a str")
    moe.check_types(
        x=x,
        gate_up=gate_up,
        down=down,
        expert_index=expert_index,
        expert_weights=expert_weights,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
    )
    if not torch.compiler.is_dynamo_compiling():
        register_if_counted()
    result = torch.ops.outblas.moe_mlp.default(*tensors, name, *biases)
    return result


# ---- parts of the computation
def _run(layer: Layer, device: torch.device, call: Callable[[Any], T]) -> T:
    """Runs a pass: with Triton's kernels on a GPU, else with torch's functions."""
    if device.type == "cuda" and torch.version.cuda is not None and layer.elements:
        try:
            return call(hooks.moe_kernels.get())
        except ImportError as error:
            fallback.warn_once(str(error))
        except CompileForbidden as error:
            fallback.warn_fallback(str(error))
    return call(moe_passes)


def _first_product(
    rows: Tensor, gate_up: Tensor, offs: Tensor, bias: Tensor | None, activation: str, keep: bool
) -> tuple[Tensor, Tensor]:
    """Returns f(x) and x, the product before the activation; without `keep` x has no elements."""
    given = rows, gate_up, offs, bias, None, None, None, None, activation
    if keep:
        return cast(tuple[Tensor, Tensor], ops.grouped_gemm_aux(*given))
    return ops.grouped_gemm(*given), rows.new_empty(0)


def _computed(given: tuple[Any, ...], *, keep: bool) -> tuple[Tensor, ...]:
    """Returns what `moe_mlp_forward` does; without `keep`, rows have no elements, and where the
    product gathers them itself they are not stored.
    """
    x, gate_up, down, expert_index, weights, activation, gate_up_bias, down_bias = completed(given)
    layer = moe.check(*completed(given))
    invariance.refuse_promise("moe_mlp")
    index = expert_index.contiguous()
    offs, row_of_slot, slot_of_row = _run(layer, x.device, lambda p: p.route(index, layer.experts))
    tokens = x.contiguous()
    with recorded_shapes.chosen_by_tokens(layer.k):
        if keep or gate_up.shape[-1] > GATHERING_COLUMNS:
            rows = _run(layer, x.device, lambda p: p.dispatch(tokens, row_of_slot))
            inner, before = _first_product(rows, gate_up, offs, gate_up_bias, activation, keep)
        else:
            token_of_row = slot_of_row.div(max(index.shape[1], 1), rounding_mode="floor")
            inner = ops.grouped_gemm(
                tokens, gate_up, offs, gate_up_bias, None, token_of_row, None, None, activation
            )
            before = x.new_empty(0)
    if not keep:
        rows = before  # frees as much memory as the second product takes
    results = _product(inner, down, offs, down_bias)
    shares = weights.contiguous()
    out = _run(layer, x.device, lambda p: p.combine(results, row_of_slot, shares))
    return out, rows, before, offs, row_of_slot, slot_of_row


class _Saved(NamedTuple):
    """What the forward pass keeps for gradients. `rows` are the dispatched tokens, `before` the
    rows before the activation.
    """

    rows: Tensor
    before: Tensor
    offs: Tensor
    row_of_slot: Tensor
    slot_of_row: Tensor


def _gradients(grad: Tensor, *given: Any) -> tuple[Tensor, ...]:
    """Computes `moe_mlp_backward`."""
    saved, needs, of_layer = _Saved(*given[:5]), given[5], completed(given[6:])
    _, gate_up, *_ = of_layer
    layer, wanted = moe.check(*of_layer), dict(zip(_DIFFERENTIABLE, needs, strict=True))
    found = {name: grad.new_empty(0) for name in _DIFFERENTIABLE}
    of_before, more = _through_down(grad.contiguous(), saved, layer, wanted, of_layer)
    found |= more
    if wanted["gate_up"]:
        found["gate_up"] = _gradient_of(gate_up, saved.rows, of_before, saved.offs)
    if wanted["gate_up_bias"]:
        ones = of_before.new_ones(1, 1).expand(1, layer.slots)
        found["gate_up_bias"] = _product(ones, of_before, saved.offs).squeeze(1)
    if wanted["x"]:
        of_rows = _product(of_before, gate_up.mT, saved.offs)
        found["x"] = _run(layer, grad.device, lambda p: p.combine(of_rows, saved.row_of_slot, None))
    return tuple(found.values())


def _through_down(
    grad: Tensor, saved: _Saved, layer: Layer, wanted: dict[str, bool], of_layer: tuple[Any, ...]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the gradients of the rows before the activation, and by name those of `down`, its
    bias and the weights of experts.
    """
    _, _, down, expert_index, expert_weights, activation, _, down_bias = of_layer
    found, offs, slot_of_row = {}, saved.offs, saved.slot_of_row
    shares = expert_weights.contiguous()
    of_results = _run(layer, grad.device, lambda p: p.dispatch(grad, saved.row_of_slot))
    of_inner = _product(of_results, down.mT, offs)
    of_before, weighted, of_weights = _run(
        layer,
        grad.device,
        lambda p: p.activation_backward(
            of_inner, saved.before, shares, slot_of_row, offs, activation
        ),
    )
    if wanted["down"]:
        found["down"] = _gradient_of(down, weighted, of_results, offs)
    if wanted["down_bias"]:
        row_weights = shares.flatten()[slot_of_row.long()].to(grad.dtype)
        found["down_bias"] = _product(row_weights.unsqueeze(0), of_results, offs).squeeze(1)
    if wanted["expert_weights"]:
        if down_bias is not None:
            of_weights = of_weights + _products_with_bias(grad, down_bias, expert_index)
        found["expert_weights"] = of_weights.to(expert_weights.dtype)
    return of_before, found


def _gradient_of(weight: Tensor, a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """Returns a^T b for each expert, stored in the order of `weight`: autograd would copy another
    one.
    """
    result: Tensor = (
        _product(b.mT, a, offs).mT if _is_transposed(weight) else _product(a.mT, b, offs)
    )
    return result


def _is_transposed(weight: Tensor) -> bool:
    return weight.mT.is_contiguous() and not weight.is_contiguous()


def _products_with_bias(grad: Tensor, bias: Tensor, expert_index: Tensor) -> Tensor:
    """Returns grad[t] · bias[e] for the experts e of each token t, in fp32."""
    experts = bias.shape[0]
    exists = (expert_index >= 0) & (expert_index < experts)
    given: Any = grad, bias.mT, None, None, None, 1, 1, "", torch.float32
    products: Tensor = ops.gemm(*given)
    return products.gather(1, expert_index.clamp(0, experts - 1).long()).where(exists, 0)


# ---- the operators
def completed(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns all arguments of `moe_mlp`, because the dispatcher leaves out trailing defaults."""
    return given + _DEFAULTS[len(given) :]


def _without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function of an operator under which nothing is cast."""

    def run(*given: Any) -> Any:
        if not any_autocast():
            return function(*given)
        with _autocast_off():
            return function(*given)

    return run


_DIFFERENTIABLE = "x", "gate_up", "down", "expert_weights", "gate_up_bias", "down_bias"
_DEFAULTS = tuple(each.default for each in ARGUMENTS["moe_mlp"])
_POSITIONS = {each.name: i for i, each in enumerate(ARGUMENTS["moe_mlp"])}


@fake("moe_mlp")
def _(*given: Any) -> Tensor:
    moe.check(*completed(given))
    return cast(Tensor, given[0].new_empty(given[0].shape))


@fake("moe_mlp_forward")
def _(*given: Any) -> tuple[Tensor, ...]:
    layer = moe.check(*completed(given))
    x = given[0]
    integers = functools.partial(x.new_empty, dtype=torch.int32)
    return (
        x.new_empty(x.shape),
        x.new_empty(layer.slots, layer.H),
        x.new_empty(layer.slots, layer.W),
        integers(layer.experts),
        integers(layer.tokens, layer.k),
        integers(layer.slots),
    )


@fake("moe_mlp_backward")
def _(grad: Tensor, *given: Any) -> tuple[Tensor, ...]:
    needs, of_layer = given[5], completed(given[6:])
    found = []
    for name, is_needed in zip(_DIFFERENTIABLE, needs, strict=True):
        t = of_layer[_POSITIONS[name]]
        if not is_needed:
            found.append(grad.new_empty(0))
        elif t.dim() == 3 and _is_transposed(t):
            found.append(t.new_empty(t.mT.shape).mT)
        else:
            found.append(t.new_empty(t.shape))
    return tuple(found)


# ---- gradients
class _Gradients(torch.autograd.Function):
    """The autograd function of `moe_mlp`. `apply` takes all arguments of the operator."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        ctx.set_materialize_grads(False)
        with within_forward():
            out, *kept = torch.ops.outblas.moe_mlp_forward.default(*given)
        tensors = [t if isinstance(t, Tensor) else None for t in given]
        ctx.save_for_backward(*kept, *tensors)
        ctx.activation = given[_POSITIONS["activation"]]
        return cast(Tensor, out)

    @staticmethod
    @unseen_by_types
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        gradients: list[Tensor | None] = [None] * len(_POSITIONS)
        if grad is None:
            return tuple(gradients)
        saved = list(ctx.saved_tensors)
        kept, given = saved[: len(_Saved._fields)], saved[len(_Saved._fields) :]
        given[_POSITIONS["activation"]] = ctx.activation
        needs = [ctx.needs_input_grad[_POSITIONS[name]] for name in _DIFFERENTIABLE]
        found = torch.ops.outblas.moe_mlp_backward.default(grad, *kept, needs, *given)
        for name, is_needed, gradient in zip(_DIFFERENTIABLE, needs, found, strict=True):
            if is_needed:
                gradients[_POSITIONS[name]] = gradient
        return tuple(gradients)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "moe_mlp": lambda *given: _computed(given, keep=False)[0],
    "moe_mlp_forward": lambda *given: _computed(given, keep=True),
    "moe_mlp_backward": _gradients,
}
for _name, _function in _FUNCTIONS.items():
    for _key in ("CPU", "CUDA"):
        implement(_name, _key, _without_autocast(_function))
record_gradients("moe_mlp", _Gradients)
refuse_gradients("moe_mlp_backward", "the backward pass of moe_mlp")
