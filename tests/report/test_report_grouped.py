"""What pages show of grouped products: a table for each GPU and kind of product."""

from pathlib import Path
from typing import Any

import pytest
from support.reports import Entry, entry, rendered, write

from outblas.core.grouped_shapes import Distribution, Form, GroupedWorkload

MIXTRAL = GroupedWorkload(8, 4096, 28672, 4096)
PART = "grouped outblas from results/it.json"


def timing(provider: str, ratio: float, workload: GroupedWorkload, **changes: Any) -> Entry:
    """A timing of a grouped product, as `outblas bench --op grouped` saves it."""
    facts: dict[str, Any] = {
        "shape": list(workload.shape),
        "experts": workload.experts,
        "form": workload.form,
        "distribution": workload.distribution,
        "gbs": 1234.0,
    }
    return entry(provider, ratio, **facts | changes)


def both(ratio: float, workload: GroupedWorkload, **changes: Any) -> tuple[Entry, Entry]:
    """Those of torch and of outblas."""
    base = timing("torch", 1.0, workload, **{**changes, "check": "–"})
    return base, timing("outblas", ratio, workload, **changes)


def with_rows(
    rows: int, distribution: Distribution = "balanced", form: Form = "rows"
) -> GroupedWorkload:
    return GroupedWorkload(8, rows, 28672, 4096, distribution, form)


def page(folder: Path, *entries: Entry, part: str = PART, **environment: Any) -> str:
    (folder / "results").mkdir(exist_ok=True)
    write(folder / "results" / "it.json", *entries, **environment)
    _, text = rendered(folder, part)
    return text


def rows_of(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]


def test_a_row_has_the_groups_and_the_figures_of_both(tmp_path: Path) -> None:
    head, row, *_ = rows_of(page(tmp_path, *both(1.25, MIXTRAL, ratio_apart=1.2)))

    assert dict(zip(head, row, strict=True)) == {
        "experts": "8, mixtral-8x7b gate and up",
        "N×K": "28672×4096",
        "rows": "4096",
        "groups": "balanced",
        "µs": "140",
        "torch µs": "175",
        "TFLOP/s": "975",
        "GB/s": "1234",
        "× torch": "1.250",
        "spread": "1.238–1.262",
        "apart": "1.200",
    }


def test_a_table_ends_with_the_geometric_mean_and_the_least_ratio(tmp_path: Path) -> None:
    entries = *both(1.21, with_rows(256)), *both(1.0, with_rows(4096))

    *_, mean, least = rows_of(page(tmp_path, *entries))

    assert (mean[0], mean[8]) == ("geometric mean", "**1.100**")
    assert (least[0], least[8]) == ("least", "**1.000**")


def test_rows_are_in_the_order_of_their_sizes(tmp_path: Path) -> None:
    entries = [
        each
        for workload in (with_rows(4096, "zipf"), with_rows(4096), with_rows(256))
        for each in both(1.0, workload)
    ]

    found = rows_of(page(tmp_path, *entries))

    assert [row[2:4] for row in found[1:4]] == [
        ["256", "balanced"],
        ["4096", "balanced"],
        ["4096", "zipf"],
    ]


def test_gradients_of_weights_have_a_table_of_their_own(tmp_path: Path) -> None:
    text = page(
        tmp_path,
        *both(1.2, with_rows(4096, form="terms"), layout="tn"),
        *both(1.1, with_rows(4096)),
    )

    assert text.index("**Forward, NVIDIA H100") < text.index("**Gradients of weights, NVIDIA H100")
    assert [row[8] for row in rows_of(text) if row[0] == "least"] == ["**1.100**", "**1.200**"]


@pytest.mark.parametrize(
    ("form", "scales"),
    [
        ("rows", "one for each 1×128 block of A and 128×128 block of B"),
        ("terms", "one for each 1×128 block of A and 128×1 block of B, in groups of whole blocks"),
    ],
)
def test_a_table_of_fp8_says_what_torch_is_and_what_has_a_scale(
    form: Form, scales: str, tmp_path: Path
) -> None:
    text = page(tmp_path, *both(1.3, with_rows(4096, form=form), dtype="fp8-block"))

    (note,) = (line for line in text.splitlines() if line.startswith("fp8-block, nt, outblas in "))
    assert f"scales: {scales}; *torch*: one `torch._scaled_mm` for each group" in note
    assert "*× torch*: the time of all these over the time of the call" in note
    assert "grouped_mm" not in note


def test_torchs_grouped_product_is_the_base_without_scales(tmp_path: Path) -> None:
    text = page(tmp_path, *both(1.3, MIXTRAL))

    assert "*× torch*: the time of torch's `grouped_mm` over the time of the call" in text
    assert "scales" not in text


