"""The scales of fp8 operands of grouped products: one of each 128 terms of a row of A, and one of
each block of 128 terms and 128 columns of B. Where terms are divided among groups, each column of
B has its own.

Scales are numbered along K from its beginning, whatever groups there are.
"""

from dataclasses import dataclass

import torch

from outblas.call import fp8
from outblas.call.errors import OperandError
from outblas.call.grouped_rows import Form
from outblas.call.problem import Strides
from outblas.call.sizes import are_equal
from outblas.call.tensor_memory import alignment as alignment_of

Tensor = torch.Tensor

BLOCK = fp8.BLOCK  # terms, and columns, that share a scale
FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
OUT_DTYPES = torch.bfloat16, torch.float16, torch.float32
_FORMS = (
    "expected mat_a (M, K) and mat_b (G, K, N) with offs, mat_a (G, C, K) and mat_b (G, K, N) with "
    "counts, or mat_a (M, K) and mat_b (K, N) with offs"
)


@dataclass(frozen=True)
class GroupScales:
    """Where the scales of a grouped product lie, in elements.

    a: the strides over (groups, rows, blocks of K). Groups of rows that follow one another have
        stride 0 along groups, as groups of terms have.
    b: the strides over (groups, blocks of K, columns or blocks of columns).
    columns: how many columns of B share a scale, `BLOCK` or 1.
    formats: those of A and B, values of `FORMATS`.
    dtype_b: the dtype of B, which may be another than that of A.
    alignment: of both, the largest power of two up to 16 that divides the address in bytes.
    """

    a: Strides
    b: Strides
    columns: int
    formats: tuple[str, str]
    dtype_b: torch.dtype
    alignment: tuple[int, int]


def check_form(
    form: Form, mat_a: Tensor, mat_b: Tensor, offs: Tensor | None, counts: Tensor | None
) -> None:
    """Checks that a product of this form may have scales. Raises OperandError."""
    if form == "ragged_n":
        raise OperandError(
            f"mat_a has {mat_a.dim()} dimensions and mat_b has {mat_b.dim()}, {_FORMS}"
        )
    if form == "batch" and counts is None and offs is None:
        raise OperandError(f"offs and counts are None, {_FORMS}")


def check_output_dtype(output_dtype: torch.dtype | None) -> torch.dtype:
    """Returns the dtype of the result. Raises OperandError."""
    dtype = output_dtype or torch.bfloat16
    if dtype not in OUT_DTYPES:
        raise OperandError(
            f"output_dtype is {dtype}, expected one of {', '.join(map(str, OUT_DTYPES))}"
        )
    return dtype


def check_scales(
    form: Form, mat_a: Tensor, mat_b: Tensor, scale_a: Tensor | None, scale_b: Tensor | None
) -> None:
    """Checks the scales of checked operands. Raises OperandError."""
    *groups, K, N = mat_b.shape
    blocks = -(-K // BLOCK)
    columns = N if form == "ragged_k" else -(-N // BLOCK)
    wanted = {"scale_a": (*mat_a.shape[:-1], blocks), "scale_b": (*groups, blocks, columns)}
    for (name, shape), t in zip(wanted.items(), (scale_a, scale_b), strict=True):
        assert t is not None, "a call has both or none"
        is_float32 = t.dtype == torch.float32 and t.device == mat_a.device
        if not (is_float32 and are_equal(t.shape, shape)):
            raise OperandError(
                f"{name} is {t.dtype} of shape {tuple(t.shape)} on {t.device}, expected "
                f"torch.float32 of shape {shape} on {mat_a.device}"
            )


def describe(
    form: Form, mat_a: Tensor, mat_b: Tensor, scale_a: Tensor | None, scale_b: Tensor | None
) -> GroupScales | None:
    """Describes the scales of a checked product; None for one without."""
    if scale_a is None or scale_b is None:
        return None
    return GroupScales(
        a=tuple(scale_a.stride() if scale_a.dim() == 3 else (0, *scale_a.stride())),
        b=tuple(scale_b.stride() if scale_b.dim() == 3 else (0, *scale_b.stride())),
        columns=1 if form == "ragged_k" else BLOCK,
        formats=(FORMATS[mat_a.dtype], FORMATS[mat_b.dtype]),
        dtype_b=mat_b.dtype,
        alignment=(alignment_of(scale_a), alignment_of(scale_b)),
    )


def spread(scale: Tensor, dim: int, begin: int, end: int, block: int = BLOCK) -> Tensor:
    """Returns the scale of each element from `begin` to `end` of a dimension, in which `block`
    elements share one.
    """
    places = torch.arange(begin, end, device=scale.device).div(block, rounding_mode="floor")
    return scale.index_select(dim, places)
