"""Two campaigns side by side: which ratios fell."""

from pathlib import Path
from typing import Any

import pytest

from outblas.bench.compare import compare, load

H200 = {"gpu": "NVIDIA H200"}


def record(ratio: float | None = 1.05, spread: float = 0.002, **other: Any) -> dict[str, Any]:
    """A record as `outblas bench --save` writes it."""
    made = {
        "provider": "outblas",
        "config": "",
        "shape": [4096, 4096, 4096],
        "dtype": "bfloat16",
        "layout": "nt",
        "mode": "burst",
        "check": "exact",
    } | other
    if ratio is not None:
        made |= {"ratio": ratio, "ratio_low": ratio - spread, "ratio_high": ratio + spread}
    return made


def report(*records: dict[str, Any], environment: dict[str, Any] = H200) -> dict[str, Any]:
    return {"environment": environment, "results": list(records)}


@pytest.mark.parametrize(
    ("after", "verdict"),
    [(1.03, "fell"), (1.046, "same"), (1.054, "same"), (1.07, "rose")],
)
def test_a_ratio_falls_or_rises_by_more_than_half_a_percent(after: float, verdict: str) -> None:
    found = compare(report(record(1.05)), report(record(after)))

    assert [change.verdict for change in found.changes] == [verdict]


def test_sustained_ratios_repeat_better() -> None:
    earlier, later = record(1.05, mode="sustained"), record(1.046, mode="sustained")

    assert len(compare(report(earlier), report(later)).of("fell")) == 1


def test_the_greatest_fall_comes_first() -> None:
    shapes = [[512] * 3, [1024] * 3]
    earlier = report(*(record(1.1, shape=shape) for shape in shapes))
    later = report(record(1.05, shape=shapes[0]), record(1.0, shape=shapes[1]))

    names = [change.name for change in compare(earlier, later).of("fell")]

    assert names == ["outblas 1024 nt burst", "outblas 512 nt burst"]


@pytest.mark.parametrize(
    "other",
    [
        {"provider": "hopper.gemm"},
        {"config": "stages=4"},
        {"shape": [8, 4096, 4096]},
        {"layout": "nn"},
        {"mode": "cold"},
        {"dtype": "float16"},
        {"epilogue": "bias"},
        {"batch_invariant": True},
        {"product": "dA"},
    ],
    ids=lambda other: next(iter(other)),
)
def test_only_the_same_measurements_are_compared(other: dict[str, Any]) -> None:
    found = compare(report(record()), report(record(0.5, **other)))

    assert found.changes == ()
    assert found.missing == ("outblas 4096 nt burst",)


def test_reports_of_two_gpus_are_not_compared() -> None:
    with pytest.raises(
        ValueError, match="--against was measured on NVIDIA H200, expected this GPU, H100"
    ):
        compare(report(), report(environment={"gpu": "H100"}))


# ---- files
@pytest.mark.parametrize("text", ["", "{", "[]", '{"results": 1}'], ids=repr)
def test_another_file_is_refused_by_name(text: str, tmp_path: Path) -> None:
    path = tmp_path / "before.json"
    path.write_text(text)

    with pytest.raises(ValueError, match=r"--against is .*before\.json"):
        load(path)
