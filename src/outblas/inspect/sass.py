"""Parses SASS into instructions: mnemonics, branches, loops, and the FLOP and shared-memory bytes
of each.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

_LABEL = re.compile(r"^(\.L_\w+):")
INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*)")
_TARGET = re.compile(r"\((\.L_\w+)\)")
_WIDTHS = (("128", 16), ("64", 8), ("U16", 2), ("S16", 2), ("U8", 1), ("S8", 1))
_WARP = 32


@dataclass(frozen=True)
class Instruction:
    """An instruction: its `index` in the code, the mnemonic with its shape, operands as text, and
    the index of a branch's target.
    """

    index: int
    name: str
    operands: str
    target: int | None = None


def parse(text: str) -> tuple[Instruction, ...]:
    """Returns the instructions of nvdisasm's output for one kernel."""
    labels: dict[str, int] = {}
    found: list[tuple[str, str]] = []
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(found)
        elif instruction := INSTRUCTION.match(line):
            found.append((instruction[2], instruction[3].strip()))
    return tuple(
        Instruction(i, name, operands, _target(name, operands, labels))
        for i, (name, operands) in enumerate(found)
    )


def _target(name: str, operands: str, labels: dict[str, int]) -> int | None:
    label = _TARGET.search(operands) if name.startswith("BRA") else None
    return labels.get(label[1]) if label else None


def width(name: str) -> int:
    """Returns the bytes that a load or store moves for one thread."""
    parts = name.split(".")
    return next((size for suffix, size in _WIDTHS if suffix in parts), 4)


def hot_loop(instructions: Sequence[Instruction]) -> Sequence[Instruction]:
    """Returns the loop with the most FLOP per instruction: the main loop of a GEMM. Returns all of
    the code if no loop multiplies.
    """
    loops = [
        instructions[i.target : i.index + 1]
        for i in instructions
        if i.target is not None and i.target <= i.index
    ]
    best = max(loops, key=_density, default=instructions)
    return best if _density(best) else instructions


def _density(instructions: Sequence[Instruction]) -> float:
    return sum(map(flops, instructions)) / len(instructions)


def unit(instructions: Sequence[Instruction]) -> str:
    """Returns the unit that multiplies: "float16" (tensor cores on 16-bit operands), "tf32", "fp8",
    or "float32" (FFMA).
    """
    for i in instructions:
        if re.match(r"Q(G?)MMA\b", i.name):
            return "fp8"
        if re.match(r"H(G?)MMA\b", i.name):
            return "tf32" if "TF32" in i.name else "float16"
    return "float32"


def flops(instruction: Instruction) -> int:
    """Returns the FLOP of one instruction of a warp, or of a warpgroup for wgmma."""
    name = instruction.name
    if shape := re.match(r"[HQ]GMMA\.(\d+)x(\d+)x(\d+)", name):
        return 2 * int(shape[1]) * int(shape[2]) * int(shape[3])
    if shape := re.match(r"[HQ]MMA\.(16)(8)(\d+)", name):
        return 2 * int(shape[1]) * int(shape[2]) * int(shape[3])
    return 2 * _WARP if _is_ffma(instruction) else 0


def ffma_share(instructions: Sequence[Instruction]) -> float:
    """Returns the fraction of FFMA among all instructions."""
    return sum(map(_is_ffma, instructions)) / len(instructions)


def ffma_reuse(instructions: Sequence[Instruction]) -> float | None:
    """Returns the fraction of the FFMA that keep an operand for the next instruction (`.reuse`);
    None if there is no FFMA.
    """
    kept = [".reuse" in i.operands for i in instructions if _is_ffma(i)]
    return sum(kept) / len(kept) if kept else None


def _is_ffma(instruction: Instruction) -> bool:
    return re.match(r"FFMA\b", instruction.name) is not None


def shared_bytes(instruction: Instruction) -> int:
    """Returns the bytes that one instruction reads from shared memory.

    wgmma reads slices of 32 bytes per row: B's N rows, and A's 64 rows unless A is in registers.
    Loads count the bytes that they deliver to registers, so a word counts once per lane that
    requests it.
    """
    name = instruction.name
    if shape := re.match(r"[HQ]GMMA\.(\d+)x(\d+)x(\d+)", name):
        a_in_shared = re.match(r"R\w+, *gdesc\[", instruction.operands) is not None
        return 32 * (int(shape[2]) + (int(shape[1]) if a_in_shared else 0))
    if name.startswith("LDSM"):
        matrices = re.search(r"\.([124])$", name)
        return 128 * int(matrices[1] if matrices else 1)
    return _WARP * width(name) if re.match(r"LDS\b", name) else 0
