"""Host code that Triton and Gluon kernels share: arguments, specialization, and the chunks of a
call.

Every kernel takes pointers `a`, `b`, `c` (None without an addend) and `out`, then `alpha`, `beta`,
`size` (a ProblemSize) and `strides` (ProblemStrides), then the kernel's constants by name. A kernel
with epilogues has the constant EPILOGUE, and takes `epilogue_tensors` as its last argument; both
are None for a call without an epilogue.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from outblas.call.epilogue import EPILOGUE_ARGS, NONE, View
from outblas.call.problem import WIDEST, Launch, Problem, dtype_name
from outblas.device.grid import INT32_MAX, Chunk, kept_dims
from outblas.device.records import (
    EpilogueRefs,
    EpilogueTraits,
    ProblemSize,
    ProblemStrides,
    Strides,
    TensorRef,
)

Tensor = torch.Tensor
Path = tuple[int, ...]  # positions that lead to an argument, or into a tuple

TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}


@dataclass(frozen=True)
class Specialization:
    """Everything that the compiler is told: argument types, constants and divisors by path, launch
    options.
    """

    signature: tuple[tuple[str, Any], ...]
    constants: tuple[tuple[Path, Any], ...]
    divisors: tuple[tuple[Path, int], ...]
    num_warps: int
    num_stages: int
    max_registers: int | None

    @property
    def options(self) -> dict[str, Any]:
        """Returns the options for `triton.compile`."""
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "maxnreg": self.max_registers,
            "enable_fp_fusion": True,
            "sanitize_overflow": False,  # offsets of masked lanes wrap
        }


def contiguous(problem: Problem, operand: str) -> str:
    """Returns the axis along which operand "a" or "b" is contiguous: "m", "n" or "k"."""
    axes, strides = ("mk", problem.a[-2:]) if operand == "a" else ("kn", problem.b[-2:])
    return axes[0] if strides[0] == 1 and strides[1] != 1 else axes[1]


def unsupported_dtype(problem: Problem) -> str | None:
    if problem.dtype in TYPES and problem.out_dtype in TYPES:
        return None
    names = dtype_name(problem.dtype), dtype_name(problem.out_dtype)
    return (
        f"needs bfloat16, float16 or float32, but was given {names[0]} operands for {names[1]} "
        "outputs"
    )


def kernel_strides(problem: Problem, strides: Sequence[int]) -> Strides:
    """Returns the strides of a tensor of a call, batch dimensions first, in the form that a kernel
    takes.
    """
    outer, inner = ([0, 0] + [strides[i] for i in kept_dims(problem)])[-2:]
    return Strides(outer, inner, strides[-2], strides[-1])


def problem_size(problem: Problem) -> ProblemSize:
    """Returns the sizes of a call in the form that a kernel takes."""
    kept = kept_dims(problem)
    return ProblemSize(problem.M, problem.N, problem.K, problem.batch[kept[-1]] if kept else 1)


def problem_strides(problem: Problem) -> ProblemStrides:
    """Returns the strides of a call in the form that a kernel takes; those of C are constants
    without an addend.
    """
    return ProblemStrides(
        a=kernel_strides(problem, problem.a),
        b=kernel_strides(problem, problem.b),
        c=Strides(0, 0, 1, 1) if problem.c is None else kernel_strides(problem, problem.c),
        out=kernel_strides(problem, problem.out),
    )


def epilogue_strides(problem: Problem) -> dict[str, Strides | None]:
    """Returns the strides of bias, residual and aux; None for tensors that the call lacks. The
    stride along rows or columns is None where these repeat and the kernel reads them.
    """
    found: dict[str, Strides | None] = {}
    for name in EPILOGUE_ARGS:
        view = problem.epilogue.views.get(name)
        strides = None if view is None else kernel_strides(problem, view.strides)
        if strides and name != "aux" and 0 in (strides.row, strides.col):
            strides = strides._replace(**{"col" if strides.row else "row": None})
        found[name] = strides
    return found


def epilogue_traits(problem: Problem) -> EpilogueTraits | None:
    """Returns the value of a kernel's constant EPILOGUE."""
    epilogue = problem.epilogue
    return None if epilogue == NONE else EpilogueTraits(epilogue.function, epilogue.gated)


