"""The idea of each rung of the Hopper ladder, in its machine code. How many of each instruction
there are is in tests/data/machine_code.json.
"""

from types import ModuleType
from typing import NamedTuple

import pytest
from support.hopper_problems import FIRST_AND_LAST, RUNGS, load

from outblas.inspect import GateError, inspect

MULTICAST, TMA_STORE, SET_REGISTERS = "UTMALDG.2D.MULTICAST", "UTMASTG", "USETMAXREG"
ARRIVAL_OF_EACH_THREAD = "SYNCS.ARRIVE.TRANS64.ART0"


class Claim(NamedTuple):
    """Instructions, by prefix, that a rung's machine code has and lacks in its own config, the most
    registers of a thread, and the fewest CTAs that an SM has room for.
    """

    has: tuple[str, ...]
    lacks: tuple[str, ...] = ()
    max_registers: int | None = 168
    min_ctas: int = 1


ONE_CONSUMER_MMA, TWO_CONSUMERS_MMA = "HGMMA.64x128x16.F32.BF16", "HGMMA.64x256x16.F32.BF16"
TMA_LOAD = "UTMALDG.2D"
STORED_FROM_REGISTERS = (MULTICAST, TMA_STORE)
STORED_BY_TMA = Claim(
    has=(TWO_CONSUMERS_MMA, SET_REGISTERS, MULTICAST, "UTMASTG.2D", "STSM.16.M88.4"),
    lacks=("STG",),
)
CLAIMS = {
    "tma_wgmma": Claim(
        has=("HGMMA.64x64x16.F32.BF16", TMA_LOAD, "STG.E"),
        lacks=(*STORED_FROM_REGISTERS, SET_REGISTERS, ARRIVAL_OF_EACH_THREAD),
        max_registers=64,
        min_ctas=8,
    ),
    "large_tile": Claim(
        has=(ONE_CONSUMER_MMA, TMA_LOAD, "STG.E"),
        lacks=(*STORED_FROM_REGISTERS, SET_REGISTERS, ARRIVAL_OF_EACH_THREAD),
        max_registers=None,
        min_ctas=3,
    ),
    "warp_specialized": Claim(
        has=(ONE_CONSUMER_MMA, TMA_LOAD, ARRIVAL_OF_EACH_THREAD),
        lacks=(*STORED_FROM_REGISTERS, SET_REGISTERS),
        max_registers=None,
    ),
    "two_consumers": Claim(
        has=(TWO_CONSUMERS_MMA, SET_REGISTERS, ARRIVAL_OF_EACH_THREAD),
        lacks=STORED_FROM_REGISTERS,
    ),
    "persistent": Claim(
        has=(TWO_CONSUMERS_MMA, SET_REGISTERS, ARRIVAL_OF_EACH_THREAD),
        lacks=STORED_FROM_REGISTERS,
    ),
    "lean_barriers": Claim(
        has=(TWO_CONSUMERS_MMA, SET_REGISTERS, ARRIVAL_OF_EACH_THREAD),
        lacks=(*STORED_FROM_REGISTERS, "UCGABAR"),
    ),
    "cluster_multicast": Claim(
        has=(TWO_CONSUMERS_MMA, SET_REGISTERS, TMA_LOAD, MULTICAST, "UCGABAR_WAIT", "STG.E"),
        lacks=(TMA_STORE, "STG.E.128"),
    ),
    "store_tuning": Claim(
        has=(
            TWO_CONSUMERS_MMA,
            SET_REGISTERS,
            MULTICAST,
            "STG.E.128.STRONG.SYS",
            "SHFL.BFLY",
        ),
        lacks=(TMA_STORE,),
    ),
    "tma_store": STORED_BY_TMA,
    "hilbert": STORED_BY_TMA,
    "gemm": STORED_BY_TMA,
}


@pytest.mark.compile
@pytest.mark.parametrize("rung", RUNGS)
def test_the_idea_of_a_rung_is_in_its_machine_code(rung: str) -> None:
    """Without spills and without warnings of the assembler."""
    claim = CLAIMS[rung]

    code = inspect(f"hopper.{rung}")

    code.require(
        stack=0,
        has=claim.has,
        lacks=claim.lacks,
        max_registers=claim.max_registers,
        min_ctas=claim.min_ctas,
    )
    config = load(rung).Config
    tile = f"{config.tile_m}x{config.tile_n}x{config.tile_k}"
    assert code.name.startswith(f"outblas_hopper_{rung}_{tile}")


