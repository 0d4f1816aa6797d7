"""What README.md shows of a campaign against both bases: geometric means, and cold weights; and
that a table of bare products leaves out what was timed beside them.
"""

from pathlib import Path
from typing import Any

import pytest
from support.reports import Entry, entry, loaded, rendered, write

from outblas.report import lookup


def table(folder: Path, part: str, *entries: Entry, **environment: Any) -> dict[str, list[str]]:
    """The rows of a generated table of these results, by their first cell."""
    (folder / "results").mkdir()
    write(folder / "results" / "it.json", *entries, **environment)
    _, text = rendered(folder, f"{part} from results/it.json")
    rows = [line.strip("| ").split("|") for line in text.splitlines() if line.startswith("| ")]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}


def base(n: int, **changes: Any) -> Entry:
    return entry("cublas", 1.0, n, check="–", **changes)


# ---- geometric means
TWO_SHAPES = (
    base(512),
    entry("cublaslt-best", 1.05, 512, ratio_best=1.0),
    entry("outblas", 1.2, 512, ratio_best=1.1),
    base(4096),
    entry("cublaslt-best", 1.0, ratio_best=1.0),
    entry("outblas", 1.0, ratio_best=1.0),
)


def test_a_suite_ends_with_geometric_means_against_both_bases(tmp_path: Path) -> None:
    rows = table(tmp_path, "suite", *TWO_SHAPES)

    best, ours = rows["geometric mean"][-2:]
    assert best == "**1.025**"
    assert ours == "**1.095** (1.049 of cublaslt-best)"


def test_a_provider_that_lacks_a_shape_has_no_mean(tmp_path: Path) -> None:
    rows = table(tmp_path, "suite", *TWO_SHAPES[:-1])

    assert rows["geometric mean"][-1] == "–"


# ---- cold weights
COLD: dict[str, Any] = {"mode": "cold", "shape": [16, 4096, 4096]}
COLD_AND_WARM = (
    base(0, **COLD, us=12.0),
    entry("outblas", 1.2, **COLD, us=10.0, gbs=3360.0, bandwidth_share=0.84, ratio_best=1.15),
    base(0, shape=[16, 4096, 4096]),
    entry("outblas", 1.5, shape=[16, 4096, 4096]),
)


def test_cold_calls_stand_beside_their_bandwidth_and_the_warm_ratio(tmp_path: Path) -> None:
    rows = table(tmp_path, "cold outblas", *COLD_AND_WARM, copy_gbs=4000.0)

    assert rows["16x4096x4096"] == [
        "12",
        "10",
        "3360",
        "84%",
        "1.200 (1.188–1.212)",
        "1.150",
        "1.500 (1.485–1.515)",
    ]


def test_a_table_of_cold_calls_says_what_a_copy_reaches(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    write(tmp_path / "results" / "it.json", *COLD_AND_WARM, copy_gbs=4000.0)

    _, text = rendered(tmp_path, "cold outblas from results/it.json")

    assert "a copy of a gigabyte reaches 4000 GB/s" in text


# ---- operations apart
OPERATIONS = [{"epilogue": "bias+gelu"}, {"product": "dA"}, {"batch_invariant": True}]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: next(iter(operation)))
def test_a_bare_product_is_not_found_among_others(operation: dict[str, Any]) -> None:
    timings = loaded(entry("portable", 0.9), entry("portable", 0.5, **operation)).measurements

    found = lookup.find(timings, "portable", (4096, 4096, 4096), "bfloat16", "H100", layout="nt")

    assert found is not None
    assert found.ratio == 0.9


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: next(iter(operation)))
def test_a_table_mixes_no_operations(operation: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="2 kinds of GPU, dtype, layout and operation"):
        table(tmp_path, "suite", base(512), base(4096, **operation))


def test_results_on_normal_data_are_checked_too() -> None:
    (timing,) = loaded(entry("outblas", 1.1, check="bounded", epilogue="bias")).measurements

    assert (timing.check, timing.epilogue) == ("bounded", "bias")
