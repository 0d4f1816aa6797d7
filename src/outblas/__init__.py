"""GEMM kernels in Python DSLs that outrun cuBLAS, and the ladder of kernels that explains how."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .api import addmm, linear, matmul
from .capture import warmup
from .fallback import FallbackWarning
from .inductor import inductor_choice
from .invariance import batch_invariant
from .nn import Linear, patch, unpatch
from .registry import Kernel, ladder
from .scaled import scaled_mm

if TYPE_CHECKING:
    from .autotune.automatic import tune

__all__ = [
    "FallbackWarning",
    "Kernel",
    "Linear",
    "addmm",
    "batch_invariant",
    "inductor_choice",
    "ladder",
    "linear",
    "matmul",
    "patch",
    "scaled_mm",
    "tune",
    "unpatch",
    "warmup",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`tune` and `autotune`, imported when first asked for: sweeps bring process pools and a database."""
    if name == "tune":
        from .autotune.automatic import tune

        return tune
    if name == "autotune":
        return import_module(".autotune", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
