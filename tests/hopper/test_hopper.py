"""The idea of each rung of the Hopper ladder, in its machine code. How many of each instruction
there are is in tests/data/machine_code.json.
"""

from collections.abc import Mapping
from typing import NamedTuple

import pytest
from support import recorded_code
from support.hopper_problems import FIRST_AND_LAST, ONE_CONSUMER, RUNGS, load

from outblas.inspect import GateError, Inspection, inspect

MULTICAST, TMA_STORE, SET_REGISTERS = "UTMALDG.2D.MULTICAST", "UTMASTG", "USETMAXREG"
ARRIVAL_OF_EACH_THREAD = "SYNCS.ARRIVE.TRANS64.A1T0"


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


def cases(named: Mapping[str, object]) -> list[object]:
    """Variants of the snapshot by name; those that CI does not compile are `slow`."""
    return [recorded_code.parameter(f"hopper.{name}", value) for name, value in named.items()]


@pytest.mark.compile
@pytest.mark.parametrize(
    ("name", "layout"),
    cases({f"{rung} {layout}": layout for rung in FIRST_AND_LAST for layout in ("nn", "tn", "tt")}),
)
def test_every_layout_has_the_same_instructions(name: str, layout: str) -> None:
    """Major modes of wgmma and of TMA's boxes: nothing is copied or transposed. How often TMA loads
    and how C is stored is another matter.
    """
    claim = CLAIMS[name.removeprefix("hopper.").removesuffix(f" {layout}")]
    other = ("UTMALDG", "STG")
    has = [name for name in claim.has if not name.startswith(other)]
    lacks = [name for name in claim.lacks if not name.startswith(other)]

    code = recorded_code.inspected(name)

    code.require(stack=0, has=has, lacks=lacks)
    assert f"_{layout}_bf16_bf16" in code.name


OF_DTYPES = {
    "tma_wgmma float32 output": ("HGMMA.64x64x16.F32.BF16", "STG.E.64"),
    "tma_wgmma float16": ("HGMMA.64x64x16.F32", "STG.E"),
    "store_tuning float16, float32 output": ("HGMMA.64x256x16.F32", "STG.E.64.STRONG.SYS"),
    "hilbert float16": ("HGMMA.64x256x16.F32", "UTMASTG.2D"),
    "hilbert float32 output": ("UTMASTG.2D", "STS.64"),
}


@pytest.mark.compile
@pytest.mark.parametrize(("name", "has"), cases(OF_DTYPES))
def test_every_dtype_has_its_instructions(name: str, has: tuple[str, ...]) -> None:
    recorded_code.inspected(name).require(has=has)


OF_CONFIGS = {
    "tma_wgmma 16 columns": Claim(has=("HGMMA.64x16x16",)),
    "tma_wgmma jitter": Claim(has=("HGMMA.64x64x16", "NANOSLEEP")),
    "large_tile mma_n 64": Claim(has=("HGMMA.64x64x16",)),
    "large_tile mma_n 32": Claim(has=("HGMMA.64x32x16",)),
    "two_consumers registers as compiled": Claim(has=(), lacks=(SET_REGISTERS,)),
    "cluster_multicast 2x2": Claim(has=(MULTICAST,)),
    "cluster_multicast 1x1": Claim(has=(TMA_LOAD,), lacks=(MULTICAST,)),
    "store_tuning stores not reordered": Claim(has=("STG.E.STRONG.SYS",), lacks=("SHFL",)),
    "store_tuning stores through L1": Claim(has=("STG.E.128",), lacks=("STG.E.128.STRONG.SYS",)),
    "hilbert group in flight": Claim(has=("UTMASTG.2D", MULTICAST)),
    "hilbert three consumers": Claim(has=("UTMASTG.2D",)),
}


@pytest.mark.compile
@pytest.mark.parametrize(("name", "claim"), cases(OF_CONFIGS))
def test_a_config_shows_in_the_machine_code(name: str, claim: Claim) -> None:
    recorded_code.inspected(name).require(has=claim.has, lacks=claim.lacks)


class TestOneConsumerOfALargeTile:
    """128x256 sums in one warpgroup are 256 registers a thread, and a thread has 255."""

    @pytest.fixture
    def code(self) -> Inspection:
        """The rung of two consumers, with one."""
        return inspect("hopper.two_consumers", config=ONE_CONSUMER)

    @pytest.mark.compile
    def test_spills_and_serialises_wgmma(self, code: Inspection) -> None:
        with pytest.raises(GateError, match="C7511") as caught:
            code.require(max_registers=255)

        assert "spilled bytes" in str(caught.value)

    @pytest.mark.compile
    def test_leaves_registers_as_they_were_compiled(self, code: Inspection) -> None:
        assert code.count(SET_REGISTERS) == 0


PHASES = {
    "tma_wgmma": "phases=True,jitter=True",
    "hilbert": "phases=True,jitter=True,in_flight=1,stages=4,epilogue_stages=2,sms=0",
}


@pytest.mark.compile
@pytest.mark.parametrize("rung", FIRST_AND_LAST)
class TestThePhaseClock:
    """Only kernels with phases read the clock."""

    def test_is_not_in_a_kernel_without_phases(self, rung: str) -> None:
        code = inspect(f"hopper.{rung}")

        code.require(lacks=("CS2R.32", "S2UR.64"))
        assert "clock64" not in code.ptx_text

    def test_is_in_a_kernel_with_phases(self, rung: str) -> None:
        code = inspect(f"hopper.{rung}", config=PHASES[rung])

        code.require(has=("CS2R", "NANOSLEEP"))
        assert "clock64" in code.ptx_text
