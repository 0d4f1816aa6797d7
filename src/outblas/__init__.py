"""GEMM kernels in Python DSLs that outrun cuBLAS, and the ladder of kernels that explains how."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .core.accumulation import accumulate_gradients
from .core.errors import OperandError
from .core.invariance import batch_invariant
from .core.readiness import weights_ready
from .core.registry import Kernel, ladder
from .runtime import hooks

# What imports torch. The command line imports it when a command needs it, see `_outblas_command`.
if TYPE_CHECKING or "_outblas_command" not in sys.modules:
    from .api import addmm, linear, matmul
    from .core.sm_carveout import sm_carveout
    from .runtime.cuda_graphs import warmup
    from .runtime.fallback import FallbackWarning
    from .runtime.record import record_shapes
    from .torch_ops.aten import disable, enable
    from .torch_ops.grouped_mm import grouped_mm
    from .torch_ops.moe import moe_mlp
    from .torch_ops.quantize import quantize
    from .torch_ops.scaled_grouped_mm import scaled_grouped_mm
    from .torch_ops.scaled_mm import scaled_mm

if TYPE_CHECKING:
    from . import autotune as autotune
    from . import inductor as inductor
    from . import nn as nn
    from .autotune.automatic import tune
    from .inductor import inductor_choice
    from .nn import FP8Linear, Linear, patch, unpatch
    from .packing.ahead import precompile
    from .runtime.packs import load_pack

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
    "FallbackWarning": "runtime.fallback",
    "addmm": "api",
    "linear": "api",
    "matmul": "api",
    "scaled_mm": "torch_ops.scaled_mm",
    "grouped_mm": "torch_ops.grouped_mm",
    "scaled_grouped_mm": "torch_ops.scaled_grouped_mm",
    "moe_mlp": "torch_ops.moe",
    "quantize": "torch_ops.quantize",
    "sm_carveout": "core.sm_carveout",
    "disable": "torch_ops.aten",
    "enable": "torch_ops.aten",
    "warmup": "runtime.cuda_graphs",
    "record_shapes": "runtime.record",
    "precompile": "packing.ahead",
    "load_pack": "runtime.packs",
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


# ---- who answers the runtime: it may not name the autotuner and the ladders, which import it
def _tuner() -> hooks.Tuner:
    from .autotune import automatic

    return automatic


def _operand_copies() -> hooks.OperandCopies:
    from .hopper.gemm import operand_copies

    return operand_copies


def _activation_kernels() -> hooks.ActivationKernels:
    from .kernels import activation

    return activation


def _portable_grouped() -> hooks.GroupedKernels:
    from .kernels import grouped

    return grouped


def _hopper_grouped() -> hooks.GroupedKernels:
    from .hopper import grouped

    return grouped


def _moe_kernels() -> hooks.MoeKernels:
    from .kernels import moe

    return moe


def _quantize_kernels() -> hooks.QuantizeKernels:
    from .kernels import quantize as kernels

    return kernels


hooks.tuner.register(_tuner)
hooks.operand_copies.register(_operand_copies)
hooks.activation_kernels.register(_activation_kernels)
hooks.portable_grouped.register(_portable_grouped)
hooks.hopper_grouped.register(_hopper_grouped)
hooks.moe_kernels.register(_moe_kernels)
hooks.quantize_kernels.register(_quantize_kernels)
