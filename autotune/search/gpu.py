"""What a measurement depends on besides the kernel: the GPU, its driver, and software versions."""

import functools
import platform

import torch

from outblas.autotune.store.records import Gpu
from outblas.base import machines
from outblas.base.requirements import installed
from outblas.bench.environment import driver, power_limit

CPU = "CPU, interpreted"


@functools.cache
def current(index: int | None = None) -> Gpu:
    """Returns the GPU of this index, by default the current one. Without a GPU, returns the CPU on
    which the interpreter runs.
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


@functools.lru_cache(maxsize=64)
def machine(gpu: Gpu) -> machines.Machine | None:
    """Returns the rates and sizes of a GPU that the models use; None for the interpreter."""
    if gpu.arch == 0:
        return None
    return machines.of_properties(gpu.name, gpu.arch, gpu.sms)


def imagined(name: str) -> Gpu:
    """Returns a GPU by the name of its machine, such as "h100", for plans without a GPU.

    Raises ValueError for an unknown name.
    """
    machine = machines.find(name)
    return Gpu(machines.device_name(machine), machine.arch, machine.sms)
