"""The CUDA-core climb in reports: two documents at two sizes, mixed operands, bank conflicts and traffic by ncu."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from outblas import configs, machines, registry
from outblas.cli import app
from outblas.kernels.simt_config import PRESETS
from outblas.report import (
    budgets,
    claims,
    compare,
    counted_simt,
    ladder,
    measured_001,
    measured_simt,
    profiles,
    readme,
    results,
    roofline,
    rungs,
    simt_runs,
)

CLIMB = rungs.planned("simt")
RESULTS = Path(__file__).parents[1] / "results" / "h100_simt.json"
V06 = "block_m=64,block_n=64,block_k=8,warp_m=32,warp_n=16,thread_m=4,thread_n=4,piece_m=4,prefetch=False"
FIRST, SPLIT, PADDED = "pad=0,piece_n=8", "pad=0", "piece_n=8"


def entry(provider: str, ratio: float, n: int = 4096, **changes: Any) -> dict[str, Any]:
    known = {
        "provider": provider, "config": "", "shape": [n, n, n], "dtype": "float32", "layout": "nn", "mode": "burst",
        "check": "exact", "ratio": ratio, "ratio_low": ratio * 0.999, "ratio_high": ratio * 1.001, "verdict": "slower",
        "tflops": 50 * ratio, "us": 2700 / ratio, "utilisation": 0.85 * ratio,
    }  # fmt: skip
    return known | changes


def counted(provider: str, config: str = "", n: int = 4096, **changes: Any) -> dict[str, Any]:
    known = {
        "provider": provider, "config": config, "resolved": "", "shape": [n, n, n], "dtype": "float32", "layout": "nn",
        "us": 2700.0, "l2_hit_rate": 0.8, "dram_read_bytes": 1e8, "l2_to_sm_bytes": 1e9, "registers": 128,
    }  # fmt: skip
    return known | changes


def passes(loads: tuple[float, float], stores: tuple[float, float], requests: float | None = None) -> dict[str, Any]:
    """Wavefronts and the share that conflicts added, of loads and of stores; L1's counters call 10% more of the stores
    conflicts."""
    counters = {"ld": loads, "st": (stores[0] * 1.1, 1 - (1 - stores[1]) / 1.1)}
    kinds = {key: dict(zip(("wavefronts", "excess"), of, strict=True)) for key, of in counters.items()}
    memory = [
        {
            "space": "shared",
            "operation": op,
            "operand": "A",
            "requests": requests,
            "wavefronts": n,
            "ideal": n * (1 - of),
        }
        for op, (n, of) in (("load", loads), ("store", stores))
    ]
    memory.append({"space": "global", "operation": "load", "operand": "A", "requests": 1e9})
    return {"shared": kinds, "memory": memory if requests else None}


def write(path: Path, entries: list[dict[str, Any]], **environment: Any) -> Path:
    known = {"gpu": "NVIDIA H100 80GB HBM3", "date": "2026-01-01", "cuda": "13.0"}
    path.write_text(json.dumps({"environment": known | environment, "results": entries}))
    return path


def evidence(tmp_path: Path, *entries: dict[str, Any]) -> claims.Evidence:
    """Timings and profiles, each kind of one campaign."""
    timings, counts = ([e for e in entries if ("l2_hit_rate" in e) is kind] for kind in (False, True))
    return claims.Evidence(
        results.load([write(tmp_path / "some.json", timings)]) if timings else (),
        profiles.load([write(tmp_path / "ncu.json", counts)]) if counts else (),
    )


def claim(part: str, source: str = "") -> claims.Claim:
    (found,) = [
        c for c in (*measured_simt.CLAIMS, *counted_simt.CLAIMS) if part in c.text and c.source.startswith(source)
    ]
    return found


def verdict(part: str, tmp_path: Path, *entries: dict[str, Any], source: str = "") -> tuple[str, float | None]:
    finding = claim(part, source).test(evidence(tmp_path, *entries))
    return finding.verdict, finding.value


def climbed() -> list[dict[str, Any]]:
    found = [entry("cublas", 1.0, n, check="–") for n in (2048, 4096)]
    found += [entry(rung, 0.02 + 0.12 * i, n) for i, rung in enumerate(CLIMB) for n in (2048, 4096)]
    found += [entry(CLIMB[4], 0.9, layout="nt"), entry(CLIMB[4], 0.9, dtype="bfloat16", layout="nt")]
    return [*found, entry(CLIMB[4], 0.05, 4096, dtype="bfloat16", tflops=20.0)]


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    active = counted(CLIMB[4], ipc=2.97, fma_active=0.64, occupancy=0.18, registers=165)
    return write(tmp_path / "bench.json", climbed()), write(tmp_path / "ncu.json", [active])


def test_each_ladder_is_measured_in_its_layout() -> None:
    assert registry.layout_of("simt") == registry.layout_of("simt.warptile") == "nn"
    assert [registry.layout_of(name) for name in ("hopper.hilbert", "portable", "turing.wmma", "cublas")] == ["nt"] * 4


def test_every_rung_beside_both_documents(files: tuple[Path, Path]) -> None:
    assert ladder.default_sizes("simt") == (2048, 4096)
    rows = ladder.rows(results.load(files[:1]), "simt", (2048, 4096), profiles.load(files[1:]))
    by_name = {row.rung.name: row.cells() for row in rows}
    assert by_name["simt.register"] == (
        "simt.register", "25.9, 0.52\n002 2D tile, GH200, at 4096\n2.1–2.7, 0.47–0.61\n003 v04, T4",
        "2048\n4096\nmixed", "25\n25\n20", "0.500 (0.499–0.500)\n0.500 (0.499–0.500)\n80% of float32's",
        "1.316\n1.316\n–", "165", "18%", "64%\n2.97", "exact",
    )  # fmt: skip
    assert by_name["simt.warptile"][1].splitlines()[-2:] == ["–, 0.94", "004, N unstated"]
    assert "001 kernel 1" not in by_name["simt.warptile"][1]  # bf16
    assert by_name["simt.naive"][1] == "0.502, 0.01\n002 baseline, GH200, at 4096"
    record = rows[4].record()
    assert [figure["gpu"] for figure in record["seeds"]] == ["GH200", "T4"]
    assert [at["mixed_share"] for at in record["sizes"]] == [None, pytest.approx(0.8)]
    assert (record["profile"]["ipc"], record["profile"]["occupancy"]) == (2.97, 0.18)
    assert len(ladder.columns("simt")) == len(ladder.columns("hopper")) == len(ladder.COLUMNS) == len(rows[0].cells())
    assert ladder.columns("simt")[-3:-1] == ("occupancy", "FMA pipe,\nIPC")


def test_the_hopper_ladder_starts_from_the_mixed_measurement(files: tuple[Path, Path], tmp_path: Path) -> None:
    bench = write(tmp_path / "mixed.json", [entry("simt.warptile", 0.05, dtype="bfloat16", tflops=38.0)])
    row = ladder.rows(results.load([files[0], bench]), "hopper", (4096,), profiles.load(files[1:]))[0]
    assert row.cells()[:5] == ("simt.warptile", "32, 0.04\n001 kernel 1", "4096", "38", "0.050 (0.050–0.050)")
    found = {s.claim.text: s.finding.verdict for s in claims.settled(claims.Evidence(results.load([bench])))}
    assert found["simt.warptile reaches 32 TFLOP/s at 4096 with bfloat16 operands"] == "differs"
    assert found["simt.warptile reaches 4% of cuBLAS at 4096 with bfloat16 operands"] == "differs"


def test_readme_parts_and_chart(files: tuple[Path, Path], tmp_path: Path) -> None:
    for name in ("src/outblas", "results"):
        (tmp_path / name).mkdir(parents=True)
    parts = "ladder simt", "climb simt results/climb.svg"
    text = "\n".join(f"<!-- generated: {part} from bench.json,ncu.json -->\n<!-- end -->" for part in parts)
    (tmp_path / "README.md").write_text(text)
    assert readme.render(tmp_path) == ["README.md", "results/climb.svg"]
    made = (tmp_path / "README.md").read_text()
    assert "| registers | occupancy | FMA pipe,<br>IPC | check |" in made
    assert "registers, occupancy, FMA pipe, IPC by ncu; mixed: bfloat16 operands" in made
    assert "float32 and bfloat16, nn, burst" in made
    drawn = (tmp_path / "results" / "climb.svg").read_text()
    for label in ("seed at 2048 (T4)", "seed at 4096 (GH200)", "ours at 2048", "ours at 4096"):
        assert label in drawn


def test_readme_part_of_layouts(tmp_path: Path) -> None:
    for name in ("src/outblas", "results"):
        (tmp_path / name).mkdir(parents=True)
    entries = [entry(CLIMB[-1], ratio, layout=layout) for layout, ratio in (("nt", 1.01), ("tn", 0.99), ("tt", 1.04))]
    write(tmp_path / "bench.json", [*entries, entry(CLIMB[-1], 0.5, layout="nt", config="group_m=4")])
    part = f"<!-- generated: layouts {CLIMB[-1]} from bench.json -->\n<!-- end -->"
    (tmp_path / "README.md").write_text(part)
    readme.render(tmp_path)
    made = (tmp_path / "README.md").read_text()
    assert "| `tn` | 2727 | 49.5 | 0.990 (0.989–0.991) | exact |" in made
    assert "0.500" not in made
    assert "float32, nt, tn and tt, simt.pipelined at 4096, burst" in made


def test_command(files: tuple[Path, Path]) -> None:
    options = ("--results", str(files[0]), "--profiles", str(files[1]), "--ladder", "simt")
    done = CliRunner().invoke(app, ["report", "ladder", *options])
    assert done.exit_code == 0, done.output
    assert max(map(len, done.stdout.splitlines())) <= 140
    assert "80% of float32's" in done.stdout


def test_texts_of_claims_are_unique() -> None:
    texts = Counter((s.claim.source, s.claim.text) for s in claims.settled(claims.Evidence()))
    assert max(texts.values()) == 1


def test_side_experiments_are_configs_of_their_rungs_in_brief_form() -> None:
    runs = {run for run in vars(simt_runs).values() if isinstance(run, compare.Run) and run.provider != "cublas"}
    assert len(runs) == 18
    for run in sorted(runs, key=str):
        config = configs.from_text(registry.load(run.provider).Config, run.config)
        assert set(configs.brief(config).split(",")) == set(run.config.split(","))


@pytest.mark.parametrize(
    ("words", "stride", "ways"), [(1, 0, 1), (1, 1, 1), (1, 2, 2), (1, 32, 32), (1, 33, 1), (4, 4, 1), (4, 8, 2)]
)
def test_bank_conflicts(words: int, stride: int, ways: int) -> None:
    assert budgets.ways((lane * stride for lane in range(32)), words) == ways


def test_loads_by_arithmetic_are_those_of_the_layouts() -> None:
    """Kernel 6's columns in pieces of eight, kernel 7's of four, as the claims have them and as the rungs do."""
    from outblas.artifact import example
    from outblas.kernels.simt_access import in_shared

    problem = example(torch.float32, None, "nn", (4096, 4096, 4096))
    found = {s.claim.text: s.finding.value for s in claims.settled(claims.Evidence())}
    for name, expected in (("000 kernel 6, padded", (1, 2)), ("000 kernel 7, padded", (1, 1))):
        kernel, config = PRESETS[name]
        accesses = in_shared(configs.from_text(registry.load(kernel).Config, config), problem)
        of = [accesses[f"{operand} load"] for operand in "AB"]
        assert tuple(each.wavefronts / each.ideal for each in of) == expected
    stated = ("loads of A show no conflicts either", 1), ("loads of B, eight columns", 2), ("four columns a thread", 1)
    for part, ways in stated:
        (value,) = [value for text, value in found.items() if part in text]
        assert value == ways


def test_arithmetic_of_the_cuda_cores() -> None:
    assert [budgets.transposed_ways(k, stride) for k in (8, 16) for stride in (128, 132)] == [2, 1, 4, 2]
    assert [budgets.strided_lines(stride) for stride in (0, 4, 8, 16384)] == [1, 1, 2, 32]
    assert budgets.tile_traffic(2048, 64, 64) == 2 * budgets.tile_traffic(2048, 128, 128) == 2**30
    found = {s.claim.text: s.finding for s in claims.settled(claims.Evidence())}

    def of(part: str) -> tuple[float | None, str]:
        (finding,) = [finding for text, finding in found.items() if part in text]
        return finding.value, finding.verdict

    assert of("a warp loads A in lines of 128 bytes") == (32, "refuted")
    assert of("6352 GFLOP/s are nearly 12 times") == (pytest.approx(12.64, abs=0.01), "differs")
    assert of("nearly 100 times faster than 502.5") == (pytest.approx(99.6, abs=0.1), "confirmed")
    assert of("64×64 tiles move twice the bytes") == (2, "confirmed")
    assert of("BK = 8 is the root cause of the traffic") == (1, "refuted")
    assert of("the lanes of a warp conflict 8-way") == (1, "refuted")
    assert of("do 8 FLOP per load from shared memory") == (8, "confirmed")


def test_steps_of_002_by_its_own_forms(tmp_path: Path) -> None:
    steps = [c for c in measured_simt.COMPARISONS if c[0].startswith("002")]
    assert [stated for *_, stated in steps][::5] == [(6.3522, 0.5025), (41.496, 31.4208)]
    assert len(steps) == 6
    for _, text, faster, slower, stated in steps:
        at = [
            entry(run.provider, value / 50, config=run.config)
            for run, value in ((faster, stated[0]), (slower, stated[1]))
        ]
        assert verdict(text, tmp_path, *at)[0] == "confirmed"
        assert verdict(text, tmp_path, *(e | {"layout": "nt"} for e in at)) == (claims.OPEN, None)
        backwards = [entry(run.provider, value, config=run.config) for run, value in ((faster, 0.3), (slower, 0.5))]
        assert verdict(text, tmp_path, *backwards) == ("refuted", pytest.approx(-0.4))


def test_a_gain_of_several_times_is_said_in_times(tmp_path: Path) -> None:
    found = claim("coalescing gains").test(evidence(tmp_path, entry(CLIMB[1], 0.126), entry(CLIMB[0], 0.01)))
    assert found.ours.startswith("12.60 times")


@pytest.mark.parametrize(
    ("part", "rung", "config", "ratio", "expected"),
    [
        ("nearly 100 times slower", "naive", "", 0.0101, "confirmed"),
        ("nearly 100 times slower", "naive", "", 0.005, "differs"),
        ("8 times slower", "coalesced", "", 0.126, "confirmed"),
        ("more than 5 times slower", "shared", "", 0.18, "confirmed"),
        ("more than 5 times slower", "shared", "", 0.25, "differs"),
        ("achieves nearly 0.84", "warptile", "pad=0,prefetch=False", 0.82, "confirmed"),
        ("kernel reached 0.937", "warptile", "prefetch=False", 0.82, "differs"),
        ("56% of the fp32 roofline", "vectorized", FIRST, 0.65, "confirmed"),
        ("56% of the fp32 roofline", "vectorized", FIRST, 0.95, "differs"),
    ],
)
def test_shares_of_cublas(part: str, rung: str, config: str, ratio: float, expected: str, tmp_path: Path) -> None:
    assert verdict(part, tmp_path, entry(f"simt.{rung}", ratio, config=config))[0] == expected


def test_cublas_itself_in_the_layout_of_the_climb(tmp_path: Path) -> None:
    assert verdict("cuBLAS reaches 85%", tmp_path, entry("cublas", 1.0)) == ("confirmed", 0.85)
    assert verdict("cuBLAS reaches 85%", tmp_path, entry("cublas", 1.0, layout="nt")) == (claims.OPEN, None)


def test_what_003_says_of_its_v06(tmp_path: Path) -> None:
    v05, v06 = entry("simt.vectorized", 0.8, 2048, config="block_k=16"), entry("simt.warptile", 0.4, 2048, config=V06)
    loses = "64×64×8 lose to v05"
    assert verdict(loses, tmp_path, v05, v06) == ("confirmed", pytest.approx(1.0))
    less = entry("simt.warptile", 0.8 / 1.57, 2048, config=V06)
    assert verdict(loses, tmp_path, v05, less) == ("differs", pytest.approx(0.57))  # under 3/4 of the stated factor
    assert verdict(loses, tmp_path, v05, entry("simt.warptile", 0.9, 2048, config=V06))[0] == "refuted"
    deep = V06.replace("block_k=8,", "")
    cause = "root cause of its loss"
    for ratio, expected in ((0.5, "differs"), (0.7, "confirmed")):
        at = verdict(cause, tmp_path, v05, v06, entry("simt.warptile", ratio, 2048, config=deep))
        assert at == (expected, pytest.approx((ratio - 0.4) / 0.4))
    assert verdict(cause, tmp_path, v05, v06) == (claims.OPEN, None)
    faster = entry("simt.warptile", 0.9, 2048, config=V06), entry("simt.warptile", 0.9, 2048, config=deep)
    assert verdict(cause, tmp_path, v05, *faster) == ("differs", None)


def test_caches_still_help_at_4096(tmp_path: Path) -> None:
    at = verdict("vanishes at 4096", tmp_path, entry("simt.coalesced", 0.12, tflops=6.0))
    assert at == ("differs", pytest.approx(6.0 / (3.352 * 0.25)))
    assert verdict("vanishes at 4096", tmp_path, entry("simt.coalesced", 0.02, tflops=0.8))[0] == "confirmed"


def test_bank_conflicts_by_ncu(tmp_path: Path) -> None:
    first = counted("simt.vectorized", FIRST, **passes((500.0, 0.45), (260.0 / 1.1, 0.4), 100.0))
    assert verdict("loads from shared memory conflict 5-way", tmp_path, first) == ("confirmed", 5.0)
    assert verdict("stores to shared memory conflict 2.6-way", tmp_path, first) == ("confirmed", 2.6)
    assert verdict("over 40%", tmp_path, first) == ("confirmed", pytest.approx(0.4516, abs=1e-4))
    without = counted("simt.vectorized", FIRST, **passes((500.0, 0.45), (260.0, 0.4)))
    assert verdict("loads from shared memory conflict 5-way", tmp_path, without) == (claims.OPEN, None)
    assert verdict("over 40%", tmp_path, counted("simt.vectorized", SPLIT, **passes((5.0, 0.4), (2.0, 0.4)))) == (
        claims.OPEN, None,
    )  # fmt: skip

    padded = counted("simt.vectorized", PADDED, **passes((500.0, 0.44), (160.0, 0.01), 100.0))
    assert verdict("padding eliminates", tmp_path, padded) == ("confirmed", pytest.approx(0.01))
    without = counted("simt.vectorized", PADDED, **passes((500.0, 0.44), (160.0, 0.01)))
    assert verdict("padding eliminates", tmp_path, without) == (claims.OPEN, None)
    assert verdict("padding does not mend", tmp_path, first, padded)[0] == "confirmed"
    mended = counted("simt.vectorized", PADDED, **passes((500.0, 0.0), (160.0, 0.2), 100.0))
    assert verdict("padding does not mend", tmp_path, first, mended)[0] == "differs"
    assert verdict("padding eliminates", tmp_path, mended) == ("differs", pytest.approx(0.2))
    split = counted("simt.vectorized", SPLIT, **passes((500.0, 0.01), (160.0, 0.4), 100.0))
    assert verdict("four columns side by side", tmp_path, split) == ("confirmed", pytest.approx(0.01))


def test_issue_by_ncu(tmp_path: Path) -> None:
    found = counted(
        "simt.warptile",
        "pad=0,prefetch=False",
        ipc=2.97,
        fma_active=0.64,
        occupancy=0.181,
        registers=165,
        not_selected_share=0.33,
    )
    for part, value in (("165 registers", 165), ("unpadded, achieved occupancy", 0.181), ("2.97 instructions", 2.97),
                        ("64% active", 0.64), ("33% of the time", 0.33)):  # fmt: skip
        assert verdict(part, tmp_path, found) == ("confirmed", value)
    assert verdict("SMs are 74% busy", tmp_path, found) == ("confirmed", pytest.approx(2.97 / 4))
    for ipc, expected in ((3.03, "confirmed"), (2.98, "differs"), (2.97, "differs"), (2.9, "refuted")):
        both = found, counted("simt.warptile", "prefetch=False", ipc=ipc)
        assert verdict("padding raises the instructions", tmp_path, *both)[0] == expected


def test_traffic_by_ncu(tmp_path: Path) -> None:
    v05 = counted("simt.vectorized", "block_k=16", 2048, dram_read_bytes=4e7, l2_to_sm_bytes=5e8, ffma=2048.0**3)
    v06 = counted(
        "simt.warptile", V06, 2048, dram_read_bytes=4e7, l2_to_sm_bytes=1e9, ffma=2048.0**3, l1_load_bytes=1.1e9
    )
    assert verdict("twice the DRAM traffic", tmp_path, v05, v06) == ("differs", 1.0)
    assert verdict("works twice as hard", tmp_path, v05, v06) == ("confirmed", 2.0)
    assert verdict("v06's global loads are 1.11 GB", tmp_path, v06) == ("confirmed", 1.1)
    assert verdict("as much DRAM as cuBLAS", tmp_path, v05, counted("cublas", n=2048, dram_read_bytes=4e7)) == (
        "confirmed", 1.0,
    )  # fmt: skip
    every = claim("every version executes").test(evidence(tmp_path, v05, v06))
    assert (every.verdict, every.ours) == ("confirmed", "8.590e+09 to 8.590e+09 in 2 of 6")
    assert verdict("every version executes", tmp_path, v05, v06 | {"ffma": 9e9}) == ("differs", 9e9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"occupancy": 18.0}, r"results\[0\].occupancy is 18.0, expected a number from 0 to 1.1"),
        ({"ipc": "fast"}, r"results\[0\].ipc is 'fast'"),
        ({"not_selected_share": -1}, r"results\[0\].not_selected_share is -1"),
        ({"shared": {"ld": 3}}, r"results\[0\].shared.ld is 3, expected an object"),
        ({"shared": {"st": {"excess": 2}}}, r"results\[0\].shared.st.excess is 2"),
        ({"memory": {}}, r"results\[0\].memory is \{\}, expected a list"),
        ({"memory": [{"requests": "many"}]}, r"results\[0\].memory\[0\].requests is 'many'"),
    ],
)
def test_malformed_profiles_name_the_field(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "ncu.json", [counted("simt.naive", **changes)])
    with pytest.raises(ValueError, match=message):
        profiles.load([path])


@pytest.mark.compile
def test_no_rung_is_faster_than_its_roofline() -> None:
    """At the clock of the measurement, in results/."""
    found = roofline.points("simt", machines.find("H100"), "float32", (4096, 4096, 4096), results.load([RESULTS]))
    for point in found:
        assert point.ours is not None
        assert point.ours.tflops is not None
        assert 0.4 * point.bound.tflops < point.ours.tflops < point.bound.tflops, point.cells()
    assert [point.bound.by for point in found] == [*["l1"] * 2, *["shared"] * 3, *["compute"] * 3]


def test_claims_by_ladder() -> None:
    every = claims.settled(claims.Evidence())
    sources = {ladder: {s.claim.source for s in claims.of_ladder(every, ladder)} for ladder in rungs.LADDERS}
    assert {"000 kernel 6", "002 float4", "003 v06", "004 introduction"} <= sources["simt"]
    assert not {"003 v07", "001 kernel 3"} & sources["simt"]
    assert sources["portable"] == set()
    assert set().union(*sources.values()) == {s.claim.source for s in every}
    assert claims.of_ladder(every, None) == every


def test_claims_of_hopper_keep_their_layout(tmp_path: Path) -> None:
    steps = [c for c in measured_001.CLAIMS if c.text.startswith("hopper.large_tile gains")]
    at = [entry(f"hopper.{name}", ratio, dtype="bfloat16") for name, ratio in (("large_tile", 0.6), ("tma_wgmma", 0.4))]
    assert steps[0].test(evidence(tmp_path, *at)) == claims.NOT_MEASURED
    assert steps[0].test(evidence(tmp_path, *(e | {"layout": "nt"} for e in at))).verdict == "confirmed"


def test_turing_rows_have_both_builds_and_start_from_a_cuda_core_rung(tmp_path: Path) -> None:
    """A line for code compiled for sm_75, its gain over the parent's; the start's figure is in its own operands."""
    entries = [
        entry("simt.vectorized", 0.05, dtype="float16", layout="nt", tflops=40.0),
        entry("turing.wmma", 0.04, dtype="float16", layout="nt", tflops=30.0),
        entry("turing.wmma", 0.03, dtype="float16", layout="nt", tflops=22.0, config="arch=75"),
        entry("turing.shared", 0.08, dtype="float16", layout="nt", tflops=60.0),
        entry("turing.shared", 0.045, dtype="float16", layout="nt", tflops=33.0, config="arch=75"),
    ]
    bench = write(tmp_path / "turing.json", entries)
    found = {row.rung.name: row for row in ladder.rows(results.load([bench]), "turing", (4096,))}
    assert found["simt.vectorized"].cells()[1] == "3.2–3.4, 0.08–0.08\n003 v05 in float32, T4, at 2048"
    assert found["simt.vectorized"].cells()[3] == "40"
    assert found["turing.shared"].cells()[2:4] == ("4096\nsm_75", "60\n33")
    assert found["turing.shared"].cells()[5] == "2.000\n1.500"
    assert found["turing.shared"].record()["sizes"][0]["sm_75_gain"] == pytest.approx(1.5)
    assert found["turing.cp_async"].cells()[4] == "not measured"
