"""The only checker of the arguments of `grouped_mm`. It turns them into a `GroupedProblem`, or
raises.

A grouped product is one product per group, whose sizes differ in one dimension: the ends of the
groups in that dimension lie on the device, in `offs`. No size of a group is read by the host.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from outblas.call import epilogue, grouped_rows, grouped_scales, problem
from outblas.call.epilogue import Epilogue, View
from outblas.call.errors import OperandError
from outblas.call.grouped_rows import Form as Form
from outblas.call.grouped_scales import GroupScales
from outblas.call.problem import DTYPES, Strides
from outblas.call.sizes import are_equal, holds
from outblas.call.tensor_memory import alignment as alignment_of
from outblas.call.tensor_memory import read_address

Tensor = torch.Tensor

MAX_GROUPS = 1024
# Columns of B up to which `hopper.grouped` gathers rows of A as it loads them. That makes every
# tile slower, so with more columns a pass that stores the rows takes less (H100, WORKLOG.md).
GATHERING_COLUMNS = 2048
FEW_ROWS = 64  # of a group, for which a tile of 64 rows is enough
# The largest capacity of a masked group of which no more than `FEW_ROWS` are expected to be there:
# in decoding few are, and DRAM bounds the call.
FEW_PLACES = 512


class GroupedTensors(NamedTuple):
    """The tensors of a grouped product besides its operands, its result and `offs`; None for those
    that a call does not have. Kernels take them in the form of their `GroupedProblem`.

    bias: (groups, N). residual: as the result. aux: as the product before the activation; it is
    written. a_index: int32 (M,), the row of A that each row of a group is. scatter_index: int32
    (M,), the row of the result in which each row of a group is stored. scatter_weights: fp32 (M,),
    by which the rows of groups are multiplied before the residual is added. counts: int32
    (groups,), the rows of each group where all have the same room; kernels take it as `offs`, and
    nothing here. scale_a, scale_b: fp32, of fp8 operands, as `core.grouped_scales` describes them.
    """

    bias: Tensor | None = None
    residual: Tensor | None = None
    aux: Tensor | None = None
    a_index: Tensor | None = None
    scatter_index: Tensor | None = None
    scatter_weights: Tensor | None = None
    counts: Tensor | None = None
    scale_a: Tensor | None = None
    scale_b: Tensor | None = None


NO_TENSORS = GroupedTensors()


@dataclass(frozen=True)
class GroupedProblem:
    """The products of all groups, in the form that kernels plan: ragged rows, or ragged terms.

    ragged_m: x[m, :] = A[m, :] B[g] + bias[g] for the rows m of group g. A is (M, K), B (groups, K,
    N).
    ragged_k: x[g] = A[:, k] B[k, :] + bias[g] over the terms k of group g. A is (M, K), B (K, N),
    and x (groups, M, N).

    x is written to `aux` where a call asks for it. Then out = f(x) + residual, as in
    `core.epilogue`. With ragged rows the rows of groups may lie elsewhere, so that no permutation
    has to be stored: A[a_index[m], :] stands for A[m, :], and out[scatter_index[m], :] =
    scatter_weights[m] f(x[m, :]) + residual[scatter_index[m], :]. x keeps the order of groups.

    M, N, K: the sizes of the products of all groups; N counts the columns of B, also where an
        activation pairs them, so that the result has N/2.
    a, b, out: strides in elements, groups first where a tensor has them.
    epilogue: the activation, and the views of bias, residual and aux. The strides of a bias are
        those over (groups, M, N), 0 along rows; those of the others are as many as their tensor
        has dimensions.
    rows_of_a: the rows of A: M, or where `gathers` how many rows `a_index` chooses from.
    gathers, scatters, weighted: whether there are `a_index`, `scatter_index`, `scatter_weights`.
    alignment: of a, b, out, the largest power of two up to 16 that divides the address in bytes.
    zero_tail: rows beyond the last group are stored as zeros, where they would be stored; otherwise
        nothing is. They have no epilogue, and aux stays as it is.
    exchanged: a is the caller's mat_b, transposed, and b the mat_a.
    capacity: the rows for which each group has room, where group g begins at row g * capacity, and
        `offs` holds how many rows of each group there are. All others are neither computed nor
        stored. 0 where groups follow one another, and `offs` holds their ends.
    scales: of fp8 operands, those of their blocks; None for operands without scales. `dtype` is
        that of A then.
    """

    form: Form
    groups: int
    M: int
    N: int
    K: int
    a: Strides
    b: Strides
    out: Strides
    dtype: torch.dtype
    out_dtype: torch.dtype
    device: torch.device
    alignment: tuple[int, int, int]
    zero_tail: bool
    exchanged: bool = False
    epilogue: Epilogue = epilogue.NONE
    rows_of_a: int = 0
    gathers: bool = False
    scatters: bool = False
    weighted: bool = False
    capacity: int = 0
    scales: GroupScales | None = None

    @property
    def columns(self) -> int:
        """The columns of the result: N, or half as many where an activation pairs columns."""
        return self.N // 2 if self.epilogue.gated else self.N

    @property
    def expected_rows(self) -> int:
        """M, or the rows that are likely to be there where groups have places of their own: in
        decoding few of them are.
        """
        if 0 < self.capacity <= FEW_PLACES:
            return self.groups * min(self.capacity, FEW_ROWS)
        return self.M

    @property
    def writes_more_than_it_reads(self) -> bool:
        """Whether the results of groups of terms have more values than the operands."""
        operands = (self.M + self.N) * self.K
        return self.form == "ragged_k" and self.groups * self.M * self.columns > operands

    @property
    def names(self) -> tuple[str, str]:
        """The caller's names of a and b."""
        return ("mat_b", "mat_a") if self.exchanged else ("mat_a", "mat_b")


