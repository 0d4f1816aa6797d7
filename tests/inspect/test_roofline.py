"""FLOPs per byte of a kernel, and what they let a machine reach."""

import pytest
from support.sass_texts import WGMMA

from outblas.base import machines
from outblas.inspect import roofline, sass
from outblas.inspect.roofline import Intensity

H100 = machines.find("H100")


@pytest.fixture
def square() -> Intensity:
    """Of 4096³ in bf16 by CTAs of 128x256."""
    return roofline.intensity((4096, 4096, 4096), (128, 256, 64), 2, 2, sass.parse(WGMMA))


@pytest.fixture
def few_rows() -> Intensity:
    """Of 16x4096x4096 with an fp32 output, by code that reads no shared memory."""
    ffma = sass.parse("        /*0000*/                   FFMA R0, R1, R2, R0 ;")
    return roofline.intensity((16, 4096, 4096), (16, 64, 64), 2, 4, ffma)


def test_dram_moves_each_matrix_once(square: Intensity, few_rows: Intensity) -> None:
    assert square.dram == pytest.approx(4096 / 3)
    bytes_moved = 2 * (16 * 4096 + 4096**2) + 4 * 16 * 4096
    assert few_rows.dram == pytest.approx(2 * 16 * 4096**2 / bytes_moved)


def test_l2_moves_the_operands_of_each_cta(square: Intensity) -> None:
    assert square.l2 == pytest.approx(2 * 128 * 256 / ((128 + 256) * 2))


def test_shared_memory_moves_what_the_hot_loop_reads(
    square: Intensity, few_rows: Intensity
) -> None:
    assert square.shared == pytest.approx(2 * 2 * 64 * 128 * 16 / ((64 + 128 + 128) * 32))
    assert few_rows.shared is None


def test_ceilings_are_the_intensities_times_the_bandwidths(square: Intensity) -> None:
    ceilings = roofline.bound(H100, square, "float16").ceilings

    assert ceilings["dram"] == pytest.approx(4096 / 3 * 3.352)
    assert ceilings["l2"] == pytest.approx(square.l2 * 5120 * 1830e6 / 1e12)
    assert ceilings["shared"] == pytest.approx(square.shared * 132 * 128 * 1830e6 / 1e12)


def test_code_that_reads_no_shared_memory_has_no_ceiling_of_it(few_rows: Intensity) -> None:
    bound = roofline.bound(machines.find("A100"), few_rows, "float32")

    assert set(bound.ceilings) == {"compute", "dram", "l2"}
    assert (bound.by, bound.tflops) == ("compute", machines.find("A100").peak_tflops("float32"))


def test_l2_is_no_bound(square: Intensity) -> None:
    """Merged requests pass its ceiling."""
    bound = roofline.bound(H100, square, "float16")

    assert bound.ceilings["l2"] < bound.tflops
    assert (bound.by, bound.tflops) == ("compute", H100.peak_tflops("float16"))


def test_a_faster_clock_raises_the_ceiling_of_compute_and_not_that_of_dram(
    square: Intensity,
) -> None:
    slower = roofline.bound(H100, square, "float16")
    faster = roofline.bound(H100, square, "float16", clock_mhz=1980)

    assert faster.ceilings["dram"] == slower.ceilings["dram"]
    assert faster.ceilings["compute"] == pytest.approx(H100.peak_tflops("float16", 1980))
