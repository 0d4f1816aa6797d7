"""The Hopper climb in reports: several sizes, ncu's counters, one run against another, the sweep of the last rung."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outblas import configs, registry
from outblas.cli import app
from outblas.report import (
    claims,
    compare,
    ladder,
    ladder_chart,
    measured_001,
    phases,
    profiles,
    readme,
    results,
    rungs,
    sizes,
)

ENVIRONMENT = {"gpu": "NVIDIA H100 80GB HBM3", "date": "2026-01-01", "cuda": "13.0", "power_limit_w": 700.0}
CLIMB = rungs.planned("hopper")[:10]


def entry(provider: str, ratio: float, n: int = 4096, **changes: Any) -> dict[str, Any]:
    known = {
        "provider": provider, "config": "", "shape": [n, n, n], "dtype": "bfloat16", "layout": "nt", "mode": "burst",
        "check": "exact", "ratio": ratio, "ratio_low": ratio * 0.999, "ratio_high": ratio * 1.001, "verdict": "slower",
        "tflops": 780 * ratio, "us": 175 / ratio,
    }  # fmt: skip
    return known | changes


def counted(provider: str, rate: float | None, n: int = 4096, **changes: Any) -> dict[str, Any]:
    known = {
        "provider": provider, "config": "", "resolved": "", "shape": [n, n, n], "dtype": "bfloat16", "layout": "nt",
        "us": 170.0, "l2_hit_rate": rate, "dram_read_bytes": 1e8, "l2_to_sm_bytes": 1e9, "registers": 168,
    }  # fmt: skip
    return known | changes


def write(path: Path, entries: list[dict[str, Any]], **environment: Any) -> Path:
    path.write_text(json.dumps({"environment": ENVIRONMENT | environment, "results": entries}))
    return path


def climbed() -> list[dict[str, Any]]:
    """Every rung at two sizes, and the last at all."""
    found = [entry("cublas", 1.0, n, check="–", clock_mhz=mhz) for n, mhz in ((1024, 1780), (4096, 1640), (8192, 1600))]
    found += [entry(rung, 0.4 + 0.07 * i, n) for i, rung in enumerate(CLIMB) for n in (4096, 8192)]
    found += [entry(CLIMB[-1], 1.2, n, ratio_apart=1.1, us_apart=3.5, us=3.0) for n in (512, 1024)]
    return [*found, entry(CLIMB[-1], 1.05, 2048), entry(CLIMB[-1], 0.99, 16384)]


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    resolved = "tile_m=128,tile_n=256,slots=3"
    bench = write(tmp_path / "bench.json", climbed())
    return bench, write(
        tmp_path / "ncu.json",
        [counted("cublas", 0.70), counted("hopper.persistent", 0.84, resolved=resolved),
         counted("hopper.persistent", 0.6, config="order=consecutive"),
         counted("hopper.hilbert", 0.88, 8192, resolved=resolved)],
    )  # fmt: skip


def invoke(*arguments: str | Path) -> str:
    done = CliRunner().invoke(app, ["report", *map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done.stdout


def verdict(claim: claims.Claim, *entries: dict[str, Any], tmp_path: Path) -> tuple[str, float | None]:
    path = write(tmp_path / "some.json", list(entries))
    finding = claim.test(claims.Evidence(results.load([path])))
    return finding.verdict, finding.value


def test_every_rung_at_every_size(files: tuple[Path, Path]) -> None:
    rows = ladder.rows(results.load(files[:1]), "hopper", (4096, 8192), profiles.load(files[1:]))
    by_name = {row.rung.name: row for row in rows}
    persistent = by_name["hopper.persistent"]
    assert [at.gain for at in persistent.at] == [pytest.approx(0.68 / 0.61)] * 2
    assert persistent.cells() == (
        "hopper.persistent", "660, 0.92\n001 kernel 6", "4096\n8192", "530\n530",
        "0.680 (0.679–0.681)\n0.680 (0.679–0.681)", "1.115\n1.115", "168", "3", "84%", "exact",
    )  # fmt: skip
    assert by_name["hopper.hilbert"].cells()[-2] == "88%"
    assert by_name["hopper.tma_store"].cells()[-4:-1] == ("–", "–", "–")
    record = persistent.record()
    assert [at["n"] for at in record["sizes"]] == [4096, 8192]
    assert record["profile"]["l2_hit_rate"] == 0.84


def test_commands(files: tuple[Path, Path], tmp_path: Path) -> None:
    bench, ncu = files
    options = ("--results", bench, "--profiles", ncu, "--ladder", "hopper")
    html, chart, saved = (tmp_path / name for name in ("l.html", "l.svg", "l.json"))
    shown = invoke("ladder", *options, "--html", html, "--chart", chart, "--save", saved)
    assert max(map(len, shown.splitlines())) <= 140
    assert "│ hopper.cluster_multicast │ 734, 1.03      │ 4096 │" in shown  # nothing folds
    value = json.loads(saved.read_text())
    assert (value["sizes"], value["sweep"]["kernel"]) == ([4096, 8192], "hopper.hilbert")
    assert [at["n"] for at in value["sweep"]["sizes"]] == [512, 1024, 2048, 4096, 8192, 16384]
    drawn = chart.read_text()
    assert "ours at 8192" in drawn
    assert "simt.warptile" in drawn
    assert "hopper.hilbert by size" in html.read_text()
    one = json.loads(invoke("ladder", *options, "--shapes", "8192", "--json"))
    assert [at["n"] for at in one["rungs"][1]["sizes"]] == [8192]


def test_sizes_of_one_kernel(files: tuple[Path, Path]) -> None:
    rows = sizes.rows(results.load(files[:1]), "hopper.hilbert")
    cells = {row.n: row.cells() for row in rows}
    assert cells[512] == ("512", "3", "936", "1.200 (1.199–1.201)", "3.5", "1.100", "1.02", "exact")
    assert [cells[n][6] for n in (1024, 2048, 8192, 16384)] == ["1.17", "1.07–1.08", "1.015", "–"]
    assert cells[16384][4:6] == ("–", "–")
    assert sizes.last(results.load(files[:1]), "hopper") == "hopper.hilbert"
    assert sizes.last((), "hopper") is None
    assert "hopper.hilbert by size" in invoke("sizes", "hopper.hilbert", "--results", files[0])
    done = CliRunner().invoke(app, ["report", "sizes", "hopper.gemm", "--results", str(files[0])])
    assert done.exit_code == 2
    assert "no square product of hopper.gemm" in done.output


def test_readme_parts(files: tuple[Path, Path], tmp_path: Path) -> None:
    for name in ("src/outblas", "results"):
        (tmp_path / name).mkdir(parents=True)
    parts = (
        "ladder hopper", "ladder hopper 8192", "sizes hopper.hilbert", "claims", "climb hopper results/climb.svg",
    )  # fmt: skip
    (tmp_path / "README.md").write_text(
        "\n".join(f"<!-- generated: {part} from bench.json,ncu.json -->\n<!-- end -->" for part in parts)
    )
    assert readme.render(tmp_path) == ["README.md", "results/climb.svg"]
    assert readme.stale(tmp_path) == []
    text = (tmp_path / "README.md").read_text()
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
        ((1.00, 0.001), (1.05, 0.001), None, "refuted"),
    ],
)
def test_one_run_against_another(
    first: tuple[float, float],
    second: tuple[float, float],
    stated: tuple[float, float] | None,
    expected: str,
    tmp_path: Path,
) -> None:
    def spread(run: compare.Run, ratio: float, by: float, config: str) -> dict[str, Any]:
        return entry(run.provider, ratio, config=config, ratio_low=ratio - by, ratio_high=ratio + by)

    claim = compare.against("001", "a beats b", A, B, stated)
    found = spread(A, *first, ""), spread(B, *second, "order=row,sms=0")
    assert verdict(claim, *found, tmp_path=tmp_path) == (expected, pytest.approx(first[0] / second[0] - 1))


def test_runs_of_different_campaigns_are_not_compared(tmp_path: Path) -> None:
    claim = compare.against("001", "a beats b", A, B)
    other = entry(B.provider, 1.0, config=B.config)
    paths = [
        write(tmp_path / "a.json", [entry(A.provider, 1.1)], date="2026-01-03"),
        write(tmp_path / "b.json", [other], date="2026-01-02"),
    ]
    assert claim.test(claims.Evidence(results.load(paths))) == claims.NOT_MEASURED
    paths += [write(tmp_path / "c.json", [entry(A.provider, 1.2), other])]
    for order in (paths, paths[::-1]):
        assert claim.test(claims.Evidence(results.load(order))).value == pytest.approx(0.2)


def test_claims_of_the_climb(files: tuple[Path, Path]) -> None:
    settled = claims.settled(claims.Evidence(results.load(files[:1]), profiles.load(files[1:])))
    found = {s.claim.text: s.finding for s in settled if s.claim in measured_001.CLAIMS}
    steps = {text: finding for text, finding in found.items() if " gains " in text and " on " in text}
    assert len(steps) == 9
    assert all(finding.verdict != claims.OPEN for finding in steps.values())
    barriers = steps["hopper.lean_barriers gains 6.7% on persistent: 704 TFLOP/s after 660"]
    assert (barriers.verdict, barriers.value) == ("differs", pytest.approx(0.75 / 0.68 - 1))
    assert found["the order in groups of 16×8 hits L2 83% of the time"].verdict == "confirmed"
    assert found["cuBLAS hits L2 70% of the time"].verdict == "confirmed"
    assert found["groups of 16×8 hit L2 more often than cuBLAS"].value == pytest.approx(0.14)
    clock = found["power bounds large products: at 8192 the clock falls"]
    assert (clock.verdict, clock.ours) == ("confirmed", "1600 MHz, at 1024 1780 (cublas)")
    assert found["groups of 16×8 beat 2×2"] == claims.NOT_MEASURED


@pytest.mark.parametrize(
    ("watts", "n", "expected"),
    [(695, 8192, "confirmed"), (500, 8192, "refuted"), (500, 2048, "confirmed"), (704, 2048, "differs")],
)
def test_power(watts: float, n: int, expected: str, tmp_path: Path) -> None:
    text = {8192: "the 700 W limit", 2048: "the power wall stands"}[n]
    (claim,) = [claim for claim in measured_001.CLAIMS if claim.text.startswith(text)]
    found = entry("cublas", 1.0, n, mode="sustained", watts=watts, clock_mhz=1400)
    assert verdict(claim, found, tmp_path=tmp_path) == (expected, pytest.approx(watts / 700))


def test_side_experiments_are_configs_of_their_rungs_in_brief_form() -> None:
    pytest.importorskip("cutlass")
    built = {kernel.name for kernel in registry.ladder("hopper")}
    runs = {run for _, _, *pair, _ in measured_001.COMPARISONS for run in pair}
    for run in sorted((run for run in runs if run.provider in built), key=str):
        module = registry.load(run.provider)
        config = configs.from_text(module.Config, run.config)
        assert configs.brief(config) == run.config


def phase_file(path: Path, **changes: Any) -> Path:
    role = {"name": "all", "wait": 0.0, "load": 1450.0, "tensor": 690.0, "store": 11000.0, "total": 150000.0}
    entry = {"provider": "hopper.large_tile", "shape": [4096] * 3, "dtype": "bfloat16", "phases": [role | changes]}
    path.write_text(json.dumps({"environment": {"gpu": "NVIDIA H100 80GB HBM3"}, "results": [entry]}))
    return path


def test_cycles_by_phase_beside_the_seeds(tmp_path: Path) -> None:
    counted = phases.load([phase_file(tmp_path / "p.json")])
    assert [row[0] for row in phases.rows(counted)] == ["hopper.large_tile", "001 kernel 3"]
    found = {s.claim.text: s.finding.verdict for s in claims.settled(claims.Evidence(phases=counted))}
    assert found["the load phase of a slice of K takes 1415 cycles"] == "confirmed"
    assert found["storing a tile takes 4572 cycles"] == "differs"


@pytest.mark.parametrize(("field", "value"), [("load", -1.0), ("store", "fast"), ("name", 3)])
def test_malformed_phases_name_the_field(tmp_path: Path, field: str, value: Any) -> None:
    path = phase_file(tmp_path / "p.json", **{field: value})
    with pytest.raises(ValueError, match=rf"p.json: results\[0\].phases\[0\].*{'name' if field == 'name' else field}"):
        phases.load([path])
