"""What a program multiplies, recorded for a pack."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import outblas
from outblas.call.products import parse_line
from outblas.packing.products import parse_file

pytestmark = pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")

BF16 = torch.bfloat16


def of(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


RECORDED: dict[str, tuple[Callable[[], Any], str]] = {
    "matmul": (lambda: outblas.matmul(of(2, 8), of(8, 4)), "2x4x8 bfloat16 nn"),
    "float16": (
        lambda: outblas.matmul(of(2, 8, dtype=torch.half), of(8, 4, dtype=torch.half)),
        "2x4x8 float16 nn",
    ),
    "a layer": (lambda: outblas.linear(of(2, 8), of(4, 8)), "2x4x8 bfloat16 nt"),
    "a layer of sequences": (lambda: outblas.linear(of(3, 5, 8), of(4, 8)), "15x4x8 bfloat16 nt"),
    "all steps": (
        lambda: outblas.linear(of(2, 8), of(4, 8), of(4), activation="gelu", residual=of(2, 4)),
        "2x4x8 bfloat16 nt bias+gelu+residual",
    ),
    "gated pairs": (
        lambda: outblas.linear(of(2, 8), of(4, 8), activation="swiglu"),
        "2x4x8 bfloat16 nt swiglu",
    ),
    "gated pairs of a vector": (
        lambda: outblas.linear(of(8), of(4, 8), activation="swiglu"),
        "1x4x8 bfloat16 nt swiglu",
    ),
    # The rows of the matrix are paired, so they are columns of what a kernel multiplies.
    "gated pairs by a vector": (
        lambda: outblas.matmul(of(4, 8), of(8), activation="swiglu"),
        "1x4x8 bfloat16 nt swiglu",
    ),
    "gated pairs of columns by a vector": (
        lambda: outblas.matmul(of(8, 4).t(), of(8), activation="swiglu"),
        "1x4x8 bfloat16 nn swiglu",
    ),
    "an odd address": (
        lambda: outblas.matmul(of(17)[1:].view(2, 8), of(8, 4)),
        "2x4x8 bfloat16 nn align-a:2",
    ),
    "columns of a taller matrix": (
        lambda: outblas.matmul(of(8, 6).t()[:2], of(8, 4)),
        "2x4x8 bfloat16 tn lda:6",
    ),
    "a batch of one": (lambda: outblas.matmul(of(1, 3, 8), of(1, 8, 4)), "3x4x8 bfloat16 nn"),
    "one row of a wider matrix": (
        lambda: outblas.matmul(of(1, 24)[:, 8:16], of(8, 4)),
        "1x4x8 bfloat16 nn",
    ),
}


@pytest.mark.parametrize("name", RECORDED)
def test_a_product_is_recorded_as_a_line_of_a_pack(name: str) -> None:
    call, line = RECORDED[name]

    with outblas.record_shapes() as recorded:
        call()
        call()

    assert recorded.lines == [line]
    assert str(parse_line(line)) == line
    assert recorded.others == []


OTHERS: dict[str, tuple[Callable[[], Any], str]] = {
    "a batch of slices": (
        lambda: outblas.matmul(of(2, 3, 9)[:, :, :8], of(2, 8, 4)),
        "2x3x4x8 bfloat16, a batch of matrices that do not follow one another",
    ),
    "a matrix that a batch shares": (
        lambda: outblas.matmul(of(3, 8), of(2, 8, 4)),
        "2x3x4x8 bfloat16, a batch of matrices that do not follow one another",
    ),
    "heads": (
        lambda: outblas.matmul(of(2, 3, 5, 8).transpose(1, 2), of(2, 5, 8, 4)),
        "2x5x3x4x8 bfloat16, a batch of several dimensions that do not follow one another",
    ),
    "a bias of each matrix": (
        lambda: outblas.matmul(of(2, 3, 8), of(2, 8, 4), bias=of(2, 1, 4)),
        "2x3x4x8 bfloat16, a bias that is not one contiguous row",
    ),
    "a bias of each row": (
        lambda: outblas.matmul(of(2, 8), of(8, 4), bias=of(2, 1)),
        "2x4x8 bfloat16, a bias that is not one contiguous row",
    ),
    "a bias of one value": (
        lambda: outblas.matmul(of(2, 8), of(8, 4), bias=of(1)),
        "2x4x8 bfloat16, a bias that is not one contiguous row",
    ),
    "a residual that a batch shares": (
        lambda: outblas.matmul(of(2, 3, 8), of(2, 8, 4), residual=of(2, 3, 5)[:, :, :4]),
        "2x3x4x8 bfloat16, a batch with a residual that does not lie as the result",
    ),
    "float64": (
        lambda: outblas.matmul(torch.ones(2, 8).double(), torch.ones(8, 4).double()),
        "2x4x8 float64, a dtype that torch multiplies",
    ),
    "an addend": (
        lambda: outblas.addmm(of(2, 4), of(2, 8), of(8, 4), alpha=2),
        "2x4x8 bfloat16, alpha, beta and an addend",
    ),
    "aux": (
        lambda: outblas.matmul(of(2, 8), of(8, 4), activation="relu", aux=of(2, 4)),
        "2x4x8 bfloat16, aux",
    ),
    "a result by columns": (
        lambda: outblas.matmul(of(2, 8), of(8, 4), out=of(4, 2).t()),
        "2x4x8 bfloat16, a result whose columns are contiguous",
    ),
    "a residual that repeats": (
        lambda: outblas.matmul(of(2, 8), of(8, 4), residual=of(1, 4).expand(2, 4)),
        "2x4x8 bfloat16, a residual that repeats",
    ),
    "rows that repeat": (
        lambda: outblas.matmul(of(8).expand(2, 8), of(8, 4)),
        "2x4x8 bfloat16, rows that overlap",
    ),
    "rows that begin within each other": (
        lambda: outblas.matmul(of(16).as_strided((2, 8), (4, 1)), of(8, 4)),
        "2x4x8 bfloat16, rows that overlap",
    ),
    "nothing": (
        lambda: outblas.matmul(of(0, 8), of(8, 4)),
        "0x4x8 bfloat16, nothing is multiplied",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_a_pack_does_not_hold_is_named(name: str) -> None:
    call, other = OTHERS[name]

    with outblas.record_shapes() as recorded:
        call()

    assert recorded.lines == []
    assert recorded.others == [other]


def test_weights_that_are_ready_have_kernels_of_their_own() -> None:
    with outblas.record_shapes() as recorded, outblas.weights_ready():
        outblas.linear(of(2, 8), of(4, 8))

    assert recorded.lines == []
    assert recorded.others == ["2x4x8 bfloat16, weights_ready"]


def test_rows_of_one_kind_are_joined() -> None:
    weight = of(4, 8)

    with outblas.record_shapes() as recorded:
        for rows in (8, 1, 2, 3, 10):
            outblas.linear(of(rows, 8), weight)

    assert recorded.lines == ["1-3,8,10x4x8 bfloat16 nt"]


def test_recordings_may_lie_in_each_other() -> None:
    with outblas.record_shapes() as outer:
        outblas.matmul(of(2, 8), of(8, 4))
        with outblas.record_shapes() as inner:
            outblas.matmul(of(3, 8), of(8, 4))

    assert outer.lines == ["2-3x4x8 bfloat16 nn"]
    assert inner.lines == ["3x4x8 bfloat16 nn"]


def test_batch_invariant_products_are_lines_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU no kernel makes the promise, and the call is refused after it was seen."""
    with (
        outblas.record_shapes() as recorded,
        pytest.raises(ValueError, match="batch_invariant"),
        outblas.batch_invariant(),
    ):
        outblas.matmul(of(2, 8), of(8, 4))

    assert recorded.lines == ["2x4x8 bfloat16 nn batch-invariant"]


def test_a_file_of_a_recording_is_one_of_a_pack(tmp_path: Path) -> None:
    with outblas.record_shapes() as recorded:
        outblas.matmul(of(2, 8), of(8, 4))
        outblas.matmul(of(2, 3, 9)[:, :, :8], of(2, 8, 4))

    recorded.save(tmp_path / "shapes.txt")

    assert [str(each) for each in parse_file(tmp_path / "shapes.txt")] == ["2x4x8 bfloat16 nn"]
    assert "# not packed: 2x3x4x8" in (tmp_path / "shapes.txt").read_text(encoding="utf-8")
