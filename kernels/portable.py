"""portable: plain tl.dot with masks and strides, on every GPU that Triton knows and on the CPU.

Idea: leave tiles, pipelines and instructions to Triton; any strides, any sizes, any architecture.
Parent: none.
Changes: none to a parent. Edges are masked only where a tile can overhang, and offsets are 64-bit
    only where they must be: both are decided on the host, per call, as is all that the compiler is
    told about alignment.
Why it pays: it is the fallback of every other kernel, and through Triton's interpreter the one that
runs without a GPU.
Source: beyond the seeds.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from ..core import machines
from ..core.artifact import Artifact, example
from ..core.problem import Launch, Problem, dtype_name
from ..core.registry import Kernel
from ..device import language, launch
from ..device.fused import finish, halves, pair, quarters
from ..device.grid import (
    MAX_PROGRAMS,
    group_m,
    max_registers,
    needs_int64,
    out_columns,
    pieces_of,
    tiles,
)
from ..device.launch import Specialization
from .portable_config import (
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
    "plan",
    "precompile",
    "space",
    "unsupported",
]

Config = PortableConfig
BATCH_INVARIANT = (
    True  # one config for all rows, and every element sums over K in the order of its slabs
)
EPILOGUES = True

_ROUND_TO_TF32 = tl.constexpr("cvt.rna.tf32.f32 $0, $1;")


def _readable_name(specialization: Any) -> str:
    blocks = "x".join(
        str(specialization.constants[name]) for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K")
    )
    return f"outblas_portable_{blocks}_{specialization.signature['a'].removeprefix('*')}"


@triton.jit(repr=_readable_name)  # type: ignore[untyped-decorator]
def matmul_kernel(  # type: ignore[no-untyped-def]
    a,
    b,
    c,
    out,
    alpha,
    beta,
    M,
    N,
    K,
    inner,
    a_outer,
    a_inner,
    a_m,
    a_k,
    b_outer,
    b_inner,
    b_k,
    b_n,
    c_outer,
    c_inner,
    c_m,
    c_n,
    out_outer,
    out_inner,
    out_m,
    out_n,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_M: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED_K: tl.constexpr,
    FUNCTION: tl.constexpr,
    GATED: tl.constexpr,
    extra,
):
    """One tile of out[outer, inner, M, N] = alpha A B + beta C (c is None without one), or what
    `fused.finish` makes of that; of a gated pair from BLOCK_N // 2 columns of B and as many of its
    second half.

    Masked lanes may compute offsets that wrap around; every offset that is used is in range. The
    interpreter needs K as a Python number to walk a range (INTERPRETED_K, 0 when compiled), and
    operands in fp64: its bf16 products are wrong, and bits of fp32 sums may depend on a row's place
    in a tile.
    """
    tiles_m = (M + BLOCK_M - 1) // BLOCK_M
    WIDTH: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    tiles_n = (N + WIDTH - 1) // WIDTH
    tile = tl.program_id(0) % (tiles_m * tiles_n)
    product = tl.program_id(0) // (tiles_m * tiles_n)
    outer_index = (product // inner).to(tl.int64)
    inner_index = (product % inner).to(tl.int64)
    in_group = tile % (GROUP_M * tiles_n)
    first_m = tile // (GROUP_M * tiles_n) * GROUP_M
    group_m = tl.minimum(tiles_m - first_m, GROUP_M)

    m = (first_m + in_group % group_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    first_n = (in_group // group_m) * WIDTH
    n = first_n + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    if WIDE:
        m = m.to(tl.int64)
        n = n.to(tl.int64)
        k = k.to(tl.int64)
    b_column = n
    if GATED:
        n, b_column = pair(n, tl.arange(0, BLOCK_N), N, WIDTH)
    # A mask of ones compiles away.
    inside_m = tl.full((BLOCK_M, 1), 1, tl.int1) if EVEN_M else m[:, None] < M
    inside_n = tl.full((1, BLOCK_N), 1, tl.int1) if EVEN_N else n[None, :] < N

    a_tile_ptr = (
        a + outer_index * a_outer + inner_index * a_inner + (m[:, None] * a_m + k[None, :] * a_k)
    )
    b_tile_ptr = (
        b
        + outer_index * b_outer
        + inner_index * b_inner
        + (k[:, None] * b_k + b_column[None, :] * b_n)
    )
    acc = tl.full((BLOCK_M, BLOCK_N), 0, tl.float32)
    ones = tl.full((BLOCK_M, BLOCK_N), 1, tl.float32)
    slab = (
        tl.full((), BLOCK_K, tl.int64) if WIDE else BLOCK_K
    )  # a step of so many strides can be wider than they are
    # A `while` loop would not be pipelined.
    for start in range(0, INTERPRETED_K if INTERPRETED_K else K, BLOCK_K):
        inside_k = tl.full((BLOCK_K,), 1, tl.int1) if EVEN_K else k < K - start
        a_tile = tl.load(a_tile_ptr, mask=inside_m & inside_k[None, :], other=0.0)
        b_tile = tl.load(b_tile_ptr, mask=inside_k[:, None] & inside_n, other=0.0)
        if PRECISION == "tf32":
            # Tensor cores would drop the low bits: twice cuBLAS's error, and a bias towards zero.
            a_tile = tl.inline_asm_elementwise(
                _ROUND_TO_TF32, "=r,r", [a_tile], tl.float32, True, 1
            )
            b_tile = tl.inline_asm_elementwise(
                _ROUND_TO_TF32, "=r,r", [b_tile], tl.float32, True, 1
            )
        if INTERPRETED_K:
            acc += tl.dot(a_tile.to(tl.float64), b_tile.to(tl.float64), out_dtype=tl.float64).to(
                tl.float32
            )
        elif a_tile.dtype == tl.float32 and PRECISION == "ieee":
            # Sums of BLOCK_K terms, then a sum of those: the error of one long sum grows with K. As
            # an addition the compiler would fold it into the product.
            acc = tl.fma(tl.dot(a_tile, b_tile, input_precision=PRECISION), ones, acc)
        else:
            acc = tl.dot(a_tile, b_tile, acc, input_precision=PRECISION)
        a_tile_ptr += slab * a_k
        b_tile_ptr += slab * b_k

    COUNT: tl.constexpr = 1 if FUNCTION is None else 2 if BLOCK_N < 128 else 4
    PART: tl.constexpr = BLOCK_N // COUNT
    # One after the other, for all outputs of a large tile take too many registers.
    parts = (acc,) if COUNT == 1 else halves(acc) if COUNT == 2 else quarters(acc)
    c_view, out_view = (c, c_outer, c_inner, c_m, c_n), (out, out_outer, out_inner, out_m, out_n)
    for part in tl.static_range(WIDTH // PART):
        n = first_n + part * PART + tl.arange(0, PART)
        if WIDE:
            n = n.to(tl.int64)
        inside_n = tl.full((1, PART), 1, tl.int1) if EVEN_N else n[None, :] < N
        place = (m[:, None], n[None, :], inside_m, inside_n, outer_index, inner_index)
        sums = (parts[part], parts[part + COUNT // 2]) if GATED else (parts[part],)
        finish(
            sums,
            c_view,
            out_view,
            extra,
            alpha,
            beta,
            N,
            place,
            FUNCTION,
            GATED,
            INTERPRETED_K != 0,
        )


_interpreted = language.interpreted(matmul_kernel)


def unsupported(problem: Problem, config: PortableConfig | None = None) -> str | None:
    """Why this kernel cannot take a call (with this config); None if it can."""
    if reason := launch.unsupported_dtype(problem):
        return reason
    if problem.device.type not in ("cpu", "cuda"):
        return f"needs CUDA or CPU tensors, and was given tensors on {problem.device}"
    if problem.device.type == "cuda" and not isinstance(matmul_kernel, triton.JITFunction):
        return "needs CPU tensors while TRITON_INTERPRET=1 is set, and was given CUDA tensors"
    if config is not None:
        limit = None if problem.device.type == "cpu" else launch.shared_memory_limit(problem.device)
        if reason := invalid_reason(config, problem.dtype, limit):
            return reason
        if tiles(config, problem) > MAX_PROGRAMS:
            return f"needs at most {MAX_PROGRAMS} tiles, and was given {tiles(config, problem)}"
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
        return launch.bind(problem, pieces_of(problem, config), _interpreter, constants)
    arch = launch.arch_of(problem.device)
    if config is None:
        config = choose(
            problem,
            launch.sm_count(problem.device),
            arch,
            launch.shared_memory_limit(problem.device),
        )
    constants = _constants(problem, config, _precision(problem, arch), interpreted=False)
    with torch.cuda.device(problem.device):
        compiled = _compile(_specialize(problem, config, arch), arch, torch.cuda.current_device())
        return launch.bind(
            problem,
            pieces_of(problem, config),
            lambda programs: compiled[programs, 1, 1],
            constants,
        )


def precompile(problem: Problem, config: PortableConfig, arch: int) -> None:
    """Compiles to Triton's cache what `plan` would load; needs no GPU, and loads nothing on one."""
    compile_for(problem, config, arch)


