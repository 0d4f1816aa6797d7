"""The arguments of a public call, and the checks that they pass before an operator or torch
receives them.
"""

import math
import numbers
import sys
from typing import Any, NamedTuple, TypeGuard

import torch

from outblas.base import configs, registry
from outblas.base.compat.torch_private import (
    FakeTensor,
    FunctionalTensor,
    constant_to_dynamo,
    dataclasses_are_constants,
)
from outblas.call import problem
from outblas.call.default_kernel import MODES
from outblas.call.epilogue import ACTIVATIONS, EpilogueArgs
from outblas.call.errors import A, B, OperandError
from outblas.call.tensor_memory import read_address

Tensor = torch.Tensor
Parameter = torch.nn.Parameter
is_traced = torch.compiler.is_dynamo_compiling

# The types that operators accept as plain tensors, including their stand-ins while a program is
# traced.
PLAIN = Tensor, Parameter, FakeTensor, FunctionalTensor

# What a type has that overrides nothing. The functions are those of Tensor, which wraps results,
# and of Parameter, which does not.
_DISPATCH: Any = Tensor.__torch_dispatch__
_WRAPS: Any = vars(Tensor)["__torch_function__"].__func__
_WRAPS_NOT: Any = Parameter.__torch_function__


@constant_to_dynamo
def has_plain_values(kind: type) -> bool:
    """Returns whether operators compute with tensors of a type as with plain ones: they hold their
    values themselves, whatever attributes and functions of torch the type adds or overrides.
    """
    return kind in PLAIN or (issubclass(kind, Tensor) and kind.__torch_dispatch__ is _DISPATCH)


@constant_to_dynamo
def is_plain_type(kind: type) -> bool:
    """Returns whether tensors of a type have plain values, and the type overrides no function of
    torch, so that it need not be asked what a call computes.
    """
    if kind in PLAIN:
        return True
    function: Any = has_plain_values(kind) and getattr(kind, "__torch_function__", None)
    return function is _WRAPS_NOT or getattr(function, "__func__", None) is _WRAPS


# For each public function, the parameters that are operands A, B and C of the operators.
OPERANDS = {
    "matmul": {"a": "input", "b": "other"},
    "addmm": {"c": "input", "a": "mat1", "b": "mat2"},
    "linear": {"a": "input", "b": "weight"},
}


class GivenEpilogue(NamedTuple):
    """The epilogue that a call requests."""

    activation: str | None
    bias: Tensor | None
    residual: Tensor | None
    aux: Tensor | None


class KernelChoice(NamedTuple):
    """A call's choice of kernel."""

    kernel: str | None
    config: Any
    tune: str | None
    batch_invariant: bool | None


class OperatorChoice(NamedTuple):
    """A checked `KernelChoice`, in the form that operators take."""

    kernel: str = ""
    config: str = ""
    tune: str = ""
    batch_invariant: bool | None = None


NO_CHOICE = OperatorChoice()


class Arguments(NamedTuple):
    """The arguments of `function` (matmul, addmm or linear). For linear, `b` is the weight."""

    function: str
    a: Tensor
    b: Tensor
    c: Tensor | None
    out: Tensor | None
    alpha: Any
    beta: Any
    out_dtype: torch.dtype | None
    given: GivenEpilogue
    choice: KernelChoice

    def tensors(self) -> dict[str, Tensor]:
        """Returns A, B and the other tensors of the call by the names of their parameters."""
        names = OPERANDS[self.function]
        _, bias, residual, aux = self.given
        others = {"bias": bias, "residual": residual, "out": self.out, "aux": aux}
        found = {} if self.c is None else {names["c"]: self.c}
        found |= {names["a"]: self.a, names["b"]: self.b}
        return found | {name: t for name, t in others.items() if t is not None}

    def all_tensors(self) -> tuple[Tensor | None, ...]:
        """Returns all tensor arguments; None for those that were not given."""
        _, bias, residual, aux = self.given
        return self.a, self.b, self.c, bias, residual, self.out, aux

    def extra(self) -> EpilogueArgs:
        """Returns the epilogue in the form that the runtime takes."""
        activation, bias, residual, aux = self.given
        return EpilogueArgs(activation or "", bias, residual, aux)

    def has_epilogue(self) -> bool:
        """Returns whether there is an epilogue besides alpha and C."""
        activation, bias, residual, aux = self.given
        return not (activation is None and bias is None and residual is None and aux is None)


