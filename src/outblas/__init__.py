"""GEMM kernels in Python DSLs that outrun cuBLAS, and the ladder of kernels that explains how."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from outblas.base.registry import Kernel, ladder
from outblas.call.context_flag import accumulate_gradients, weights_ready
from outblas.call.errors import OperandError
from outblas.call.invariance import batch_invariant

# What imports torch. The command line imports it when a command needs it, see `_outblas_command`.
if TYPE_CHECKING or "_outblas_command" not in sys.modules:
    from outblas.api import addmm, linear, matmul
    from outblas.base.cuda_graphs import warmup
    from outblas.call.fallback import FallbackWarning
    from outblas.call.packs import load_pack, record_shapes
    from outblas.call.sm_carveout import sm_carveout
    from outblas.torch_ops.aten import disable, enable
    from outblas.torch_ops.grouped_mm import grouped_mm
    from outblas.torch_ops.moe import moe_mlp
    from outblas.torch_ops.quantize import quantize
    from outblas.torch_ops.scaled_grouped_mm import scaled_grouped_mm
    from outblas.torch_ops.scaled_mm import scaled_mm

if TYPE_CHECKING:
    from outblas import autotune as autotune
    from outblas import inductor as inductor
    from outblas import nn as nn
    from outblas.autotune.automatic import tune
    from outblas.inductor import inductor_choice
    from outblas.nn import FP8Linear, Linear, patch, unpatch
    from outblas.packing.build import precompile

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


# ---- what is imported when it is first asked for: sweeps bring process pools and a database
_MODULE_OF = {
    "FallbackWarning": "call.fallback",
    "addmm": "api",
    "linear": "api",
    "matmul": "api",
    "scaled_mm": "torch_ops.scaled_mm",
    "grouped_mm": "torch_ops.grouped_mm",
    "scaled_grouped_mm": "torch_ops.scaled_grouped_mm",
    "moe_mlp": "torch_ops.moe",
    "quantize": "torch_ops.quantize",
    "sm_carveout": "call.sm_carveout",
    "disable": "torch_ops.aten",
    "enable": "torch_ops.aten",
    "warmup": "base.cuda_graphs",
    "record_shapes": "call.packs",
    "precompile": "packing.build",
    "load_pack": "call.packs",
    "tune": "autotune.automatic",
    "inductor_choice": "inductor",
    "FP8Linear": "nn",
    "Linear": "nn",
    "patch": "nn",
    "unpatch": "nn",
}
_MODULES = ("autotune", "inductor", "nn")


# Type checkers know the names above, and are not to take any other for one.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _MODULE_OF:
            return getattr(import_module("." + _MODULE_OF[name], __name__), name)
        if name in _MODULES:
            return import_module("." + name, __name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The API, and what Python puts into every module."""
    return sorted({*__all__, *_MODULES, *(name for name in globals() if name.startswith("__"))})
