"""CTAs that fit on one SM, by the rules of NVIDIA's occupancy calculator (cuda_occupancy.h)."""

from dataclasses import dataclass

from ..core.machines import Machine

_PARTITIONS = 4  # of an SM: warps and registers do not cross them


@dataclass(frozen=True)
class Occupancy:
    """CTAs and warps resident on an SM, the share of its warp slots, and what runs out first.

    `limiter` is "registers", "shared memory", "threads" or "ctas". 0 CTAs: the kernel cannot be
    launched.
    """

    ctas_per_sm: int
    warps_per_sm: int
    share: float
    limiter: str


def occupancy(machine: Machine, registers: int, smem_bytes: int, threads: int) -> Occupancy:
    """Occupancy of a kernel with so many registers a thread, bytes of shared memory and threads a
    CTA.

    `smem_bytes` are the CTA's own, static and dynamic; all of an SM's shared memory is taken to be
    configured as such. Raises ValueError for a count below 0, or no threads.
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
    limits = {
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
