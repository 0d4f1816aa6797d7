"""The host side of `hopper.grouped`: what it supports, the choice of a config, compiling, launching."""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from ...core.grouped import GroupedProblem
from ...runtime.cuda_graphs import not_ready
from ..core import bounds, compile, tile_order
from ..core.config import SHARED_MEMORY, HopperConfig, compile_key
from ..core.host import tma_strides
from ..gemm import Config, heuristic, variant
from .kernel import Grouped
from .traits import BY_BALLOT, GroupedTraits

Tensor = torch.Tensor

MOST_GROUPS = 512  # whose schedule fits beside the stages
_DTYPES = (torch.bfloat16, torch.float16)
# tile_m, consumers, tile_n
_TILES = (
    (128, 2, 256),
    (128, 2, 192),
    (128, 2, 128),
    (64, 1, 256),
    (64, 1, 128),
    (64, 1, 64),
)
# The model of a tile, in cycles; those of `gemm.heuristic` where they have the same names.
_TILE_CYCLES = 1500.0  # between two tiles of a CTA: finding a group, the first load, the last store


def unsupported(problem: GroupedProblem) -> str | None:
    """Returns why the kernel cannot take a product on an sm_90 GPU; None if it can."""
    if problem.form != "ragged_m":
        return f"it supports ragged rows, but was given {problem.form}"
    if problem.dtype not in _DTYPES:
        return f"it supports bfloat16 and float16, but was given {problem.dtype}"
    if problem.bias is not None:
        return "it supports no bias, but was given one"
    if problem.groups + problem.zero_tail > MOST_GROUPS:
        return f"it supports {MOST_GROUPS - 1} groups, but was given {problem.groups}"
    if problem.K < 1 or max(problem.M, problem.N, problem.K) > bounds.LARGEST:
        return (
            f"it supports extents of 1 to {bounds.LARGEST}, but was given "
            f"{problem.M}x{problem.N}x{problem.K}"
        )
    return _unaligned_reason(problem)


def _unaligned_reason(problem: GroupedProblem) -> str | None:
    """Returns why TMA cannot move an operand or the result; None if it can."""
    group, *matrix = problem.b
    operands = (
        ("mat_a", problem.M, problem.K, problem.a, problem.alignment[0]),
        ("mat_b", problem.K, problem.N, (matrix[0], matrix[1]), problem.alignment[1]),
    )
    for name, rows, columns, strides, alignment in operands:
        if alignment < 16 or tma_strides(rows, columns, (strides[0], strides[1])) is None:
            return (
                "TMA needs addresses that are multiples of 16 bytes, one stride of 1 and others in "
                f"multiples of 8 elements, but {name} has strides {strides} at an address that is "
                f"a multiple of {alignment}"
            )
    if group % 8:
        return f"TMA needs strides in multiples of 8 elements, but mat_b has {group} along groups"
    granule = 16 // problem.out_dtype.itemsize
    row, column = problem.out
    if column != 1 or row % granule or problem.N % granule or problem.alignment[2] < 16:
        return (
            f"it needs rows of the result that begin and end at multiples of 16 bytes, but was given "
            f"{problem.N} columns with strides {problem.out}"
        )
    return None


def config_for(problem: GroupedProblem, sms: int) -> HopperConfig:
    """Chooses the tile with the fewest cycles by a simple model, for groups of equal size."""
    return min(_candidates(), key=lambda config: _cycles(config, problem, sms))


@functools.cache
def _candidates() -> tuple[HopperConfig, ...]:
    base = replace(Config(), k_serpentine=False, gpc_local=False, stagger="never")
    found = []
    for tile_m, consumers, tile_n in _TILES:
        shaped = heuristic.shaped(base, tile_m, consumers, 1, 1)
        found.append(heuristic.filled(replace(shaped, tile_n=tile_n)))
    return tuple(found)


def _cycles(config: HopperConfig, problem: GroupedProblem, sms: int) -> float:
    mean = problem.M / problem.groups
    # A group ends in the middle of a tile on average.
    rows = problem.groups * max(1.0, mean / config.tile_m + (0.5 if mean > config.tile_m else 0.0))
    tiles = min(rows, problem.M) * math.ceil(problem.N / config.tile_n)
    products = 2 * config.tile_m * config.tile_n * problem.K / (heuristic.REACHED * 4096)
    loads = 2 * (config.tile_m + config.tile_n) * problem.K / heuristic.SPLIT_BYTES
    tile = (products**3 + loads**3) ** (1 / 3) + _TILE_CYCLES
    return math.ceil(tiles / sms) * tile


@dataclass(frozen=True)
class GroupedVariant(variant.Variant):
    """The key of one compile. `layout` is that of A and of each matrix of B."""

    @property
    def name(self) -> str:
        c, t = self.config, self.traits
        dtypes = compile.SHORT[self.dtype], compile.SHORT[self.out_dtype]
        tile = f"{c.tile_m}x{c.tile_n}x{c.tile_k}x{c.stages}"
        groups, tail = f"{t.capacity}groups", "tail" if t.zero_tail else ""
        return compile.full_name(
            self, ["outblas_hopper_grouped", tile, self.layout, *dtypes, groups, tail]
        )