class Checked(NamedTuple):
    """What a checked call computes: its form, the number of its groups, the shapes of the product
    and of the result, and their dtype.
    """

    form: Form
    groups: int
    product: tuple[int, ...]
    result: tuple[int, ...]
    dtype: torch.dtype


def check_types(
    mat_a: object,
    mat_b: object,
    out_dtype: object,
    names: Sequence[str],
    others: Sequence[object],
) -> None:
    """Raises TypeError for an argument that the operator's schema would not take. `others`: the
    other tensors, whose names are `names`; None for those that a call does not have.
    """
    problem.check_tensor("mat_a", mat_a)
    problem.check_tensor("mat_b", mat_b)
    for i, t in enumerate(others):
        if t is not None:
            problem.check_tensor(names[i], t)
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise TypeError(f"out_dtype is {type(out_dtype).__name__}, expected a torch.dtype")


def check(
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None,
    tensors: GroupedTensors,
    activation: str,
    out_dtype: torch.dtype | None,
    *,
    zero_tail: bool = False,
) -> Checked:
    """Checks the arguments of a call. The tensors are the caller's: indices may be int64, weights
    of the dtype of the result.

    Raises OperandError.
    """
    is_scaled = tensors.scale_a is not None
    _check_operands(mat_a, mat_b, is_scaled)
    form = _form(mat_a, mat_b)
    if is_scaled:
        grouped_scales.check_form(form, mat_a, mat_b, offs, tensors.counts)
    if tensors.counts is None:
        groups = _check_offs(form, mat_a, mat_b, offs)
    else:
        groups = _check_counts(form, mat_a, mat_b, offs, tensors, zero_tail)
        form = "masked"
    if is_scaled:
        dtype = grouped_scales.check_output_dtype(out_dtype)
        grouped_scales.check_scales(form, mat_a, mat_b, tensors.scale_a, tensors.scale_b)
    else:
        dtype = _check_out_dtype(out_dtype, mat_a.dtype)
    if tensors.a_index is not None:
        grouped_rows.check_gather(form, mat_a, tensors.a_index)
    M = mat_a.shape[-2] if tensors.a_index is None else tensors.a_index.shape[0]
    N = mat_b.shape[-1]
    product = (M, N) if form in ("ragged_m", "ragged_n") else (groups, M, N)
    if tensors is NO_TENSORS and not activation:
        return Checked(form, groups, product, product, dtype)
    result = _check_activation(form, activation, product)
    if tensors.bias is not None:
        _check_bias(form, groups, N, tensors.bias, dtype, mat_a.device)
    if tensors.residual is not None:
        _check_like("residual", tensors.residual, result, dtype, mat_a.device)
    if tensors.aux is not None:
        _check_like("aux", tensors.aux, product, dtype, mat_a.device)
        problem.check_out(tensors.aux, product, dtype, mat_a.device, "aux")
    index, weights = tensors.scatter_index, tensors.scatter_weights
    grouped_rows.check_scatter(form, M, index, weights, dtype, mat_a.device)
    return Checked(form, groups, product, result, dtype)


def _check_out_dtype(out_dtype: torch.dtype | None, own: torch.dtype) -> torch.dtype:
    """Returns the dtype of the result."""
    dtype = out_dtype or own
    if dtype not in (own, torch.float32):
        raise OperandError(
            f"out_dtype is {dtype}, expected {own}, the dtype of mat_a, or torch.float32"
        )
    return dtype