def test_fp8_has_a_table_of_its_own(tmp_path: Path) -> None:
    entries = *both(1.1, MIXTRAL), *both(1.3, MIXTRAL, dtype="fp8-block", us=100.0)

    text = page(tmp_path, *entries)

    assert "**Forward, NVIDIA H100 80GB HBM3, bfloat16, nt**" in text
    assert "**Forward, NVIDIA H100 80GB HBM3, fp8-block, nt**" in text
    assert [row[8] for row in rows_of(text) if row[0] == "least"] == ["**1.100**", "**1.300**"]


def test_deepgemm_has_a_table_beside_torch(tmp_path: Path) -> None:
    workload = GroupedWorkload(4, 32768, 4096, 7168)
    entries = [
        timing(name, ratio, workload, dtype="fp8-block")
        for name, ratio in (("torch", 1.0), ("outblas", 1.02), ("deepgemm", 1.05))
    ]

    found = rows_of(page(tmp_path, *entries, part=PART.replace("outblas", "deepgemm")))

    assert found[1][:4] == ["4", "4096×7168", "32768", "balanced"]
    assert found[1][8] == "1.050"


def test_a_table_of_deepgemm_has_the_mean_of_outblas_over_the_same_rows(tmp_path: Path) -> None:
    entries = [
        timing(name, ratio, GroupedWorkload(4, rows, 4096, 7168), dtype="fp8-block")
        for name, ratio, rows in (
            ("torch", 1.0, 4096),
            ("outblas", 1.2, 4096),
            ("deepgemm", 1.1, 4096),
            ("torch", 1.0, 256),
            ("outblas", 2.0, 256),
        )
    ]

    found = rows_of(page(tmp_path, *entries, part=PART.replace("outblas", "deepgemm")))

    assert [(row[0], row[8]) for row in found[-4:]] == [
        ("geometric mean", "**1.100**"),
        ("least", "**1.100**"),
        ("outblas in these rows, geometric mean", "**1.200**"),
        ("outblas in these rows, least", "**1.200**"),
    ]


def test_means_have_a_row_for_each_base_over_the_workloads_of_both(tmp_path: Path) -> None:
    entries = [
        *both(1.21, with_rows(256)),
        *both(1.0, with_rows(4096)),
        *both(1.5, with_rows(256), dtype="fp8-block", us=100.0),
        *both(1.3, with_rows(4096), dtype="fp8-block", us=100.0),
        timing("deepgemm", 1.2, with_rows(4096), dtype="fp8-block", us=105.0),
    ]

    _, *found = rows_of(page(tmp_path, *entries, part=PART.replace(" outblas", "-means")))

    h100 = "H100 80GB HBM3"
    assert found == [
        ["bfloat16, forward", h100, "torch's `grouped_mm`", "2", "1.100", "1.000"],
        ["fp8-block, forward", h100, "DeepGEMM", "1", "1.050", "1.050"],
        [
            "fp8-block, forward",
            h100,
            "one `torch._scaled_mm` for each group",
            "2",
            "1.396",
            "1.300",
        ],
    ]


def test_each_gpu_has_a_table_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    write(tmp_path / "results" / "h200.json", *both(1.3, MIXTRAL), gpu="NVIDIA H200")

    text = page(tmp_path, *both(1.1, MIXTRAL), part=f"{PART},results/h200.json")

    assert "**Forward, NVIDIA H200, bfloat16, nt**" in text
    assert "**Forward, NVIDIA H100 80GB HBM3, bfloat16, nt**" in text


def test_cold_weights_have_their_share_of_the_bandwidth(tmp_path: Path) -> None:
    cold = both(1.1, MIXTRAL, mode="cold", bandwidth_share=0.87)

    head, row, *_ = rows_of(page(tmp_path, *cold, part=PART.replace("outblas", "outblas cold")))

    assert (head[-1], row[-1]) == ("of copy", "87%")


def test_single_products_are_left_out(tmp_path: Path) -> None:
    found = rows_of(page(tmp_path, entry("outblas", 2.0), *both(1.1, MIXTRAL)))

    assert [row[8] for row in found] == ["× torch", "1.100", "**1.100**", "**1.100**"]


def test_the_part_says_so_where_nothing_was_measured_yet(tmp_path: Path) -> None:
    _, text = rendered(tmp_path, "grouped outblas from results/h300_grouped.json")

    assert "No campaign was saved yet." in text


def test_other_parts_need_their_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        rendered(tmp_path, "suite from results/none.json")


def test_a_provider_that_was_not_timed_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="portable was not timed at grouped GEMMs in burst"):
        page(tmp_path, *both(1.1, MIXTRAL), part=PART.replace("outblas", "portable"))


def test_a_workload_that_was_timed_twice_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a workload was timed twice"):
        page(tmp_path, *both(1.1, MIXTRAL), *both(1.2, MIXTRAL))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"form": "columns"}, r"form is 'columns', expected one of rows, terms"),
        ({"distribution": None}, r"distribution is None, expected one of balanced, zipf"),
        ({"experts": 0}, r"experts is 0, expected an integer of at least 1"),
    ],
    ids=["form", "distribution", "experts"],
)
def test_damaged_records_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        page(tmp_path, timing("outblas", 1.1, MIXTRAL, **changes))
