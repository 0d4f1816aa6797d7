"""Which products run on kernels of outblas under `outblas.enable`: its arguments, checked."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from outblas.base import registry
from outblas.call import problem as operands
from outblas.call.context_flag import check_bool
from outblas.torch_ops.aten_scaled import DTYPES as FP8
from outblas.torch_ops.aten_scaled import NOT_INVARIANT

DTYPES = (torch.float16, torch.bfloat16)
NOTHING = "nothing is multiplied"
GROUPED = "_grouped_mm"
# Operators that multiply batches.
BATCHED = ("bmm", "baddbmm", "bmm.dtype", "baddbmm.dtype", GROUPED)


@dataclass(frozen=True)
class Product:
    """A product that torch is asked for, as the `filter` of `enable` sees it.

    Attributes:
        operator: `mm`, `addmm`, `bmm` or `baddbmm`, with `.dtype` where torch is given an
            `out_dtype`, `_scaled_mm` or `_grouped_mm`.
        batch: The number of products of this size; 1 for `mm`, `addmm` and `_scaled_mm`, and where
            a dimension is divided among groups.
        M: Rows of the result.
        N: Columns of the result.
        K: The inner size.
        dtype: The dtype of the operands.
        groups: The groups of `_grouped_mm`, among which a dimension is divided; else 1.
        divided: That dimension, "M", "N" or "K", whose size is that of all groups; else "".

    Example:
        >>> import torch, outblas
        >>> def large(product):  # a Product
        ...     return product.M > 1 and product.flops > 1e9
        >>> _ = outblas.enable(filter=large)
        >>> outblas.disable()
    """

    operator: str
    batch: int
    M: int
    N: int
    K: int
    dtype: torch.dtype
    groups: int = 1
    divided: str = ""

    @property
    def flops(self) -> int:
        """The floating-point operations: 2 · batch · M · N · K."""
        return 2 * self.batch * self.M * self.N * self.K

    def __str__(self) -> str:
        has_batch = self.operator in BATCHED and not self.divided
        batch = f"{self.batch}x" if has_batch else ""
        name = operands.dtype_name(self.dtype)
        groups = f", {self.divided} in {self.groups} groups" if self.divided else ""
        return f"{self.operator} {batch}{self.M}x{self.N}x{self.K} {name}{groups}"


class Rules(NamedTuple):
    """Which products run on kernels of outblas, and where.

    key: the dispatch key whose kernels are overridden. kernel: the kernel that takes them; "" for
    the best known one. The other fields are the arguments of `enable`; without arguments, every
    product is taken.
    """

    dtypes: tuple[torch.dtype, ...]
    min_flops: float
    min_gain: float
    filter: Callable[[Product], bool] | None
    key: str = "CUDA"
    kernel: str = ""
    batch_invariant: bool = False


def checked_rules(
    dtypes: Collection[torch.dtype] | None,
    min_flops: float,
    min_gain: float | None,
    filter: Callable[[Product], bool] | None,
    batch_invariant: bool,
) -> Rules:
    """Returns the rules of the arguments of `enable`. Raises as it does."""
    check_bool(batch_invariant, "batch_invariant")
    if batch_invariant:
        _check_takes_all(min_flops, min_gain, filter)
    if dtypes is None:
        dtypes = (*DTYPES, torch.float32) if batch_invariant else DTYPES
    dtypes = _checked_dtypes(dtypes)
    if batch_invariant and (fp8 := [dtype for dtype in dtypes if dtype in FP8]):
        raise ValueError(f"dtypes has {fp8[0]} with batch_invariant=True, but {NOT_INVARIANT}")
    if min_gain is None:
        min_gain = 0 if batch_invariant else 1.0
    return Rules(
        dtypes,
        _checked_limit("min_flops", min_flops),
        _checked_limit("min_gain", min_gain),
        _checked_filter(filter),
        batch_invariant=batch_invariant,
    )


def _checked_dtypes(dtypes: object) -> tuple[torch.dtype, ...]:
    known = dict.fromkeys(dtype for kernel in registry.ladder() for dtype in kernel.dtypes)
    known |= dict.fromkeys(map(operands.dtype_name, FP8))
    if isinstance(dtypes, torch.dtype) or not isinstance(dtypes, Collection):
        raise TypeError(f"dtypes is {dtypes!r}, expected a collection of torch dtypes")
    for dtype in dtypes:
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtypes has {dtype!r}, expected torch dtypes")
        if operands.dtype_name(dtype) not in known:
            raise ValueError(f"dtypes has {dtype}, expected some of {', '.join(known)}")
    return tuple(dtypes)


def _checked_limit(name: str, limit: object) -> float:
    if isinstance(limit, bool) or not isinstance(limit, int | float):
        raise TypeError(f"{name} is {limit!r}, expected a number")
    if not limit >= 0:
        raise ValueError(f"{name} is {limit}, expected 0 or more")
    return limit


def _check_takes_all(min_flops: object, min_gain: object, filter: object) -> None:
    """Raises ValueError for arguments that leave products to torch, which promises no bits."""
    given = {"min_flops": min_flops, "min_gain": min_gain or 0, "filter": filter or 0}
    for name, value in given.items():
        if value != 0:
            raise ValueError(
                f"{name} is {value!r} with batch_invariant=True, expected none: a product that "
                "stays with torch has other bits in other batches"
            )


def _checked_filter(given: Any) -> Callable[[Product], bool] | None:
    if given is not None and not callable(given):
        raise TypeError(f"filter is {given!r}, expected a function of a product, or None")
    return given  # type: ignore[no-any-return]


def unwanted_reason(rules: Rules, product: Product) -> str:
    """Returns why a product is not to be taken, whatever kernel could compute it; "" if it is."""
    if product.dtype not in rules.dtypes:
        return f"{product.dtype} is not among the dtypes that enable() was given"
    if product.flops == 0:
        return NOTHING
    if product.flops < rules.min_flops:
        return f"its {product.flops} FLOP are less than min_flops, {rules.min_flops:g}"
    if rules.filter is not None and not rules.filter(product):
        return "the filter does not take it"
    return ""
