"""GEMM kernels in Python DSLs that outrun cuBLAS, and the ladder of kernels that explains how."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .api import addmm, linear, matmul
from .core.errors import OperandError
from .core.invariance import batch_invariant
from .core.registry import Kernel, ladder
from .runtime.cuda_graphs import warmup
from .runtime.fallback import FallbackWarning
from .torch_ops.scaled_mm import scaled_mm

if TYPE_CHECKING:
    from .autotune.automatic import tune
    from .inductor import inductor_choice
    from .nn import Linear, patch, unpatch

__all__ = [
    "FallbackWarning",
    "Kernel",
    "Linear",
    "OperandError",
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

# By lazy name: sweeps bring process pools and a database.
_HOMES = {
    "tune": "autotune.automatic",
    "inductor_choice": "inductor",
    "Linear": "nn",
    "patch": "nn",
    "unpatch": "nn",
}


def __getattr__(name: str) -> Any:
    """What is imported when first asked for."""
    if name in _HOMES:
        return getattr(import_module("." + _HOMES[name], __name__), name)
    if name in ("autotune", "inductor", "nn"):
        return import_module("." + name, __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
