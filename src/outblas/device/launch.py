"""What Triton and Gluon kernels share on the host: arguments, specialization, pieces of a call.

Every kernel takes a, b, c (None without an addend), out, alpha, beta, then `arguments`, then
constants of its own. One with an epilogue has `fused` among these, and takes the views of bias,
residual and aux at last, as `fused.finish` does.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..core.epilogue import EPILOGUE_ARGS, NONE, View
from ..core.problem import Launch, Problem, dtype_name
from .grid import INT32_MAX, Piece, kept_dims

Tensor = torch.Tensor
Path = tuple[int, ...]  # to an argument, or into a tuple: positions

WIDEST = 16  # bytes of a load or a store
TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}


@dataclass(frozen=True)
class Specialization:
    """All that the compiler is told: argument types, constants and divisors by path, launch
    options.
    """

    signature: tuple[tuple[str, Any], ...]
    constants: tuple[tuple[Path, Any], ...]
    divisors: tuple[tuple[Path, int], ...]
    num_warps: int
    num_stages: int
    max_registers: int | None

    @property
    def attributes(self) -> dict[Path, list[list[Any]]]:
        """The divisors as Triton takes them."""
        return {path: [["tt.divisibility", divisor]] for path, divisor in self.divisors}

    @property
    def options(self) -> dict[str, Any]:
        """For `triton.compile`."""
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "maxnreg": self.max_registers,
            "enable_fp_fusion": True,
            "sanitize_overflow": False,  # offsets of masked lanes wrap
        }


def vector(problem: Problem, operand: str) -> int:
    """Elements (a power of two, at most 16 bytes) that one load of operand "a" or "b" can move in
    all of its rows.
    """
    strides, extents = (
        (problem.a, (problem.M, problem.K))
        if operand == "a"
        else (problem.b, (problem.K, problem.N))
    )
    if 1 not in strides[-2:]:
        return 1
    unit = -1 if strides[-1] == 1 else -2
    others = [stride for i, stride in enumerate(strides, start=-len(strides)) if i != unit]
    alignment = min(problem.alignment["ab".index(operand)], WIDEST) // problem.dtype.itemsize
    return math.gcd(max(alignment, 1), extents[unit], *others)


def contiguous(problem: Problem, operand: str) -> str:
    """The axis along which operand "a" or "b" is stored: "m", "n" or "k"."""
    axes, strides = ("mk", problem.a[-2:]) if operand == "a" else ("kn", problem.b[-2:])
    return axes[0] if strides[0] == 1 and strides[1] != 1 else axes[1]


def unsupported_dtype(problem: Problem) -> str | None:
    if problem.dtype in TYPES and problem.out_dtype in TYPES:
        return None
    names = dtype_name(problem.dtype), dtype_name(problem.out_dtype)
    return (
        f"needs bfloat16, float16 or float32, and was given {names[0]} operands for {names[1]} "
        "outputs"
    )


def arguments(problem: Problem) -> dict[str, int]:
    """Sizes, the inner extent of the batch, and strides by name, in the order of every kernel's
    parameters.
    """
    kept = kept_dims(problem)
    operands = {
        "a": (problem.a, "mk"),
        "b": (problem.b, "kn"),
        "c": (problem.c, "mn"),
        "out": (problem.out, "mn"),
    }
    values = {
        "M": problem.M,
        "N": problem.N,
        "K": problem.K,
        "inner": problem.batch[kept[-1]] if kept else 1,
    }
    for name, (steps, axes) in operands.items():
        steps = steps or (1,) * (len(problem.batch) + 2)
        outer, inner = ([0, 0] + [steps[i] for i in kept])[-2:]
        values |= {f"{name}_outer": outer, f"{name}_inner": inner}
        values |= {f"{name}_{axis}": step for axis, step in zip(axes, steps[-2:], strict=True)}
    return values


def fused(problem: Problem) -> dict[str, Any]:
    """The constants of an epilogue: FUNCTION, None without one, and GATED."""
    epilogue = problem.epilogue
    return {"FUNCTION": None if epilogue == NONE else epilogue.function, "GATED": epilogue.gated}


def _views(problem: Problem) -> list[tuple[str, View | None, dict[str, int | None]]]:
    """Of bias, residual and aux: name, view, and steps as a kernel takes them, None where what it
    reads repeats.
    """
    found = []
    for name in EPILOGUE_ARGS:
        view = problem.epilogue.views.get(name)
        steps: dict[str, int | None] = {}
        if view is not None:
            outer, inner = ([0, 0] + [view.strides[i] for i in kept_dims(problem)])[-2:]
            m, n = view.strides[-2:]
            steps = {f"{name}_outer": outer, f"{name}_inner": inner, f"{name}_m": m, f"{name}_n": n}
            if name != "aux" and 0 in (m, n):
                steps[f"{name}_n" if m else f"{name}_m"] = None
        found.append((name, view, steps))
    return found


def specialize(
    problem: Problem,
    pieces: Sequence[Piece],
    constants: Mapping[str, Any],
    divisor: Callable[[str, int], int],
    *,
    wide: bool,
    num_warps: int,
    num_stages: int = 1,
    max_registers: int | None = None,
) -> Specialization:
    """Types and divisors from the problem alone, so that a plan holds for every call that shares
    it.

    `divisor(name, value)` is what the compiler may know to divide an address in bytes or a number;
    `wide`: sizes and strides take 64 bits, for a slab of K can be 2³¹ elements wide where its
    strides are not.
    """
    signature: dict[str, Any] = {}
    fixed: list[tuple[Path, Any]] = []
    divisors: list[tuple[Path, int]] = []

    def constant(path: Path, value: Any) -> str:
        fixed.append((path, value))
        return "constexpr"

    def pointer(path: Path, name: str, dtype: torch.dtype, alignment: int, i: int) -> str:
        starts = (piece.offsets[i] * dtype.itemsize for piece in pieces)
        divisors.append((path, divisor(name, math.gcd(WIDEST, alignment, *starts))))
        return TYPES[dtype]

    def number(path: Path, name: str, value: Any) -> str:
        unused = value == 0 and name.endswith(
            ("_outer", "_inner")
        )  # without a batch, its indices need no registers
        if name in constants or value is None or value == 1 or unused:
            return constant(path, value)
        divisors.append((path, divisor(name, value)))
        return "i64" if value > INT32_MAX or (wide and name != "inner") else "i32"

    alignment = dict(zip(("a", "b", "out", "c"), problem.alignment, strict=False))
    dtypes = {"a": problem.dtype, "b": problem.dtype, "c": problem.dtype, "out": problem.out_dtype}
    for i, (name, dtype) in enumerate(dtypes.items()):
        absent = name == "c" and problem.c is None
        signature[name] = (
            constant((i,), None) if absent else pointer((i,), name, dtype, alignment[name], i)
        )
    signature |= {"alpha": "fp32", "beta": "fp32"}
    for i, (name, value) in enumerate(
        (arguments(problem) | dict(constants)).items(), start=len(signature)
    ):
        signature[name] = number((i,), name, value)
    if problem.epilogue != NONE:
        at, views = len(signature), []
        for i, (name, view, steps) in enumerate(_views(problem)):
            path = (at, i, 0)
            first = (
                pointer(path, name, problem.out_dtype, view.alignment, 4 + i)
                if view
                else constant(path, None)
            )
            numbers = (
                number((at, i, j), step, value)
                for j, (step, value) in enumerate(steps.items(), start=1)
            )
            views.append((first, *numbers))
        signature["extra"] = tuple(views)
    elif "FUNCTION" in constants:
        signature["extra"] = constant((len(signature),), None)
    return Specialization(
        tuple(signature.items()),
        tuple(fixed),
        tuple(divisors),
        num_warps,
        num_stages,
        max_registers,
    )


Run = Callable[..., None]


def bind(
    problem: Problem,
    pieces: Sequence[Piece],
    run: Callable[[int], Run],
    constants: Mapping[str, Any],
) -> Launch:
    """The launch of a call; `run(programs)` starts so many CTAs with all arguments of the
    kernel.
    """
    has_c = problem.c is not None
    fused = problem.epilogue != NONE
    tail = (*arguments(problem).values(), *constants.values())
    if "FUNCTION" in constants and not fused:
        tail = (*tail, None)
    steps = [tuple(own.values()) for _, _, own in _views(problem)]
    runs = [(piece.offsets, run(piece.programs)) for piece in pieces]
    first = runs[0][1]

    def launch(
        a: Tensor, b: Tensor, c: Tensor | None, out: Tensor, alpha: float, beta: float
    ) -> None:
        first(a, b, c if has_c else None, out, float(alpha), float(beta), *tail)

    def views(extra: Sequence[Tensor | None]) -> tuple[Any, ...]:
        return tuple((t, *own) for t, own in zip(extra, steps, strict=True))

    def launch_fused(
        a: Tensor, b: Tensor, c: Any, out: Tensor, alpha: float, beta: float, *extra: Any
    ) -> None:
        first(a, b, c if has_c else None, out, float(alpha), float(beta), *tail, views(extra))

    def launch_pieces(
        a: Tensor, b: Tensor, c: Any, out: Tensor, alpha: float, beta: float, *extra: Any
    ) -> None:
        tensors = (a, b, c if has_c else None, out, *extra)
        for offsets, start in runs:
            shifted = [
                None if t is None else _shift(t, offset)
                for t, offset in zip(tensors, offsets, strict=False)
            ]
            last = [views(shifted[4:])] if fused else []
            start(*shifted[:4], float(alpha), float(beta), *tail, *last)

    return launch_pieces if len(runs) > 1 else launch_fused if fused else launch


def _shift(t: Tensor, offset: int) -> Tensor:
    """A view that starts `offset` elements later: kernels take no address arithmetic from
    the host.
    """
    return torch.as_strided(t, (1,), (1,), t.storage_offset() + offset) if offset else t


def arch_of(device: torch.device) -> int:
    """90 for sm_90."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def sm_count(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def shared_memory_limit(device: torch.device) -> int:
    """Bytes of shared memory that a CTA may ask for."""
    properties = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]
