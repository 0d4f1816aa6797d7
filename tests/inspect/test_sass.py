"""The reading of machine code: its hot loop, and what that computes and moves."""

import pytest
from support.sass_texts import FFMA, WGMMA

from outblas.inspect import sass

WGMMA_NAME = "HGMMA.64x128x16.F32.BF16"


def test_instructions_have_names_and_branches_their_targets() -> None:
    code = sass.parse(WGMMA)

    names = [instruction.name for instruction in code]
    assert names == ["BRA", WGMMA_NAME, WGMMA_NAME, "BRA", "LDS.128", "EXIT"]
    assert [instruction.target for instruction in code] == [5, None, None, 0, None, None]


def test_the_hot_loop_ends_at_the_branch_back() -> None:
    assert sass.hot_loop(sass.parse(WGMMA)) == sass.parse(WGMMA)[:4]
    assert len(sass.hot_loop(sass.parse(FFMA))) == 7


def test_wgmma_multiplies_a_tile() -> None:
    loop = sass.hot_loop(sass.parse(WGMMA))

    flops = 2 * 64 * 128 * 16
    assert [sass.flops(instruction) for instruction in loop] == [0, flops, flops, 0]
    assert sass.unit(loop) == "float16"


def test_wgmma_reads_a_from_shared_memory_or_from_registers() -> None:
    loop = sass.hot_loop(sass.parse(WGMMA))

    a_in_shared, a_in_registers = (64 + 128) * 16 * 2, 128 * 16 * 2
    read = [sass.shared_bytes(instruction) for instruction in loop]
    assert read == [0, a_in_shared, a_in_registers, 0]


def test_an_ffma_is_two_flops_of_each_lane() -> None:
    loop = sass.hot_loop(sass.parse(FFMA))

    assert sum(map(sass.flops, loop)) == 2 * 2 * 32
    assert sass.unit(loop) == "float32"


def test_loads_from_shared_memory_have_their_width_of_each_lane() -> None:
    loop = sass.hot_loop(sass.parse(FFMA))

    assert [sass.shared_bytes(instruction) for instruction in loop[:2]] == [8 * 32, 4 * 128]


def test_the_share_of_ffma_and_that_of_ffma_which_keep_an_operand() -> None:
    loop = sass.hot_loop(sass.parse(FFMA))

    assert sass.ffma_share(loop) == 2 / 7
    assert sass.ffma_reuse(loop) == 1 / 2


def test_without_ffma_nothing_is_kept() -> None:
    loads = sass.hot_loop(sass.parse(FFMA))[:2]

    assert sass.ffma_share(loads) == 0
    assert sass.ffma_reuse(loads) is None


def test_an_ffma_may_keep_any_operand() -> None:
    code = sass.parse(FFMA.replace("R4, R6, R5", "R4.reuse, R6, R5"))

    assert sass.ffma_reuse(sass.hot_loop(code)) == 1


def test_spills_have_their_width() -> None:
    spills = [i.name for i in sass.parse(FFMA) if i.name.startswith(("STL", "LDL"))]

    assert [sass.width(name) for name in spills] == [8, 4]


@pytest.mark.parametrize(
    ("name", "flops", "unit"),
    [
        ("HMMA.16816.F32.BF16", 2 * 16 * 8 * 16, "float16"),
        ("HMMA.1688.F32", 2 * 16 * 8 * 8, "float16"),
        ("HMMA.1684.F32.TF32", 2 * 16 * 8 * 4, "tf32"),
        ("HGMMA.64x64x8.F32.TF32", 2 * 64 * 64 * 8, "tf32"),
        ("QGMMA.64x256x32.F32.E4M3.E4M3", 2 * 64 * 256 * 32, "fp8"),
        ("HFMA2.MMA", 0, "float32"),  # how constants are made
    ],
)
def test_an_instruction_has_flops_and_a_unit(name: str, flops: int, unit: str) -> None:
    instruction = sass.Instruction(0, name, "R0, R2, R4, R6")

    assert sass.flops(instruction) == flops
    assert sass.unit([instruction]) == unit
