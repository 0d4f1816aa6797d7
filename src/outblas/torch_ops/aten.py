"""`outblas.enable`: torch's own dense products run on kernels of outblas, whoever calls them.

aten's `mm`, `addmm`, `bmm` and `baddbmm`, their forms with `out` and `out_dtype`, `addmm_` and
`baddbmm_`, `_grouped_mm`, and on request `_scaled_mm`, are overridden at the dispatch key of a
device. That key lies below autograd, autocast, vmap and tracing, so these see torch's own
operators, and only the arithmetic changes. The kernels that the operators had before are kept: they
compute whatever outblas does not cover, and `disable` gives the operators back to them.

Rules hold for the whole process. Blocks of several threads overlap, and end in any order: those
that have not ended are listed, and the rules of the last one hold.
"""

import warnings
from collections.abc import Callable, Collection
from types import TracebackType

import torch

from outblas.call import fallback
from outblas.torch_ops import aten_gradients, native
from outblas.torch_ops.aten_calls import OURS, Active, activate, lock
from outblas.torch_ops.aten_gradients import with_gradients
from outblas.torch_ops.aten_operators import OVERRIDES, REFUSED
from outblas.torch_ops.aten_rules import Product, Rules, checked_rules
from outblas.torch_ops.aten_scaled import DTYPES as FP8
from outblas.torch_ops.aten_scaled import OPERATOR as SCALED

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
    _depth: int  # of the blocks that were entered and not left

    def __init__(self) -> None:
        self.decisions: dict[str, str] = {}

    @classmethod
    def _by(cls, rules: Rules) -> "Enabled":
        block = cls()
        block._rules, block._depth = rules, 0
        return block

    def __enter__(self) -> "Enabled":
        """Enables once more what has ended."""
        with lock:
            self._depth += 1
            if self not in _blocks:
                _begin(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends what was enabled, with the last of the blocks that entered it: then the most recent
        one that has not ended holds.
        """
        with lock:
            self._depth = max(self._depth - 1, 0)
            if not self._depth and self in _blocks:
                _blocks.remove(self)
                if _active is self:
                    _activate(_blocks[-1] if _blocks else None)


_blocks: list[Enabled] = []  # what was enabled and has not ended, the most recent last
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
    if the arguments below admit them. That includes `torch.matmul`, `F.linear`, `torch.einsum`,
    `torch.tensordot`, `nn.MultiheadAttention` and local products of distributed tensors, their
    backward passes by torch's own formulas, and what `torch.compile` calls. Products with an
    `out_dtype` get gradients, which torch 2.13 does not have. Everything else stays with torch,
    errors included. Results differ from cuBLAS's in the last bits.

    The call takes effect at once and until `disable`. As a context manager it ends with the block.
    All threads are affected: of what was enabled and has not ended, by whichever thread, the most
    recent holds. Without a CUDA device it does nothing, and warns once.

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
            a grouped product with an `offs`, and so do aten's products that have no kernel here:
            `_addmm_activation`, behind which layers of `nn.TransformerEncoder` are in inference,
            and `addmv`, behind which `mv` is. What else multiplies stays with torch: `dot` and
            `vdot`, fp8 operands, integers (`_int_mm`), packed weights (`_weight_int4pack_mm`,
            `_weight_int8pack_mm`, `_mixed_dtypes_linear`), sparse and nested tensors, convolutions,
            recurrent layers of cuDNN, fused attention, and solvers and factorizations of
            `torch.linalg`.

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
    rules = checked_rules(dtypes, min_flops, min_gain, filter, batch_invariant)
    if not torch.cuda.device_count():
        fallback.warn_once(
            "enable() does nothing on this machine, because torch has no CUDA device"
        )
    return _enable(rules)


def disable() -> None:
    """Give aten's products back to the kernels that they had before `enable`.

    It ends all that was enabled, in all threads. Without a call of `enable` before it does nothing.

    Example:
        >>> import outblas
        >>> _ = outblas.enable()
        >>> outblas.disable()
    """
    with lock:
        _blocks.clear()
        _activate(None)


def _enable(rules: Rules) -> Enabled:
    block = Enabled._by(rules)
    _begin(block)
    return block


def _begin(block: Enabled) -> None:
    with lock:
        _activate(block)
        _blocks.append(block)


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
    left_out = set() if any(dtype in FP8 for dtype in rules.dtypes) else {SCALED}
    if not rules.batch_invariant:
        left_out.add(REFUSED)
    names = (name for name, (operator, _) in OVERRIDES.items() if operator not in left_out)
    return rules.key, tuple(names)


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
            try:
                previous = torch.library.get_kernel(f"aten::{name}", key)
            except RuntimeError:  # an older torch, or one for a CPU, does not have them all
                continue
            kernel = override(name if operator == REFUSED else operator, previous)
            if native.install(name, key, kernel):
                continue
            library.impl(name, kernel, key, with_keyset=True, allow_override=True)
        for name in aten_gradients.OPERATORS if aten_gradients.are_missing() else ():
            above = f"Autograd{key}"
            kernel = with_gradients(name, torch.library.get_kernel(f"aten::{name}", above))
            library.impl(name, kernel, above, with_keyset=True, allow_override=True)
    _library = library


def _uninstall() -> None:
    """Gives the operators back to the kernels that they had before."""
    global _library
    _library = None  # its registrations end with it
    native.uninstall()
