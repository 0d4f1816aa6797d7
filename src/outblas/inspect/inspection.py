"""`inspect`: compile a kernel without a GPU and say what the machine would run; `require`: hold it
to that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..core import machines, registry
from ..core.configs import from_text
from . import machine_code, roofline, sass
from .gates import GateError, failures
from .occupancy import occupancy

if TYPE_CHECKING:
    from ..core.artifact import Artifact

ARCHS = (75, 80, 90)
# Fields that are no part of the record.
_UNRECORDED = ("name", "dtype", "out_dtype", "layout", "unit", "limiter", "sass", "ptx_text")


@dataclass(frozen=True)
class Inspection:
    """One compiled variant of a kernel.

    `registers` and `stack` (bytes) a thread; `spill_stores`, `spill_loads` bytes a thread (see
    `MachineCode`); `smem_bytes`, `threads` and `stages` a CTA; `ctas_per_sm`, `warps_per_sm`, and
    `limiter`, what runs out first, on the architecture's reference machine. `instructions` and
    `ptx` map mnemonics with their shapes to counts, `warnings` are the assembler's. `intensity`
    maps "dram", "l2", "l1", "shared" to FLOP per byte (None: that level is not read), `bound` the
    name of every machine of the architecture to `{tflops, by, ceilings}`. `ffma_share` is the
    fraction of FFMA among the instructions of the hot loop, `ffma_reuse` the fraction of those FFMA
    that flag an operand `.reuse` (None: no FFMA). `sass` and `ptx_text` are the code.
    """

    kernel: str
    arch: str
    config: str
    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    smem_bytes: int
    stages: int
    threads: int
    ctas_per_sm: int
    warps_per_sm: int
    instructions: Mapping[str, int]
    ptx: Mapping[str, int]
    warnings: Sequence[str]
    bank_conflicts: Mapping[str, float] | None
    intensity: Mapping[str, float | None]
    bound: Mapping[str, Mapping[str, Any]]
    ffma_share: float
    ffma_reuse: float | None
    name: str
    dtype: str
    out_dtype: str
    layout: str
    unit: str
    limiter: str
    sass: str = field(repr=False)
    ptx_text: str = field(repr=False)

    def count(self, prefix: str) -> int:
        """Instructions, SASS or PTX, that start with `prefix`: "HGMMA.64x256x16", "mma.sync"."""
        return sum(
            n
            for counts in (self.instructions, self.ptx)
            for op, n in counts.items()
            if op.startswith(prefix)
        )

    def record(self) -> dict[str, Any]:
        """What `outblas inspect --json` prints."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _UNRECORDED}

    def require(
        self,
        *,
        spills: int | None = 0,
        no_warnings: bool = True,
        min_ctas: int = 1,
        max_registers: int | None = None,
        stack: int | None = None,
        has: Sequence[str] | Mapping[str, int] = (),
        lacks: Sequence[str] = (),
    ) -> Inspection:
        """Holds the machine code to what it should be, and returns it.

        `spills`: bytes of spill stores and loads, at most (None: any). `no_warnings`: the assembler
        warned of nothing.
        `min_ctas`: CTAs an SM of the reference machine, at least. `max_registers` a thread and
        `stack` in bytes, at most. `has`: prefixes of SASS mnemonics or PTX opcodes that must occur,
        or a map from them to exact counts;
        `lacks`: prefixes that must not. Raises GateError, an AssertionError that lists every gate
        that failed.
        """
        spilled = self.spill_stores + self.spill_loads
        bounds = ("spilled bytes", spilled, spills), ("registers", self.registers, max_registers)
        limits = (*bounds, ("stack bytes", self.stack, stack))
        failed = failures(
            most={name: (found, limit) for name, found, limit in limits if limit is not None},
            least={"CTAs an SM": (self.ctas_per_sm, min_ctas)},
            has=has,
            lacks=lacks,
            warnings=self.warnings if no_warnings else (),
            count=self.count,
        )
        if failed:
            raise GateError(f"{self.name} for {self.arch} ({self.config})", failed)
        return self


