"""The only checker of the arguments of `grouped_mm`. It turns them into a `GroupedProblem`, or
raises.

A grouped product is one product per group, whose sizes differ in one dimension: the ends of the
groups in that dimension lie on the device, in `offs`. No size of a group is read by the host.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from . import problem
from .errors import OperandError
from .problem import DTYPES, Strides
from .tensor_memory import read_address

Tensor = torch.Tensor

# Which dimension is divided among groups: the rows of A and of the result, the columns of B and of
# the result, or the terms of the sums. Where none is, a product of batches is meant.
Form = Literal["ragged_m", "ragged_n", "ragged_k", "batch"]
MAX_GROUPS = 1024


@dataclass(frozen=True)
class GroupedProblem:
    """The products of all groups, in the form that kernels plan: ragged rows, or ragged terms.

    ragged_m: out[m, :] = A[m, :] B[g] for the rows m of group g. A is (M, K), B (groups, K, N).
    ragged_k: out[g] = A[:, k] B[k, :] over the terms k of group g. A is (M, K), B (K, N), and out
    (groups, M, N).

    M, N, K: the sizes of the operands; that of the ragged dimension counts all groups.
    a, b, out: strides in elements, groups first where a tensor has them.
    bias: strides of a bias over (groups, M, N) where there is one; 0 along a dimension over which
        it repeats.
    alignment: of a, b, out, the largest power of two up to 16 that divides the address in bytes.
    zero_tail: rows of out beyond the last group are set to zero; otherwise they stay as they are.
    exchanged: a is the caller's mat_b, transposed, and b the mat_a.
    """

    form: Form
    groups: int
    M: int
    N: int
    K: int
    a: Strides
    b: Strides
    out: Strides
    bias: Strides | None
    dtype: torch.dtype
    out_dtype: torch.dtype
    device: torch.device
    alignment: tuple[int, int, int]
    zero_tail: bool
    exchanged: bool = False

    @property
    def names(self) -> tuple[str, str]:
        """The caller's names of a and b."""
        return ("mat_b", "mat_a") if self.exchanged else ("mat_a", "mat_b")


def check_types(
    mat_a: object, mat_b: object, offs: object, bias: object, out_dtype: object
) -> None:
    """Raises TypeError for an argument that the operator's schema would not take."""
    for name, t in (("mat_a", mat_a), ("mat_b", mat_b), ("offs", offs), ("bias", bias)):
        if t is not None or name.startswith("mat"):
            problem.check_tensor(name, t)
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise TypeError(f"out_dtype is {type(out_dtype).__name__}, expected a torch.dtype")


def check(
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
) -> tuple[Form, tuple[int, ...], torch.dtype]:
    """Checks the arguments. Returns the form of the product, and the shape and dtype of its result.

    Raises OperandError.
    """
    _check_operands(mat_a, mat_b)
    form = _form(mat_a, mat_b)
    groups = _check_offs(form, mat_a, mat_b, offs)
    dtype = out_dtype or mat_a.dtype
    if dtype not in (mat_a.dtype, torch.float32):
        raise OperandError(
            f"out_dtype is {dtype}, expected {mat_a.dtype}, the dtype of mat_a, or torch.float32"
        )
    M, N = mat_a.shape[-2], mat_b.shape[-1]
    shape = (M, N) if form in ("ragged_m", "ragged_n") else (groups, M, N)
    _check_bias(form, groups, N, bias, dtype, mat_a.device)
    return form, shape, dtype


def _check_operands(mat_a: Tensor, mat_b: Tensor) -> None:
    for name, t in (("mat_a", mat_a), ("mat_b", mat_b)):
        if t.dim() not in (2, 3):
            raise OperandError(f"{name} has {t.dim()} dimensions, expected 2 or 3")
        if t.dtype not in DTYPES:
            raise OperandError(
                f"{name}.dtype is {t.dtype}, expected one of {', '.join(map(str, DTYPES))}"
            )
    if mat_b.dtype != mat_a.dtype:
        raise OperandError(f"mat_b.dtype is {mat_b.dtype} but mat_a.dtype is {mat_a.dtype}")
    if mat_b.device != mat_a.device:
        raise OperandError(f"mat_b is on {mat_b.device} but mat_a is on {mat_a.device}")
    if mat_a.shape[-1] != mat_b.shape[-2]:
        raise OperandError(
            f"mat_a.shape[-1] is {mat_a.shape[-1]} but mat_b.shape[-2] is {mat_b.shape[-2]}"
        )


