"""`inspect` compiles a kernel without a GPU and describes its machine code; `require` checks that
against limits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from outblas.base import machines, registry
from outblas.base.configs import from_text
from outblas.inspect import machine_code, roofline, sass
from outblas.inspect.occupancy import occupancy

if TYPE_CHECKING:
    from outblas.call.artifact import Artifact

ARCHS = (75, 80, 90)
# The fields that an artifact, or its machine code, has too.
_OF_ARTIFACT = (
    *("kernel", "arch", "config", "smem_bytes", "stages", "threads"),
    *("dtype", "out_dtype", "layout"),
)
_OF_CODE = ("registers", "spill_stores", "spill_loads", "stack", "instructions", "name", "sass")
# The fields that are not part of the record.
_UNRECORDED = ("name", "dtype", "out_dtype", "layout", "unit", "limiter", "sass", "ptx_text")


class GateError(AssertionError):
    """An error for machine code that is not what it should be.

    The attribute `failed` has a line for each figure that is wrong.

    Example:
        >>> from outblas.inspect import GateError, inspect
        >>> try:
        ...     inspect("simt.naive", arch=80).require(has=["HMMA"])
        ... except GateError as error:
        ...     print(error.failed)
        ('HMMA: 0, expected at least 1',)
    """

    def __init__(self, subject: str, failed: Sequence[str]):
        super().__init__(f"{subject}:" + "".join(f"\n  {line}" for line in failed))
        self.failed = tuple(failed)


@dataclass(frozen=True)
class Inspection:
    """The machine code of one compiled variant of a kernel, and what follows from it.

    Occupancy is that of the reference GPU of the architecture: T4 for sm_75, A100 for sm_80, H100
    for sm_90.

    Attributes:
        kernel: The name of the kernel.
        arch: The architecture that it was compiled for, such as "sm_90a".
        config: The config as text.
        registers: Registers of a thread.
        spill_stores: Bytes that a thread stores when registers spill, as in `MachineCode`.
        spill_loads: Bytes that a thread loads when registers spill.
        stack: Bytes of a thread's stack.
        smem_bytes: Bytes of shared memory of a CTA.
        stages: The depth of the pipeline from loads to products.
        threads: Threads of a CTA.
        ctas_per_sm: CTAs that fit on an SM.
        warps_per_sm: Their warps.
        instructions: From SASS mnemonic with its shape ("HGMMA.64x256x16.F32.BF16") to its count.
        ptx: From PTX opcode with its shape to its count.
        warnings: The warnings of the assembler.
        bank_conflicts: From an access to the extra wavefronts of each of its instructions; None
            where the kernel does not say.
        intensity: FLOP per byte of "dram", "l2", "l1" and "shared"; None for a level that is not
            read.
        bound: From the name of each GPU of the architecture to its roofline: `tflops`, `by` (what
            bounds it) and `ceilings` (TFLOP/s by resource).
        ffma_share: The fraction of FFMA among the instructions of the hot loop.
        ffma_reuse: The fraction of these FFMA that flag an operand `.reuse`; None without FFMA.
        name: The name of the compiled function.
        dtype: The dtype of the operands.
        out_dtype: The dtype of the product.
        layout: How A and B are stored: "nt", "nn", "tn" or "tt".
        unit: What computes: the dtype of the tensor cores, or "float32" for FFMA.
        limiter: What limits the CTAs on an SM: "registers", "shared memory", "threads" or "ctas".
        sass: The machine code as text.
        ptx_text: The PTX as text.

    Example:
        >>> from outblas.inspect import inspect
        >>> found = inspect("simt.naive", arch=80)
        >>> found.threads, found.smem_bytes, found.spill_stores
        (1024, 0, 0)
        >>> found.count("FFMA") > 0
        True
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
        """Count instructions by the beginning of their SASS mnemonic or PTX opcode.

        Args:
            prefix: Such as "HGMMA.64x256x16" or "mma.sync".

        Returns:
            The number of instructions, in SASS and PTX together.
        """
        return sum(
            n
            for counts in (self.instructions, self.ptx)
            for op, n in counts.items()
            if op.startswith(prefix)
        )

    def record(self) -> dict[str, Any]:
        """Make the record that `outblas inspect --json` prints.

        Returns:
            The fields by name, without the code itself.
        """
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
        """Check the machine code against gates, as tests do.

        Args:
            spills: The most bytes of spill stores and loads; None for any.
            no_warnings: Whether a warning of the assembler fails.
            min_ctas: The fewest CTAs on an SM of the reference GPU.
            max_registers: The most registers of a thread; None for any.
            stack: The most bytes of stack; None for any.
            has: Beginnings of SASS mnemonics or PTX opcodes that must occur, or a map from them to
                exact counts.
            lacks: Beginnings that must not occur.

        Returns:
            The inspection itself.

        Raises:
            GateError: A gate fails; the message lists all that do. It is an AssertionError.
        """
        figures = {
            "spilled bytes": (self.spill_stores + self.spill_loads, spills),
            "registers": (self.registers, max_registers),
            "stack bytes": (self.stack, stack),
        }
        failed = [
            f"{name}: {value}, expected at most {most}"
            for name, (value, most) in figures.items()
            if most is not None and value > most
        ]
        if self.ctas_per_sm < min_ctas:
            failed.append(f"CTAs per SM: {self.ctas_per_sm}, expected at least {min_ctas}")
        for op in has:
            count, exact = self.count(op), has[op] if isinstance(has, Mapping) else None
            if count != exact if exact is not None else not count:
                failed.append(f"{op}: {count}, expected {'at least 1' if exact is None else exact}")
        failed += [f"{op}: {self.count(op)}, expected 0" for op in lacks if self.count(op)]
        if no_warnings:
            failed += [f"the assembler warned: {warning}" for warning in self.warnings]
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
    """Compile a kernel, and read its machine code; no GPU is needed.

    Args:
        kernel: The name of the kernel, as in `outblas.ladder`.
        config: An instance of the kernel's `Config`, its text such as "tile_m=128", or None for
            what the kernel would choose itself.
        arch: The architecture: 75, 80 or 90; None for the newest that the kernel runs on.
        dtype: The dtype of the operands by its name in torch; None for the one that the ladder is
            measured with: float32 for simt, float16 for turing, else bfloat16.
        out_dtype: The dtype of the product; None for that of the operands.
        layout: How A and B are stored, "nt", "nn", "tn" or "tt"; None for the layout that the
            ladder is measured with: "nn" for simt, else "nt".
        shape: The sizes (M, N, K) of the product.

    Returns:
        The inspection.

    Raises:
        TypeError: `kernel` is no str.
        ValueError: There is no such kernel, or it does not take the architecture, dtype, layout or
            config.
        ImportError: The DSL of the kernel is not installed; the message says what to install.

    Example:
        >>> from outblas.inspect import inspect
        >>> found = inspect("simt.naive", config="block_n=16", arch=80)
        >>> found.arch, found.threads, found.spill_loads
        ('sm_80', 512, 0)
        >>> found.bound["A100"]["by"]  # what limits it there
        'l1'
    """
    record = registry.find(kernel)
    archs = compilable(record)
    if not archs:
        raise ValueError(
            f"kernel {kernel!r} runs on none of the architectures {', '.join(map(str, ARCHS))}"
        )
    arch = archs[-1] if arch is None else arch
    dtype, layout = dtype or registry.dtype_of(kernel), layout or registry.layout_of(kernel)
    if arch not in archs:
        raise ValueError(f"arch is {arch!r}, expected {' or '.join(map(str, archs))} for {kernel}")
    for name, kind in (("dtype", dtype), ("out_dtype", out_dtype or dtype)):
        expected = record.dtypes if name == "dtype" else (dtype, "float32")
        if kind not in expected:
            raise ValueError(f"{name} is {kind!r}, expected {' or '.join(expected)} for {kernel}")
    module = registry.load(kernel)
    chosen = from_text(module.Config, config) if isinstance(config, str) else config
    import torch

    kinds = [None if name is None else getattr(torch, name) for name in (dtype, out_dtype)]
    artifact: Artifact = module.artifact(
        chosen, arch=arch, dtype=kinds[0], out_dtype=kinds[1], layout=layout, shape=shape
    )
    return read(artifact, shape)