def _check_operands(mat_a: Tensor, mat_b: Tensor, is_scaled: bool) -> None:
    allowed = grouped_scales.FORMATS if is_scaled else DTYPES
    for name, t in (("mat_a", mat_a), ("mat_b", mat_b)):
        if t.dim() not in (2, 3):
            raise OperandError(f"{name} has {t.dim()} dimensions, expected 2 or 3")
        if t.dtype not in allowed:
            raise OperandError(
                f"{name}.dtype is {t.dtype}, expected one of {', '.join(map(str, allowed))}"
            )
    if mat_b.dtype != mat_a.dtype and not is_scaled:
        raise OperandError(f"mat_b.dtype is {mat_b.dtype} but mat_a.dtype is {mat_a.dtype}")
    if mat_b.device != mat_a.device:
        raise OperandError(f"mat_b is on {mat_b.device} but mat_a is on {mat_a.device}")
    if not holds(mat_a.shape[-1] == mat_b.shape[-2]):
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
        if not holds(mat_a.shape[0] == mat_b.shape[0]):
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
    return _check_groups("offs", offs, mat_a, mat_b)


def _check_counts(
    form: Form,
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None,
    tensors: GroupedTensors,
    zero_tail: bool,
) -> int:
    """Returns the number of groups."""
    counts = tensors.counts
    assert counts is not None, "the caller has looked"
    if form != "batch":
        raise OperandError(
            f"counts is given, expected None where mat_a has {mat_a.dim()} and mat_b {mat_b.dim()} "
            "dimensions: it needs 3 of both"
        )
    for name, t in (("offs", offs), *list(tensors._asdict().items())[3:6]):
        if t is not None:
            raise OperandError(f"{name} is given, expected None beside counts")
    if zero_tail:
        raise OperandError("zero_tail is True, expected False beside counts")
    if counts.dim() != 1 or counts.dtype != torch.int32 or counts.device != mat_a.device:
        raise OperandError(
            f"counts is {counts.dtype} of shape {tuple(counts.shape)} on {counts.device}, expected "
            f"torch.int32 of 1 dimension on {mat_a.device}"
        )
    return _check_groups("counts", counts, mat_a, mat_b)


def _check_groups(given: str, t: Tensor, mat_a: Tensor, mat_b: Tensor) -> int:
    """Checks that both operands have as many matrices, where they have several, as the tensor
    `given` has elements. Returns their number.
    """
    groups = t.shape[0]
    for name, operand in (("mat_a", mat_a), ("mat_b", mat_b)):
        if operand.dim() == 3 and not holds(operand.shape[0] == groups):
            raise OperandError(
                f"{name}.shape[0] is {operand.shape[0]} but {given} has {groups} elements"
            )
    if not (holds(groups >= 1) and holds(groups <= MAX_GROUPS)):
        raise OperandError(f"{given} has {groups} elements, expected 1 to {MAX_GROUPS}")
    return groups


