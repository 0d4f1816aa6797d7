"""The candidates of a search: each is one config of one kernel, with what is known about it before
it runs.
"""

import math
from dataclasses import dataclass
from typing import Any

from outblas.autotune.search.target import TuneTarget
from outblas.autotune.store.records import Workload
from outblas.base.configs import brief
from outblas.base.space import Footprint

# Costs in Triton's interpreter, in µs: of starting a program, and per element of A, B or C that a
# step along K touches. Fitted to a sweep of 66 configs of portable. docs/tuning/sample-sweep.jsonl
# is another sweep, whose order they predict with a rank correlation of 0.88. Machines differ in
# scale.
PROGRAM_US, ELEMENT_US = 12_700.0, 0.62


def by_interpreter(footprint: Footprint, workload: Workload) -> float:
    """Estimates the µs of a config without a GPU, where programs run one after another and each
    processes its own tiles.
    """
    m, n, k = footprint.tile_m, footprint.tile_n, footprint.tile_k
    programs = math.ceil(workload.M / m) * math.ceil(workload.N / n)
    steps = math.ceil(workload.K / k)
    return programs * (PROGRAM_US + ELEMENT_US * steps * (m * k + k * n + m * n))


@dataclass(frozen=True)
class Candidate:
    """A config that is worth measuring.

    Attributes:
        target: The kernel.
        config: An instance of the kernel's `Config`.
        text: The config as text, as stores have it.
        compile_key: The text of the config whose compiled code it shares.
        footprint: How the config cuts the problem into tiles, and the registers, shared memory and
            threads that it takes: `footprint.tile_m`, `.stages`, `.registers` and so on.
        predicted_us: The time that the model predicts, in µs, or on a CPU `by_interpreter`.
        own: Whether it is the config that the kernel chooses where none is given.

    Example:
        >>> from outblas.autotune import Gpu, TuneTarget, Workload, plan
        >>> configs = plan(
        ...     [TuneTarget("portable", "outblas.kernels.portable")],
        ...     Workload(512, 512, 512),
        ...     Gpu("NVIDIA H100 80GB HBM3", 90, 132),
        ...     trials=4,
        ... )
        >>> candidate = configs.ranked[0]
        >>> candidate.target.name, candidate.footprint.tile_k in (32, 64, 128)
        ('portable', True)
    """

    target: TuneTarget
    config: Any
    text: str
    compile_key: str
    footprint: Footprint
    predicted_us: float
    own: bool = False

    @property
    def label(self) -> str:
        """The kernel and the config: `portable[block_m=64,...]`."""
        return f"{self.target.name}[{self.text}]"

    @property
    def brief(self) -> str:
        """The kernel, with the fields of the config that differ from the defaults."""
        return f"{self.target.name}[{brief(self.config)}]"
