"""GEMM kernels in Python DSLs that outrun cuBLAS, and the ladder of kernels that explains how."""

from .fallback import FallbackWarning
from .ops import addmm, matmul
from .registry import Kernel, ladder

__all__ = ["FallbackWarning", "Kernel", "addmm", "ladder", "matmul"]
__version__ = "0.1.0"
