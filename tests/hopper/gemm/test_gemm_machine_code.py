"""The machine code of hopper.gemm: what each lever of its config shows in it, and what it must not
have. How many of each instruction there are is in tests/data/machine_code.json.
"""

import re
from typing import NamedTuple

import pytest
from support.gemm_problems import BF16, SMALL_TILE, gemm_config, variant_of

from outblas.core.artifact import example
from outblas.hopper import gemm
from outblas.hopper.gemm.compile import compile_variant, shared_memory
from outblas.hopper.gemm.variant import Variant
from outblas.inspect import inspect

MULTICAST, TMA_STORE = "UTMALDG.2D.MULTICAST", "UTMASTG"
COUNT_PARTITIONS = "ATOMG.E.ADD.STRONG.GPU"  # a CTA has added its partition to a tile


class Lever(NamedTuple):
    """A config, and instructions that its machine code has and lacks."""

    config: str
    layout: str
    has: tuple[str, ...]
    lacks: tuple[str, ...] = ()
    out_dtype: str | None = None


BOTH_WIDTHS = ("HGMMA.64x192x16", "HGMMA.64x184x16")
LEVERS = {
    "variable tile N": Lever(
        "tile_n=192,variable_tile_n=True", "nt", (*BOTH_WIDTHS, "STSM.16.M88.4")
    ),
    "variable tile N, B by rows": Lever(
        "tile_n=192,variable_tile_n=True", "nn", (*BOTH_WIDTHS, TMA_STORE)
    ),
    "pingpong": Lever(
        "tile_m=64,pingpong=True",
        "nt",
        ("HGMMA.64x256x16", TMA_STORE, MULTICAST),
        lacks=(COUNT_PARTITIONS,),
    ),
    "split-K": Lever("split_k=4,k_serpentine=False", "nt", (COUNT_PARTITIONS, "STG.E.128")),
    "stream-K": Lever("stream_k=True,k_serpentine=False", "nn", (COUNT_PARTITIONS, "STG.E.128")),
    "swapped operands": Lever(
        f"{SMALL_TILE},tile_n=32,swap_ab=True", "nt", ("STSM.16.MT88.4",), (MULTICAST, "STG")
    ),
    "swapped operands, B by rows": Lever(
        f"{SMALL_TILE},tile_n=32,swap_ab=True", "nn", ("STSM.16.MT88.4",), (MULTICAST, "STG")
    ),
    "fp32 output": Lever(
        "", "nn", ("HGMMA.64x256x16", "STS.64", TMA_STORE), ("STSM", "STG"), out_dtype="float32"
    ),
    "partitions of K in a cluster": Lever(
        f"{SMALL_TILE},tile_n=32,cluster_k=4",
        "nt",
        ("STAS.128", TMA_STORE),
        lacks=(MULTICAST, "STG", COUNT_PARTITIONS),
    ),
    "a narrow tile": Lever(
        f"{SMALL_TILE},tile_n=16",
        "nn",
        ("HGMMA.64x16x16", "STSM.16.M88.4", TMA_STORE),
        lacks=(MULTICAST, "STG"),
    ),
}


@pytest.mark.compile
@pytest.mark.parametrize("name", LEVERS)
def test_a_lever_shows_in_the_machine_code(name: str) -> None:
    """Without spills and without warnings of the assembler."""
    lever = LEVERS[name]

    code = inspect(
        "hopper.gemm", config=lever.config, layout=lever.layout, out_dtype=lever.out_dtype
    )

    code.require(stack=0, has=lever.has, lacks=lever.lacks)


SHORT_CALLS = {
    "one small tile a CTA": ((512, 512, 512), f"{SMALL_TILE},tile_n=32,stages=8"),
    "one consumer in a cluster": (
        (1024, 1024, 1024),
        "tile_m=64,tile_n=128,consumers=1,producer_registers=0,consumer_registers=0,stages=8",
    ),
    "two consumers": ((2048, 2048, 2048), ""),
    "few rows, two partitions of K": (
        (16, 4096, 4096),
        f"{SMALL_TILE},tile_n=16,swap_ab=True,cluster_k=2",
    ),
}


@pytest.mark.compile
@pytest.mark.parametrize("name", SHORT_CALLS)
def test_a_short_call_neither_divides_nor_fences_nor_waits_twice(name: str) -> None:
    """It waits for its cluster once: a CTA of one tile ends when no other will reach into its
    memory.
    """
    shape, config = SHORT_CALLS[name]

    code = inspect("hopper.gemm", config=config, shape=shape)

    code.require(stack=0, lacks=("MUFU", "MEMBAR.ALL.GPU", "MEMBAR.SC.GPU", "LDL", "STL"))
    assert code.count("UCGABAR_WAIT") <= 1


@pytest.mark.compile
@pytest.mark.parametrize(
    "config",
    [
        pytest.param("split_k=11,k_serpentine=False", id="two consumers"),
        pytest.param(
            "tile_m=192,tile_n=128,consumers=3,producer_registers=32,consumer_registers=160,"
            "split_k=11,k_serpentine=False,epilogue_stages=1",
            id="three consumers",
        ),
    ],
)
def test_consumers_meet_before_they_count_partitions(config: str) -> None:
    """After the count one of them may be done with the tile, and the other would wait for it for
    ever.
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


SHARED_MEMORY = {
    "many tiles a CTA": SharedMemory("", 8192, 0),
    "one tile a CTA stores from the pipeline's stages": SharedMemory("", 2048, 32768),
    "TMA cannot store C": SharedMemory("", 8191, 32768),
    "partitions of K in a cluster": SharedMemory(
        "tile_n=128,stages=5,cluster_m=1,epilogue_stages=1,cluster_k=2", 1024, 0
    ),
    "subtiles of 32 columns": SharedMemory(f"{SMALL_TILE},tile_n=32", 8192, 4096),
    "subtiles of 16 columns": SharedMemory(f"{SMALL_TILE},tile_n=16", 8192, 6144),
}


def variant_with_columns(columns: int, config: str) -> Variant:
    rows = -(-columns // 8) * 8
    given = example(BF16, None, "nt", (rows, columns, 1024))
    return variant_of(given, gemm_config(config))


@pytest.mark.parametrize("name", SHARED_MEMORY)
def test_shared_memory_has_no_epilogue_stages_that_are_not_used(name: str) -> None:
    config, columns, unused_bytes = SHARED_MEMORY[name]

    size = shared_memory(gemm.Gemm, variant_with_columns(columns, config))

    assert size == gemm_config(config).shared_memory_bytes - unused_bytes


@pytest.mark.compile
@pytest.mark.parametrize("name", SHARED_MEMORY)
def test_a_kernel_asks_for_the_shared_memory_that_the_host_computes(name: str) -> None:
    config, columns, _ = SHARED_MEMORY[name]
    variant = variant_with_columns(columns, config)

    compiled = compile_variant(gemm.Gemm, variant)

    assert f"{shared_memory(gemm.Gemm, variant)} : i64" in str(compiled.ir_module)
