"""The GPU models that measurements are compared with: the capacity of an SM, its operations per
clock, and the bandwidths of memory.

Occupancy, rooflines, utilisation and the choice of configs read this module. It imports no DSL and
needs no GPU.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True)
class Machine:
    """One GPU model.

    Sizes are in bytes, clocks in MHz, `dram_gbs` in GB/s. `arch` is the compute capability (90 is
    sm_90).

    `boost_mhz` is the clock from which the data sheet's dense tensor peak is computed; a board may
    run faster or slower. `reserved_shared_memory` is the amount that the system reserves in an SM
    for every CTA. Granularities are units of allocation: registers per warp, warps per CTA, bytes
    of shared memory per CTA. `l2_bytes_per_clock` is the read bandwidth of the whole chip,
    `shared_bytes_per_clock` that of one SM. `flops_per_sm_clock` maps "bfloat16", "float16",
    "tf32", "fp8" (tensor cores, dense) and "float32" (FFMA) to FLOP; a dtype that the GPU has no
    units for is absent.
    """

    name: str
    arch: int
    sms: int
    boost_mhz: int
    shared_memory_per_sm: int
    shared_memory_per_cta: int
    l2_bytes: int
    dram_gbs: float
    flops_per_sm_clock: Mapping[str, int]
    source: str
    # The defaults are those of an A100 and newer GPUs.
    reserved_shared_memory: int = KIB
    shared_memory_granularity: int = 128
    threads_per_sm: int = 2048
    warps_per_sm: int = 64
    ctas_per_sm: int = 32
    l2_bytes_per_clock: int = 5120
    shared_bytes_per_clock: int = 128
    registers_per_sm: int = 65536
    register_granularity: int = 256
    warp_granularity: int = 4
    max_registers_per_thread: int = 255
    max_threads_per_cta: int = 1024

    def peak_tflops(self, dtype: str, clock_mhz: float | None = None) -> float:
        """Returns the dense peak at a clock, by default the data sheet's. Raises ValueError for a
        dtype that the GPU has no units for.
        """
        if dtype not in self.flops_per_sm_clock:
            raise ValueError(
                f"dtype is {dtype!r}, expected for {self.name}: "
                f"{', '.join(self.flops_per_sm_clock)}"
            )
        clock = self.boost_mhz if clock_mhz is None else clock_mhz
        return self.sms * self.flops_per_sm_clock[dtype] * clock / 1e6


_CAPABILITY = (
    "CUDA C++ Programming Guide, technical specifications per compute capability (SM limits)"
)
_HOPPER_FLOPS = {"bfloat16": 4096, "float16": 4096, "tf32": 2048, "fp8": 8192, "float32": 256}

_H20_FLOPS = {"bfloat16": 1024, "float16": 1024, "tf32": 512, "fp8": 2048, "float32": 256}


def _hopper(
    name: str,
    *,
    dram_gbs: float,
    l2_mib: int,
    source: str,
    sms: int = 132,
    boost_mhz: int = 1830,
    flops: Mapping[str, int] = _HOPPER_FLOPS,
) -> Machine:
    """Returns a GH100 machine, with 132 SMs by default. The data sheet's dense bf16 peak, 989.4
    TFLOP/s, is 132 x 4096 x 1830 MHz.
    """
    return Machine(
        name=name,
        arch=90,
        sms=sms,
        boost_mhz=boost_mhz,
        shared_memory_per_sm=228 * KIB,
        shared_memory_per_cta=227 * KIB,
        l2_bytes=l2_mib * MIB,
        dram_gbs=dram_gbs,
        flops_per_sm_clock=MappingProxyType(dict(flops)),
        source=f"{source}; {_CAPABILITY}; H100 architecture whitepaper (SMs, FLOP a clock); L2: "
        f"A100's 5120 B/clk, "
        "which agrees with Nsight Compute's peak on an H100",
    )


_ALL = (
    Machine(
        name="T4",
        arch=75,
        sms=40,
        boost_mhz=1590,
        shared_memory_per_sm=64 * KIB,
        shared_memory_per_cta=64 * KIB,
        reserved_shared_memory=0,
        shared_memory_granularity=256,
        threads_per_sm=1024,
        warps_per_sm=32,
        ctas_per_sm=16,
        l2_bytes=4 * MIB,
        dram_gbs=320,
        l2_bytes_per_clock=1024,
        # 32 banks of 4 bytes, but 16 load/store lanes per SM: a warp takes two clocks.
        shared_bytes_per_clock=64,
        flops_per_sm_clock=MappingProxyType({"float16": 1024, "float32": 128}),
        source="T4 product brief PB-08993 (SMs, clock, 256 bits x 10 Gb/s); Turing whitepaper "
        "(FLOP a clock, LD/ST "
        f"units, L2 of 8 x 512 KiB, taken as 16 slices of 64 B/clk); {_CAPABILITY}",
    ),
    Machine(
        name="A100",
        arch=80,
        sms=108,
        boost_mhz=1410,
        shared_memory_per_sm=164 * KIB,
        shared_memory_per_cta=163 * KIB,
        l2_bytes=40 * MIB,
        dram_gbs=2039,
        flops_per_sm_clock=MappingProxyType(
            {"bfloat16": 2048, "float16": 2048, "tf32": 1024, "float32": 128}
        ),
        source="A100 80GB SXM data sheet (DRAM, 312 TFLOP/s); A100 architecture whitepaper "
        "(SMs, clock, FLOP a "
        f"clock, L2 of 40 MB and 5120 B/clk); {_CAPABILITY}",
    ),
    _hopper("H100", dram_gbs=3352, l2_mib=50, source="H100 SXM5 80GB data sheet (3.35 TB/s)"),
    _hopper(
        "GH200", dram_gbs=4000, l2_mib=60, source="GH200 data sheet, 96GB HBM3 (4 TB/s); L2: device"
    ),
    _hopper("H200", dram_gbs=4800, l2_mib=60, source="H200 SXM data sheet (4.8 TB/s); L2: device"),
    _hopper("H800", dram_gbs=3352, l2_mib=50, source="H100 SXM5 data sheet: products are as fast"),
    _hopper(
        "H100 PCIe",
        dram_gbs=2039,
        l2_mib=50,
        sms=114,
        boost_mhz=1619,
        source="H100 PCIe data sheet (114 SMs, 2 TB/s, 756 TFLOP/s of dense bf16, 1619 MHz)",
    ),
    _hopper(
        "H20",
        dram_gbs=4000,
        l2_mib=60,
        sms=78,
        boost_mhz=1853,
        flops=_H20_FLOPS,
        source="H20 as sold (78 SMs, 4.0 TB/s, 60 MB of L2, 148 TFLOP/s of dense bf16 and 296 of "
        "fp8: a quarter of Hopper's rate of an SM, at 1853 MHz)",
    ),
)
MACHINES: Mapping[str, Machine] = MappingProxyType({machine.name: machine for machine in _ALL})

_REFERENCE = {75: "T4", 80: "A100", 90: "H100"}
_DEVICES = {
    "Tesla T4": "T4",
    "NVIDIA T4": "T4",
    "A100-SXM4-80GB": "A100",
    "NVIDIA A100-SXM4-80GB": "A100",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA GH200 480GB": "GH200",
    "NVIDIA H200": "H200",
    "NVIDIA H800": "H800",
    "NVIDIA H100 PCIe": "H100 PCIe",
    "NVIDIA H20": "H20",
}


def find(name: str) -> Machine:
    """Returns the machine with this name, in any case ("h100"). Raises ValueError for an unknown
    name.
    """
    by_name = {machine.name.upper(): machine for machine in _ALL}
    if name.upper() not in by_name:
        raise ValueError(f"machine is {name!r}, expected one of: {', '.join(MACHINES)}")
    return by_name[name.upper()]


def of_device(name: str) -> Machine | None:
    """Returns the machine for a name from `torch.cuda.get_device_name`; None for models that are
    not listed (A100 with 40 GB, MIG slices).
    """
    return MACHINES.get(_DEVICES.get(name, ""))


def of_properties(
    name: str, arch: int, sms: int, shared_memory_per_cta: int | None = None
) -> Machine:
    """Returns the machine of a device, listed or not. An unlisted device is described by the
    reference machine of its architecture, or of the newest older one, with the SMs and shared
    memory that the device reports. Raises ValueError below sm_75.
    """
    listed = of_device(name)
    if listed is None:
        older = [known for known in _REFERENCE if known <= arch]
        if not older:
            raise ValueError(f"arch is {arch}, expected at least {min(_REFERENCE)}")
        listed = replace(MACHINES[_REFERENCE[max(older)]], name=name, arch=arch)
    return replace(
        listed,
        sms=sms,
        shared_memory_per_cta=listed.shared_memory_per_cta
        if shared_memory_per_cta is None
        else shared_memory_per_cta,
    )


def reference(arch: int) -> Machine:
    """Returns the machine that stands for an architecture: T4 for 75, A100 for 80, H100 for 90.
    Raises ValueError for other architectures.
    """
    if arch not in _REFERENCE:
        raise ValueError(f"arch is {arch!r}, expected one of: {', '.join(map(str, _REFERENCE))}")
    return MACHINES[_REFERENCE[arch]]


def of_arch(arch: int) -> tuple[Machine, ...]:
    """Every machine of an architecture, its reference first."""
    return tuple(machine for machine in MACHINES.values() if machine.arch == arch)


def device_name(machine: Machine) -> str:
    """Returns the name that torch gives the device of a listed machine."""
    return next(
        (device for device, name in reversed(_DEVICES.items()) if name == machine.name),
        machine.name,
    )
