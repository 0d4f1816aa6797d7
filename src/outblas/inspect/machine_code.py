"""Registers, stack, spills and instruction counts of a cubin, through the CUDA tools inside the triton wheel."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class MachineCode:
    """One compiled kernel.

    `registers` a thread, `stack` bytes a thread, `spills` the instructions that move registers to and from local
    memory, `instructions` from SASS mnemonic with its shape ("HGMMA.64x64x16.F32.BF16") to its count.
    """

    name: str
    registers: int
    stack: int
    spills: int
    instructions: dict[str, int]

    def count(self, prefix: str) -> int:
        """Instructions whose mnemonic starts with `prefix`."""
        return sum(n for name, n in self.instructions.items() if name.startswith(prefix))

    def first(self, prefix: str) -> str:
        """A mnemonic that starts with `prefix`, or "" when there is none."""
        return next((name for name in self.instructions if name.startswith(prefix)), "")


def tool(name: str) -> Path:
    """Path of `ptxas`, `cuobjdump` or `nvdisasm`. Raises FileNotFoundError when triton's wheel is absent."""
    spec = importlib.util.find_spec("triton")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "backends" / "nvidia" / "bin" / name
        if path.exists():
            return path
    raise FileNotFoundError(f"{name} comes inside the triton wheel, which is not installed")


def read_cubin(cubin: bytes) -> MachineCode:
    """Disassembles a cubin that holds one kernel."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage = _run(tool("cuobjdump"), "--dump-resource-usage", path)
        sass = _run(tool("cuobjdump"), "--dump-sass", path)
    resources = re.search(r"Function (\S+):\s+REG:(\d+) STACK:(\d+)", usage)
    if resources is None:
        raise ValueError(f"cuobjdump named no kernel: {usage[:200]!r}")
    counts = Counter(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", sass, re.MULTILINE))
    spills = sum(n for name, n in counts.items() if re.match(r"(LDL|STL)\b", name))
    return MachineCode(resources[1], int(resources[2]), int(resources[3]), spills, dict(counts))


def _run(*command: object) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} failed: {done.stderr.strip()}")
    return done.stdout
