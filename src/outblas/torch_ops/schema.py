"""The operators `torch.ops.outblas.*`: their schemas, and the kernels that modules give them.

All operators are defined when outblas is imported, so that whoever names one, traces it or loads a
program that has it finds it. The kernels of those that few programs call are deferred: at each of
their dispatch keys stands a function that imports the module with the kernel when it is first
called.
"""

import ast
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import torch

from outblas.base.compat.torch_private import register_fake

Kernel = Callable[..., Any]

FAKE = "fake"  # stands for a dispatch key, where an operator has its fake implementation

library = torch.library.Library("outblas", "DEF")

# Default values cost nothing per call, because the dispatcher omits them. The argument is not
# called `kernel`, because Inductor uses that name for an argument of its own.
_CHOICE = "str kernel_name='', str config='', str tune='', bool? batch_invariant=None"
_GEMM = (
    "Tensor a, Tensor b, Tensor? c=None, Tensor? bias=None, Tensor? residual=None, Scalar alpha=1, "
    f"Scalar beta=1, str activation='', ScalarType? out_dtype=None, {_CHOICE}"
)
_GROUPED_GEMM = (
    "Tensor mat_a, Tensor mat_b, Tensor? offs=None, Tensor? bias=None, Tensor? residual=None, "
    "Tensor? a_index=None, Tensor? scatter_index=None, Tensor? scatter_weights=None, "
    "str activation='', ScalarType? out_dtype=None, str kernel_name='', bool zero_tail=False, "
    "Tensor? counts=None"
)
_MOE_MLP = (
    "Tensor x, Tensor gate_up, Tensor down, Tensor expert_index, Tensor expert_weights, "
    "str activation='swiglu', Tensor? gate_up_bias=None, Tensor? down_bias=None"
)
SCHEMAS = {
    "matmul": f"(Tensor a, Tensor b, ScalarType? out_dtype=None, {_CHOICE}) -> Tensor",
    "matmul_out": "(Tensor a, Tensor b, Tensor(a!) out, ScalarType? out_dtype=None, "
    f"{_CHOICE}) -> ()",
    "addmm": f"(Tensor c, Tensor a, Tensor b, Scalar alpha=1, Scalar beta=1, {_CHOICE}) -> Tensor",
    "addmm_out": "(Tensor c, Tensor a, Tensor b, Tensor(a!) out, Scalar alpha=1, Scalar beta=1, "
    f"{_CHOICE}) -> ()",
    # matmul and addmm with an epilogue
    "gemm": f"({_GEMM}) -> Tensor",
    "gemm_aux": f"({_GEMM}) -> (Tensor, Tensor)",
    "gemm_out": f"(Tensor(a!) out, Tensor(b!)? aux, {_GEMM}) -> ()",
    "activation_backward": "(Tensor grad, Tensor x, str activation) -> Tensor",
    "grouped_mm": "(Tensor mat_a, Tensor mat_b, Tensor? offs=None, Tensor? bias=None, "
    "ScalarType? out_dtype=None, str kernel_name='', bool zero_tail=False) -> Tensor",
    "grouped_gemm": f"({_GROUPED_GEMM}) -> Tensor",
    "grouped_gemm_aux": f"({_GROUPED_GEMM}) -> (Tensor, Tensor)",
    "grouped_gemm_to_aux": f"(Tensor(a!) aux, {_GROUPED_GEMM}) -> Tensor",
    "scaled_grouped_mm": "(Tensor mat_a, Tensor mat_b, Tensor scale_a, Tensor scale_b, "
    "Tensor? offs=None, Tensor? bias=None, Tensor? residual=None, Tensor? a_index=None, "
    "Tensor? scatter_index=None, Tensor? scatter_weights=None, Tensor? counts=None, "
    "str activation='', ScalarType? output_dtype=None, str kernel_name='') -> Tensor",
    "scaled_mm": "(Tensor mat_a, Tensor mat_b, Tensor scale_a, Tensor scale_b, Tensor? bias=None, "
    "ScalarType? output_dtype=None, bool use_fast_accum=False, str activation='', "
    "Tensor? residual=None) -> Tensor",
    "scaled_mm_quantized": "(Tensor mat_a, Tensor mat_b, Tensor scale_a, Tensor scale_b, "
    "str recipe, Tensor? bias=None, bool power_of_two=False, bool use_fast_accum=False, "
    "str activation='', Tensor? residual=None) -> (Tensor, Tensor)",
    "quantize": "(Tensor x, str recipe, ScalarType? dtype=None, bool power_of_two=False) "
    "-> (Tensor, Tensor)",
    "moe_mlp": f"({_MOE_MLP}) -> Tensor",
    # The result, and what the gradients need: the dispatched rows, those before the activation,
    # offs, row_of_slot and slot_of_row.
    "moe_mlp_forward": f"({_MOE_MLP}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    # The gradients of x, gate_up, down, expert_weights, gate_up_bias and down_bias; those that are
    # not among `needs`, which are six bools in this order, have no elements.
    "moe_mlp_backward": "(Tensor grad, Tensor rows, Tensor inner, Tensor offs, Tensor row_of_slot, "
    f"Tensor slot_of_row, bool[] needs, {_MOE_MLP}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
}