def compilable(kernel: registry.Kernel) -> tuple[int, ...]:
    """Returns the architectures of {75, 80, 90} that a kernel runs on."""
    return tuple(
        a
        for a in ARCHS
        if kernel.min_arch <= a and (kernel.max_arch is None or a <= kernel.max_arch)
    )


def read(artifact: Artifact, shape: tuple[int, int, int] = (4096, 4096, 4096)) -> Inspection:
    """Read the machine code of a compiled kernel.

    Args:
        artifact: What the `artifact` function of a kernel's module returns.
        shape: The sizes (M, N, K) that the DRAM roofline is drawn for.

    Returns:
        The inspection.

    Raises:
        FileNotFoundError: The disassembler, which is part of the triton wheel, is not installed.

    Example:
        >>> import torch
        >>> from outblas.inspect import read
        >>> from outblas.kernels import naive
        >>> compiled = naive.artifact(None, arch=80, dtype=torch.float32, layout="nn")
        >>> read(compiled).arch
        'sm_80'
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
        **{name: getattr(artifact, name) for name in _OF_ARTIFACT},
        **{name: getattr(code, name) for name in _OF_CODE},
        ctas_per_sm=resident.ctas_per_sm,
        warps_per_sm=resident.warps_per_sm,
        ptx=machine_code.ptx_instructions(artifact.ptx),
        warnings=machine_code.warnings(artifact.log),
        bank_conflicts=None if artifact.bank_conflicts is None else dict(artifact.bank_conflicts),
        intensity=asdict(intensity),
        bound={m.name: asdict(roofline.bound(m, intensity, unit)) for m in machines.of_arch(arch)},
        ffma_share=sass.ffma_share(loop),
        ffma_reuse=sass.ffma_reuse(loop),
        unit=unit,
        limiter=resident.limiter,
        ptx_text=artifact.ptx,
    )