class Divisibility(Protocol):
    """Chooses the divisors of a call's values that the compiler may assume. Each different divisor
    compiles another kernel.
    """

    def of_pointer(self, tensor: str, alignment: int) -> int:
        """Returns a divisor of a tensor's address in bytes, which `alignment` divides."""

    def of_stride(self, tensor: str, stride: int) -> int:
        """Returns a divisor of a tensor's stride."""

    def of_size(self, name: str, size: int) -> int:
        """Returns a divisor of M, N, K or the inner extent of the batch."""


@dataclass
class _Arguments:
    """Collects constants and divisors by path while the argument types are built."""

    divisibility: Divisibility
    wide: bool
    constants: list[tuple[Path, Any]] = field(default_factory=list)
    divisors: list[tuple[Path, int]] = field(default_factory=list)

    def constant(self, path: Path, value: Any) -> str:
        self.constants.append((path, value))
        return "constexpr"

    def pointer(self, path: Path, name: str, dtype: torch.dtype, alignment: int) -> str:
        self.divisors.append((path, self.divisibility.of_pointer(name, alignment)))
        return TYPES[dtype]

    def number(self, path: Path, value: int, divisor: int, *, wide: bool) -> str:
        self.divisors.append((path, divisor))
        return "i64" if wide or value > INT32_MAX else "i32"

    def sizes(self, position: int, sizes: ProblemSize) -> ProblemSize:
        """Returns the types of the sizes, which are the argument at `position`."""
        types = []
        for i, (name, size) in enumerate(sizes._asdict().items()):
            path = (position, i)
            if size == 1:
                types.append(self.constant(path, 1))
            else:
                divisor = self.divisibility.of_size(name, size)
                types.append(self.number(path, size, divisor, wide=self.wide and name != "inner"))
        return ProblemSize(*types)

    def strides(self, path: Path, name: str, strides: Strides) -> Iterator[str]:
        """Yields the types of a tensor's strides; `path` is that of the first."""
        *outer_path, first = path
        for i, stride in enumerate(strides):
            unused = stride == 0 and i < 2  # without a batch, its indices need no registers
            at = (*outer_path, first + i)
            if stride is None or stride == 1 or unused:
                yield self.constant(at, stride)
            else:
                divisor = self.divisibility.of_stride(name, stride)
                yield self.number(at, stride, divisor, wide=self.wide)


def specialize(
    problem: Problem,
    chunks: Sequence[Chunk],
    constants: Mapping[str, Any],
    divisibility: Divisibility,
    *,
    wide: bool,
    num_warps: int,
    num_stages: int = 1,
    max_registers: int | None = None,
) -> Specialization:
    """Derives types and divisors from the problem alone, so that a plan is valid for every call
    with the same problem.

    `wide`: sizes and strides take 64 bits, because a k-block can span 2³¹ elements where no stride
    does.
    """
    found = _Arguments(divisibility, wide)
    signature: dict[str, Any] = {}

    def aligned(alignment: int, dtype: torch.dtype, index: int) -> int:
        starts = (chunk.offsets[index] * dtype.itemsize for chunk in chunks)
        return math.gcd(WIDEST, alignment, *starts)

    alignments = dict(zip(("a", "b", "out", "c"), problem.alignment, strict=False))
    for i, name in enumerate(("a", "b", "c", "out")):
        dtype = problem.out_dtype if name == "out" else problem.dtype
        if name == "c" and problem.c is None:
            signature[name] = found.constant((i,), None)
        else:
            alignment = aligned(alignments[name], dtype, i)
            signature[name] = found.pointer((i,), name, dtype, alignment)
    signature |= {"alpha": "fp32", "beta": "fp32"}
    signature["size"] = found.sizes(len(signature), problem_size(problem))
    position = len(signature)
    signature["strides"] = ProblemStrides(
        *(
            Strides(*found.strides((position, i, 0), name, strides))
            for i, (name, strides) in enumerate(problem_strides(problem)._asdict().items())
        )
    )
    for name, value in constants.items():
        signature[name] = found.constant((len(signature),), value)
    if "EPILOGUE" in constants:
        signature["epilogue_tensors"] = _epilogue_types(
            problem,
            len(signature),
            found,
            lambda view, i: aligned(view.alignment, problem.out_dtype, i),
        )
    return Specialization(
        tuple(signature.items()),
        tuple(found.constants),
        tuple(found.divisors),
        num_warps,
        num_stages,
        max_registers,
    )