def variant_of(problem: GroupedProblem, config: HopperConfig) -> GroupedVariant:
    """Returns the variant for a supported product."""
    a, b = (
        tma_strides(*given)
        for given in (
            (problem.M, problem.K, (problem.a[0], problem.a[1])),
            (problem.K, problem.N, (problem.b[1], problem.b[2])),
        )
    )
    assert a and b, "`unsupported` refuses other strides"
    layout = "".join("n" if strides[1] == 1 else "t" for strides in (a, b))
    groups = problem.groups + problem.zero_tail
    traits = GroupedTraits(
        width=16 // problem.out_dtype.itemsize,
        by_columns=False,
        staged=True,
        transposed=False,
        batched=False,
        ordered=False,
        single_wave=False,
        scaled=False,
        capacity=-(-groups // BY_BALLOT) * BY_BALLOT,
        zero_tail=problem.zero_tail,
    )
    return GroupedVariant(compile_key(config), traits, problem.dtype, problem.out_dtype, layout)


def compile_variant(made: GroupedVariant, options: str = "") -> Any:
    """Compiles for sm_90a, with or without a GPU. Returns CuTe DSL's compiled function."""
    M, N, K, groups = (cute.sym_int() for _ in range(4))
    granule = made.traits.width
    N = cute.sym_int(divisibility=granule)
    outer_a, outer_b, matrix = (cute.sym_int64(divisibility=8) for _ in range(3))
    letter_a, letter_b = made.layout
    dtype, size = compile.NUMERIC[made.dtype], made.dtype.itemsize
    a = make_fake_tensor(
        dtype, (M, K), (outer_a, 1) if letter_a == "n" else (1, outer_a), assumed_align=8 * size
    )
    b = make_fake_tensor(
        dtype,
        (groups, K, N),
        (matrix, outer_b, 1) if letter_b == "n" else (matrix, 1, outer_b),
        assumed_align=8 * size,
    )
    c = make_fake_tensor(
        compile.NUMERIC[made.out_dtype],
        (M, N),
        (cute.sym_int64(divisibility=granule), 1),
        assumed_align=16,
    )
    offs = make_fake_tensor(cutlass.Int32, (groups,), (1,), assumed_align=4)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    Grouped.kernel.set_name_prefix(made.name, remove_cutlass_symbol=True, keep_mangled_name=False)
    kernel = Grouped(made.config, made.traits)
    with compile.target_arch():
        return cute.compile(
            kernel,
            a,
            b,
            c,
            offs,
            cutlass.Int32(1),
            stream,
            options=f"{compile.OPTIONS} {options}",
        )


def load(made: GroupedVariant) -> Any:
    """Returns the compiled kernel of a variant: from memory, from disk, or newly compiled."""
    return compile.load(made, lambda: compile_variant(made))


def run(
    problem: GroupedProblem,
    a: Tensor,
    b: Tensor,
    out: Tensor,
    offs: Tensor,
    bias: Tensor | None,
) -> None:
    """Computes a product that `unsupported` does not refuse.

    Raises RuntimeError while a CUDA graph is captured, if a kernel is needed for the first time.
    """
    del bias  # None
    if 0 in (problem.M, problem.N):
        return
    launch(problem)(a, b, out, offs)


# As many shapes as a model with experts has, many times over.
@functools.lru_cache(maxsize=4096)
def launch(problem: GroupedProblem, config: HopperConfig | None = None) -> Any:
    """Returns the function that launches the kernel for a supported product with a config, by
    default that of `config_for`.
    """
    sms = tile_order.clusters(problem.device, 0, 1)
    config = config or config_for(problem, sms)
    made = variant_of(problem, config)
    if torch.cuda.is_current_stream_capturing() and not compile.is_loaded(made):
        raise not_ready()
    compiled = load(made)
    clusters = tile_order.clusters(problem.device, config.sms, config.cluster)
    strides_a = tma_strides(problem.M, problem.K, (problem.a[0], problem.a[1]))
    strides_b = tma_strides(problem.K, problem.N, (problem.b[1], problem.b[2]))
    assert strides_a and strides_b, "`unsupported` refuses other strides"
    whole_b = problem.groups, problem.K, problem.N

    def launch_kernel(a: Tensor, b: Tensor, out: Tensor, offs: Tensor) -> None:
        compiled(
            a.as_strided((problem.M, problem.K), strides_a),
            b.as_strided(whole_b, (problem.b[0], *strides_b)),
            out,
            offs,
            clusters,
        )

    return launch_kernel


def shared_memory_left(config: HopperConfig, capacity: int) -> int:
    """Returns the shared memory that a config leaves beside the schedule, in bytes."""
    return SHARED_MEMORY - config.shared_memory_bytes - 4 * capacity