# ---- numbers
def is_plain_scalar(value: object) -> bool:
    """Returns whether `scalar` would return alpha or beta unchanged."""
    if type(value) is int:  # compared with an int below, which takes half the time
        return -1_000_000_000_000_000_000 <= value <= 1_000_000_000_000_000_000
    return type(value) is float and -1e18 <= value <= 1e18


def scalar(name: str, value: object, dtype: torch.dtype) -> Any:
    """Converts alpha or beta to a Python number that products of a dtype can use.

    Raises TypeError or OperandError.
    """
    if is_traced() and isinstance(value, int | float):  # it may be symbolic
        return value
    number = _python_number(name, value)
    if not isinstance(number, numbers.Real):
        number = complex(number)
        if number.imag and not dtype.is_complex:
            raise OperandError(
                f"{name} is {number}, expected a real number for operands of {dtype}"
            )
        if dtype.is_complex:
            return number
        number = number.real
    if dtype is torch.bool and isinstance(number, bool):
        return number
    try:
        converted = int(number) if isinstance(number, numbers.Integral) else float(number)
        magnitude = abs(float(converted))
    except OverflowError:
        raise _too_large(name, number) from None
    fits = not math.isfinite(converted) or magnitude <= torch.finfo(torch.float32).max
    if not fits and dtype.itemsize <= 4:
        raise _too_large(name, number)
    return converted if -(2**63) <= converted < 2**63 else float(converted)


def _too_large(name: str, number: object) -> OperandError:
    return OperandError(f"{name} is {number}, expected a number that float32 can hold")


def _python_number(name: str, value: object) -> Any:
    """Returns the value of a Python or NumPy number, or of a one-element tensor. Raises
    TypeError.
    """
    if isinstance(value, Tensor):
        if value.dim():
            raise TypeError(
                f"{name} is a tensor of shape {tuple(value.shape)}, expected a number or one of "
                "shape ()"
            )
        if value.requires_grad:
            raise TypeError(
                f"{name} is a tensor that requires grad, expected a number or one that does not"
            )
        value = value.item()
    elif (numpy := sys.modules.get("numpy")) is not None and isinstance(value, numpy.generic):
        value = value.item()
    if not isinstance(value, numbers.Complex):
        raise TypeError(f"{name} is {type(value).__name__}, expected a number")
    return value


# ---- choices
def is_activation(name: object) -> bool:
    """Returns whether `name` is the name of an activation."""
    return type(name) is str and name in ACTIVATIONS


def checked_kernel(kernel: str | None, config: Any) -> tuple[str, str]:
    """Returns the kernel's name and its config's text, as operators take them.

    Raises TypeError or ValueError.
    """
    if kernel is None:
        if config is not None:
            raise ValueError(
                "config is given without kernel, expected the kernel that it configures"
            )
        return "", ""
    known = config is None or dataclasses_are_constants
    if is_traced() and known and (found := _found_while_traced(kernel, config)) is not None:
        return found
    return _found_kernel(kernel, config)


@constant_to_dynamo
def _found_while_traced(kernel: str, config: Any) -> tuple[str, str] | None:
    """`_found_kernel` as Dynamo calls it: it cannot trace what reads the source of a kernel. None
    for a call that is wrong, so that the error is raised where Dynamo sees it.
    """
    try:
        return _found_kernel(kernel, config)
    except (TypeError, ValueError, ImportError):
        return None


def _found_kernel(kernel: str, config: Any) -> tuple[str, str]:
    """Returns what `checked_kernel` returns, for a kernel that is named."""
    name = registry.find(kernel).name
    if config is None:
        return name, ""
    # A rung's Config only sets the rung's defaults; it derives from this type.
    family = registry.load(name).Config.__mro__[-2]
    if not isinstance(config, family):
        raise TypeError(
            f"config is {type(config).__name__}, expected {family.__name__} for kernel {name!r}"
        )
    return name, configs.to_text(config)


def checked_tune(tune: object) -> str:
    """Returns `tune` in the form that operators take. Raises TypeError or ValueError."""
    return problem.check_name("tune", tune, MODES, f": {', '.join(MODES)}")


def checked_choice(choice: KernelChoice) -> OperatorChoice:
    """Returns a choice in the form that operators take. Raises TypeError or ValueError."""
    kernel, config = checked_kernel(choice.kernel, choice.config)
    return OperatorChoice(kernel, config, checked_tune(choice.tune), choice.batch_invariant)