def compile_for(problem: Problem, config: PortableConfig, arch: int) -> CompiledKernel:
    """The kernel that `plan` would launch on an architecture (90 is sm_90); needs no GPU, and loads
    nothing on one.
    """
    return _compile(_specialize(problem, config, arch), arch, None)


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
    """What `plan` would launch on the reference GPU of an architecture (90 without one); needs no
    GPU.

    `problem` replaces the aligned, row-major product that `dtype`, `out_dtype`, `layout` and
    `shape` describe. Without a config, `choose` picks one for the problem. Raises ValueError for
    what the kernel cannot take.
    """
    from ..device import triton_artifact  # imports Gluon, which no launch needs

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


@cache
def _compile(specialization: Specialization, arch: int, device: int | None) -> CompiledKernel:
    """`device` is the index of the GPU on which the caller loads the kernel: a loaded kernel
    belongs to one.
    """
    signature, constants = dict(specialization.signature), dict(specialization.constants)
    source = ASTSource(matmul_kernel, signature, constants, specialization.attributes)
    with language.lock:
        return triton.compile(
            source, target=GPUTarget("cuda", arch, 32), options=specialization.options
        )


def _specialize(problem: Problem, config: PortableConfig, arch: int) -> Specialization:
    constants = _constants(problem, config, _precision(problem, arch), interpreted=False)
    # Without a limit ptxas spills a few registers to fit more CTAs; with one, FMA kernels with
    # masks take all of them.
    masked = not (constants["EVEN_M"] and constants["EVEN_N"] and constants["EVEN_K"])
    unlimited = masked and arch >= 80 and uses_fma(problem, arch)
    return launch.specialize(
        problem,
        pieces_of(problem, config),
        constants,
        lambda _, value: math.gcd(value, 16),
        wide=constants["WIDE"],
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        max_registers=None if unlimited else max_registers(config.threads),
    )


