"""Runs some instructions of PTX on the registers of many threads at once, which are arrays."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

Array = Any  # of numpy


def floats(bits: Array) -> Array:
    return bits.view(np.float32)


def bits_of(values: Any) -> Array:
    """Registers of 32 bits."""
    return np.asarray(values, dtype=np.float32).view(np.uint32)


def to_e4m3x2(high: Array, low: Array) -> Array:
    """The codes of two values, that of `high` in the upper byte: saturated, and 0x7F for NaN."""
    codes = []
    for each in (low, high):
        values = torch.from_numpy(floats(each).copy())
        code = values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        codes.append(code.where(~values.isnan(), 0x7F).numpy().astype(np.uint32))
    return codes[0] | codes[1] << np.uint32(8)


def _divided(x: Array, y: Array) -> Array:
    with np.errstate(all="ignore"):
        return bits_of(floats(x) / floats(y))


INSTRUCTIONS: dict[str, Callable[..., Array]] = {
    "abs.f32": lambda x: x & np.uint32(0x7FFFFFFF),
    "max.f32": lambda x, y: bits_of(np.fmax(floats(x), floats(y))),  # a number beside NaN
    "setp.lt.f32": lambda x, y: floats(x) < floats(y),
    "setp.gt.f32": lambda x, y: floats(x) > floats(y),
    "selp.f32": lambda x, y, p: np.where(p, x, y),
    "mov.b32": lambda x: x,
    "add.s32": lambda x, y: x + y,
    "and.b32": lambda x, y: x & y,
    "div.rn.f32": _divided,
    "cvt.rn.satfinite.e4m3x2.f32": to_e4m3x2,
}


def inline_ptx(
    code: str, write_only_types: Sequence[object], read_only_args: Sequence[Any]
) -> Array:
    """What stands for `cute.arch.inline_ptx` with one result: fp32 for a type called "Float32",
    else an integer.
    """
    registers = {f"{{$r{i}}}": bits_of(value) for i, value in enumerate(read_only_args)}

    def operand(text: str) -> Array:
        if text.startswith(("0f", "0x")):
            return np.uint32(int(text[2:], 16))
        return registers[text]

    body = code.strip()
    if body.startswith("{ "):
        body = body.removeprefix("{").removesuffix("}")
    for statement in filter(None, map(str.strip, body.split(";"))):
        name, _, rest = statement.partition(" ")
        if name == ".reg":
            continue
        target, *given = (text.strip() for text in rest.split(","))
        registers[target] = INSTRUCTIONS[name](*map(operand, given))
    result = registers["{$w0}"]
    return floats(result) if write_only_types == ["Float32"] else result
