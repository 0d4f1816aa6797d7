"""How many CTAs an SM has room for, and what limits them."""

from typing import NamedTuple

import pytest

from outblas.base import machines
from outblas.inspect.occupancy import occupancy

KIB = 1024


class Kernel(NamedTuple):
    """What a CTA takes of a machine's SM, and how many CTAs and warps that leaves room for."""

    machine: str
    registers: int
    smem_bytes: int
    threads: int
    ctas: int
    warps: int
    limiter: str


KERNELS = {
    "165 registers are 5376 a warp": Kernel("H100", 165, 0, 128, 3, 12, "registers"),
    "116 registers on a T4": Kernel("T4", 116, 18944, 256, 2, 16, "registers"),
    "beyond 227 KiB": Kernel("H100", 168, 230 * KIB, 384, 0, 0, "shared memory"),
    "168 registers of 384 threads": Kernel("H100", 168, 196 * KIB, 384, 1, 12, "registers"),
    "twice 113 KiB and 1 KiB": Kernel("H100", 32, 113 * KIB, 128, 2, 8, "shared memory"),
    "a byte more than half": Kernel("H100", 32, 113 * KIB + 1, 128, 1, 4, "shared memory"),
    "1024 threads": Kernel("A100", 32, 0, 1024, 2, 64, "registers"),
    "a warp, which are allotted in fours": Kernel("A100", 16, 0, 32, 16, 16, "threads"),
    "two warps": Kernel("A100", 16, 0, 64, 16, 32, "threads"),
    "nothing is reserved on sm_75": Kernel("T4", 32, 32 * KIB, 128, 2, 8, "shared memory"),
    "two warps on a T4": Kernel("T4", 16, 0, 64, 8, 16, "threads"),
    "more than 255 registers": Kernel("H100", 256, 0, 128, 0, 0, "registers"),
    "more than 1024 threads": Kernel("H100", 32, 0, 1056, 0, 0, "threads"),
}


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_an_sm_has_room_for_so_many_ctas(kernel: Kernel) -> None:
    machine = machines.find(kernel.machine)

    found = occupancy(machine, kernel.registers, kernel.smem_bytes, kernel.threads)

    assert (found.ctas_per_sm, found.warps_per_sm) == (kernel.ctas, kernel.warps)
    assert found.limiter == kernel.limiter
    assert found.share == kernel.warps / machine.warps_per_sm


def test_a_cta_without_threads_is_refused() -> None:
    with pytest.raises(ValueError, match="threads is 0, expected at least 1"):
        occupancy(machines.find("T4"), 32, 0, 0)
