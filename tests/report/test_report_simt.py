"""The CUDA-core climb in reports: two documents at two sizes, mixed operands, bank conflicts and
traffic by ncu.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import seed_claims
from seed_claims import compare
from seed_claims.arithmetic import doc_000, formulas
from seed_claims.measured import simt_runs, simt_speed
from support.paths import ROOT
from support.reports import (
    Entry,
    counted,
    finding,
    findings,
    rendered,
    rows_of,
    shown,
    verdict,
    write,
)
from support.reports import entry as timing

from outblas.core import configs, machines, registry
from outblas.report import ladder, profiles, results, roofline, rungs
from outblas.report.evidence import Evidence

CLIMB = rungs.names("simt")
V06 = (
    "block_m=64,block_n=64,block_k=8,warp_m=32,warp_n=16,thread_m=4,thread_n=4,piece_m=4,"
    "prefetch=False"
)
FIRST, SPLIT, PADDED = "pad=0,piece_n=8", "pad=0", "piece_n=8"
OPEN = (seed_claims.OPEN, None)


def entry(provider: str, ratio: float, n: int = 4096, **changes: Any) -> Entry:
    figures = {"tflops": 50 * ratio, "us": 2700 / ratio, "utilisation": 0.85 * ratio}
    return timing(provider, ratio, n, **{"dtype": "float32", "layout": "nn"} | figures | changes)


def conflicting(
    config: str,
    loads: tuple[float, float],
    stores: tuple[float, float],
    requests: float | None = None,
) -> Entry:
    """simt.vectorized: wavefronts and the share that conflicts added, of loads and of stores; L1's
    counters call 10% more of the stores conflicts.
    """
    by_l1 = {"ld": loads, "st": (stores[0] * 1.1, 1 - (1 - stores[1]) / 1.1)}
    kinds = {
        kind: {"wavefronts": wavefronts, "excess": excess}
        for kind, (wavefronts, excess) in by_l1.items()
    }
    total = {"space": "shared", "operand": "A", "requests": requests}
    memory = [
        total
        | {"operation": operation, "wavefronts": wavefronts, "ideal": wavefronts * (1 - added)}
        for operation, (wavefronts, added) in (("load", loads), ("store", stores))
    ]
    memory.append({"space": "global", "operation": "load", "operand": "A", "requests": 1e9})
    return counted("simt.vectorized", config, shared=kinds, memory=memory if requests else None)


CLIMBED = [
    *(entry("cublas", 1.0, n, check="–") for n in (2048, 4096)),
    *(entry(rung, 0.02 + 0.12 * i, n) for i, rung in enumerate(CLIMB) for n in (2048, 4096)),
    entry(CLIMB[4], 0.9, layout="nt"),
    entry(CLIMB[4], 0.9, dtype="bfloat16", layout="nt"),
    entry(CLIMB[4], 0.05, dtype="bfloat16", tflops=20.0),
]
COUNTED = counted(CLIMB[4], ipc=2.97, fma_active=0.64, occupancy=0.18, registers=165)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return write(tmp_path / "bench.json", *CLIMBED), write(tmp_path / "ncu.json", COUNTED)


def test_every_rung_beside_both_documents() -> None:
    rows = rows_of("simt", (2048, 4096), *CLIMBED, COUNTED)
    assert rows["simt.register"].cells() == (
        "simt.register",
        "25.9, 0.52\n002 2D tile, GH200, at 4096\n2.1–2.7, 0.47–0.61\n003 v04, T4",
        "2048\n4096\nmixed",
        "25\n25\n20",
        "0.500 (0.495–0.505)\n0.500 (0.495–0.505)\n80% of float32's",
        "1.316\n1.316\n–",
        "165",
        "18%",
        "64%\n2.97",
        "exact",
    )
    assert rows["simt.warptile"].cells()[1] == (
        "41.5, 0.83\n002 warp tile, GH200, at 4096\n1.57, 0.35\n003 v06, T4\n–, 0.94\n004, N "
        "unstated"
    )
    record = rows["simt.register"].record()
    assert [figure["gpu"] for figure in record["seeds"]] == ["GH200", "T4"]
    assert [at["mixed_share"] for at in record["sizes"]] == [None, pytest.approx(0.8)]
    assert (record["profile"]["ipc"], record["profile"]["occupancy"]) == (2.97, 0.18)
    assert len(ladder.columns("simt")) == len(ladder.columns("hopper")) == len(ladder.COLUMNS) == 10


def test_the_hopper_ladder_starts_from_the_mixed_measurement() -> None:
    mixed = entry("simt.warptile", 0.05, dtype="bfloat16", tflops=38.0)
    start = rows_of("hopper", (4096,), *CLIMBED, mixed, COUNTED)["simt.warptile"]
    assert start.cells()[:5] == (
        "simt.warptile",
        "32, 0.04\n001 kernel 1",
        "4096",
        "38",
        "0.050 (0.050–0.051)",
    )
    found = findings(mixed)
    for reached in ("32 TFLOP/s", "4% of cuBLAS"):
        assert (
            found[f"simt.warptile reaches {reached} at 4096 with bfloat16 operands"].verdict
            == "differs"
        )


def test_readme_parts_and_chart(files: tuple[Path, Path], tmp_path: Path) -> None:
    parts = "ladder simt", "climb simt results/climb.svg"
    changed, made = rendered(tmp_path, *(f"{part} from bench.json,ncu.json" for part in parts))
    assert changed == ["README.md", "results/climb.svg"]
    assert "| registers | occupancy | FMA pipe,<br>IPC | check |" in made
    assert "registers, occupancy, FMA pipe, IPC by ncu; mixed: bfloat16 operands" in made
    assert "float32 and bfloat16, nn, burst" in made
    drawn = (tmp_path / "results" / "climb.svg").read_text()
    for label in ("seed at 2048 (T4)", "seed at 4096 (GH200)", "ours at 2048", "ours at 4096"):
        assert label in drawn


def test_readme_part_of_layouts(tmp_path: Path) -> None:
    entries = [
        entry(CLIMB[-1], ratio, layout=layout)
        for layout, ratio in (("nt", 1.01), ("tn", 0.99), ("tt", 1.04))
    ]
    write(tmp_path / "bench.json", *entries, entry(CLIMB[-1], 0.5, layout="nt", config="group_m=4"))
    _, made = rendered(tmp_path, f"layouts {CLIMB[-1]} from bench.json")
    assert "| `tn` | 2727 | 49.5 | 0.990 (0.980–1.000) | exact |" in made
    assert "0.500" not in made
    assert "float32, nt, tn and tt, simt.pipelined at 4096, burst" in made


def test_command(files: tuple[Path, Path]) -> None:
    printed = shown("ladder", "--results", files[0], "--profiles", files[1], "--ladder", "simt")
    assert max(map(len, printed.splitlines())) <= 140
    assert "80% of float32's" in printed


def test_texts_of_claims_are_unique() -> None:
    texts = Counter((s.claim.source, s.claim.text) for s in seed_claims.settled(Evidence()))
    assert max(texts.values()) == 1


def test_side_experiments_are_configs_of_their_rungs_in_brief_form() -> None:
    named = vars(simt_runs).values()
    runs = {run for run in named if isinstance(run, compare.Run) and run.provider != "cublas"}
    assert len(runs) == 18
    for run in sorted(runs, key=str):
        config = configs.from_text(registry.load(run.provider).Config, run.config)
        assert set(configs.brief(config).split(",")) == set(run.config.split(","))


@pytest.mark.parametrize(
    ("words", "stride", "ways"),
    [(1, 0, 1), (1, 1, 1), (1, 2, 2), (1, 32, 32), (1, 33, 1), (4, 4, 1), (4, 8, 2)],
)
def test_bank_conflicts(words: int, stride: int, ways: int) -> None:
    assert formulas.conflict_ways((lane * stride for lane in range(32)), words) == ways


def test_arithmetic_of_the_cuda_cores() -> None:
    assert [doc_000.transposed_ways(k, stride) for k in (8, 16) for stride in (128, 132)] == [
        2,
        1,
        4,
        2,
    ]
    assert [formulas.strided_lines(stride) for stride in (0, 4, 8, 16384)] == [1, 1, 2, 32]
    assert formulas.tile_traffic(2048, 64, 64) == 2 * formulas.tile_traffic(2048, 128, 128) == 2**30
    assert verdict("a warp loads A in lines of 128 bytes") == ("refuted", 32)
    assert verdict("6352 GFLOP/s are nearly 12 times") == (
        "differs",
        pytest.approx(12.64, abs=0.01),
    )
    assert verdict("nearly 100 times faster than 502.5") == (
        "confirmed",
        pytest.approx(99.6, abs=0.1),
    )
    assert verdict("loads of A show no conflicts either") == ("confirmed", 1)
    assert verdict("loads of B, eight columns") == ("differs", 2)
    assert verdict("four columns a thread") == ("confirmed", 1)
    assert verdict("64×64 tiles move twice the bytes") == ("confirmed", 2)
    assert verdict("BK = 8 is the root cause of the traffic") == ("refuted", 1)
    assert verdict("the lanes of a warp conflict 8-way") == ("refuted", 1)
    assert verdict("do 8 FLOP per load from shared memory") == ("confirmed", 8)


def test_steps_of_002_by_its_own_forms() -> None:
    steps = [c for c in simt_speed.COMPARISONS if c.source.startswith("002")]
    assert [step.stated for step in steps][::5] == [(6.3522, 0.5025), (41.496, 31.4208)]
    assert len(steps) == 6
    for step in steps:
        runs = step.faster, step.slower
        at = [
            entry(run.provider, value / 50, config=run.config)
            for run, value in zip(runs, step.stated, strict=True)
        ]
        assert verdict(step.text, *at)[0] == "confirmed"
        assert verdict(step.text, *(e | {"layout": "nt"} for e in at)) == OPEN
        backwards = [
            entry(run.provider, ratio, config=run.config)
            for run, ratio in zip(runs, (0.3, 0.5), strict=True)
        ]
        assert verdict(step.text, *backwards) == ("refuted", pytest.approx(-0.4))


def test_a_gain_of_several_times_is_said_in_times() -> None:
    found = finding("coalescing gains", entry(CLIMB[1], 0.126), entry(CLIMB[0], 0.01))
    assert found.ours.startswith("12.60 times")


@pytest.mark.parametrize(
    ("part", "rung", "config", "ratio", "expected"),
    [
        ("nearly 100 times slower", "naive", "", 0.0101, "confirmed"),
        ("nearly 100 times slower", "naive", "", 0.005, "differs"),
        ("simt.coalesced is 8 times slower", "coalesced", "", 0.126, "confirmed"),
        ("more than 5 times slower", "shared", "", 0.18, "confirmed"),
        ("more than 5 times slower", "shared", "", 0.25, "differs"),
        ("achieves nearly 0.84", "warptile", "pad=0,prefetch=False", 0.82, "confirmed"),
        ("kernel reached 0.937", "warptile", "prefetch=False", 0.82, "differs"),
        ("56% of the fp32 roofline", "vectorized", FIRST, 0.65, "confirmed"),
        ("56% of the fp32 roofline", "vectorized", FIRST, 0.95, "differs"),
    ],
)
def test_shares_of_cublas(part: str, rung: str, config: str, ratio: float, expected: str) -> None:
    assert verdict(part, entry(f"simt.{rung}", ratio, config=config))[0] == expected


def test_cublas_itself_in_the_layout_of_the_climb() -> None:
    assert verdict("cuBLAS reaches 85%", entry("cublas", 1.0)) == ("confirmed", 0.85)
    assert verdict("cuBLAS reaches 85%", entry("cublas", 1.0, layout="nt")) == OPEN


@pytest.mark.parametrize(
    ("part", "v06", "deep", "expected", "value"),
    [
        ("64×64×8 lose to v05", 0.4, None, "confirmed", 1.0),
        (
            "64×64×8 lose to v05",
            0.8 / 1.57,
            None,
            "differs",
            0.57,
        ),  # under 3/4 of the stated factor
        ("64×64×8 lose to v05", 0.9, None, "refuted", -1 / 9),
        ("root cause of its loss", 0.4, 0.5, "differs", 0.25),
        ("root cause of its loss", 0.4, 0.7, "confirmed", 0.75),
        ("root cause of its loss", 0.4, None, *OPEN),
        ("root cause of its loss", 0.9, 0.9, "differs", None),
    ],
)
def test_what_003_says_of_its_v06(
    part: str, v06: float, deep: float | None, expected: str, value: float | None
) -> None:
    ratios = {V06: v06, V06.replace("block_k=8,", ""): deep}
    tiles = [
        entry("simt.warptile", ratio, 2048, config=config)
        for config, ratio in ratios.items()
        if ratio
    ]
    v05 = entry("simt.vectorized", 0.8, 2048, config="block_k=16")
    assert verdict(part, v05, *tiles) == (expected, pytest.approx(value))


def test_caches_still_help_at_4096() -> None:
    at = verdict("vanishes at 4096", entry("simt.coalesced", 0.12, tflops=6.0))
    assert at == ("differs", pytest.approx(6.0 / (3.352 * 0.25)))
    assert verdict("vanishes at 4096", entry("simt.coalesced", 0.02, tflops=0.8))[0] == "confirmed"


def test_bank_conflicts_by_ncu() -> None:
    first = conflicting(FIRST, (500.0, 0.45), (260.0 / 1.1, 0.4), 100.0)
    assert verdict("loads from shared memory conflict 5-way", first) == ("confirmed", 5.0)
    assert verdict("stores to shared memory conflict 2.6-way", first) == ("confirmed", 2.6)
    assert verdict("over 40%", first) == ("confirmed", pytest.approx(0.4516, abs=1e-4))
    without = conflicting(FIRST, (500.0, 0.45), (260.0, 0.4))
    assert verdict("loads from shared memory conflict 5-way", without) == OPEN
    assert verdict("over 40%", conflicting(SPLIT, (5.0, 0.4), (2.0, 0.4))) == OPEN

    padded = conflicting(PADDED, (500.0, 0.44), (160.0, 0.01), 100.0)
    assert verdict("padding eliminates", padded) == ("confirmed", pytest.approx(0.01))
    assert verdict("padding eliminates", conflicting(PADDED, (500.0, 0.44), (160.0, 0.01))) == OPEN
    assert verdict("padding does not mend", first, padded)[0] == "confirmed"
    mended = conflicting(PADDED, (500.0, 0.0), (160.0, 0.2), 100.0)
    assert verdict("padding does not mend", first, mended)[0] == "differs"
    assert verdict("padding eliminates", mended) == ("differs", pytest.approx(0.2))
    split = conflicting(SPLIT, (500.0, 0.01), (160.0, 0.4), 100.0)
    assert verdict("four columns side by side", split) == ("confirmed", pytest.approx(0.01))


def test_issue_by_ncu() -> None:
    figures = {
        "ipc": 2.97,
        "fma_active": 0.64,
        "occupancy": 0.181,
        "registers": 165,
        "not_selected_share": 0.33,
    }
    found = counted("simt.warptile", "pad=0,prefetch=False", **figures)
    for part, value in (
        ("takes 165 registers", 165),
        ("unpadded, achieved occupancy", 0.181),
        ("2.97 instructions", 2.97),
        ("64% active", 0.64),
        ("33% of the time", 0.33),
    ):
        assert verdict(part, found) == ("confirmed", value)
    assert verdict("SMs are 74% busy", found) == ("confirmed", pytest.approx(2.97 / 4))
    for ipc, expected in (
        (3.03, "confirmed"),
        (2.98, "differs"),
        (2.97, "differs"),
        (2.9, "refuted"),
    ):
        padded = counted("simt.warptile", "prefetch=False", ipc=ipc)
        assert verdict("padding raises the instructions", found, padded)[0] == expected


def test_traffic_by_ncu() -> None:
    usual = {"n": 2048, "dram_read_bytes": 4e7, "ffma": 2048.0**3}
    v05 = counted("simt.vectorized", "block_k=16", l2_to_sm_bytes=5e8, **usual)
    v06 = counted("simt.warptile", V06, l2_to_sm_bytes=1e9, l1_load_bytes=1.1e9, **usual)
    assert verdict("v06 generates twice the DRAM traffic", v05, v06) == ("differs", 1.0)
    assert verdict("works twice as hard", v05, v06) == ("confirmed", 2.0)
    assert verdict("v06's global loads are 1.11 GB", v06) == ("confirmed", 1.1)
    cublas = counted("cublas", n=2048, dram_read_bytes=4e7)
    assert verdict("as much DRAM as cuBLAS", v05, cublas) == ("confirmed", 1.0)
    every = finding("every version executes", v05, v06)
    assert (every.verdict, every.ours) == ("confirmed", "8.590e+09 to 8.590e+09 in 2 of 6")
    assert verdict("every version executes", v05, v06 | {"ffma": 9e9}) == ("differs", 9e9)


LOAD = {"space": "shared", "operation": "load"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"occupancy": 18.0}, r"occupancy is 18.0, expected a number from 0 to 1.1"),
        ({"ipc": "fast"}, r"ipc is 'fast'"),
        ({"not_selected_share": -1}, r"not_selected_share is -1"),
        ({"shared": {"ld": 3}}, r"shared.ld is 3, expected an object"),
        ({"shared": {"st": {"excess": 2}}}, r"shared.st.excess is 2"),
        ({"memory": {}}, r"memory is \{\}, expected a list"),
        ({"memory": [{"requests": "many"}]}, r"memory\[0\].requests is 'many'"),
        ({"memory": [{"space": "shared"}]}, r"memory\[0\].operation is None"),
        ({"memory": [LOAD | {"operand": 3}]}, r"memory\[0\].operand is 3"),
        ({"memory": [LOAD | {"ideal": -1}]}, r"memory\[0\].ideal is -1"),
    ],
)
def test_malformed_profiles_name_the_field(changes: Entry, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "ncu.json", counted("simt.naive", **changes))
    with pytest.raises(ValueError, match=rf"results\[0\].{message}"):
        profiles.load([path])


@pytest.mark.compile
def test_no_rung_is_faster_than_its_roofline() -> None:
    """At the clock of the measurement, in results/."""
    measured = results.load([ROOT / "results" / "h100_simt.json"])
    found = roofline.points("simt", machines.find("H100"), "float32", (4096, 4096, 4096), measured)
    for point in found:
        assert point.ours is not None
        assert point.ours.tflops is not None
        assert 0.4 * point.bound.tflops < point.ours.tflops < point.bound.tflops, point.cells()
    assert [point.bound.by for point in found] == [*["l1"] * 2, *["shared"] * 3, *["compute"] * 3]


def test_claims_by_ladder() -> None:
    every = seed_claims.settled(Evidence())
    sources = {
        ladder: {s.claim.source for s in seed_claims.of_ladder(every, ladder)}
        for ladder in rungs.LADDERS
    }
    assert {"000 kernel 6", "002 float4", "003 v06", "004 introduction"} <= sources["simt"]
    assert not {"003 v07", "001 kernel 3"} & sources["simt"]
    assert sources["portable"] == set()
    assert set().union(*sources.values()) == {s.claim.source for s in every}
    assert seed_claims.of_ladder(every, None) == every


def test_claims_of_hopper_keep_their_layout() -> None:
    at = [
        entry(f"hopper.{name}", ratio, dtype="bfloat16")
        for name, ratio in (("large_tile", 0.6), ("tma_wgmma", 0.4))
    ]
    assert finding("hopper.large_tile gains", *at) == seed_claims.NOT_MEASURED
    assert (
        finding("hopper.large_tile gains", *(e | {"layout": "nt"} for e in at)).verdict
        == "confirmed"
    )


def test_turing_rows_have_both_builds_and_start_from_a_cuda_core_rung() -> None:
    """A line for code compiled for sm_75, its gain over the parent's; the start's figure is in its
    own operands.
    """
    timed = [
        ("simt.vectorized", 0.05, 40.0, ""),
        ("turing.wmma", 0.04, 30.0, ""),
        ("turing.wmma", 0.03, 22.0, "arch=75"),
        ("turing.shared", 0.08, 60.0, ""),
        ("turing.shared", 0.045, 33.0, "arch=75"),
    ]
    entries = [
        entry(name, ratio, dtype="float16", layout="nt", tflops=tflops, config=config)
        for name, ratio, tflops, config in timed
    ]
    found = rows_of("turing", (4096,), *entries)
    assert (
        found["simt.vectorized"].cells()[1] == "3.2–3.4, 0.08–0.08\n003 v05 in float32, T4, at 2048"
    )
    assert found["simt.vectorized"].cells()[3] == "40"
    assert found["turing.shared"].cells()[2:4] == ("4096\nsm_75", "60\n33")
    assert found["turing.shared"].cells()[5] == "2.000\n1.500"
    assert found["turing.shared"].record()["sizes"][0]["sm_75_gain"] == pytest.approx(1.5)
    assert found["turing.cp_async"].cells()[4] == "not measured"
