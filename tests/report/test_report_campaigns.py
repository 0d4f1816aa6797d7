"""What pages show of a campaign against both bases: geometric means, the headline, cold weights and
fp8; and that a table of bare products leaves out what was timed beside them.
"""

from pathlib import Path
from typing import Any

import pytest
from support.reports import Entry, entry, loaded, rendered, write

from outblas.core.shapes import SUITE
from outblas.report import lookup


def table(folder: Path, part: str, *entries: Entry, **environment: Any) -> dict[str, list[str]]:
    """The rows of a generated table of these results, by their first cell."""
    (folder / "results").mkdir()
    write(folder / "results" / "it.json", *entries, **environment)
    _, text = rendered(folder, f"{part} from results/it.json")
    rows = [line[1:-1].split("|") for line in text.splitlines() if line.startswith("| ")]
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


def test_a_suite_ends_with_the_geometric_mean_of_each_provider(tmp_path: Path) -> None:
    rows = table(tmp_path, "suite", *TWO_SHAPES)

    assert rows["geometric mean"] == ["", "", "**1.025**", "", "**1.095**", ""]


def test_a_suite_of_one_provider_ends_with_geometric_means_against_both_bases(
    tmp_path: Path,
) -> None:
    rows = table(tmp_path, "suite outblas", *TWO_SHAPES)

    assert rows["geometric mean"][3:] == ["**1.095**", "", "", "**1.049**"]


def test_a_suite_of_one_provider_has_a_row_for_each_shape(tmp_path: Path) -> None:
    apart = entry("outblas", 1.2, 512, ratio_best=1.1, ratio_apart=1.15)

    rows = table(tmp_path, "suite outblas", *TWO_SHAPES[:2], apart)

    assert rows["512"] == ["146", "175", "936", "1.200", "1.188–1.212", "1.150", "1.100"]


def test_a_suite_without_the_second_base_has_no_column_for_it(tmp_path: Path) -> None:
    rows = table(tmp_path, "suite portable", base(512), entry("portable", 0.9, 512))

    assert rows["shape"][-1] == "apart"


@pytest.mark.parametrize(
    ("part", "means"),
    [
        pytest.param("suite", ["", "", "**1.025**", "", "–", ""], id="of all"),
        pytest.param("suite outblas", ["", "", "", "–", "", "", "–"], id="against both bases"),
    ],
)
def test_a_provider_that_lacks_a_shape_has_no_mean(
    part: str, means: list[str], tmp_path: Path
) -> None:
    rows = table(tmp_path, part, *TWO_SHAPES[:-1])

    assert rows["geometric mean"] == means


def test_a_suite_of_a_provider_that_was_not_timed_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="portable was not timed in burst"):
        table(tmp_path, "suite portable", *TWO_SHAPES)


# ---- the headline
def headline(folder: Path, *entries: Entry) -> str:
    """The headline of these results."""
    (folder / "results").mkdir()
    write(folder / "results" / "it.json", *entries)
    _, text = rendered(folder, "headline from results/it.json")
    return text


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(
            "**1.095 times as fast as `torch.mm`** (1.000 to 1.200 by shape)", id="cuBLAS"
        ),
        pytest.param(
            "**1.049 times as fast as the best of cuBLASLt's algorithms** (1.000 to 1.100)",
            id="cuBLASLt",
        ),
        pytest.param("On an NVIDIA H100 80GB HBM3, `outblas.matmul` is", id="the GPU"),
        pytest.param(
            "over 512 and 4096, bfloat16, layout nt, burst, from one campaign of 2026-01-01",
            id="the conditions",
        ),
    ],
)
def test_the_headline_says(words: str, tmp_path: Path) -> None:
    assert words in headline(tmp_path, *TWO_SHAPES)


def test_a_headline_over_the_whole_suite_says_so(tmp_path: Path) -> None:
    timings = [
        each
        for shape in SUITE
        for each in (
            base(0, shape=list(shape)),
            entry("outblas", 1.2, shape=list(shape), ratio_best=1.1),
        )
    ]

    assert "over the 11 shapes of the suite" in headline(tmp_path, *timings)


def test_a_headline_needs_both_bases_at_every_shape(tmp_path: Path) -> None:
    without = *TWO_SHAPES[:-1], entry("outblas", 1.0)

    with pytest.raises(ValueError, match="was not timed beside cublaslt-best at 4096"):
        headline(tmp_path, *without)


def test_a_headline_needs_the_provider_at_every_shape(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="4096 has no outblas in burst"):
        headline(tmp_path, *TWO_SHAPES[:-1])


# ---- batch invariance
def invariant(rows: int, columns: int, plain: float, mode: str = "burst") -> list[Any]:
    """One layer: cuBLAS, a batch-invariant call at 1.0 of it, a plain one, and two others."""
    at: dict[str, Any] = {"shape": [rows, columns, 4096], "mode": mode, "batch_invariant": True}
    ratios = {
        "outblas": 1.0,
        "outblas-plain": plain,
        "cublas-no-workspace": 0.9,
        "triton-persistent": 0.5,
    }
    return [base(0, **at), *(entry(name, ratio, **at) for name, ratio in ratios.items())]


