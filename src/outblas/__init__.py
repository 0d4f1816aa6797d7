"""GEMM kernels in Python DSLs that outrun cuBLAS, and the ladder of kernels that explains how."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outblas import autotune as autotune
    from outblas import inductor as inductor
    from outblas import nn as nn
    from outblas.autotune.automatic import tune
    from outblas.base.cuda_graphs import warmup
    from outblas.base.registry import Kernel, ladder
    from outblas.call.context_flag import accumulate_gradients, weights_ready
    from outblas.call.errors import OperandError
    from outblas.call.fallback import FallbackWarning
    from outblas.call.invariance import batch_invariant
    from outblas.call.packs import load_pack, record_shapes
    from outblas.call.sm_carveout import sm_carveout
    from outblas.inductor import inductor_choice
    from outblas.nn import FP8Linear, Linear, patch, unpatch
    from outblas.packing.build import precompile
    from outblas.torch_ops.aten import disable, enable
    from outblas.torch_ops.grouped_mm import grouped_mm
    from outblas.torch_ops.moe import moe_mlp
    from outblas.torch_ops.quantize import quantize
    from outblas.torch_ops.scaled_grouped_mm import scaled_grouped_mm
    from outblas.torch_ops.scaled_mm import scaled_mm

# It imports torch and defines the operators. The command line, whose module `_outblas_command` is,
# imports it when a command needs it.
if TYPE_CHECKING or "_outblas_command" not in sys.modules:
    from outblas.api import addmm, linear, matmul

__all__ = [
    "FP8Linear",
    "FallbackWarning",
    "Kernel",
    "Linear",
    "OperandError",
    "accumulate_gradients",
    "addmm",
    "batch_invariant",
    "disable",
    "enable",
    "grouped_mm",
    "inductor_choice",
    "ladder",
    "linear",
    "load_pack",
    "matmul",
    "moe_mlp",
    "patch",
    "precompile",
    "quantize",
    "record_shapes",
    "scaled_grouped_mm",
    "scaled_mm",
    "sm_carveout",
    "tune",
    "unpatch",
    "warmup",
    "weights_ready",
]
__version__ = "0.1.0"


# ---- what is imported when it is first asked for, by module
_EXPORTS = {
    "api": ("addmm", "linear", "matmul"),
    "autotune.automatic": ("tune",),
    "base.cuda_graphs": ("warmup",),
    "base.registry": ("Kernel", "ladder"),
    "call.context_flag": ("accumulate_gradients", "weights_ready"),
    "call.errors": ("OperandError",),
    "call.fallback": ("FallbackWarning",),
    "call.invariance": ("batch_invariant",),
    "call.packs": ("load_pack", "record_shapes"),
    "call.sm_carveout": ("sm_carveout",),
    "inductor": ("inductor_choice",),
    "nn": ("FP8Linear", "Linear", "patch", "unpatch"),
    "packing.build": ("precompile",),
    "torch_ops.aten": ("disable", "enable"),
    "torch_ops.grouped_mm": ("grouped_mm",),
    "torch_ops.moe": ("moe_mlp",),
    "torch_ops.quantize": ("quantize",),
    "torch_ops.scaled_grouped_mm": ("scaled_grouped_mm",),
    "torch_ops.scaled_mm": ("scaled_mm",),
}
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names}
_MODULES = ("autotune", "inductor", "nn")


# Type checkers know the names above, and are not to take any other for one.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _MODULE_OF:
            value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        elif name in _MODULES:
            value = import_module(f"{__name__}.{name}")
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value  # found at once from now on
        return value


def __dir__() -> list[str]:
    """The API, and what Python puts into every module."""
    return sorted({*__all__, *_MODULES, *(name for name in globals() if name.startswith("__"))})