# A checked choice of dtype, kernel, config and mode, as the fast path of eager calls takes it.
EagerChoice = tuple[torch.dtype | None, str, str, str]
_MOST_CHOICES = 256
# By the identity of a config: the config, which is thereby kept, and the choice.
_eager_choices: dict[tuple[Any, ...], tuple[Any, EagerChoice]] = {}


def eager_choice(
    out_dtype: Any, kernel: str | None, config: Any, tune: str | None
) -> EagerChoice | None:
    """Returns the choice of a call that names a dtype, a kernel, a config or a mode; None where it
    is wrong, or where the config could be modified later. Checking a choice takes longer than all
    else that a warm call does, so choices are kept.
    """
    try:
        key = out_dtype, kernel, id(config), tune
        kept = _eager_choices.get(key)
    except TypeError:  # an argument that cannot be hashed
        return None
    if kept is not None and kept[0] is config:
        return kept[1]
    parameters = getattr(type(config), "__dataclass_params__", None)
    constant = config is None or isinstance(config, str) or (parameters and parameters.frozen)
    if not constant or not (out_dtype is None or isinstance(out_dtype, torch.dtype)):
        return None
    try:
        found = out_dtype, *checked_kernel(kernel, config), checked_tune(tune)
    except (TypeError, ValueError, ImportError):  # raised once more where the call is explained
        return None
    if len(_eager_choices) >= _MOST_CHOICES:
        _eager_choices.clear()
    _eager_choices[key] = config, found
    return found


# ---- shapes and written tensors
def product_shape(call: Arguments) -> tuple[int, ...]:
    """Returns the shape of the product. Raises OperandError."""
    if call.function != "linear":
        return problem.check_product(call.a, call.b, call.c)
    check_linear(call.a, call.b)
    return (*call.a.shape[:-1], *call.b.shape[:-1])


def check_linear(x: Tensor, weight: Tensor) -> None:
    """Checks that the shapes allow `x @ weight.T`. Raises OperandError."""
    if weight.dim() not in (1, 2):
        raise OperandError(f"{B} has {weight.dim()} dimensions, expected 2 (N, K) or 1 (K)")
    if x.dim() == 0 or x.shape[-1] != weight.shape[-1]:
        raise OperandError(
            f"{A}.shape is {tuple(x.shape)}, expected (..., {weight.shape[-1]}) for {B}.shape "
            f"{tuple(weight.shape)}"
        )
    if not is_autocast(x):
        problem.check_alike(x, weight)


def check_result(call: Arguments, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Checks the epilogue and `out` against a product of this shape and dtype."""
    shape = problem.check_epilogue_args(call.extra(), shape, dtype, call.a.device)
    if call.out is not None:
        problem.check_out(call.out, shape, dtype, call.a.device)


def check_written(call: Arguments) -> None:
    """Checks that `out` and `aux` can be written.

    Autograd cannot differentiate through tensors that a call writes, and operators cannot write
    through a lazy view. Raises OperandError.
    """
    _, bias, residual, aux = call.given
    for name, t in (("out", call.out), ("aux", aux)):
        if t is None:
            continue
        if not is_traced():
            problem.check_writable(t, name)
        if torch.is_grad_enabled():
            if t.requires_grad:
                raise OperandError(
                    f"{name} requires grad, expected a tensor that does not (or torch.no_grad())"
                )
            read = call.a, call.b, call.c, bias, residual
            if any(x is not None and x.requires_grad for x in read):
                raise OperandError(
                    f"{name} is given with inputs that need gradients, expected no {name} (or "
                    "torch.no_grad())"
                )
        if is_lazy_view(t) and call.has_epilogue():
            raise OperandError(
                f"{name} is a view that negates or conjugates, expected a resolved tensor"
            )


def is_lazy_view(out: Tensor | None) -> TypeGuard[Tensor]:
    """Returns whether `out` is a lazily negated or conjugated view, which the dispatcher cannot
    pass to an operator.
    """
    if out is None or is_traced():
        return False
    return out.is_neg() or out.is_conj()


def is_autocast(t: Tensor) -> bool:
    """Returns whether autocast would cast tensors like this one."""
    return (t.is_cuda and torch.is_autocast_enabled("cuda")) or (
        t.is_cpu and torch.is_autocast_enabled("cpu")
    )


def has_address(t: object) -> bool:
    """Returns whether this is a tensor with memory; fake, sparse and transformed tensors have
    none.
    """
    if not isinstance(t, Tensor) or t.layout is not torch.strided or t.is_nested:
        return False
    if not (t.is_cuda or t.is_cpu):
        return False
    try:
        return bool(read_address(t)) or not t.numel()
    except RuntimeError:
        return False
