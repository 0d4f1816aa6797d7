"""Draws calls of `scaled_grouped_mm`."""

import torch

from outblas.call.epilogue import glu_split
from outblas.call.grouped import Form

from .fp8 import E4M3
from .grouped_calls import BLOCK, GroupedCall

Tensor = torch.Tensor

FORMS: tuple[Form, ...] = ("ragged_m", "masked", "ragged_k")
# Groups of rows, some empty: their ends, or their counts where each has a room; groups of terms.
ENDS: dict[Form, tuple[int, ...]] = {
    "ragged_m": (0, 5, 5, 22, 40),
    "masked": (3, 0, 17, -4, 21),
    "ragged_k": (0, 128, 128, 384),
}
EXTENTS: dict[Form, int] = {"ragged_m": 43, "masked": 17, "ragged_k": 512}  # more than groups have


def values(*shape: int, dtype: torch.dtype, real: bool = False) -> Tensor:
    """Draws small integers, which fp8 holds, or real numbers."""
    return (torch.randn(shape) if real else torch.randint(-3, 4, shape)).to(dtype)


def scales(*shape: int, real: bool = False) -> Tensor:
    """Draws powers of two, with which sums of integers stay exact, or real numbers."""
    if real:
        return torch.rand(shape) + 0.1
    return 2.0 ** torch.randint(-1, 3, shape)


def blocks(extent: int) -> int:
    """Returns how many blocks a dimension has."""
    return -(-extent // BLOCK)


def draw(
    form: Form,
    *names: str,
    a: torch.dtype = E4M3,
    b: torch.dtype = E4M3,
    out_dtype: torch.dtype = torch.bfloat16,
    activation: str = "",
    real: bool = False,
    M: int = 21,
    N: int = 136,
    K: int = 200,
    ends: tuple[int, ...] | None = None,
    extent: int = 0,
) -> GroupedCall:
    """Draws a call with the tensors `names` besides its operands, scales and groups.

    M, K: where they are not divided. ends: those of groups, or their counts. extent: the size of
    the dimension that is divided, or the rows for which a group has room; 0 for that of the tests
    on a CPU.
    """
    divided = torch.tensor(ENDS[form] if ends is None else ends, dtype=torch.int32)
    extent = extent or EXTENTS[form]
    groups, terms = len(divided), extent if form == "ragged_k" else K
    lead = {"ragged_m": (extent,), "masked": (groups, extent), "ragged_k": (M,)}[form]
    whole = () if form == "ragged_k" else (groups,)
    columns = N if form == "ragged_k" else blocks(N)
    tensors = {
        "mat_a": values(*lead, terms, dtype=a, real=real),
        "mat_b": values(*whole, N, terms, dtype=b, real=real).mT,
        "scale_a": scales(*lead, blocks(terms), real=real),
        "scale_b": scales(*whole, blocks(terms), columns, real=real),
        "counts" if form == "masked" else "offs": divided,
    }
    result = (groups, M) if form == "ragged_k" else lead
    possible = {
        "bias": values(groups, N, dtype=out_dtype, real=real),
        "residual": values(*result, N // glu_split(activation), dtype=out_dtype, real=real),
        "a_index": torch.randint(-2, extent + 2, (extent,)),
        "scatter_index": torch.randperm(extent),
        "scatter_weights": scales(extent),
    }
    tensors |= {name: possible[name] for name in names}
    options = {"activation": activation or None, "out_dtype": out_dtype}
    return GroupedCall(form, tensors, options)
