"""A second ranker: NVIDIA's nvMatmulHeuristics, which models tiles, stages and clusters, but not
the kernels of outblas.
"""

import ctypes
import math
from typing import Any

from outblas.autotune.search.candidates import Ranker, by_model
from outblas.autotune.store.records import Workload
from outblas.base.machines import Machine
from outblas.base.shapes import LAYOUTS
from outblas.base.space import Footprint

_GPUS = {"A100": "A100_SXM_80GB", "H100": "H100_SXM", "GH200": "H100_SXM", "H200": "H200_SXM"}
_BY_ARCH = {80: "A100_SXM_80GB", 90: "H100_SXM"}
# The letters stand for the types of A, of the accumulator and of C: H half, T bfloat16, S single.
_PRECISIONS = {
    ("float16", "float16"): "HSH",
    ("float16", "float32"): "HSS",
    ("bfloat16", "bfloat16"): "TST",
    ("bfloat16", "float32"): "TSS",
    ("float32", "float32"): "SSS",
    ("tf32", "float32"): "SSS",
}
_INSTRUCTION = {"wgmma": (64, 8, 16), "mma": (16, 8, 16), "fma": (1, 1, 1)}
_LAYOUT = "{}_ROW_MAJOR"  # filled with a layout in outblas's letters: A then B, n stored by rows


def ranker() -> Ranker:
    """Returns a ranker that uses the library's estimate of a config's runtime, and the analytic
    model where the library has none.

    Raises ImportError that names the package to install.
    """
    try:
        import nvMatmulHeuristics as library
    except (ImportError, OSError) as error:
        raise ImportError(
            "ranker 'heuristics' needs nvidia-matmul-heuristics, which cannot be loaded "
            f"({error}): pip install 'outblas[heuristics]'"
        ) from None
    libraries: dict[tuple[str, str], Any] = {}

    def rank(f: Footprint, workload: Workload, machine: Machine) -> float:
        key = machine.name, _PRECISIONS[workload.dtype, workload.out_dtype]
        if key not in libraries:
            libraries[key] = _Library(library, machine, key[1])
        return libraries[key].us(f, workload) or by_model(f, workload, machine)

    return rank


class _Library:
    """The library for one GPU and precision.

    The handle is never destroyed, because version 0.1.0.27 crashes when it is, and in
    `estimateSiliconMetric`.
    """

    def __init__(self, library: Any, machine: Machine, precision: str) -> None:
        self._interface = library.NvMatmulHeuristicsInterface(
            library.NvMatmulHeuristicsTarget.GENERIC, precision
        )
        self._gpu = self._interface.nullptr
        name = _GPUS.get(machine.name) or _BY_ARCH.get(machine.arch)
        if name is not None:
            self._gpu = self._interface.createHardwareDescriptor()
            self._interface.setHardwarePredefinedGpu(
                self._gpu, library.NvMatmulHeuristicsNvidiaGpu[name]
            )
        self._layouts = {
            letters: library.NvMatmulHeuristicsMatmulLayout[_LAYOUT.format(letters.upper())]
            for letters in LAYOUTS
        }
        for layout in self._layouts.values():
            self._interface.loadInternalDiscoverySet(layout, self._gpu)
        self._handle, self._interface.handle = self._interface.handle, None
        self._precision = precision.encode("ascii")

    def us(self, f: Footprint, workload: Workload) -> float | None:
        """Returns the library's estimate in µs; None where it has none."""
        interface = self._interface
        problem = interface.makeNvMatmulHeuristicsProblem(
            *workload.shape, self._layouts[workload.layout]
        )
        seconds = interface.nvMatmulHeuristicsEstimateRuntime(
            self._handle,
            self._precision,
            ctypes.c_int(interface.target),
            ctypes.byref(problem),
            ctypes.byref(self._kernel(f)),
            self._gpu,
        )
        return seconds * 1e6 if math.isfinite(seconds) and seconds > 0 else None

    def _kernel(self, f: Footprint) -> Any:
        kernel = self._interface.nvmmhKernelConfiguration()
        kernel.cta[:] = f.tile_m, f.tile_n, f.tile_k
        kernel.warp[:] = min(64, f.tile_m), min(64, f.tile_n), min(32, f.tile_k)
        kernel.instr[:] = _INSTRUCTION[f.math]
        kernel.splitK, kernel.loadStages, kernel.gridSwizzle, kernel.ctaOrder = 1, f.stages, 1, 0
        kernel.cluster[:] = f.cluster_m, f.cluster_n
        return kernel
