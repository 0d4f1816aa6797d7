"""The machine code of hopper.gemm: what each lever of its config shows in it, and what it must not
have. The variants are those of the snapshot, tests/data/machine_code.json, which also says how many
of each instruction there are.
"""

import re
from typing import NamedTuple

import pytest
from support import recorded_code
from support.gemm_problems import BF16, SMALL_TILE, gemm_config, variant_of

from outblas.core.artifact import example
from outblas.hopper import gemm
from outblas.hopper.gemm.compile import compile_variant, shared_memory
from outblas.hopper.gemm.variant import Variant
from outblas.hopper.parts import compile
from outblas.inspect import inspect

MULTICAST, TMA_STORE = "UTMALDG.2D.MULTICAST", "UTMASTG"
COUNT_PARTITIONS = "ATOMG.E.ADD.STRONG.GPU"  # a CTA has added its partition to a tile


class Lever(NamedTuple):
    """Instructions that the machine code of a variant has and lacks."""

    has: tuple[str, ...]
    lacks: tuple[str, ...] = ()


VARIABLE_TILE_N = Lever(("HGMMA.64x192x16", "HGMMA.64x184x16", "STSM.16.M88.4", TMA_STORE))
PARTITIONS_OF_K = Lever((COUNT_PARTITIONS, "STG.E.128"))
PARTITIONS_IN_A_CLUSTER = Lever(("STAS.128", TMA_STORE), lacks=(MULTICAST, "STG", COUNT_PARTITIONS))
SWAPPED_OPERANDS = Lever(("STSM.16.MT88.4",), lacks=(MULTICAST, "STG"))
LEVERS = {
    "variable tile N": VARIABLE_TILE_N,
    "variable tile N nn": VARIABLE_TILE_N,
    "pingpong": Lever(("HGMMA.64x256x16", TMA_STORE, MULTICAST), lacks=(COUNT_PARTITIONS,)),
    "tanh GELU, pingpong": Lever(("HGMMA.64x192x16", TMA_STORE), lacks=(COUNT_PARTITIONS,)),
    "split-K": PARTITIONS_OF_K,
    "split-K, three consumers": PARTITIONS_OF_K,
    "stream-K nn": PARTITIONS_OF_K,
    "swapped operands": SWAPPED_OPERANDS,
    "swapped operands nn": SWAPPED_OPERANDS,
    "batch, swapped operands": Lever(("STSM.16.MT88.4",), lacks=("UTMALDG.3D.MULTICAST", "STG")),
    "float32 output": Lever(("HGMMA.64x256x16", "STS.64", TMA_STORE), lacks=("STSM", "STG")),
    "K in a cluster of 2, 16 rows": PARTITIONS_IN_A_CLUSTER,
    "K in a cluster of 4": PARTITIONS_IN_A_CLUSTER,
    "one wave, two consumers": Lever(("HGMMA.64x256x16", "BAR.ARV", TMA_STORE)),
    "one wave, two consumers, not staggered": Lever(("HGMMA.64x256x16",), lacks=("BAR.ARV",)),
    "one wave, three consumers": Lever(("HGMMA.64x96x16", "BAR.ARV", TMA_STORE)),
    "staggered, three consumers": Lever(("HGMMA.64x192x16", "BAR.ARV", MULTICAST, TMA_STORE)),
    "16 columns nn": Lever(
        ("HGMMA.64x16x16", "STSM.16.M88.4", TMA_STORE), lacks=(MULTICAST, "STG")
    ),
}


def variants(*names: str) -> list[object]:
    """Variants of the kernel as cases; those that CI does not compile are `slow`."""
    return [recorded_code.parameter(f"hopper.gemm {name}") for name in names]


@pytest.mark.compile
@pytest.mark.parametrize("name", variants(*LEVERS))
def test_a_lever_shows_in_the_machine_code(name: str) -> None:
    """Without spills and without warnings of the assembler."""
    lever = LEVERS[name.removeprefix("hopper.gemm ")]

    code = recorded_code.inspected(name)

    code.require(stack=0, has=lever.has, lacks=lever.lacks)


@pytest.mark.compile
@pytest.mark.parametrize(
    "name",
    variants(
        "one wave",
        "one wave, two consumers",
        "one wave, three consumers",
        "K in a cluster of 2, 16 rows",
    ),
)
def test_a_short_call_neither_divides_nor_fences_nor_waits_twice(name: str) -> None:
    """It waits for its cluster once: a CTA of one tile ends when no other will reach into its
    memory.
    """
    code = recorded_code.inspected(name)

    code.require(stack=0, lacks=("MUFU", "MEMBAR.ALL.GPU", "MEMBAR.SC.GPU", "LDL", "STL"))
    assert code.count("UCGABAR_WAIT") <= 1


@pytest.mark.compile
@pytest.mark.parametrize(
    "config",
    [
        pytest.param("split_k=11,k_serpentine=False", id="two consumers", marks=pytest.mark.slow),
        pytest.param(
            "tile_m=192,tile_n=128,consumers=3,producer_registers=32,consumer_registers=160,"
            "split_k=11,k_serpentine=False,epilogue_stages=1",
            id="three consumers",
        ),
    ],
)
def test_consumers_meet_before_they_count_partitions(config: str) -> None:
    """Where C lies over the pipeline's stages. After the count one of them may be done with the
    tile, and the other would wait for it for ever.
    """
    ptx = inspect("hopper.gemm", config=config, shape=(256, 512, 65536)).ptx_text

    (meeting,) = re.finditer(r"(bar|barrier)\.sync\S* \s*8, (256|384);", ptx)

    assert meeting.start() < ptx.index("atom.")


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

    size = shared_memory(gemm.Gemm, variant_with_columns(case))

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

    code = compile.compile_code(
        variant, lambda options: compile_variant(gemm.Gemm, variant, options)
    )

    assert f"{shared_memory(gemm.Gemm, variant)} : i64" in code.launch
