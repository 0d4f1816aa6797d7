"""The machine code of hopper.gemm: what each lever of its config shows in it, and what it must not
have. The variants are those of the snapshot, tests/data/machine_code.json, which also says how many
of each instruction there are.
"""

from typing import NamedTuple

import pytest
from support.gemm_problems import BF16, SMALL_TILE, gemm_config, variant_of

from outblas.core.artifact import example
from outblas.hopper.gemm.compile import compile_variant, shared_memory
from outblas.hopper.gemm.variant import Variant
from outblas.hopper.parts import compile


class SharedMemory(NamedTuple):
    """A config, the columns of C, and the bytes of epilogue stages that the config counts and the
    kernel does not need.
    """

    config: str
    columns: int
    unused_bytes: int
    layout: str = "nt"


SHARED_MEMORY = {
    "many tiles a CTA": SharedMemory("", 8192, 0),
    "one tile a CTA stores from the pipeline's stages": SharedMemory("", 2048, 32768),
    "TMA cannot store C": SharedMemory("", 8191, 32768),
    "partitions of K in a cluster": SharedMemory(
        "tile_n=128,stages=5,cluster_m=1,epilogue_stages=1,cluster_k=2", 1024, 0
    ),
    "subtiles of 32 columns": SharedMemory(f"{SMALL_TILE},tile_n=32", 8192, 4096),
    "subtiles of 16 columns": SharedMemory(f"{SMALL_TILE},tile_n=16", 8192, 6144, "nn"),
}
# The others are the compiles of variants of the snapshot that CI has.
COMPILED_FOR_THEMSELVES = ("partitions of K in a cluster", "subtiles of 32 columns")


def variant_with_columns(case: SharedMemory) -> Variant:
    rows = -(-case.columns // 8) * 8
    given = example(BF16, None, case.layout, (rows, case.columns, 1024))
    return variant_of(given, gemm_config(case.config))


@pytest.mark.parametrize("name", SHARED_MEMORY)
def test_shared_memory_has_no_epilogue_stages_that_are_not_used(name: str) -> None:
    case = SHARED_MEMORY[name]

    size = shared_memory(variant_with_columns(case))

    assert size == gemm_config(case.config).shared_memory_bytes - case.unused_bytes


@pytest.mark.compile
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in COMPILED_FOR_THEMSELVES else ())
        for name in SHARED_MEMORY
    ],
)
def test_a_kernel_asks_for_the_shared_memory_that_the_host_computes(name: str) -> None:
    variant = variant_with_columns(SHARED_MEMORY[name])

    code = compile.compile_code(variant, lambda options: compile_variant(variant, options))

    assert f"{shared_memory(variant)} : i64" in code.launch