@pytest.mark.compile
@pytest.mark.parametrize("layout", ["nn", "tn", "tt"])
@pytest.mark.parametrize("rung", FIRST_AND_LAST)
def test_every_layout_has_the_same_instructions(rung: str, layout: str) -> None:
    """Major modes of wgmma and of TMA's boxes: nothing is copied or transposed. How often TMA loads
    and how C is stored is another matter.
    """
    claim = CLAIMS[rung]
    other = ("UTMALDG", "STG")
    has = [name for name in claim.has if not name.startswith(other)]
    lacks = [name for name in claim.lacks if not name.startswith(other)]

    code = inspect(f"hopper.{rung}", layout=layout)

    code.require(stack=0, has=has, lacks=lacks)
    assert f"_{layout}_bf16_bf16" in code.name


@pytest.mark.compile
@pytest.mark.parametrize(
    ("rung", "dtype", "out_dtype", "has"),
    [
        ("tma_wgmma", "bfloat16", "float32", ("HGMMA.64x64x16.F32.BF16", "STG.E.64")),
        ("tma_wgmma", "float16", "float16", ("HGMMA.64x64x16.F32", "STG.E")),
        ("store_tuning", "float16", "float32", ("HGMMA.64x256x16.F32", "STG.E.64.STRONG.SYS")),
        ("hilbert", "float16", "float16", ("HGMMA.64x256x16.F32", "UTMASTG.2D")),
        ("hilbert", "bfloat16", "float32", ("UTMASTG.2D", "STS.64")),
    ],
)
def test_every_dtype_has_its_instructions(
    rung: str, dtype: str, out_dtype: str, has: tuple[str, ...]
) -> None:
    inspect(f"hopper.{rung}", dtype=dtype, out_dtype=out_dtype).require(has=has)


THREE_CONSUMERS = (
    "tile_m=192,tile_n=128,consumers=3,producer_registers=32,consumer_registers=160,"
    "epilogue_stages=2"
)


@pytest.mark.compile
@pytest.mark.parametrize(
    ("rung", "text", "has", "lacks"),
    [
        ("tma_wgmma", "tile_n=16,tile_k=16", ("HGMMA.64x16x16",), ()),
        ("tma_wgmma", "tile_k=128,jitter=True", ("HGMMA.64x64x16", "NANOSLEEP"), ()),
        ("large_tile", "mma_n=64", ("HGMMA.64x64x16",), ()),
        ("large_tile", "mma_n=32", ("HGMMA.64x32x16",), ()),
        ("two_consumers", "producer_registers=0,consumer_registers=0", (), (SET_REGISTERS,)),
        ("cluster_multicast", "cluster_n=2", (MULTICAST,), ()),
        ("cluster_multicast", "cluster_m=1", (TMA_LOAD,), (MULTICAST,)),
        ("store_tuning", "reorder_stores=False", ("STG.E.STRONG.SYS",), ("SHFL",)),
        ("store_tuning", "write_through=False", ("STG.E.128",), ("STG.E.128.STRONG.SYS",)),
        ("hilbert", "in_flight=1,stages=4,epilogue_stages=2,sms=0", ("UTMASTG.2D", MULTICAST), ()),
        ("hilbert", THREE_CONSUMERS, (), ()),
        ("hilbert", "phases=True,jitter=True", ("CS2R", "NANOSLEEP"), ()),
    ],
)
def test_a_config_shows_in_the_machine_code(
    rung: str, text: str, has: tuple[str, ...], lacks: tuple[str, ...]
) -> None:
    inspect(f"hopper.{rung}", config=text).require(has=has, lacks=lacks)


@pytest.mark.compile
def test_one_consumer_of_a_128x256_tile_spills_and_serialises_wgmma() -> None:
    one_consumer = "consumers=1,producer_registers=0,consumer_registers=0"
    code = inspect("hopper.two_consumers", config=one_consumer)

    with pytest.raises(GateError, match="C7511") as caught:
        code.require(max_registers=255)

    assert "spilled bytes" in str(caught.value)


@pytest.mark.compile
@pytest.mark.parametrize("rung", FIRST_AND_LAST)
class TestThePhaseClock:
    """Only kernels with phases read the clock."""

    @pytest.fixture
    def module(self, rung: str) -> ModuleType:
        """The rung's module."""
        return load(rung)

    def test_is_not_in_a_kernel_without_phases(self, module: ModuleType) -> None:
        inspect(module.KERNEL.name).require(lacks=("CS2R.32", "S2UR.64"))

        assert "clock64" not in module.artifact().ptx

    def test_is_in_a_kernel_with_phases(self, module: ModuleType) -> None:
        assert "clock64" in module.artifact(module.Config(phases=True)).ptx
