"""The Hopper climb in reports: several sizes, ncu's counters, one run against another, the sweep of
the last rung.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import seed_claims
from seed_claims import compare
from seed_claims.measured import hopper
from support.reports import (
    Entry,
    counted,
    entry,
    findings,
    invoke,
    loaded,
    rendered,
    rows_of,
    shown,
    verdict,
    write,
)

from outblas.core import configs, registry
from outblas.report import ladder, ladder_chart, phases, readme, rungs, sizes
from outblas.report.evidence import Evidence

CLIMB = rungs.names("hopper")[:10]


def profile(provider: str, rate: float, n: int = 4096, **changes: Any) -> Entry:
    return (
        counted(provider, "", n, dtype="bfloat16", layout="nt", l2_hit_rate=rate, registers=168)
        | changes
    )


# Every rung at two sizes, and the last at all.
CLIMBED = [
    *(
        entry("cublas", 1.0, n, check="–", clock_mhz=mhz)
        for n, mhz in ((1024, 1780), (4096, 1640), (8192, 1600))
    ),
    *(entry(rung, 0.4 + 0.07 * i, n) for i, rung in enumerate(CLIMB) for n in (4096, 8192)),
    *(entry(CLIMB[-1], 1.2, n, ratio_apart=1.1, us_apart=3.5, us=3.0) for n in (512, 1024)),
    entry(CLIMB[-1], 1.05, 2048),
    entry(CLIMB[-1], 0.99, 16384),
]
COUNTED = [
    profile("cublas", 0.70),
    profile("hopper.persistent", 0.84, resolved="tile_m=128,tile_n=256,stages=3"),
    profile("hopper.persistent", 0.6, config="order=consecutive"),
    profile("hopper.hilbert", 0.88, 8192),
]


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return write(tmp_path / "bench.json", *CLIMBED), write(tmp_path / "ncu.json", *COUNTED)


def test_every_rung_at_every_size() -> None:
    rows = rows_of("hopper", (4096, 8192), *CLIMBED, *COUNTED)
    persistent = rows["hopper.persistent"]
    assert [at.gain for at in persistent.at] == [pytest.approx(0.68 / 0.61)] * 2
    assert persistent.cells() == (
        "hopper.persistent",
        "660, 0.92\n001 kernel 6",
        "4096\n8192",
        "530\n530",
        "0.680 (0.673–0.687)\n0.680 (0.673–0.687)",
        "1.115\n1.115",
        "168",
        "3",
        "84%",
        "exact",
    )
    assert rows["hopper.hilbert"].cells()[-2] == "88%"
    assert rows["hopper.tma_store"].cells()[-4:-1] == ("–", "–", "–")
    record = persistent.record()
    assert [at["n"] for at in record["sizes"]] == [4096, 8192]
    assert record["profile"]["l2_hit_rate"] == 0.84


@pytest.mark.parametrize("field", ["slots", "stages"])
def test_stages_are_read_by_both_names_of_their_field(field: str) -> None:
    counted = profile("hopper.persistent", 0.84, resolved=f"tile_m=128,{field}=3")
    row = rows_of("hopper", (4096,), *CLIMBED, counted)["hopper.persistent"]
    assert row.cells()[ladder.columns("hopper").index("stages")] == "3"
    assert row.record()["profile"]["slots"] == "3"


def test_commands(files: tuple[Path, Path], tmp_path: Path) -> None:
    bench, ncu = files
    options = ("--results", bench, "--profiles", ncu, "--ladder", "hopper")
    html, chart, saved = (tmp_path / name for name in ("l.html", "l.svg", "l.json"))
    printed = shown("ladder", *options, "--html", html, "--chart", chart, "--save", saved)
    assert max(map(len, printed.splitlines())) <= 140
    assert "│ hopper.cluster_multicast │ 734, 1.03      │ 4096 │" in printed  # nothing folds
    value = json.loads(saved.read_text())
    assert (value["sizes"], value["sweep"]["kernel"]) == ([4096, 8192], "hopper.hilbert")
    assert [at["n"] for at in value["sweep"]["sizes"]] == [512, 1024, 2048, 4096, 8192, 16384]
    drawn = chart.read_text()
    assert "ours at 8192" in drawn
    assert "simt.warptile" in drawn
    assert "hopper.hilbert by size" in html.read_text()
    one = json.loads(shown("ladder", *options, "--shapes", "8192", "--json"))
    assert [at["n"] for at in one["rungs"][1]["sizes"]] == [8192]


def test_sizes_of_one_kernel(files: tuple[Path, Path]) -> None:
    measured = loaded(*CLIMBED).measurements
    cells = {row.n: row.cells() for row in sizes.rows(measured, "hopper.hilbert")}
    assert cells[512] == ("512", "3", "936", "1.200 (1.188–1.212)", "3.5", "1.100", "1.02", "exact")
    assert [cells[n][6] for n in (1024, 2048, 8192, 16384)] == ["1.17", "1.07–1.08", "1.015", "–"]
    assert cells[16384][4:6] == ("–", "–")
    assert sizes.last(measured, "hopper") == "hopper.hilbert"
    assert sizes.last((), "hopper") is None
    assert "hopper.hilbert by size" in shown("sizes", "hopper.hilbert", "--results", files[0])
    done = invoke("sizes", "hopper.gemm", "--results", files[0], code=2)
    assert "no square product of hopper.gemm" in done.output


def test_readme_parts(files: tuple[Path, Path], tmp_path: Path) -> None:
    parts = (
        "ladder hopper",
        "ladder hopper 8192",
        "sizes hopper.hilbert",
        "climb hopper results/climb.svg",
    )
    changed, text = rendered(tmp_path, *(f"{part} from bench.json,ncu.json" for part in parts))
    assert changed == ["README.md", "results/climb.svg"]
    assert readme.stale(tmp_path) == []
    assert "| `hopper.persistent` | 660, 0.92<br>001 kernel 6 | 4096<br>8192 | 530<br>530 |" in text
    assert "| `hopper.persistent` | 660, 0.92<br>001 kernel 6, at 4096 | 8192 | 530 |" in text
    assert "| `512` | 3 | 936 |" in text
    assert "hopper.hilbert" in (tmp_path / "results" / "climb.svg").read_text()
    (tmp_path / "results" / "climb.svg").unlink()
    assert readme.stale(tmp_path) == ["results/climb.svg"]


def test_nothing_to_draw() -> None:
    with pytest.raises(ValueError, match="no rung has a figure"):
        ladder_chart.draw(ladder.rows((), "portable", (4096,)), (4096,))


A, B = compare.Run("hopper.tma_store"), compare.Run("hopper.store_tuning", "sms=0,order=row")


@pytest.mark.parametrize(
    ("first", "second", "stated", "expected"),
    [
        ((1.05, 0.001), (1.00, 0.001), (1.04, 1.0), "confirmed"),
        ((1.05, 0.001), (1.00, 0.001), (2.0, 1.0), "differs"),  # another size
        ((1.05, 0.001), (1.00, 0.001), None, "confirmed"),
        ((1.01, 0.100), (1.00, 0.100), None, "confirmed"),  # by 0.5%
        ((1.003, 0.001), (1.00, 0.001), None, "confirmed"),  # beyond the spreads
        ((1.003, 0.002), (1.00, 0.002), None, "differs"),
        ((1.00, 0.100), (1.05, 0.100), None, "refuted"),
        ((1.001, 0.010), (1.00, 0.010), (1.004, 1.0), "confirmed"),  # a tie, and no more was stated
        ((1.00, 0.001), (1.003, 0.001), None, "refuted"),  # beyond the spreads
    ],
)
def test_one_run_against_another(
    first: tuple[float, float],
    second: tuple[float, float],
    stated: tuple[float, float] | None,
    expected: str,
) -> None:
    runs = (A, first, ""), (B, second, "order=row,sms=0")
    found = [
        entry(
            run.provider, ratio, config=config, ratio_low=ratio - spread, ratio_high=ratio + spread
        )
        for run, (ratio, spread), config in runs
    ]
    settled = compare.against("001", "a beats b", A, B, stated).test(loaded(*found))
    assert (settled.verdict, settled.value) == (expected, pytest.approx(first[0] / second[0] - 1))


def test_runs_of_different_campaigns_are_not_compared() -> None:
    claim = compare.against("001", "a beats b", A, B)
    other = entry(B.provider, 1.0, config=B.config)
    first = loaded(entry(A.provider, 1.1), date="2026-01-03").measurements
    second = loaded(other, date="2026-01-02").measurements
    assert claim.test(Evidence(first + second)) == seed_claims.NOT_MEASURED
    both = loaded(entry(A.provider, 1.2), other).measurements
    for every in (first + second + both, both + second + first):
        assert claim.test(Evidence(every)).value == pytest.approx(0.2)


def test_claims_of_the_climb() -> None:
    found = findings(*CLIMBED, *COUNTED)
    steps = {
        text: finding for text, finding in found.items() if " gains " in text and " on " in text
    }
    assert len(steps) == 9
    assert all(finding.verdict != seed_claims.OPEN for finding in steps.values())
    barriers = steps["hopper.lean_barriers gains 6.7% on persistent: 704 TFLOP/s after 660"]
    assert (barriers.verdict, barriers.value) == ("differs", pytest.approx(0.75 / 0.68 - 1))
    assert found["the order in groups of 16×8 hits L2 83% of the time"].verdict == "confirmed"
    assert found["cuBLAS hits L2 70% of the time"].verdict == "confirmed"
    assert found["groups of 16×8 hit L2 more often than cuBLAS"].value == pytest.approx(0.14)
    clock = found["power bounds large products: at 8192 the clock falls"]
    assert (clock.verdict, clock.ours) == ("confirmed", "1600 MHz, at 1024 1780 (cublas)")
    assert found["groups of 16×8 beat 2×2"] == seed_claims.NOT_MEASURED


@pytest.mark.parametrize(
    ("watts", "n", "expected"),
    [
        (695, 8192, "confirmed"),
        (500, 8192, "refuted"),
        (500, 2048, "confirmed"),
        (704, 2048, "differs"),
    ],
)
def test_power(watts: float, n: int, expected: str) -> None:
    part = {8192: "the 700 W limit", 2048: "the power wall stands"}[n]
    found = entry("cublas", 1.0, n, mode="sustained", watts=watts, clock_mhz=1400)
    assert verdict(part, found) == (expected, pytest.approx(watts / 700))


def test_side_experiments_are_configs_of_their_rungs_in_brief_form() -> None:
    pytest.importorskip("cutlass")
    runs = {run for c in hopper.COMPARISONS for run in (c.faster, c.slower)}
    for run in sorted(runs, key=str):
        config = configs.from_text(registry.load(run.provider).Config, run.config)
        assert configs.brief(config) == run.config


def phase(**changes: Any) -> Entry:
    role = {
        "name": "all",
        "wait": 0.0,
        "load": 1450.0,
        "tensor": 690.0,
        "store": 11000.0,
        "total": 150000.0,
    }
    return {
        "provider": "hopper.large_tile",
        "shape": [4096] * 3,
        "dtype": "bfloat16",
        "phases": [role | changes],
    }


def test_cycles_by_phase_beside_the_seeds() -> None:
    assert [row[0] for row in phases.rows(loaded(phase()).phases)] == [
        "hopper.large_tile",
        "001 kernel 3",
    ]
    found = findings(phase())
    assert found["the load phase of a k tile takes 1415 cycles"].verdict == "confirmed"
    assert found["storing a tile takes 4572 cycles"].verdict == "differs"


@pytest.mark.parametrize(("field", "value"), [("load", -1.0), ("store", "fast"), ("name", 3)])
def test_malformed_phases_name_the_field(tmp_path: Path, field: str, value: Any) -> None:
    path = write(tmp_path / "p.json", phase(**{field: value}))
    with pytest.raises(ValueError, match=rf"p.json: results\[0\].phases\[0\].*{field}"):
        phases.load([path])
