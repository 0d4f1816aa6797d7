"""Registers, spills and instructions of a cubin and of PTX, read with the CUDA tools in the triton
wheel.
"""

import importlib.util
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from outblas.inspect import sass as assembly


@dataclass(frozen=True)
class MachineCode:
    """The machine code of one kernel, as the disassembler shows it.

    Spills are counted from STL and LDL instructions, each once. Where local memory holds nothing
    but spills, the bytes equal "bytes spill stores" and "bytes spill loads" of `ptxas -v`; arrays
    that are indexed at run time are counted here, and not by ptxas.

    Attributes:
        name: The name of the compiled function.
        registers: Registers of a thread.
        stack: Bytes of a thread's stack.
        spills: Instructions that move registers to and from local memory.
        spill_stores: Bytes that a thread moves with STL.
        spill_loads: Bytes that a thread moves with LDL.
        instructions: From SASS mnemonic with its shape ("HGMMA.64x64x16.F32.BF16") to its count.
        sass: The machine code as text.

    Example:
        >>> from outblas.inspect import MachineCode
        >>> code = MachineCode("kernel", 32, 0, 0, 0, 0, {"FFMA": 8, "LDG.E.128": 2}, sass="")
        >>> code.count("LDG")
        2
    """

    name: str
    registers: int
    stack: int
    spills: int
    spill_stores: int
    spill_loads: int
    instructions: dict[str, int]
    sass: str = field(repr=False)

    def count(self, prefix: str) -> int:
        """Count instructions by the beginning of their mnemonic.

        Args:
            prefix: Such as "HGMMA".

        Returns:
            The number of instructions.
        """
        return sum(n for name, n in self.instructions.items() if name.startswith(prefix))


def tool(name: str) -> Path:
    """Find a CUDA tool in the triton wheel.

    Args:
        name: "ptxas", "cuobjdump" or "nvdisasm".

    Returns:
        The path of the program.

    Raises:
        FileNotFoundError: There is no such program, because triton is not installed.

    Example:
        >>> from outblas.inspect import tool
        >>> tool("nvdisasm").name
        'nvdisasm'
    """
    spec = importlib.util.find_spec("triton")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "backends" / "nvidia" / "bin" / name
        if path.exists():
            return path
    raise FileNotFoundError(f"{name} is part of the triton wheel, which is not installed")


@dataclass(frozen=True)
class Resources:
    """A kernel's name, and the registers and bytes of stack per thread. A kernel without a stack
    does not spill.
    """

    name: str
    registers: int
    stack: int


def resources(cubin: bytes) -> Resources:
    """Returns the resources of a cubin's kernel, in two milliseconds where `read_cubin` takes
    200.
    """
    usage = _run_on(cubin, "cuobjdump", "--dump-resource-usage")
    found = re.search(r"Function (\S+):\s+REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise ValueError(f"cuobjdump named no kernel: {usage[:200]!r}")
    return Resources(found[1], int(found[2]), int(found[3]))


def disassemble(cubin: bytes) -> str:
    """Returns nvdisasm's output for the code in a cubin. Starting the program takes most of the
    time.
    """
    return _run_on(cubin, "nvdisasm", "--print-code", "--no-dataflow")


@lru_cache(maxsize=64)
def read_cubin(cubin: bytes) -> MachineCode:
    """Disassemble a cubin that holds one kernel; results are cached.

    Args:
        cubin: The bytes of the cubin.

    Returns:
        The machine code.

    Raises:
        FileNotFoundError: The disassembler, which is part of the triton wheel, is not installed.
        ValueError: The bytes hold no kernel.
        RuntimeError: The disassembler failed.

    Example:
        >>> import torch
        >>> from outblas.inspect import read_cubin
        >>> from outblas.kernels import naive
        >>> compiled = naive.artifact(None, arch=80, dtype=torch.float32, layout="nn")
        >>> read_cubin(compiled.cubin).count("FFMA") > 0
        True
    """
    taken = resources(cubin)
    text = disassemble(cubin)
    instructions = assembly.parse(text)
    stores = [i.name for i in instructions if re.match(r"STL\b", i.name)]
    loads = [i.name for i in instructions if re.match(r"LDL\b", i.name)]
    return MachineCode(
        name=taken.name,
        registers=taken.registers,
        stack=taken.stack,
        spills=len(stores) + len(loads),
        spill_stores=_bytes(stores),
        spill_loads=_bytes(loads),
        instructions=dict(Counter(i.name for i in instructions)),
        sass=text,
    )


def _bytes(names: Iterable[str]) -> int:
    return sum(assembly.width(name) for name in names)


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_STATEMENT = re.compile(
    r"(?:^|(?<=[;{}]))\s*(?:[$\w]+:\s)?\s*(?:@!?[%\w]+\s+)?([a-z]\w*(?:(?:\.|::)\w+)*)(?=[\s;])",
    re.MULTILINE,
)


def ptx_instructions(ptx: str) -> dict[str, int]:
    """Returns the count of each PTX opcode with its shape
    ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32").
    """
    return dict(Counter(_STATEMENT.findall(_COMMENT.sub("", ptx))))


_WARNING = re.compile(
    r"^ptxas.*?(?:\b(?:info|warning)\s*:\s*(\(C\d+\).*)|\bwarning\s*:\s*(.*))$", re.MULTILINE
)


def warnings(log: str) -> list[str]:
    """Returns the assembler's warnings without their prefix: "(C7510) Potential Performance Loss:
    ... serialized ...".
    """
    return [(numbered or plain).strip() for numbered, plain in _WARNING.findall(log)]


def _run_on(cubin: bytes, name: str, *options: str) -> str:
    """Returns a tool's output for a cubin."""
    command = [str(tool(name)), *options]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run([*command, str(path)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} failed: {done.stderr.strip()}")
    return done.stdout
