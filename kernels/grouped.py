"""Grouped products for every GPU that Triton knows, and on the CPU through its interpreter: one
product per group, whose sizes lie on the device.

Each program computes one tile of the result. Where rows are ragged, group g owns the slots from
begin[g] // block rows + g on, which are at least as many as it has tile rows, whatever the sizes
of groups are. So their number is known to the host, a program finds its group by a binary search
in the ends of groups, and a slot without rows ends at once. No size is read by the host, and a
captured CUDA graph may be replayed with other groups.

The ends of groups are clamped to the operand, so a wrong `offs` never leads outside of a tensor.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from ..core import compiling
from ..core.compat.torch_private import fp32_precision
from ..core.compat.triton_private import ASTSource, CompiledKernel, GPUTarget
from ..core.grouped import GroupedProblem, GroupedTensors
from ..device import language, launch
from ..runtime.cuda_graphs import not_ready
from .portable import add_product

Tensor = torch.Tensor


class Block(NamedTuple):
    """The tile of a program, and how Triton compiles it."""

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int


@triton.jit
def _group_begin(offs, group, extent):  # type: ignore[no-untyped-def]
    """Returns where a group begins in the ragged dimension, of size `extent`."""
    begin = tl.load(offs + group - 1, mask=group > 0, other=0)
    return tl.minimum(tl.maximum(begin, 0), extent)


@triton.jit  # type: ignore[untyped-decorator]
def _group_of(  # type: ignore[no-untyped-def]
    offs, slot, groups, extent, ROWS: tl.constexpr, STEPS: tl.constexpr
):
    """Returns the group that owns a slot: the last one whose slots begin at it or before. The group
    after all others owns what is left over.
    """
    low, high = slot * 0, slot * 0 + groups
    for _ in tl.static_range(STEPS):
        middle = (low + high + 1) // 2
        is_before = _group_begin(offs, middle, extent) // ROWS + middle <= slot
        low, high = tl.where(is_before, middle, low), tl.where(is_before, high, middle - 1)
    return low


class GroupedStrides(NamedTuple):
    """The strides of a grouped product in elements; those along groups are 0 for tensors that have
    none.
    """

    a_m: int
    a_k: int
    b_g: int
    b_k: int
    b_n: int
    out_g: int
    out_m: int
    out_n: int
    bias_g: int
    bias_m: int
    bias_n: int


@triton.jit  # type: ignore[untyped-decorator]
def _sum_products(  # type: ignore[no-untyped-def]
    a,
    b,
    m,
    n,
    k,
    mask_m,
    mask_n,
    terms,
    strides,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED_K: tl.constexpr,
):
    """Returns the sums over `terms` terms of K, in fp32. `k`: the terms of the first block."""
    a_ptr = a + m.to(tl.int64)[:, None] * strides.a_m + k.to(tl.int64)[None, :] * strides.a_k
    b_ptr = b + k.to(tl.int64)[:, None] * strides.b_k + n.to(tl.int64)[None, :] * strides.b_n
    step = tl.full((), BLOCK.k, tl.int64)
    offset = tl.arange(0, BLOCK.k)
    acc = tl.full((BLOCK.m, BLOCK.n), 0, tl.float32)
    for start in range(0, INTERPRETED_K if INTERPRETED_K else terms, BLOCK.k):
        mask_k = offset < terms - start
        a_tile = tl.load(a_ptr, mask=mask_m & mask_k[None, :], other=0.0)
        b_tile = tl.load(b_ptr, mask=mask_k[:, None] & mask_n, other=0.0)
        acc = add_product(acc, a_tile, b_tile, PRECISION, INTERPRETED_K != 0)
        a_ptr += step * strides.a_k
        b_ptr += step * strides.b_k
    return acc


@triton.jit  # type: ignore[untyped-decorator]
def _store_tile(  # type: ignore[no-untyped-def]
    acc, out, bias, group, m, n, mask, mask_bias, strides, BIAS: tl.constexpr
):
    """Stores a tile of a group's result, after adding the bias where `mask_bias`."""
    m, n = m.to(tl.int64)[:, None], n.to(tl.int64)[None, :]
    if BIAS:
        at = bias + group * strides.bias_g + m * strides.bias_m + n * strides.bias_n
        acc += tl.load(at, mask=mask_bias, other=0.0).to(tl.float32)
    at = out + group * strides.out_g + m * strides.out_m + n * strides.out_n
    tl.store(at, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def ragged_m_kernel(  # type: ignore[no-untyped-def]
    a,
    b,
    out,
    offs,
    bias,
    groups,
    M,
    N,
    K,
    strides,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    ZERO_TAIL: tl.constexpr,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED_K: tl.constexpr,
):
    """Computes one tile of out[m, :] = A[m, :] B[g] + bias[g] for the rows m of group g.

    STEPS: those of a binary search among the groups. INTERPRETED_K is K as a Python number, which
    the interpreter needs to iterate over a range; it is 0 when compiled.
    """
    columns = (N + BLOCK.n - 1) // BLOCK.n
    slot, column = tl.program_id(0) // columns, tl.program_id(0) % columns
    group = _group_of(offs, slot, groups, M, BLOCK.m, STEPS)
    begin = _group_begin(offs, group, M)
    end = tl.load(offs + group, mask=group < groups, other=M if ZERO_TAIL else 0)
    end = tl.minimum(end, M)
    first = begin + (slot - begin // BLOCK.m - group) * BLOCK.m
    if first < end:
        m, n = first + tl.arange(0, BLOCK.m), column * BLOCK.n + tl.arange(0, BLOCK.n)
        mask_m, mask_n = (m < end)[:, None], (n < N)[None, :]
        is_group = group < groups  # what is left over has no terms, and gets zeros
        matrix = group.to(tl.int64)
        acc = _sum_products(
            a,
            b + matrix * strides.b_g,
            m,
            n,
            tl.arange(0, BLOCK.k),
            mask_m,
            mask_n,
            tl.where(is_group, K, 0),
            strides,
            BLOCK,
            PRECISION,
            INTERPRETED_K,
        )
        mask_bias = (m < tl.where(is_group, end, 0))[:, None] & mask_n
        _store_tile(acc, out, bias, matrix, m, n, mask_m & mask_n, mask_bias, strides, BIAS)


@triton.jit  # type: ignore[untyped-decorator]
def ragged_k_kernel(  # type: ignore[no-untyped-def]
    a,
    b,
    out,
    offs,
    bias,
    groups,
    M,
    N,
    K,
    strides,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    ZERO_TAIL: tl.constexpr,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED_K: tl.constexpr,
):
    """Computes one tile of out[g] = A[:, k] B[k, :] + bias[g] over the terms k of group g. The
    parameters are those of `ragged_m_kernel`.
    """
    rows, columns = (M + BLOCK.m - 1) // BLOCK.m, (N + BLOCK.n - 1) // BLOCK.n
    tile, group = tl.program_id(0) % (rows * columns), tl.program_id(0) // (rows * columns)
    begin = _group_begin(offs, group, K)
    end = tl.maximum(_group_begin(offs, group + 1, K), begin)
    m = tile % rows * BLOCK.m + tl.arange(0, BLOCK.m)
    n = tile // rows * BLOCK.n + tl.arange(0, BLOCK.n)
    mask_m, mask_n = (m < M)[:, None], (n < N)[None, :]
    acc = _sum_products(
        a,
        b,
        m,
        n,
        begin + tl.arange(0, BLOCK.k),
        mask_m,
        mask_n,
        end - begin,
        strides,
        BLOCK,
        PRECISION,
        INTERPRETED_K,
    )
    mask = mask_m & mask_n
    _store_tile(acc, out, bias, group.to(tl.int64), m, n, mask, mask, strides, BIAS)


_KERNELS = {"ragged_m": ragged_m_kernel, "ragged_k": ragged_k_kernel}
_INTERPRETED = {form: language.interpreted(kernel) for form, kernel in _KERNELS.items()}
_INTERPRETED_BLOCK = Block(16, 32, 32, 4, 1)
_NAME = "the portable kernel of grouped products"
_loaded: set[tuple[Any, ...]] = set()  # what has been compiled and put onto a GPU


def unsupported(problem: GroupedProblem) -> str | None:
    """Returns why the kernel cannot take a product; None if it can."""
    if problem.device.type not in ("cpu", "cuda"):
        return f"needs CUDA or CPU tensors, but was given tensors on {problem.device}"
    if problem.device.type == "cuda" and not isinstance(ragged_m_kernel, triton.JITFunction):
        return "needs CPU tensors while TRITON_INTERPRET=1 is set, but was given CUDA tensors"
    if programs(problem, block(problem)) >= 2**31:
        return f"needs fewer than 2**31 tiles, but was given {programs(problem, block(problem))}"
    return None


def block(problem: GroupedProblem) -> Block:
    """Chooses the tile for a product: as many rows as a group has in the mean, in 16 to 128."""
    if problem.device.type == "cpu":
        return _INTERPRETED_BLOCK
    wide = problem.dtype.itemsize == 4
    mean = problem.M if problem.form == "ragged_k" else problem.M // problem.groups
    rows = min(max(16, triton.next_power_of_2(max(mean, 1))), 64 if wide else 128)
    stages = 2 if launch.arch_of(problem.device) < 80 else 3
    if wide:
        return Block(rows, 64, 32, 4, stages)
    return Block(rows, 128, 64, 8 if rows == 128 else 4, stages)


def programs(problem: GroupedProblem, tile: Block) -> int:
    """Returns how many programs are launched: as many as any division into groups needs."""
    rows, columns = triton.cdiv(problem.M, tile.m), triton.cdiv(problem.N, tile.n)
    if problem.form == "ragged_k":
        return int(problem.groups * rows * columns)
    return int((problem.M // tile.m + problem.groups + 1) * columns)


def strides(problem: GroupedProblem) -> GroupedStrides:
    """Returns the strides of a product in the form that the kernels take."""
    grouped_b = problem.b if len(problem.b) == 3 else (0, *problem.b)
    grouped_out = problem.out if len(problem.out) == 3 else (0, *problem.out)
    bias = problem.epilogue.bias.strides if problem.epilogue.bias else (0, 0, 0)
    return GroupedStrides(*problem.a, *grouped_b, *grouped_out, *bias)


def run(
    problem: GroupedProblem,
    a: Tensor,
    b: Tensor,
    out: Tensor,
    offs: Tensor,
    tensors: GroupedTensors,
) -> None:
    """Computes a product that `unsupported` does not refuse.

    Raises RuntimeError while a CUDA graph is captured, if a kernel is needed for the first time,
    and CompileForbidden where it would have to be compiled and may not.
    """
    tile, bias = block(problem), tensors.bias
    count = programs(problem, tile)
    if not count:
        return
    is_cpu = problem.device.type == "cpu"
    precision = "tf32" if problem.dtype == torch.float32 and _wants_tf32(problem) else "ieee"
    constants = {
        "BLOCK": tile,
        "STEPS": problem.groups.bit_length(),
        "ZERO_TAIL": problem.zero_tail,
        "BIAS": bias is not None,
        "PRECISION": precision,
        "INTERPRETED_K": problem.K if is_cpu else 0,
    }
    sizes = problem.groups, problem.M, problem.N, problem.K
    arguments = a, b, out, offs, bias, *sizes, strides(problem)
    if is_cpu:
        with language.lock, np.errstate(all="ignore"):
            _INTERPRETED[problem.form][(count,)](*arguments, **constants)
        return
    key = _specialization(problem, tile, precision, arguments)
    if key not in _loaded:
        compiling.check_allowed(_NAME)
        if torch.cuda.is_current_stream_capturing():
            raise not_ready()
    with torch.cuda.device(problem.device), language.lock:
        _KERNELS[problem.form][(count,)](
            *arguments, **constants, num_warps=tile.num_warps, num_stages=tile.num_stages
        )
    _loaded.add(key)


def _specialization(
    problem: GroupedProblem, tile: Block, precision: str, arguments: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Returns what a compiled kernel depends on, as Triton tells: of numbers, whether they are 1,
    divide by 16, and fit 32 bits; of tensors, their dtypes and whether addresses divide by 16.
    """
    *tensors, groups, M, N, K, given = arguments
    numbers = tuple((n == 1, n % 16 == 0, n < 2**31) for n in (groups, M, N, K, *given))
    of_tensors = tuple(None if t is None else (t.dtype, t.data_ptr() % 16 == 0) for t in tensors)
    constants = problem.form, problem.groups.bit_length(), problem.zero_tail, tile, precision
    return constants, numbers, of_tensors, torch.cuda.current_device()


def compile_for(problem: GroupedProblem, tile: Block, arch: int) -> CompiledKernel:
    """Compiles the kernel of a product without bias for an architecture (90 is sm_90), with 16-byte
    vectors. Needs no GPU, and loads nothing onto one.
    """
    kernel = _KERNELS[problem.form]
    pointers = {
        "a": launch.TYPES[problem.dtype],
        "b": launch.TYPES[problem.dtype],
        "out": launch.TYPES[problem.out_dtype],
        "offs": "*i32",
    }
    constants: dict[str, Any] = {
        "bias": None,
        "BLOCK": tile,
        "STEPS": problem.groups.bit_length(),
        "ZERO_TAIL": problem.zero_tail,
        "BIAS": False,
        "PRECISION": "ieee",
        "INTERPRETED_K": 0,
    }
    types: dict[str, Any] = dict.fromkeys(kernel.arg_names, "i32")
    types |= pointers | dict.fromkeys(constants, "constexpr")
    given = strides(problem)
    kinds: list[Any] = ["constexpr" if value in (0, 1) else "i32" for value in given]
    types["strides"] = GroupedStrides(*kinds)
    at = {name: (index,) for index, name in enumerate(kernel.arg_names)}
    values: dict[tuple[int, ...], Any] = {at[name]: value for name, value in constants.items()}
    divisible: list[list[Any]] = [["tt.divisibility", 16]]
    divisors: dict[tuple[int, ...], Any] = {
        at[name]: divisible for name in (*pointers, "M", "N", "K")
    }
    for index, value in enumerate(given):
        place = (*at["strides"], index)
        if value in (0, 1):
            values[place] = value
        elif value % 16 == 0:
            divisors[place] = divisible
    with language.lock:
        source = ASTSource(kernel, types, values, divisors)
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def _wants_tf32(problem: GroupedProblem) -> bool:
    """Returns whether products of fp32 operands may be rounded to tf32. Sums of single rows, which
    gradients of a bias are, gain nothing by it.
    """
    is_allowed = fp32_precision("cuda", "matmul") == "tf32" and problem.M > 1
    return is_allowed and launch.arch_of(problem.device) >= 80