def _check_activation(form: Form, activation: str, product: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of the result."""
    if form == "ragged_n" and epilogue.glu_split(activation) == 2:
        raise OperandError(
            f"activation {activation!r} pairs columns, expected another where groups are columns "
            "of the result"
        )
    return epilogue.check_columns(activation, product)


def _check_bias(
    form: Form,
    groups: int,
    N: int,
    bias: Tensor,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    if form == "ragged_n":
        raise OperandError(
            "bias is given, expected None where groups are columns of the result, because a bias "
            "has as many columns as each group's result"
        )
    _check_like("bias", bias, (groups, N), dtype, device)


def _check_like(
    name: str, t: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    if t.dtype != dtype or t.device != device or not are_equal(t.shape, shape):
        raise OperandError(
            f"{name} is {t.dtype} of shape {tuple(t.shape)} on {t.device}, expected {dtype} of "
            f"shape {shape} on {device}"
        )


def in_kernel_form(tensors: GroupedTensors, rows_of_a: int) -> GroupedTensors:
    """Returns the tensors with indices and weights as the kernels take them, without counts
    (`ends`). An int64 index is clamped before it loses bits: to rows of A, and to the rows of the
    result and one beyond them at each end, where nothing is stored.
    """
    a_index, scatter_index, weights = tensors[3:6]
    if a_index is not None:
        a_index = grouped_rows.narrow_index(a_index, 0, rows_of_a - 1)
    if scatter_index is not None:
        scatter_index = grouped_rows.narrow_index(scatter_index, -1, scatter_index.shape[0])
    if weights is not None:
        weights = weights.to(torch.float32).contiguous()
    return tensors._replace(
        a_index=a_index, scatter_index=scatter_index, scatter_weights=weights, counts=None
    )


def ends(offs: Tensor | None, tensors: GroupedTensors) -> Tensor:
    """Returns what the kernels take as `offs`."""
    found = offs if tensors.counts is None else tensors.counts
    assert found is not None, "`check` demands it"
    return found.contiguous()


def check_order(ends: Sequence[int]) -> None:
    """Checks that the ends of groups do not decrease. Raises OperandError."""
    for group, (before, end) in enumerate(itertools.pairwise(ends)):
        if end < before:
            raise OperandError(
                f"offs[{group + 1}] is {end} but offs[{group}] is {before}, expected ends of "
                "groups that do not decrease"
            )


def describe(
    form: Form,
    mat_a: Tensor,
    mat_b: Tensor,
    out: Tensor,
    groups: int,
    tensors: GroupedTensors = NO_TENSORS,
    *,
    activation: str = "",
    zero_tail: bool = False,
) -> GroupedProblem:
    """Describes a checked product with an `offs` or with counts. Ragged columns are the ragged rows
    of the transposed product, out^T = B^T A^T, whose operands are exchanged (`in_planned_form`).
    """
    scales = grouped_scales.describe(form, mat_a, mat_b, tensors.scale_a, tensors.scale_b)
    exchanged = form == "ragged_n"
    capacity = mat_a.shape[1] if form == "masked" else 0
    mat_a, mat_b, out, tensors = in_planned_form(form, mat_a, mat_b, out, tensors)
    rows = mat_a.shape[-2] if tensors.a_index is None else tensors.a_index.shape[0]
    return GroupedProblem(
        form=form if form == "ragged_k" else "ragged_m",
        groups=groups,
        M=rows,
        N=mat_b.shape[-1],
        K=mat_a.shape[-1],
        a=tuple(mat_a.stride()),
        b=tuple(mat_b.stride()),
        out=tuple(out.stride()),
        dtype=mat_a.dtype,
        out_dtype=out.dtype,
        device=mat_a.device,
        alignment=(alignment_of(mat_a), alignment_of(mat_b), alignment_of(out)),
        zero_tail=zero_tail,
        exchanged=exchanged,
        epilogue=_epilogue(activation, tensors),
        rows_of_a=mat_a.shape[-2],
        gathers=tensors.a_index is not None,
        scatters=tensors.scatter_index is not None,
        weighted=tensors.scatter_weights is not None,
        capacity=capacity,
        scales=scales,
    )


def in_planned_form(
    form: Form, mat_a: Tensor, mat_b: Tensor, out: Tensor, tensors: GroupedTensors
) -> tuple[Tensor, Tensor, Tensor, GroupedTensors]:
    """Returns the tensors of a call as the kernels take them: for ragged columns those of the
    transposed product; with counts, matrices of the rows of all groups. These are copies of
    operands that cannot be viewed so; aux and out can (`is_one_matrix`). Scales stay as they are.
    """
    if form == "masked":
        residual, aux = (
            t if t is None else t.flatten(0, 1) for t in (tensors.residual, tensors.aux)
        )
        moved = tensors._replace(residual=residual, aux=aux)
        return mat_a.flatten(0, 1), mat_b, out.flatten(0, 1), moved
    if form != "ragged_n":
        return mat_a, mat_b, out, tensors
    residual, aux = (t if t is None else t.mT for t in (tensors.residual, tensors.aux))
    return mat_b.mT, mat_a.mT, out.mT, tensors._replace(residual=residual, aux=aux)


def is_one_matrix(t: Tensor) -> bool:
    """Returns whether the matrices of a batch can be viewed as one that has the rows of all."""
    return read_address(t.flatten(0, 1)) == read_address(t)


def _epilogue(activation: str, tensors: GroupedTensors) -> Epilogue:
    gated = epilogue.glu_split(activation) == 2
    bias = tensors.bias
    return Epilogue(
        function=epilogue.GATED[activation] if gated else activation,
        gated=gated,
        bias=None
        if bias is None
        else View((bias.stride(0), 0, bias.stride(1)), alignment_of(bias)),
        residual=_view(tensors.residual),
        aux=_view(tensors.aux),
    )


def _view(t: Tensor | None) -> View | None:
    return None if t is None else View(tuple(t.stride()), alignment_of(t))
