"""The host side of `hopper.grouped`: what it supports, how it chooses a config, how it compiles and
launches.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from ...core.epilogue import NONE
from ...core.grouped import GroupedProblem, GroupedTensors
from ...core.problem import Strides
from ...runtime.cuda_graphs import not_ready
from ..core import bounds, compile, tile_order
from ..core.config import HopperConfig, compile_key
from ..gemm import heuristic, variant
from ..gemm.kernel import Config
from .kernel import Grouped
from .traits import CAPACITIES, GroupedTraits

Tensor = torch.Tensor

FEW_ROWS = 64  # of a group, for which a tile of 64 rows is enough
MOST_GROUPS = CAPACITIES[-1]  # whose schedule fits beside the stages
_DTYPES = (torch.bfloat16, torch.float16)
# tile_m, consumers, cluster_m, cluster_n, tile_n
_TILES = (
    (128, 2, 2, 1, 256),
    (128, 2, 1, 2, 256),
    (128, 2, 1, 1, 256),
    (128, 2, 2, 1, 192),
    (128, 2, 2, 1, 128),
    (128, 2, 1, 1, 128),
    (64, 1, 1, 1, 128),
    (64, 1, 1, 1, 64),
)
# An estimate of the cycles between two tiles of a CTA: finding a group, the first load, the last
# store. The other constants of the model are those of `gemm.heuristic`.
_TILE_CYCLES = 1500.0


@functools.lru_cache(maxsize=4096)  # as `launch`
def unsupported(problem: GroupedProblem) -> str | None:
    """Returns why the kernel cannot take a product on an sm_90 GPU; None if it can."""
    if problem.dtype not in _DTYPES:
        return f"it supports bfloat16 and float16, but was given {problem.dtype}"
    if asked := _beside_the_product(problem):
        return f"it supports no {asked}, but was given one"
    if problem.groups + _tail(problem) > MOST_GROUPS:
        return f"it supports {MOST_GROUPS - _tail(problem)} groups, but was given {problem.groups}"
    if problem.K < 1 or max(problem.M, problem.N, problem.K) > bounds.LARGEST:
        return (
            f"it supports extents of 1 to {bounds.LARGEST}, but was given "
            f"{problem.M}x{problem.N}x{problem.K}"
        )
    return _unusable_reason(problem)


def _beside_the_product(problem: GroupedProblem) -> str:
    """Returns the name of something that a call asks for and the kernel does not do, or ""."""
    asked = {
        "epilogue": problem.epilogue != NONE,
        "a_index": problem.gathers,
        "scatter_index": problem.scatters,
        "scatter_weights": problem.weighted,
    }
    return next((name for name, is_asked in asked.items() if is_asked), "")


def _tail(problem: GroupedProblem) -> bool:
    """Returns whether the rows behind the last group are one group more."""
    return problem.zero_tail and problem.form == "ragged_m"


def _row_major(rows: int, columns: int, strides: Strides) -> tuple[int, int] | None:
    """Returns the strides with which TMA reads contiguous rows; None where it cannot. The stride of
    an extent of 1 can be chosen freely.
    """
    row, column = strides[-2:]
    if column != 1 and columns > 1:
        return None
    row = row if rows > 1 else 8
    return (row, 1) if row > 0 and row % 8 == 0 else None


def _column_major(rows: int, columns: int, strides: Strides) -> tuple[int, int] | None:
    """Returns the strides with which TMA reads contiguous columns; None where it cannot."""
    found = _row_major(columns, rows, strides[:-3:-1])
    return found and found[::-1]


def matrix_strides(problem: GroupedProblem) -> list[tuple[int, int] | None]:
    """Returns the strides with which TMA reads A and each matrix of B; None where it cannot.

    TMA begins a tile at any coordinate of a dimension that is not the contiguous one; between
    multiples of 16 bytes of that one it would end the launch with an illegal instruction. So the
    ragged dimension must not be contiguous.
    """
    shape_a, shape_b = (problem.M, problem.K), (problem.K, problem.N)
    if problem.form == "ragged_k":
        return [_column_major(*shape_a, problem.a), _row_major(*shape_b, problem.b)]
    along_n = _row_major(*shape_b, problem.b)
    return [_row_major(*shape_a, problem.a), along_n or _column_major(*shape_b, problem.b)]


def _unusable_reason(problem: GroupedProblem) -> str | None:
    """Returns why TMA cannot move an operand or the result; None if it can."""
    operands = (problem.a, problem.alignment[0]), (problem.b, problem.alignment[1])
    found = matrix_strides(problem)
    for name, (strides, alignment), usable in zip(problem.names, operands, found, strict=True):
        outer_fits = all(stride > 0 and stride % 8 == 0 for stride in strides[:-2])
        if alignment < 16 or usable is None or not outer_fits:
            given = strides[:-2] + strides[:-3:-1] if problem.exchanged else strides
            return (
                "it needs operands at multiples of 16 bytes, contiguous in a dimension that is not "
                "divided among groups, with other strides that are positive multiples of 8, but "
                f"{name} has strides {given} at an address that is a multiple of {alignment}"
            )
    granule = 16 // problem.out_dtype.itemsize
    *group, row, column = problem.out
    steps = (*group, row, problem.N)
    if column != 1 or any(step % granule for step in steps) or problem.alignment[2] < 16:
        return (
            "it needs rows of the result that begin and end at multiples of 16 bytes, but was "
            f"given {problem.N} columns with strides {problem.out}"
        )
    return None


def config_for(problem: GroupedProblem, sms: int) -> HopperConfig:
    """Chooses the tile with the fewest cycles by a simple model, for groups of equal size.

    Where DRAM bounds the call, small tiles share the work more evenly: groups of few rows wait for
    the weights, sums of few terms for the results to be written. Measured on an H100 (WORKLOG.md).
    """
    few_rows = problem.form == "ragged_m" and problem.M / problem.groups <= FEW_ROWS
    small = [config for config in _candidates() if config.tile_m == 64]
    best = min(
        small if few_rows else _candidates(),
        key=lambda config: _predicted_cycles(config, problem, sms),
    )
    cycles, dram = _cycles(best, problem, sms)
    if problem.form == "ragged_k" and dram > cycles:
        return small[0]
    return best


def _predicted_cycles(config: HopperConfig, problem: GroupedProblem, sms: int) -> float:
    """Returns the cycles of a call in the model, in which loads from DRAM overlap with products."""
    cycles, dram = _cycles(config, problem, sms)
    return float((cycles**4 + dram**4) ** 0.25)


@functools.cache
def _candidates() -> tuple[HopperConfig, ...]:
    base = replace(Config(), k_serpentine=False, gpc_local=False, stagger="never")
    found = []
    for tile_m, consumers, cluster_m, cluster_n, tile_n in _TILES:
        shaped = heuristic.shaped(base, tile_m, consumers, cluster_m, cluster_n)
        found.append(heuristic.filled(replace(shaped, tile_n=tile_n)))
    return tuple(found)


def _cycles(config: HopperConfig, problem: GroupedProblem, sms: int) -> tuple[float, float]:
    """Returns the cycles of the SMs, and those of DRAM, for groups of equal size."""
    M, N, K, groups = problem.M, problem.N, problem.K, problem.groups
    rows = config.tile_m * config.cluster_m
    if problem.form == "ragged_m":
        groups = min(groups, max(M, 1))
        # A group ends in the middle of a tile on average.
        mean = M / groups
        tile_rows = groups * (1.0 if mean <= rows else mean / rows + 0.5)
        moved, depth = M * K + groups * K * N + M * N, float(K)
    else:
        tile_rows = groups * math.ceil(M / rows)
        moved, depth = (M + N) * K + groups * M * N, K / groups + config.tile_k / 2
    columns = config.tile_n * config.cluster_n
    tiles = tile_rows * math.ceil(N / columns) * config.cluster
    products = 2 * config.tile_m * config.tile_n * depth / (heuristic.REACHED * 4096)
    own_rows = config.tile_m / config.cluster_n + config.tile_n / config.cluster_m
    loads = 2 * own_rows * depth / heuristic.STEADY_BYTES
    tile = (products**3 + loads**3) ** (1 / 3) + _TILE_CYCLES
    dram = 2 * moved / heuristic.Rates().dram_bytes_per_clock
    return math.ceil(tiles / sms) * tile, dram


@dataclass(frozen=True)
class GroupedVariant(variant.Variant):
    """The key of one compile. `layout` is that of A and of each matrix of B."""

    @property
    def name(self) -> str:
        c, t = self.config, self.traits
        dtypes = compile.SHORT[self.dtype], compile.SHORT[self.out_dtype]
        tile = f"{c.tile_m}x{c.tile_n}x{c.tile_k}x{c.stages}_{c.cluster_m}x{c.cluster_n}"
        groups, tail = f"{t.capacity}groups", "tail" if t.zero_tail else ""
        return compile.full_name(
            self, ["outblas_hopper_grouped", t.form, tile, self.layout, *dtypes, groups, tail]
        )


def variant_of(problem: GroupedProblem, config: HopperConfig) -> GroupedVariant:
    """Returns the variant for a supported product."""
    usable = [strides for strides in matrix_strides(problem) if strides is not None]
    assert len(usable) == 2, "`unsupported` refuses other strides"
    layout = "".join("n" if strides[1] == 1 else "t" for strides in usable)
    is_ragged_k = problem.form == "ragged_k"
    groups = problem.groups + _tail(problem)
    traits = GroupedTraits(
        width=16 // problem.out_dtype.itemsize,
        by_columns=False,
        staged=True,
        transposed=False,
        batched=is_ragged_k,
        ordered=False,
        single_wave=False,
        scaled=False,
        form=problem.form,
        capacity=next(capacity for capacity in CAPACITIES if capacity >= groups),
        zero_tail=_tail(problem),
    )
    return GroupedVariant(compile_key(config), traits, problem.dtype, problem.out_dtype, layout)


def compile_variant(made: GroupedVariant, options: str = "") -> Any:
    """Compiles for sm_90a, with or without a GPU. Returns CuTe DSL's compiled function."""
    M, K, groups = (cute.sym_int() for _ in range(3))
    N = cute.sym_int(divisibility=made.traits.width)
    is_ragged_k = made.traits.form == "ragged_k"

    def tensor(
        dtype: torch.dtype, shape: tuple[Any, Any], letter: str, divisor: int, batch: bool
    ) -> Any:
        outer = cute.sym_int64(divisibility=divisor)
        strides = (outer, 1) if letter == "n" else (1, outer)
        lead = (groups,), (cute.sym_int64(divisibility=divisor),)
        before = lead if batch else ((), ())
        return make_fake_tensor(
            compile.NUMERIC[dtype],
            (*before[0], *shape),
            (*before[1], *strides),
            assumed_align=16,
        )

    a = tensor(made.dtype, (M, K), made.layout[0], 8, False)
    b = tensor(made.dtype, (K, N), made.layout[1], 8, not is_ragged_k)
    c = tensor(made.out_dtype, (M, N), "n", made.traits.width, is_ragged_k)
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
    tensors: GroupedTensors,
) -> None:
    """Computes a product that `unsupported` does not refuse.

    Raises RuntimeError while a CUDA graph is captured, if a kernel is needed for the first time.
    """
    del tensors  # there are none
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
    strides_a, strides_b = matrix_strides(problem)
    assert strides_a is not None, "`unsupported` refuses other strides"
    assert strides_b is not None, "`unsupported` refuses other strides"
    shape_b, lead = (problem.K, problem.N), problem.b[:-2]
    whole_b = (problem.groups, *shape_b) if lead else shape_b

    def launch_kernel(a: Tensor, b: Tensor, out: Tensor, offs: Tensor) -> None:
        compiled(
            a.as_strided((problem.M, problem.K), strides_a),
            b.as_strided(whole_b, (*lead, *strides_b)),
            out,
            offs,
            clusters,
        )

    return launch_kernel
