"""portable: plain tl.dot with masks and strides, on every GPU that Triton knows and on the CPU.

Idea: leave tiles, pipelines and instructions to Triton, and take any strides and any sizes on any
    architecture.
Parent: none.
Changes: nothing, for there is no parent. Edges are masked only where a tile can overhang, and
    offsets have 64 bits only where they must. The host decides both for each call, and with them
    all that the compiler is told about alignment.
Why it pays: it is the fallback of every other kernel. Through Triton's interpreter it is also the
    kernel that runs without a GPU.
Source: none; it is beyond the documents.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from outblas.base import gpus, machines
from outblas.base.compat.triton_private import CompiledKernel
from outblas.base.registry import Kernel
from outblas.call.artifact import Artifact, example
from outblas.call.problem import Launch, Problem, dtype_name
from outblas.device import language, launch
from outblas.device.cubin import kernel_of
from outblas.device.fused import (
    current_tile,
    gated_columns,
    matrix_ptr,
    quarter_columns,
    split_columns,
    store_outputs,
)
from outblas.device.grid import (
    MAX_PROGRAMS,
    chunks_of,
    group_m,
    max_registers,
    needs_int64,
    out_columns,
    tiles,
)
from outblas.device.launch import Specialization
from outblas.device.records import EpilogueRefs, OutputCoord, TensorRef, TileTraits
from outblas.device.triton_variant import TritonVariant
from outblas.kernels.portable_config import (
    CANDIDATES,
    INTERPRETED,
    PortableConfig,
    choose,
    invalid_reason,
    space,
    uses_fma,
)

__all__ = [
    "CANDIDATES",
    "KERNEL",
    "Config",
    "artifact",
    "choose",
    "compile_for",
    "invalid_reason",
    "pack_variant",
    "plan",
    "precompile",
    "space",
    "unsupported",
]

Config = PortableConfig
# All rows use one config, and every output sums over K in the order of its k-blocks.
BATCH_INVARIANT = True
EPILOGUES = True
# A plan asks packs for its kernel, and says itself where it may not be compiled.
PACKED = True

_ROUND_TO_TF32 = tl.constexpr("cvt.rna.tf32.f32 $0, $1;")


@triton.jit  # type: ignore[untyped-decorator]
def add_product(  # type: ignore[no-untyped-def]
    acc, a_tile, b_tile, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr
):
    """Returns acc + A B for a k-block.

    The interpreter computes in fp64, because its bf16 products are wrong, and the bits of its fp32
    sums may depend on a row's place in a tile.
    """
    if PRECISION == "tf32":
        # Tensor cores would truncate the low bits: twice cuBLAS's error, and a bias towards zero.
        a_tile = tl.inline_asm_elementwise(_ROUND_TO_TF32, "=r,r", [a_tile], tl.float32, True, 1)
        b_tile = tl.inline_asm_elementwise(_ROUND_TO_TF32, "=r,r", [b_tile], tl.float32, True, 1)
    if INTERPRETED:
        product = tl.dot(a_tile.to(tl.float64), b_tile.to(tl.float64), out_dtype=tl.float64)
        return acc + product.to(tl.float32)
    elif a_tile.dtype == tl.float32 and PRECISION == "ieee":
        # Sums of BLOCK_K terms are added to a running sum, because the error of one long sum grows
        # with K. The compiler would fold an addition into the product, so it is written as an fma.
        ones = tl.full(acc.shape, 1, tl.float32)
        return tl.fma(tl.dot(a_tile, b_tile, input_precision=PRECISION), ones, acc)
    else:
        return tl.dot(a_tile, b_tile, acc, input_precision=PRECISION)


@triton.jit  # type: ignore[untyped-decorator]
def store_tile(  # type: ignore[no-untyped-def]
    acc,
    c,
    out,
    epilogue_tensors,
    alpha,
    beta,
    size,
    strides,
    tile,
    TILE: tl.constexpr,
    EPILOGUE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Stores out = alpha · acc + beta · C for a tile, with the epilogue applied if there is one.
    Columns are stored in parts, because all outputs of a large tile at once would take too many
    registers.
    """
    BLOCK_N: tl.constexpr = TILE.block_n
    GATED: tl.constexpr = EPILOGUE is not None and EPILOGUE.gated
    COUNT: tl.constexpr = 1 if EPILOGUE is None else 2 if BLOCK_N < 128 else 4
    PART: tl.constexpr = BLOCK_N // COUNT
    parts = (acc,) if COUNT == 1 else split_columns(acc) if COUNT == 2 else quarter_columns(acc)
    c_ref, out_ref = TensorRef(c, *strides.c), TensorRef(out, *strides.out)
    m = tile.first_m + tl.arange(0, TILE.block_m)
    if TILE.wide:
        m = m.to(tl.int64)
    mask_m = tl.full((TILE.block_m, 1), 1, tl.int1) if TILE.even_m else m[:, None] < size.M
    for part in tl.static_range(COUNT // 2 if GATED else COUNT):
        n = tile.first_n + part * PART + tl.arange(0, PART)
        if TILE.wide:
            n = n.to(tl.int64)
        mask_n = tl.full((1, PART), 1, tl.int1) if TILE.even_n else n[None, :] < size.N
        coord = OutputCoord(m[:, None], n[None, :], mask_m, mask_n, tile.outer, tile.inner)
        sums = (parts[part], parts[part + COUNT // 2]) if GATED else (parts[part],)
        store_outputs(
            sums,
            c_ref,
            out_ref,
            epilogue_tensors,
            alpha,
            beta,
            size.N,
            coord,
            EPILOGUE,
            INTERPRETED,
        )


@triton.jit(repr=launch.readable_name)  # type: ignore[untyped-decorator]
def matmul_kernel(  # type: ignore[no-untyped-def]
    a,
    b,
    c,
    out,
    alpha,
    beta,
    size,
    strides,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED_K: tl.constexpr,
    EPILOGUE: tl.constexpr,
    epilogue_tensors,
):
    """Computes one tile of out[outer, inner, M, N] = alpha A B + beta C, with the epilogue if there
    is one. A gated tile uses BLOCK_N // 2 columns of B and as many of its second half.

    Masked lanes may compute offsets that overflow; every offset that is used is in range.
    INTERPRETED_K is K as a Python number, which the interpreter needs to iterate over a range; it
    is 0 when compiled.
    """
    BLOCK_N: tl.constexpr = TILE.block_n
    BLOCK_K: tl.constexpr = TILE.block_k
    GATED: tl.constexpr = EPILOGUE is not None and EPILOGUE.gated
    OUT_COLUMNS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    tile = current_tile(size, TILE.block_m, OUT_COLUMNS, TILE.group_m)
    m = tile.first_m + tl.arange(0, TILE.block_m)
    n = tile.first_n + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    if TILE.wide:
        m = m.to(tl.int64)
        n = n.to(tl.int64)
        k = k.to(tl.int64)
    b_column = n
    if GATED:
        n, b_column = gated_columns(n, tl.arange(0, BLOCK_N), size.N, OUT_COLUMNS)
    # A mask of ones compiles away.
    mask_m = tl.full((TILE.block_m, 1), 1, tl.int1) if TILE.even_m else m[:, None] < size.M
    mask_n = tl.full((1, BLOCK_N), 1, tl.int1) if TILE.even_n else n[None, :] < size.N

    a_ptr = matrix_ptr(a, strides.a, tile) + (
        m[:, None] * strides.a.row + k[None, :] * strides.a.col
    )
    b_ptr = matrix_ptr(b, strides.b, tile) + (
        k[:, None] * strides.b.row + b_column[None, :] * strides.b.col
    )
    acc = tl.full((TILE.block_m, BLOCK_N), 0, tl.float32)
    # A k-block can span more elements of memory than any stride.
    terms = tl.full((), BLOCK_K, tl.int64) if TILE.wide else BLOCK_K
    # Triton would not pipeline a `while` loop.
    for start in range(0, INTERPRETED_K if INTERPRETED_K else size.K, BLOCK_K):
        mask_k = tl.full((BLOCK_K,), 1, tl.int1) if TILE.even_k else k < size.K - start
        a_tile = tl.load(a_ptr, mask=mask_m & mask_k[None, :], other=0.0)
        b_tile = tl.load(b_ptr, mask=mask_k[:, None] & mask_n, other=0.0)
        acc = add_product(acc, a_tile, b_tile, PRECISION, INTERPRETED_K != 0)
        a_ptr += terms * strides.a.col
        b_ptr += terms * strides.b.row

    store_tile(
        acc,
        c,
        out,
        epilogue_tensors,
        alpha,
        beta,
        size,
        strides,
        tile,
        TILE,
        EPILOGUE,
        INTERPRETED_K != 0,
    )


_interpreted = language.interpreted(matmul_kernel)


def unsupported(problem: Problem, config: PortableConfig | None = None) -> str | None:
    """Returns why this kernel cannot take a call (with this config); None if it can."""
    if reason := launch.unsupported_dtype(problem):
        return reason
    if problem.device.type not in ("cpu", "cuda"):
        return f"needs CUDA or CPU tensors, but was given tensors on {problem.device}"
    if problem.device.type == "cuda" and not isinstance(matmul_kernel, triton.JITFunction):
        return "needs CPU tensors while TRITON_INTERPRET=1 is set, but was given CUDA tensors"
    if config is not None:
        limit = None if problem.device.type == "cpu" else gpus.shared_memory_limit(problem.device)
        return _unsupported_config(problem, config, limit)
    return None


def _unsupported_config(problem: Problem, config: PortableConfig, limit: int | None) -> str | None:
    """Returns why a config cannot take a call with this limit of shared memory; None if it can."""
    if reason := invalid_reason(config, problem.dtype, limit):
        return reason
    if tiles(config, problem) > MAX_PROGRAMS:
        return f"needs at most {MAX_PROGRAMS} tiles, but was given {tiles(config, problem)}"
    return None


def plan(problem: Problem, config: PortableConfig | None = None) -> Launch:
    """Compiles for a call and returns its launch. Raises ValueError when the call or the config is
    not supported.

    The launch takes the tensors of any call with this `Problem`, on the current device and its
    current stream. Without a config, `choose` picks one for the device.
    """
    if reason := unsupported(problem, config):
        raise ValueError(f"kernel 'portable': {reason}")
    if problem.device.type == "cpu":
        config = config or INTERPRETED
        constants = _constants(problem, config, "ieee", interpreted=True)
        return launch.bind(problem, chunks_of(problem, config), _interpreter, constants)
    arch = gpus.arch_of(problem.device)
    if config is None:
        config = choose(
            problem,
            gpus.sm_count(problem.device),
            arch,
            gpus.shared_memory_limit(problem.device),
        )
    constants = _constants(problem, config, _precision(problem, arch), interpreted=False)
    with torch.cuda.device(problem.device):
        variant = _variant(problem, config, arch)
        compiled = kernel_of(variant, torch.cuda.current_device(), KERNEL.name)
        return launch.bind(
            problem,
            chunks_of(problem, config),
            lambda programs: compiled[programs, 1, 1],
            constants,
        )


def precompile(problem: Problem, config: PortableConfig, arch: int) -> None:
    """Compiles what `plan` would load into Triton's cache. Needs no GPU, and loads nothing onto
    one.
    """
    compile_for(problem, config, arch)


def compile_for(problem: Problem, config: PortableConfig, arch: int) -> CompiledKernel:
    """Returns the kernel that `plan` would launch on an architecture (90 is sm_90). Needs no GPU,
    and loads nothing onto one.
    """
    return kernel_of(_variant(problem, config, arch), None, KERNEL.name)


def pack_variant(
    problem: Problem, machine: machines.Machine, config: PortableConfig | None = None
) -> TritonVariant:
    """Returns the kernel that `plan` would launch on a GPU that need not be there. Raises
    ValueError for a config that is not supported.
    """
    limit = machine.shared_memory_per_cta
    if config is None:
        config = choose(problem, machine.sms, machine.arch, limit)
    elif reason := _unsupported_config(problem, config, limit):
        raise ValueError(f"kernel 'portable': {reason}")
    return _variant(problem, config, machine.arch)


def artifact(
    config: PortableConfig | None = None,
    *,
    arch: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    out_dtype: torch.dtype | None = None,
    layout: str = "nt",
    shape: tuple[int, int, int] = (4096, 4096, 4096),
    problem: Problem | None = None,
) -> Artifact:
    """Compiles what `plan` would launch on the reference GPU of an architecture (90 without one).
    Needs no GPU.

    `problem` replaces the aligned problem with a row-major output that `dtype`, `out_dtype`,
    `layout` and `shape` describe. Without a config, `choose` picks one for the problem. Raises
    ValueError for a problem or config that the kernel does not support.
    """
    from outblas.device import triton_artifact  # imports Gluon, which launches do not need

    machine = machines.reference(90 if arch is None else arch)
    given = problem or example(dtype, out_dtype, layout, shape)
    if given.dtype not in launch.TYPES:
        raise ValueError(
            f"dtype is {dtype_name(given.dtype)}, expected bfloat16, float16 or float32"
        )
    if config is None:
        config = choose(given, machine.sms, machine.arch, machine.shared_memory_per_cta)
    elif reason := invalid_reason(config, given.dtype, machine.shared_memory_per_cta):
        raise ValueError(f"config: {reason}")
    return triton_artifact.from_compiled(
        compile_for(given, config, machine.arch),
        kernel=KERNEL.name,
        config=config,
        dtype=given.dtype,
        out_dtype=given.out_dtype,
        layout=layout,
        stages=config.num_stages,
        tile=(config.block_m, config.block_n, config.block_k),
    )


def _variant(problem: Problem, config: PortableConfig, arch: int) -> TritonVariant:
    return TritonVariant.of(matmul_kernel, _specialize(problem, config, arch), arch)


def _specialize(problem: Problem, config: PortableConfig, arch: int) -> Specialization:
    constants = _constants(problem, config, _precision(problem, arch), interpreted=False)
    tile: TileTraits = constants["TILE"]
    # Without a register limit ptxas spills a few registers to fit more CTAs; with one, FMA kernels
    # with masks use all of them.
    masked = not (tile.even_m and tile.even_n and tile.even_k)
    unlimited = masked and arch >= 80 and uses_fma(problem, arch)
    return launch.specialize(
        problem,
        chunks_of(problem, config),
        constants,
        _Divisibility(),
        wide=tile.wide,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        max_registers=None if unlimited else max_registers(config.threads),
    )


class _Divisibility:
    """Every divisor up to 16, because these determine what Triton vectorizes."""

    def of_pointer(self, tensor: str, alignment: int) -> int:
        return math.gcd(alignment, 16)

    def of_stride(self, tensor: str, stride: int) -> int:
        return math.gcd(stride, 16)

    def of_size(self, name: str, size: int) -> int:
        return math.gcd(size, 16)


def _constants(
    problem: Problem, config: PortableConfig, precision: str, *, interpreted: bool
) -> dict[str, Any]:
    """Returns the constants of the kernel, in the order of its parameters."""
    return {
        "TILE": TileTraits(
            name=KERNEL.name,
            block_m=config.block_m,
            block_n=config.block_n,
            block_k=config.block_k,
            group_m=group_m(config, problem),
            even_m=problem.M % config.block_m == 0,
            even_n=problem.N % out_columns(config, problem) == 0,
            even_k=problem.K % config.block_k == 0,
            wide=needs_int64(problem, config),
        ),
        "PRECISION": precision,
        "INTERPRETED_K": problem.K if interpreted else 0,
        "EPILOGUE": launch.epilogue_traits(problem),
    }


def _interpreter(programs: int) -> Callable[..., None]:
    def run(*arguments: Any) -> None:
        *others, extra = arguments
        if extra is not None:  # the interpreter needs the names that a launch omits
            extra = EpilogueRefs(*(TensorRef(*tensor) for tensor in extra))
        with language.lock, np.errstate(all="ignore"):
            _interpreted[(programs,)](*others, extra)

    return run


def _precision(problem: Problem, arch: int) -> str:
    return "tf32" if problem.tf32 and arch >= 80 else "ieee"


KERNEL = Kernel(
    name="portable",
    ladder="portable",
    idea=(
        "plain tl.dot with masks and any strides: the fallback everywhere, and on the CPU through "
        "the interpreter"
    ),
    parent=None,
    source="beyond the seeds",
    dtypes=("bfloat16", "float16", "float32"),
    min_arch=75,
    max_arch=None,
    dsl="triton",
)