def _constants(
    problem: Problem, config: PortableConfig, precision: str, *, interpreted: bool
) -> dict[str, Any]:
    """Arguments of the kernel after those of every kernel, in order."""
    M, N, K = problem.M, problem.N, problem.K
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP_M": group_m(config, problem),
        "EVEN_M": M % config.block_m == 0,
        "EVEN_N": N % out_columns(config, problem) == 0,
        "EVEN_K": K % config.block_k == 0,
        "WIDE": needs_int64(problem, config),
        "PRECISION": precision,
        "INTERPRETED_K": K if interpreted else 0,
        **launch.fused(problem),
    }


def _interpreter(programs: int) -> Callable[..., None]:
    def run(*arguments: Any) -> None:
        with language.lock, np.errstate(all="ignore"):
            _interpreted[(programs,)](*arguments)

    return run


def _precision(problem: Problem, arch: int) -> str:
    return "tf32" if problem.tf32 and arch >= 80 else "ieee"


KERNEL = Kernel(
    name="portable",
    ladder="portable",
    idea=(
        "plain tl.dot with masks and any strides: the fallback everywhere, and on the CPU "
        "through "
        "the interpreter"
    ),
    parent=None,
    source="beyond the seeds",
    dtypes=("bfloat16", "float16", "float32"),
    min_arch=75,
    max_arch=None,
    dsl="triton",
)
