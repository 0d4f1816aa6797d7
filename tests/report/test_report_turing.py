"""The Turing climb in reports: the rung of the CUDA cores from which it starts, and code that is
compiled for sm_75 beside code for the GPU at hand.
"""

import pytest
from support.reports import Entry, named_cells, rows_of
from support.simt_reports import timed

from outblas.report import ladder


def in_half_precision(provider: str, ratio: float, tflops: float, config: str = "") -> Entry:
    return timed(provider, ratio, dtype="float16", layout="nt", tflops=tflops, config=config)


@pytest.fixture(scope="module")
def rows() -> dict[str, ladder.Row]:
    """The rows of the ladder: the start and two rungs are measured, the rungs in both builds."""
    return rows_of(
        "turing",
        (4096,),
        in_half_precision("simt.vectorized", 0.05, 40.0),
        in_half_precision("turing.wmma", 0.04, 30.0),
        in_half_precision("turing.wmma", 0.03, 22.0, "arch=75"),
        in_half_precision("turing.shared", 0.08, 60.0),
        in_half_precision("turing.shared", 0.045, 33.0, "arch=75"),
    )


@pytest.mark.parametrize(
    ("heading", "cell"),
    [
        pytest.param(
            "seed: TFLOP/s, × its cuBLAS",
            "3.2–3.4, 0.08–0.08\n003 v05 in float32, T4, at 2048",
            id="seed in its own operands",
        ),
        pytest.param("TFLOP/s", "40", id="ours in the ladder's operands"),
    ],
)
def test_the_ladder_starts_from_a_rung_of_the_cuda_cores(
    heading: str, cell: str, rows: dict[str, ladder.Row]
) -> None:
    assert named_cells(rows["simt.vectorized"])[heading] == cell


@pytest.mark.parametrize(
    ("heading", "cell"),
    [
        ("N", "4096\nsm_75"),
        ("TFLOP/s", "60\n33"),
        pytest.param("× parent", "2.000\n1.500", id="each build over the same build of its parent"),
    ],
)
def test_a_rung_has_a_line_for_code_compiled_for_sm_75(
    heading: str, cell: str, rows: dict[str, ladder.Row]
) -> None:
    assert named_cells(rows["turing.shared"])[heading] == cell


def test_the_record_of_a_row_has_the_gain_of_code_for_sm_75(rows: dict[str, ladder.Row]) -> None:
    (at_4096,) = rows["turing.shared"].record()["sizes"]

    assert at_4096["sm_75_gain"] == pytest.approx(1.5)


def test_a_rung_that_was_not_timed_says_so(rows: dict[str, ladder.Row]) -> None:
    assert named_cells(rows["turing.cp_async"])["× cuBLAS"] == "not measured"