def _epilogue_types(
    problem: Problem, position: int, found: _Arguments, aligned: Callable[[View, int], int]
) -> Any:
    """Returns the types of EpilogueRefs, which is the argument at `position`."""
    if problem.epilogue == NONE:
        return found.constant((position,), None)
    types: list[TensorRef] = []
    for i, (name, strides) in enumerate(epilogue_strides(problem).items()):
        path = (position, i)
        if strides is None:
            types.append(TensorRef(*(found.constant((*path, j), None) for j in range(5))))
        else:
            alignment = aligned(problem.epilogue.views[name], 4 + i)
            pointer = found.pointer((*path, 0), name, problem.out_dtype, alignment)
            types.append(TensorRef(pointer, *found.strides((*path, 1), name, strides)))
    return EpilogueRefs(*types)


Run = Callable[..., None]


def bind(
    problem: Problem,
    chunks: Sequence[Chunk],
    run: Callable[[int], Run],
    constants: Mapping[str, Any],
) -> Launch:
    """Returns the launch of a call; `run(programs)` starts a grid of that many CTAs with all
    arguments of the kernel.
    """
    has_c = problem.c is not None
    fused = problem.epilogue != NONE
    tail: tuple[Any, ...] = (
        problem_size(problem),
        problem_strides(problem),
        *constants.values(),
    )
    if "EPILOGUE" in constants and not fused:
        tail = (*tail, None)
    absent = Strides(None, None, None, None)
    strides = [found or absent for found in epilogue_strides(problem).values()]
    runs = [(chunk.offsets, run(chunk.programs)) for chunk in chunks]
    first = runs[0][1]

    def launch(
        a: Tensor, b: Tensor, c: Tensor | None, out: Tensor, alpha: float, beta: float
    ) -> None:
        first(a, b, c if has_c else None, out, float(alpha), float(beta), *tail)

    def tensors(extra: Sequence[Tensor | None]) -> tuple[tuple[Any, ...], ...]:
        # Plain tuples: a NamedTuple takes longer to make, and the launcher does not need the names.
        return tuple([(t, *own) for t, own in zip(extra, strides, strict=True)])

    def launch_fused(
        a: Tensor, b: Tensor, c: Any, out: Tensor, alpha: float, beta: float, *extra: Any
    ) -> None:
        first(a, b, c if has_c else None, out, float(alpha), float(beta), *tail, tensors(extra))

    def launch_chunks(
        a: Tensor, b: Tensor, c: Any, out: Tensor, alpha: float, beta: float, *extra: Any
    ) -> None:
        operands = (a, b, c if has_c else None, out, *extra)
        for offsets, start in runs:
            shifted = [
                None if t is None else _shift(t, offset)
                for t, offset in zip(operands, offsets, strict=False)
            ]
            last = [tensors(shifted[4:])] if fused else []
            start(*shifted[:4], float(alpha), float(beta), *tail, *last)

    return launch_chunks if len(runs) > 1 else launch_fused if fused else launch


def _shift(t: Tensor, offset: int) -> Tensor:
    """Returns a view that starts `offset` elements later. The shift must be a view because the host
    passes tensors, not addresses, to kernels.
    """
    return torch.as_strided(t, (1,), (1,), t.storage_offset() + offset) if offset else t


def readable_name(specialization: Any) -> str:
    """Returns the kernel's name in profilers: rung, tile and dtype."""
    tile = specialization.constants["TILE"]
    dtype = specialization.signature["a"].removeprefix("*")
    return f"outblas_{tile.name}_{tile.block_m}x{tile.block_n}x{tile.block_k}_{dtype}"