def _form(mat_a: Tensor, mat_b: Tensor) -> Form:
    match mat_a.dim(), mat_b.dim():
        case 2, 3:
            return "ragged_m"
        case 3, 2:
            return "ragged_n"
        case 2, 2:
            return "ragged_k"
    return "batch"


def _check_offs(form: Form, mat_a: Tensor, mat_b: Tensor, offs: Tensor | None) -> int:
    """Returns the number of groups."""
    if form == "batch":
        if offs is not None:
            raise OperandError("offs is given, expected None where both operands have 3 dimensions")
        if mat_a.shape[0] != mat_b.shape[0]:
            raise OperandError(
                f"mat_a.shape[0] is {mat_a.shape[0]} but mat_b.shape[0] is {mat_b.shape[0]}"
            )
        return mat_a.shape[0]
    if offs is None:
        raise OperandError(
            "offs is None, expected the ends of groups where an operand has 2 dimensions"
        )
    if offs.dim() != 1 or offs.dtype != torch.int32 or offs.device != mat_a.device:
        raise OperandError(
            f"offs is {offs.dtype} of shape {tuple(offs.shape)} on {offs.device}, expected "
            f"torch.int32 of 1 dimension on {mat_a.device}"
        )
    groups = offs.shape[0]
    for name, t in (("mat_a", mat_a), ("mat_b", mat_b)):
        if t.dim() == 3 and t.shape[0] != groups:
            raise OperandError(f"{name}.shape[0] is {t.shape[0]} but offs has {groups} elements")
    if not 1 <= groups <= MAX_GROUPS:
        raise OperandError(f"offs has {groups} elements, expected 1 to {MAX_GROUPS}")
    return groups


def _check_bias(
    form: Form,
    groups: int,
    N: int,
    bias: Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    if bias is None:
        return
    if form == "ragged_n":
        raise OperandError(
            "bias is given, expected None where groups are columns of the result, because a bias "
            "has as many columns as each group's result"
        )
    if tuple(bias.shape) != (groups, N) or bias.dtype != dtype or bias.device != device:
        raise OperandError(
            f"bias is {bias.dtype} of shape {tuple(bias.shape)} on {bias.device}, expected {dtype} "
            f"of shape {(groups, N)} on {device}"
        )


def describe(
    form: Form,
    mat_a: Tensor,
    mat_b: Tensor,
    bias: Tensor | None,
    out: Tensor,
    groups: int,
    *,
    zero_tail: bool,
) -> GroupedProblem:
    """Describes a checked product with an `offs`. Ragged columns are the ragged rows of the
    transposed product, out^T = B^T A^T, whose operands are exchanged.
    """
    exchanged = form == "ragged_n"
    if exchanged:
        mat_a, mat_b, out = mat_b.mT, mat_a.mT, out.mT
    return GroupedProblem(
        form="ragged_m" if exchanged else form,
        groups=groups,
        M=mat_a.shape[-2],
        N=mat_b.shape[-1],
        K=mat_a.shape[-1],
        a=tuple(mat_a.stride()),
        b=tuple(mat_b.stride()),
        out=tuple(out.stride()),
        bias=None if bias is None else (bias.stride(0), 0, bias.stride(1)),
        dtype=mat_a.dtype,
        out_dtype=out.dtype,
        device=mat_a.device,
        alignment=(_alignment(mat_a), _alignment(mat_b), _alignment(out)),
        zero_tail=zero_tail,
        exchanged=exchanged,
    )


def _alignment(t: Tensor) -> int:
    return math.gcd(read_address(t), 16)
