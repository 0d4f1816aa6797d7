"""The facts that a figure depends on besides the kernel: the GPU, its driver, the software above
it.
"""

import functools
import platform

import torch

from ...bench.environment import driver, power_limit
from ...core import machines
from ...core.requirements import installed
from ..store.records import Gpu

CPU = "CPU, interpreted"


@functools.cache
def current(index: int | None = None) -> Gpu:
    """The GPU of this index, by default the current one; without any, what the interpreter
    runs on.
    """
    triton, dsl = installed("triton"), installed("nvidia-cutlass-dsl")
    if not torch.cuda.is_available():
        return Gpu(
            f"{CPU}, {platform.machine()}",
            0,
            0,
            torch=str(torch.__version__),
            triton=triton,
            dsl=dsl,
        )
    index = torch.cuda.current_device() if index is None else index
    properties = torch.cuda.get_device_properties(index)
    with torch.cuda.device(index):
        limit = power_limit()
    return Gpu(
        properties.name,
        10 * properties.major + properties.minor,
        properties.multi_processor_count,
        limit,
        driver(),
        torch.version.cuda,
        str(torch.__version__),
        triton,
        dsl,
    )


def machine(gpu: Gpu) -> machines.Machine | None:
    """What models know of a GPU; None for the interpreter."""
    if gpu.arch == 0:
        return None
    return machines.of_properties(gpu.name, gpu.arch, gpu.sms)


def imagined(name: str) -> Gpu:
    """A GPU by the name of its machine, "h100", where there is none: for looking ahead. Raises
    ValueError.
    """
    found = machines.find(name)
    return Gpu(machines.device_name(found), found.arch, found.sms)
