"""The only checker of the arguments of `moe_mlp`."""

from typing import NamedTuple

import torch

from outblas.call import problem
from outblas.call.epilogue import ACTIVATIONS, glu_split
from outblas.call.errors import OperandError
from outblas.call.grouped import MAX_GROUPS
from outblas.call.problem import DTYPES
from outblas.call.sizes import are_equal, holds

Tensor = torch.Tensor

INDEX_DTYPES = torch.int32, torch.int64
WEIGHT_DTYPES = *DTYPES, torch.float64
MOST_SLOTS = 2**31 - 2**16  # the kernels count them in 32 bits, a block beyond the last one too


class Layer(NamedTuple):
    """The sizes of a layer of experts: T tokens of H columns, each with k experts out of E, whose
    inner rows have F columns. Before the activation they have W: 2F where it is gated, else F.
    """

    tokens: int
    k: int
    experts: int
    H: int
    W: int
    F: int

    @property
    def slots(self) -> int:
        """Pairs of a token and one of its experts, which are rows of the products."""
        return self.tokens * self.k

    @property
    def elements(self) -> int:
        """Zero where there is nothing to compute."""
        return self.slots * self.H * self.F


def check_types(**tensors: object) -> None:
    """Raises TypeError for an argument that the operator's schema would not take. Biases may be
    None.
    """
    for name, t in tensors.items():
        if t is not None or not name.endswith("_bias"):
            problem.check_tensor(name, t)


def check(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    expert_index: Tensor,
    expert_weights: Tensor,
    activation: str,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
) -> Layer:
    """Checks the arguments; returns the sizes of the layer. Raises OperandError or ValueError."""
    problem.check_name("activation", activation, ACTIVATIONS, "")
    _check_matrices(x, gate_up, down)
    experts, H, W = gate_up.shape
    split = glu_split(activation)
    if not holds(W % split == 0):
        raise OperandError(
            f"gate_up.shape[2] is {W}, expected an even number of columns, which activation "
            f"{activation!r} pairs"
        )
    F = W // split
    if not holds(x.shape[1] == H):
        raise OperandError(f"gate_up.shape[1] is {H} but x.shape[1] is {x.shape[1]}")
    if not are_equal(down.shape, (experts, F, H)):
        raise OperandError(
            f"down.shape is {tuple(down.shape)}, expected {(experts, F, H)} for gate_up.shape "
            f"{tuple(gate_up.shape)} and {activation!r}"
        )
    if not (holds(experts >= 1) and holds(experts <= MAX_GROUPS)):
        raise OperandError(f"gate_up.shape[0] is {experts}, expected 1 to {MAX_GROUPS} experts")
    k = _check_routing(x, expert_index, expert_weights)
    for name, bias, columns in (("gate_up_bias", gate_up_bias, W), ("down_bias", down_bias, H)):
        if bias is not None:
            _check_bias(name, bias, (experts, columns), x)
    return Layer(x.shape[0], k, experts, H, W, F)


def _check_matrices(x: Tensor, gate_up: Tensor, down: Tensor) -> None:
    for name, t, dims in (("x", x, 2), ("gate_up", gate_up, 3), ("down", down, 3)):
        if t.dim() != dims:
            raise OperandError(f"{name} has {t.dim()} dimensions, expected {dims}")
        if t.dtype not in DTYPES:
            raise OperandError(
                f"{name}.dtype is {t.dtype}, expected one of {', '.join(map(str, DTYPES))}"
            )
        if t.dtype != x.dtype:
            raise OperandError(f"{name}.dtype is {t.dtype} but x.dtype is {x.dtype}")
        if t.device != x.device:
            raise OperandError(f"{name} is on {t.device} but x is on {x.device}")


def _check_routing(x: Tensor, expert_index: Tensor, expert_weights: Tensor) -> int:
    """Returns the number of experts of each token."""
    if expert_index.dim() != 2 or not holds(expert_index.shape[0] == x.shape[0]):
        raise OperandError(
            f"expert_index.shape is {tuple(expert_index.shape)}, expected ({x.shape[0]}, k)"
        )
    if expert_index.dtype not in INDEX_DTYPES:
        raise OperandError(
            f"expert_index.dtype is {expert_index.dtype}, expected torch.int32 or torch.int64"
        )
    if not are_equal(expert_weights.shape, expert_index.shape):
        raise OperandError(
            f"expert_weights.shape is {tuple(expert_weights.shape)} but expert_index.shape is "
            f"{tuple(expert_index.shape)}"
        )
    if expert_weights.dtype not in WEIGHT_DTYPES:
        raise OperandError(
            f"expert_weights.dtype is {expert_weights.dtype}, expected a floating-point dtype"
        )
    for name, t in (("expert_index", expert_index), ("expert_weights", expert_weights)):
        if t.device != x.device:
            raise OperandError(f"{name} is on {t.device} but x is on {x.device}")
    if not holds(expert_index.numel() <= MOST_SLOTS):
        raise OperandError(
            f"expert_index has {expert_index.numel()} elements, expected at most {MOST_SLOTS}"
        )
    return expert_index.shape[1]


def _check_bias(name: str, bias: Tensor, shape: tuple[int, int], x: Tensor) -> None:
    is_alike = (bias.dtype, bias.device) == (x.dtype, x.device)
    if not (is_alike and are_equal(bias.shape, shape)):
        raise OperandError(
            f"{name} is {bias.dtype} of shape {tuple(bias.shape)} on {bias.device}, expected "
            f"{x.dtype} of shape {shape} on {x.device}"
        )
