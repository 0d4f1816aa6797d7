"""CTAs that fit on one SM, by the rules of NVIDIA's occupancy calculator (cuda_occupancy.h)."""

from dataclasses import dataclass
from typing import Literal

from outblas.base.machines import Machine

Limiter = Literal["registers", "shared memory", "threads", "ctas"]

_PARTITIONS = 4  # of an SM: warps and registers do not cross them


@dataclass(frozen=True)
class Occupancy:
    """The CTAs of a kernel that are resident on an SM at a time.

    Attributes:
        ctas_per_sm: CTAs on an SM; 0 if the kernel cannot be launched.
        warps_per_sm: Their warps.
        share: The fraction of the SM's warp slots that they take, from 0 to 1.
        limiter: What runs out first: "registers", "shared memory", "threads" or "ctas".

    Example:
        >>> from outblas.inspect import Occupancy
        >>> Occupancy(2, 16, 0.25, "registers").limiter
        'registers'
    """

    ctas_per_sm: int
    warps_per_sm: int
    share: float
    limiter: Limiter


def occupancy(machine: Machine, registers: int, smem_bytes: int, threads: int) -> Occupancy:
    """Compute how many CTAs of a kernel fit on an SM.

    All memory that an SM can configure as shared memory is taken to be configured so.

    Args:
        machine: The GPU, from `outblas.base.machines`.
        registers: Registers of a thread.
        smem_bytes: Bytes of shared memory of a CTA, static and dynamic.
        threads: Threads of a CTA.

    Returns:
        The occupancy.

    Raises:
        ValueError: A count is below 0, or there are no threads.

    Example:
        >>> from outblas.base import machines
        >>> from outblas.inspect import occupancy
        >>> occupancy(machines.find("h100"), registers=168, smem_bytes=100_000, threads=384)
        Occupancy(ctas_per_sm=1, warps_per_sm=12, share=0.1875, limiter='registers')
    """
    for name, value, least in (
        ("registers", registers, 0),
        ("smem_bytes", smem_bytes, 0),
        ("threads", threads, 1),
    ):
        if value < least:
            raise ValueError(f"{name} is {value}, expected at least {least}")
    warps = -(-threads // 32)
    slots = _up(warps, machine.warp_granularity)
    limits: dict[Limiter, int] = {
        "registers": _by_registers(machine, registers, slots),
        "shared memory": _by_shared_memory(machine, smem_bytes),
        "threads": machine.warps_per_sm // slots if threads <= machine.max_threads_per_cta else 0,
        "ctas": machine.ctas_per_sm,
    }
    limiter = min(limits, key=lambda name: limits[name])
    resident = limits[limiter] * warps
    return Occupancy(limits[limiter], resident, resident / machine.warps_per_sm, limiter)


def _by_registers(machine: Machine, registers: int, slots: int) -> int:
    if registers > machine.max_registers_per_thread:
        return 0
    if registers == 0:
        return machine.ctas_per_sm
    of_warp = _up(registers * 32, machine.register_granularity)
    warps = machine.registers_per_sm // _PARTITIONS // of_warp * _PARTITIONS
    return warps // slots


def _by_shared_memory(machine: Machine, smem_bytes: int) -> int:
    if smem_bytes > machine.shared_memory_per_cta:
        return 0
    taken = _up(smem_bytes + machine.reserved_shared_memory, machine.shared_memory_granularity)
    return machine.shared_memory_per_sm // taken if taken else machine.ctas_per_sm


def _up(value: int, step: int) -> int:
    return -(-value // step) * step