def test_a_table_of_batch_invariance_has_means_over_layers(tmp_path: Path) -> None:
    """Of calls that were timed with cold weights too, those count."""
    (tmp_path / "results").mkdir()
    timings = [
        *invariant(16, 4096, 2.0),
        *invariant(16, 4096, 1.25, "cold"),
        *invariant(16, 8192, 0.8, "cold"),
        *invariant(8192, 4096, 1.0),
    ]
    write(tmp_path / "results" / "it.json", *timings)

    _, text = rendered(tmp_path, "invariance from results/it.json")

    assert "| 16 | from DRAM | 1.000 | 0.800 | 1.000 | 0.900 | 0.500 |" in text
    assert "| 8192 | warm | 1.000 | 1.000 | 1.000 | 0.900 | 0.500 |" in text
    assert "geometric means over 2 layers" in text


def test_a_table_of_batch_invariance_is_of_one_dtype(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    other = [each | {"dtype": "float16"} for each in invariant(32, 4096, 1.0)]
    write(tmp_path / "results" / "it.json", *invariant(16, 4096, 1.0), *other)

    with pytest.raises(ValueError, match="batch-invariant figures has 2 kinds"):
        rendered(tmp_path, "invariance from results/it.json")


def test_a_table_of_batch_invariance_needs_the_plain_call(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    timings = [each for each in invariant(16, 4096, 1.0) if each["provider"] != "outblas-plain"]
    write(tmp_path / "results" / "it.json", *timings)

    with pytest.raises(ValueError, match="no outblas-plain"):
        rendered(tmp_path, "invariance from results/it.json")


# ---- fp8
def test_a_provider_of_fp8_is_named_as_a_caller_writes_it(tmp_path: Path) -> None:
    timings = (
        base(4096, dtype="fp8"),
        entry("cublas-fast-accum", 1.1, dtype="fp8"),
        entry("outblas", 0.98, dtype="fp8"),
    )
    (tmp_path / "results").mkdir()
    write(tmp_path / "results" / "it.json", *timings)

    _, text = rendered(tmp_path, "fp8 from results/it.json")

    for call in (
        "`torch._scaled_mm` | float32",
        "`torch._scaled_mm` | fast",
        "`outblas.scaled_mm` | float32",
    ):
        assert f"| 4096 | {call} |" in text


@pytest.mark.parametrize(
    ("dtype", "scales"),
    [
        ("fp8", "one for each operand"),
        ("fp8-rowwise", "one scale for each row of A and column of B"),
        ("fp8-block", "one for each 1×128 block of A and 128×128 block of B"),
    ],
)
def test_a_table_of_fp8_says_what_has_a_scale(tmp_path: Path, dtype: str, scales: str) -> None:
    (tmp_path / "results").mkdir()
    write(tmp_path / "results" / "it.json", base(4096, dtype=dtype))

    _, text = rendered(tmp_path, "fp8 from results/it.json")

    assert f"scales: {scales};" in text


def test_a_table_of_fp8_says_what_follows_the_product(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    write(tmp_path / "results" / "it.json", base(4096, dtype="fp8", epilogue="bias+gelu"))

    _, text = rendered(tmp_path, "fp8 from results/it.json")

    assert "; with bias+gelu behind the product; burst" in text


def test_a_table_of_fp8_has_one_epilogue(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    timings = (
        base(4096, dtype="fp8", epilogue="bias"),
        base(8192, dtype="fp8", epilogue="bias+gelu"),
    )
    write(tmp_path / "results" / "it.json", *timings)

    with pytest.raises(ValueError, match="2 kinds of GPU, dtype, layout and operation"):
        rendered(tmp_path, "fp8 from results/it.json")


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
        "10",
        "3360",
        "84%",
        "1.200",
        "1.188–1.212",
        "1.150",
        "1.500",
    ]


def test_a_table_of_cold_calls_says_what_a_copy_reaches(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    write(tmp_path / "results" / "it.json", *COLD_AND_WARM, copy_gbs=4000.0)

    _, text = rendered(tmp_path, "cold outblas from results/it.json")

    assert "the share of the 4000 GB/s that a copy of a gigabyte reaches" in text


# ---- layers of a language model
def of_layer(provider: str, M: int, N: int, ratio: float, best: float, **changes: Any) -> Entry:
    shape: dict[str, Any] = {"mode": "cold", "shape": [M, N, 4096]}
    return entry(provider, ratio, **shape, ratio_best=best, bandwidth_share=0.9, **changes)


TWO_LAYERS = [
    of_layer(provider, M, N, 1.0 if provider == "cublas" else ratio, best)
    for provider in ("cublas", "outblas")
    for M, N, ratio, best in (
        (1, 6144, 1.2, 1.1),
        (16, 6144, 1.0, 0.9),
        (1, 28672, 0.9, 0.8),
        (16, 28672, 1.1, 1.1),
    )
]


def test_layers_have_a_row_for_each_number_of_rows(tmp_path: Path) -> None:
    rows = table(tmp_path, "layers outblas", *TWO_LAYERS)

    assert rows["rows"] == ["6144×4096, 50 MB", "28672×4096, 235 MB"]
    assert rows["1"] == ["1.20 / 1.10, 90%", "0.90 / 0.80, 90%"]
    assert rows["16"] == ["1.00 / 0.90, 90%", "1.10 / 1.10, 90%"]


def test_layers_end_with_geometric_means_against_both_bases(tmp_path: Path) -> None:
    rows = table(tmp_path, "layers outblas", *TWO_LAYERS)

    assert rows["geometric mean"] == ["1.095 / 0.995", "0.995 / 0.938"]


def test_a_layer_that_lacks_a_number_of_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="16x28672x4096 has no outblas in cold"):
        table(tmp_path, "layers outblas", *TWO_LAYERS[:-1])


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
