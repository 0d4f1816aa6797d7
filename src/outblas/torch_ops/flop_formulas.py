"""Formulas of the operators' floating-point operations, for `torch.utils.flop_counter`.

A product of M rows, N columns and K terms has 2 · M · N · K, as torch counts its own products. The
counter's module imports Triton, so it is not imported here: the formulas are registered at a call
under a dispatch mode after a program has imported it.
"""

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from outblas.base.compat.torch_private import dispatch_modes

Shape = Sequence[int]

_COUNTER = "torch.utils.flop_counter"
_registered: dict[Any, Callable[..., int]] = {}


def register_if_counted() -> None:
    """Registers the formulas with torch's counter, if the program has imported it, and with the
    counters that are on: a counter knows the formulas that were registered when it was made.
    """
    counter: Any = sys.modules.get(_COUNTER)
    if counter is None or not hasattr(counter, "register_flop_formula"):
        return
    if not _registered:
        for name, formula in _FORMULAS.items():
            operator = getattr(torch.ops.outblas, name)
            _registered[operator] = counter.register_flop_formula(operator)(formula)
    for mode in dispatch_modes():
        known = getattr(getattr(mode, "counter", None), "flop_registry", None)
        if isinstance(known, dict):
            for operator, registered in _registered.items():
                known.setdefault(operator, registered)


def product_flops(a: Shape, b: Shape) -> int:
    """Returns the FLOP of a product of operands of these shapes, whose batches broadcast."""
    rows, columns = (a[-2] if len(a) > 1 else 1), (b[-1] if len(b) > 1 else 1)
    batch = torch.broadcast_shapes(tuple(a[:-2]), tuple(b[:-2]))
    flops: int = 2 * math.prod(batch) * rows * columns * a[-1]
    return flops


def _of_operands(first: int) -> Callable[..., int]:
    """Returns the formula of an operator whose A and B are its arguments number `first` and the
    next.
    """

    def formula(*shapes: Any, out_shape: Any = None, **_: Any) -> int:
        return product_flops(shapes[first], shapes[first + 1])

    return formula


def _of_groups(first: int, place: int = sys.maxsize) -> Callable[..., int]:
    """Returns the formula of a grouped product, whose A is its argument number `first` and whose
    `a_index` is number `place`: of all rows, columns and terms that its operands have, whatever
    part of them belongs to groups.
    """

    def formula(*shapes: Any, a_index: Any = None, out_shape: Any = None, **_: Any) -> int:
        a, b = shapes[first : first + 2]
        index = shapes[place] if len(shapes) > place else a_index
        rows = a[-2] if index is None else index[0]
        groups = a[0] if len(a) == len(b) == 3 else 1
        return groups * product_flops((rows, a[-1]), b[-2:])

    return formula


def _of_experts(x: Shape, gate_up: Shape, down: Shape, index: Shape, *_: Any, **__: Any) -> int:
    """Returns the FLOP of a layer of experts, of all tokens that it is given."""
    flops: int = 2 * math.prod(index) * (math.prod(gate_up[1:]) + math.prod(down[1:]))
    return flops


def _of_experts_gradients(*given: Any, **_: Any) -> int:
    """Returns the FLOP of its gradients: the inner rows' is always needed, then one product each
    for those of x, gate_up and down.
    """
    needs, (_, gate_up, down, index) = given[6], given[7:11]
    of_x, of_gate_up, of_down, *_ = needs
    first, second = (2 * math.prod(index) * math.prod(weight[1:]) for weight in (gate_up, down))
    return int((of_x + of_gate_up) * first + (1 + of_down) * second)


_FORMULAS = {
    "matmul": _of_operands(0),
    "matmul_out": _of_operands(0),
    "addmm": _of_operands(1),
    "addmm_out": _of_operands(1),
    "gemm": _of_operands(0),
    "gemm_aux": _of_operands(0),
    "gemm_out": _of_operands(2),
    "scaled_mm": _of_operands(0),
    "scaled_mm_quantized": _of_operands(0),
    "grouped_mm": _of_groups(0),
    "grouped_gemm": _of_groups(0, 5),
    "grouped_gemm_aux": _of_groups(0, 5),
    "grouped_gemm_to_aux": _of_groups(1, 6),
    "scaled_grouped_mm": _of_groups(0, 7),
    "moe_mlp": _of_experts,
    "moe_mlp_forward": _of_experts,
    "moe_mlp_backward": _of_experts_gradients,
}