_DEFERRED = {
    operator: f"outblas.torch_ops.{module}"
    for module, operators in {
        "grouped_mm": ("grouped_mm", "grouped_gemm", "grouped_gemm_aux", "grouped_gemm_to_aux"),
        "scaled_grouped_mm": ("scaled_grouped_mm",),
        "scaled_operator": ("scaled_mm", "scaled_mm_quantized"),
        "quantize": ("quantize",),
        "moe": ("moe_mlp", "moe_mlp_forward", "moe_mlp_backward"),
    }.items()
    for operator in operators
}
_kernels: dict[tuple[str, str], Kernel | None] = {}  # of deferred operators; None until imported


# ---- arguments
class Argument(NamedTuple):
    """One argument of an operator."""

    name: str
    default: Any = None
    is_written: bool = False


class _Arguments(dict[str, tuple[Argument, ...]]):
    """The arguments of operators, parsed when first asked for from the text that defines them,
    because torch has no public name for its own parsed form.
    """

    def __missing__(self, operator: str) -> tuple[Argument, ...]:
        listed, _, _ = SCHEMAS[operator].removeprefix("(").rpartition(") -> ")
        self[operator] = arguments = tuple(map(_argument, listed.split(", ")))
        return arguments


def _argument(text: str) -> Argument:
    declared, _, default = text.partition("=")
    kind, _, name = declared.rpartition(" ")
    return Argument(name, ast.literal_eval(default) if default else None, "!" in kind)


ARGUMENTS = _Arguments()


# ---- kernels
def implement(operator: str, key: str, kernel: Kernel) -> None:
    """Gives an operator its kernel at a dispatch key, or at `FAKE`."""
    if operator not in _DEFERRED:
        _register(operator, key, kernel)
        return
    assert (operator, key) in _kernels, f"nothing of {operator} is deferred at {key}"
    _kernels[operator, key] = kernel


def fake(operator: str) -> Callable[[Kernel], Kernel]:
    """Gives an operator the decorated function as its fake implementation."""

    def registered(kernel: Kernel) -> Kernel:
        implement(operator, FAKE, kernel)
        return kernel

    return registered


def _register(operator: str, key: str, kernel: Kernel) -> None:
    if key == FAKE:
        register_fake(f"outblas::{operator}", kernel, library)
    else:
        library.impl(operator, kernel, key)


def _deferred(operator: str, key: str) -> Kernel:
    """Returns a kernel that imports the module with the real one when it is first called."""
    slot = operator, key

    def kernel(*given: Any) -> Any:
        function = _kernels[slot]
        if function is None:
            import_module(_DEFERRED[operator])
            function = _kernels[slot]
            assert function is not None, f"{_DEFERRED[operator]} has no {operator} at {key}"
        return function(*given)

    return kernel


for _operator, _schema in SCHEMAS.items():
    library.define(_operator + _schema)
for _operator in _DEFERRED:
    _keys = ["CPU", "CUDA", FAKE]
    if _operator != "moe_mlp_forward":  # which runs below autograd alone
        _keys.append("Autograd")
    if "!" in SCHEMAS[_operator]:  # torch's fallback for lazy views takes none that writes
        _keys.extend(("Negative", "Conjugate"))
    for _key in _keys:
        _kernels[_operator, _key] = None
        _register(_operator, _key, _deferred(_operator, _key))