def inspect(
    kernel: str,
    *,
    config: Any = None,
    arch: int | None = None,
    dtype: str | None = None,
    out_dtype: str | None = None,
    layout: str | None = None,
    shape: tuple[int, int, int] = (4096, 4096, 4096),
) -> Inspection:
    """Compiles a kernel of the registry for an architecture (its newest by default) and reads the
    machine code.

    `config` is the rung's frozen config, its text ("tile_m=128"), or None for what the kernel would
    choose itself; `dtype` and `layout` are those that its ladder's documents measure by default,
    `shape` is (M, N, K). Needs no GPU. Raises ValueError for an unknown kernel, an architecture,
    dtype, layout or config it cannot take, and ImportError when its DSL is not installed.
    """
    record = registry.find(kernel)
    archs = compilable(record)
    if not archs:
        raise ValueError(f"kernel {kernel!r} runs on none of {', '.join(map(str, ARCHS))}")
    arch = archs[-1] if arch is None else arch
    dtype, layout = dtype or registry.dtype_of(kernel), layout or registry.layout_of(kernel)
    if arch not in archs:
        raise ValueError(f"arch is {arch!r}, expected for {kernel}: {', '.join(map(str, archs))}")
    for name, kind in (("dtype", dtype), ("out_dtype", out_dtype or dtype)):
        expected = record.dtypes if name == "dtype" else (dtype, "float32")
        if kind not in expected:
            raise ValueError(f"{name} is {kind!r}, expected for {kernel}: {', '.join(expected)}")
    module = registry.load(kernel)
    chosen = from_text(module.Config, config) if isinstance(config, str) else config
    return _inspect(module, chosen, arch, dtype, out_dtype, layout, shape)


def compilable(kernel: registry.Kernel) -> tuple[int, ...]:
    """The architectures of {75, 80, 90} that a kernel runs on."""
    return tuple(
        a
        for a in ARCHS
        if kernel.min_arch <= a and (kernel.max_arch is None or a <= kernel.max_arch)
    )


def _inspect(
    module: ModuleType,
    config: Any,
    arch: int,
    dtype: str,
    out_dtype: str | None,
    layout: str,
    shape: tuple[int, int, int],
) -> Inspection:
    import torch

    kinds = [None if name is None else getattr(torch, name) for name in (dtype, out_dtype)]
    return read(
        module.artifact(
            config, arch=arch, dtype=kinds[0], out_dtype=kinds[1], layout=layout, shape=shape
        ),
        shape,
    )


def read(artifact: Artifact, shape: tuple[int, int, int] = (4096, 4096, 4096)) -> Inspection:
    """The inspection of a compiled kernel; `shape` (M, N, K) is what the DRAM roofline is drawn
    for.
    """
    import torch

    arch = int("".join(filter(str.isdigit, artifact.arch)))
    code = machine_code.read_cubin(artifact.cubin)
    instructions = sass.parse(code.sass)
    loop = sass.hot_loop(instructions)
    unit = sass.unit(instructions)
    resident = occupancy(
        machines.reference(arch), code.registers, artifact.smem_bytes, artifact.threads
    )
    sizes = [getattr(torch, name).itemsize for name in (artifact.dtype, artifact.out_dtype)]
    intensity = roofline.intensity(
        shape, artifact.tile, sizes[0], sizes[1], instructions, artifact.passes
    )
    return Inspection(
        kernel=artifact.kernel,
        arch=artifact.arch,
        config=artifact.config,
        registers=code.registers,
        spill_stores=code.spill_stores,
        spill_loads=code.spill_loads,
        stack=code.stack,
        smem_bytes=artifact.smem_bytes,
        stages=artifact.stages,
        threads=artifact.threads,
        ctas_per_sm=resident.ctas_per_sm,
        warps_per_sm=resident.warps_per_sm,
        instructions=code.instructions,
        ptx=machine_code.ptx_instructions(artifact.ptx),
        warnings=machine_code.warnings(artifact.log),
        bank_conflicts=None if artifact.bank_conflicts is None else dict(artifact.bank_conflicts),
        intensity=asdict(intensity),
        bound={m.name: asdict(roofline.bound(m, intensity, unit)) for m in machines.of_arch(arch)},
        ffma_share=sass.ffma_share(loop),
        ffma_reuse=sass.ffma_reuse(loop),
        name=code.name,
        dtype=artifact.dtype,
        out_dtype=artifact.out_dtype,
        layout=artifact.layout,
        unit=unit,
        limiter=resident.limiter,
        sass=code.sass,
        ptx_text=artifact.ptx,
    )
