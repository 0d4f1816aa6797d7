"""Adds the gradient of a weight to its `.grad` by the product that computes it, within
`outblas.accumulate_gradients`.

Autograd would run the AccumulateGrad node of the weight, which reads the product and `.grad` and
writes their sum. A backward pass may do that node's work, and give it nothing, if the node would
run and nobody else would see the gradient.
"""

from typing import Any

import torch

from outblas.base.compat.torch_private import has_gradient_hooks, will_accumulate
from outblas.call.errors import OperandError
from outblas.torch_ops import eager, ops
from outblas.torch_ops.call import OperatorChoice, has_address

Tensor = torch.Tensor
Parameter = torch.nn.Parameter


def add_to_grad(node: Any, g: Tensor, input: Tensor, choice: OperatorChoice) -> bool:
    """Adds gᵀ input to the `.grad` of a weight, in a backward pass. Returns whether it did.

    `node`: the node of autograd that takes the weight's gradient. `choice`: that of the product.
    """
    weight = getattr(node, "variable", None)  # of an AccumulateGrad node, which a leaf has
    if weight is None or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    grad = weight.grad
    if grad is None or not _is_addend(grad, g, input) or has_gradient_hooks(weight):
        return False
    if not _on_default_stream(g) or not will_accumulate(node):
        return False
    try:
        # `eager` compares different tensors only.
        done = eager.run(g.mT, input, grad.detach(), grad, 1, 1, choice.batch_invariant)
        if done is None:
            ops.addmm_out(grad, g.mT, input, grad, 1, 1, *choice)
    except OperandError:  # `.grad` shares memory with an operand
        return False
    return True


def _is_addend(grad: Tensor, g: Tensor, input: Tensor) -> bool:
    """Returns whether a product of g and the input can be added to `.grad` in place: g may be a
    wrapper, or a batch of gradients, of which only the dispatcher knows what they hold.
    """
    return (
        (type(grad) is Tensor or type(grad) is Parameter)
        and type(g) is Tensor
        and has_address(g)
        and grad.layout is torch.strided
        and grad.dtype is g.dtype
        and grad.device == g.device
        and grad.shape == (g.shape[-1], input.shape[-1])
        and grad.is_contiguous()
        and not grad.requires_grad
    )


def _on_default_stream(g: Tensor) -> bool:
    """Returns whether the backward pass runs on the default stream. Elsewhere only autograd knows
    what has to wait for what.
    """
    if not g.is_cuda:
        return True
    return bool(torch.cuda.current_stream(g.device) == torch.cuda.default_stream(g.device))
