"""`outblas.enable`: torch's own dense products run on kernels of outblas, whoever calls them.

aten's `mm`, `addmm`, `bmm` and `baddbmm`, their forms with `out`, `addmm_` and `baddbmm_`,
`_grouped_mm`, and on request `_scaled_mm`, are overridden at the dispatch key of a device. That key
lies below autograd, autocast, vmap and tracing, so these see torch's own operators, and only the
arithmetic changes. The kernels that the operators had before are kept: they compute whatever
outblas does not cover, and `disable` gives the operators back to them.
"""

import warnings
from collections.abc import Callable, Collection
from types import TracebackType

import torch

from . import native
from .aten_calls import OURS, Active, activate, lock
from .aten_operators import OVERRIDES
from .aten_rules import Product, Rules, checked_rules
from .aten_scaled import DTYPES as FP8
from .aten_scaled import OPERATOR as SCALED

__all__ = ["OURS", "Enabled", "Product", "Rules", "disable", "enable"]


class Enabled:
    """What `enable` returns: a context manager, and an account of what became of each product.

    Attributes:
        decisions: Every kind of product that was met, such as "addmm 512x512x512 bfloat16". Its
            value is "outblas" where a kernel of outblas computes it, and otherwise the reason why
            torch does.

    Example:
        >>> import torch, outblas
        >>> with outblas.enable() as enabled:
        ...     y = torch.ones(2, 3) @ torch.ones(3, 4)  # on a CPU: torch computes it
        >>> enabled.decisions
        {}
    """

    _rules: Rules
    _before: "Enabled | None"

    def __init__(self) -> None:
        self.decisions: dict[str, str] = {}

    @classmethod
    def _by(cls, rules: Rules, before: "Enabled | None") -> "Enabled":
        made = cls()
        made._rules, made._before = rules, before
        return made

    def __enter__(self) -> "Enabled":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Goes back to what was enabled when this was made."""
        _activate(self._before)


_active: Enabled | None = None
_library: torch.library.Library | None = None


def enable(
    *,
    dtypes: Collection[torch.dtype] | None = None,
    min_flops: float = 0,
    min_gain: float | None = None,
    filter: Callable[[Product], bool] | None = None,
    batch_invariant: bool = False,
) -> Enabled:
    """Make torch's own dense products run on kernels of outblas, in the whole process.

    aten's `mm`, `addmm`, `bmm` and `baddbmm` on CUDA tensors, with `out` and in place too, and
    `_grouped_mm`, behind which `torch.nn.functional.grouped_mm` is, then run on a kernel of outblas
    if the arguments below admit them. That includes `torch.matmul`,
    `F.linear`, `torch.einsum`, `torch.tensordot`, `nn.MultiheadAttention` and local products of
    distributed tensors, their backward passes by torch's own formulas, and what `torch.compile`
    calls. Everything else stays with torch, errors included. Results differ from cuBLAS's in the
    last bits.

    The call takes effect at once and until `disable`. As a context manager it ends with the block,
    and then what was enabled before holds again. All threads are affected.

    Args:
        dtypes: The dtypes of operands that are taken; by default float16 and bfloat16, and float32
            too with `batch_invariant`. float32 products follow torch's setting of tf32. With
            float8_e4m3fn or float8_e5m2 among them, aten's `_scaled_mm` and `_scaled_mm_v2` are
            overridden too, behind which `torch.nn.functional.scaled_mm` is: products with a scale
            for each operand, or one for each row of A and column of B, whose results are bfloat16,
            float16 or float32, and products with scales of blocks of 128, whose results are
            bfloat16 or float32.
        min_flops: The least 2 · batch · M · N · K of a product that is taken. Small products cost
            the host more than torch's own.
        min_gain: The least time of cuBLAS over ours, where a sweep measured exactly this product; a
            product that was slower stays with torch. Products that nobody measured are taken. Of
            grouped products, classes of a kernel and of sizes stand for single ones: those that
            were slower stay with torch, and those of a kernel that nobody measured too. 0 takes
            all. The default is 1, and 0 with `batch_invariant`.
        filter: A function that is asked once for each kind of product, and returns whether to take
            it.
        batch_invariant: True gives a row of a product the same bits alone, in any batch and beside
            any other rows, in every thread, as `outblas.batch_invariant` does for one. A product
            that no kernel computes raises ValueError, rather than be torch's unnoticed, and so does
            a grouped product with an `offs`. Products of a vector (aten's `mv` and `dot`) and of
            fp8 operands are not overridden.

    Returns:
        A context manager, whose `decisions` say what became of each kind of product.

    Raises:
        TypeError: If an argument is of another type.
        ValueError: If `dtypes` has one that no kernel takes, a limit is negative, or
            `batch_invariant` is True beside an argument that leaves products to torch.

    Example:
        >>> import torch, outblas
        >>> enabled = outblas.enable(min_flops=1e6)
        >>> layer = torch.nn.Linear(8, 4)
        >>> layer(torch.ones(2, 8)).shape  # on a CUDA device: computed by outblas
        torch.Size([2, 4])
        >>> outblas.disable()
    """
    return _enable(checked_rules(dtypes, min_flops, min_gain, filter, batch_invariant))


def disable() -> None:
    """Give aten's products back to the kernels that they had before `enable`.

    Without a call of `enable` before it does nothing. All threads are affected.

    Example:
        >>> import outblas
        >>> _ = outblas.enable()
        >>> outblas.disable()
    """
    _activate(None)


def _enable(rules: Rules) -> Enabled:
    with lock:
        made = Enabled._by(rules, _active)
        _activate(made)
    return made


def _activate(enabled: Enabled | None) -> None:
    """Overrides the operators by the rules of `enabled`; None gives them back."""
    global _active
    with lock:
        before = _active and _overridden(_active._rules)
        _active = None
        activate(None)
        if enabled is None:
            _uninstall()
            return
        if before != _overridden(enabled._rules):
            _uninstall()
            _install(*_overridden(enabled._rules))
        _active = enabled
        activate(Active(enabled._rules, enabled.decisions))


# ---- operators
def _overridden(rules: Rules) -> tuple[str, tuple[str, ...]]:
    """Returns the dispatch key, and the names of the operators that are overridden there."""
    takes_fp8 = any(dtype in FP8 for dtype in rules.dtypes)
    names = [name for name, (operator, _) in OVERRIDES.items() if operator != SCALED or takes_fp8]
    # An older torch does not have them all.
    there = [name for name in names if hasattr(torch.ops.aten, name.partition(".")[0])]
    return rules.key, tuple(there)


def _install(key: str, names: tuple[str, ...]) -> None:
    """Overrides operators at a dispatch key. A torch without CUDA has none there."""
    global _library
    if key == "CUDA" and not torch.backends.cuda.is_built():
        return
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        # torch warns, once in a process, that an operator has a kernel already
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        for name in names:
            operator, override = OVERRIDES[name]
            previous = torch.library.get_kernel(f"aten::{name}", key)
            kernel = override(operator, previous)
            if native.install(name, key, kernel):
                continue
            library.impl(name, kernel, key, with_keyset=True, allow_override=True)
    _library = library


def _uninstall() -> None:
    """Gives the operators back to the kernels that they had before."""
    global _library
    _library = None  # its registrations end with it
    native.uninstall()
