"""`outblas profile`: what is shown of a recording of ncu, which is that of test_counters.py."""

import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.fake_ncu import calls, cells, check_stops, printed, results

from outblas.core import registry
from outblas.hopper.core import phase_profile
from outblas.inspect import counters, instructions, lines
from outblas.inspect.profiled import Request
from outblas.report import lookup, phases, profiles

pytest_plugins = ("support.ncu_fixtures",)


class TestTheResolvedConfig:
    """The config that runs, where it is known."""

    def resolved(self, kernel: str, config: str = "") -> str:
        return Request(kernel, (64, 64, 64), "bfloat16", "nt", config).resolved()

    @pytest.mark.parametrize("kernel", ["cublas", "portable", "hopper.gemm"])
    def test_is_not_known_of_a_kernel_that_chooses_by_shape(self, kernel: str) -> None:
        assert self.resolved(kernel) == ""

    def test_is_the_config_that_was_asked_for(self) -> None:
        assert "tile_m=64,tile_n=256" in self.resolved("hopper.gemm", "tile_m=64")

    def test_is_the_own_config_of_a_rung(self) -> None:
        assert "tile_m=128,tile_n=256" in self.resolved("hopper.hilbert")


class TestAProductWithAnAddend:
    """alpha·A·B + beta·C."""

    def test_is_asked_for_and_said(self, replay: Path) -> None:
        output = printed("hopper.tma_wgmma", "--addend")

        (call,) = calls(replay)
        assert "alpha·A·B + beta·C" in output
        assert Request.from_text(call[15]).addend

    @pytest.mark.usefixtures("replay")
    def test_is_no_profile_of_a_product_without_one(self, tmp_path: Path) -> None:
        saved = tmp_path / "profile.json"
        printed("hopper.tma_wgmma", "--addend", "--save", str(saved))

        found = profiles.load([saved])

        assert [result["addend"] for result in json.loads(saved.read_text())["results"]] == [
            True,
            True,
        ]
        wanted = (found, "hopper.tma_wgmma", (4096, 4096, 4096), "bfloat16", "H100")
        assert lookup.profiled(*wanted) is None
        assert lookup.profiled(*wanted, addend=True) == found[1]


@pytest.mark.usefixtures("replay")
def test_a_table_shows_the_counters_of_cublas_and_of_the_kernel() -> None:
    output = printed("hopper.tma_wgmma")
    rows = {name: rest for name, *rest in cells(output)}
    expected = {
        "time under ncu, one cold run (µs)": ["179.0", "448.4"],
        "tensor pipe active": ["94.7%", "35.1%"],
        "FLOP / DRAM byte": ["766.4", "584.0"],
        "… if A, B, C move once": ["1,365.3", "1,365.3"],
        "… of the CTA's tile": ["–", "–"],
        "DRAM (GB/s)": ["1,002", "525"],
        "fp32 FMAs / M·N·K": ["0.000", "0.000"],
        "global load requests": ["–", "–"],
        "not selected, share of cycles between issues": ["0.4%", "0.2%"],
        "shared wavefronts: stores": ["660,937 (21.5% conflicts)", "0"],
        "shared wavefronts: wgmma": ["–", "–"],
        "cublas": ["nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "2×66×1", "384×1×1", "179.0"],
    }
    assert {name: rows[name] for name in expected} == expected


@pytest.mark.usefixtures("replay")
def test_a_table_has_the_reasons_that_stall_warps_the_longest_first() -> None:
    rows = [name for name, *_ in cells(printed("hopper.tma_wgmma"))]

    reasons = [name for name in rows if name.replace(" ", "_") in counters.STALLS]
    assert reasons[:3] == ["long scoreboard", "barrier", "wait"]
    assert "not selected" in reasons
    assert "membar" not in reasons, "it stalls nobody"


@pytest.mark.usefixtures("replay")
def test_a_table_says_how_it_was_measured() -> None:
    output = printed("hopper.tma_wgmma")

    assert "cold caches" in output
    assert "outblas bench" in output
    assert "Memory accesses by instruction" not in output


class TestJsonOfTwoShapes:
    """At the second, 16x4096x4096, cuBLAS launches two kernels."""

    @pytest.fixture
    def report(self, replay: Path, tmp_path: Path) -> dict[str, Any]:
        """What was printed, which is what was saved."""
        saved = tmp_path / "profile.json"
        shapes = "4096,16x4096x4096"
        text = printed("portable", "--shapes", shapes, "--json", "--save", str(saved))
        assert json.loads(text) == json.loads(saved.read_text())
        return json.loads(text)

    def test_names_the_gpu_and_ncu(self, report: dict[str, Any]) -> None:
        environment = report["environment"]

        assert (environment["gpu"], environment["ncu"]) == ("H100", "2025.3.1.0")

    def test_has_the_launches_of_each_provider_at_each_shape(
        self, report: dict[str, Any], replay: Path
    ) -> None:
        found = [
            (result["provider"], result["shape"][0], len(result["launches"]))
            for result in report["results"]
        ]

        assert found == [
            ("cublas", 4096, 1),
            ("portable", 4096, 1),
            ("cublas", 16, 2),
            ("portable", 16, 1),
        ]
        assert len(calls(replay)) == 2

    def test_has_the_counters_of_a_launch(self, report: dict[str, Any]) -> None:
        square = report["results"][1]

        assert square["launches"][0]["kernel"] == "outblas_portable_256x128x64_bf16"
        assert square["shared"]["ld"] == {"wavefronts": 262_144, "excess": 0}
        assert square["tensor_active"] == pytest.approx(0.8303)
        assert square["compulsory_flop_per_dram_byte"] == pytest.approx(4096 / 3)
        assert square["tile_flop_per_l2_byte"] is None, "it chooses by shape"

    def test_adds_up_the_launches_of_a_call(self, report: dict[str, Any]) -> None:
        split = report["results"][2]

        assert split["us"] == pytest.approx(15.936 + 4.448)
        assert split["launches"][1]["grid"] == [128, 1, 1]

    def test_has_instructions_only_where_they_are_asked_for(self, report: dict[str, Any]) -> None:
        assert "instructions" not in report["results"][0]


@pytest.mark.usefixtures("replay")
def test_the_tile_of_a_config_has_an_intensity() -> None:
    options = ("--config", "block_m=128,block_n=64", "--dtype", "float32")

    cublas, ours = results("portable", *options)

    assert ours["tile_flop_per_l2_byte"] == pytest.approx(2 * 128 * 64 / ((128 + 64) * 4))
    assert ours["compulsory_flop_per_dram_byte"] == pytest.approx(4096 / 6)
    assert cublas["tile_flop_per_l2_byte"] is None


class TestInstructions:
    """`--instructions`: a second run of ncu, whose source page is joined with the kernel's code."""

    @pytest.fixture
    def artifact(self, monkeypatch: pytest.MonkeyPatch) -> Mock:
        """Makes the compiled kernel, whose first loads are of A and B."""
        artifact = Mock(return_value=SimpleNamespace(cubin=b"cubin", ptx="ptx"))
        operands = [None, "A", "A", "B", "B", *[None] * 14]
        monkeypatch.setattr(instructions, "artifact", artifact)
        monkeypatch.setattr(lines, "operands", lambda *_: operands)
        monkeypatch.setattr(instructions, "ffma_reuse", lambda *_: 0.75)
        return artifact

    @pytest.fixture
    def found(self, replay: Path, page: Path, artifact: Mock) -> list[dict[str, Any]]:
        """The results of cublas and of portable."""
        return results("portable", "--instructions")

    def test_are_those_of_the_call_that_was_profiled(
        self, found: list[dict[str, Any]], artifact: Mock
    ) -> None:
        request = Request("portable", (4096, 4096, 4096), "bfloat16", "nt")

        artifact.assert_called_once_with(request, 90)

    def test_have_operands_where_the_code_is_known(self, found: list[dict[str, Any]]) -> None:
        cublas, ours = found

        assert (cublas["ffma_reuse"], ours["ffma_reuse"]) == (None, 0.75)
        assert {access["operand"] for access in cublas["instructions"]} == {None}

    def test_are_the_accesses_of_the_source_page(
        self, found: list[dict[str, Any]], page: Path
    ) -> None:
        accesses = found[1]["instructions"]

        names = [access["sass"].split()[0] for access in accesses[:5]]
        assert names == ["LDG.E.128"] * 4 + ["STS"]
        load = instructions.parse(page.read_text())[1].accesses[0]
        assert accesses[0] == {"launch": 0, **load.record(), "operand": "A"}

    def test_are_added_up_by_operand_and_memory(self, found: list[dict[str, Any]]) -> None:
        memory = found[1]["memory"]

        kinds = [(each.get("operand"), each["space"], each["operation"]) for each in memory]
        assert kinds == [
            ("A", "global", "load"),
            ("B", "global", "load"),
            (None, "global", "load"),
            (None, "global", "store"),
            (None, "shared", "load"),
            (None, "shared", "store"),
        ]
        assert [each["efficiency"] for each in memory[:2]] == [0.25, 1]
        assert "wavefronts" not in memory[0]

    @pytest.mark.usefixtures("found")
    def test_come_from_a_second_run_whose_report_is_imported(self, replay: Path) -> None:
        _, second, third = calls(replay)

        metrics = "memory_l1_wavefronts_shared,memory_l1_wavefronts_shared_ideal"
        options = "--clock-control none --profile-from-start off --section SourceCounters"
        assert second[:9] == [*options.split(), "--metrics", metrics, "-o"]
        assert second[10:14] == [sys.executable, "-P", "-m", "outblas.inspect.profiled"]
        assert third == ["--import", f"{second[9]}.ncu-rep", "--csv", "--page", "source", "C"]

    @pytest.mark.usefixtures("replay", "page")
    def test_are_shown_in_a_table(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(instructions, "artifact", lambda *_: None)

        rows = [" ".join(row) for row in cells(printed("portable", "--instructions"))]

        assert "cublas – global copy 2,048 4.00 4.00 25.0% 22,528 2,048 20,480" in rows
        assert "portable – global store 2,048 8.00 16.00 50.0% – – –" in rows
        assert "portable – shared load 262,144 – – – 1,048,576 1,048,576 0" in rows


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing",), "kernel is 'nothing', expected one of: cublas, "),
        (("portable", "--shapes", "4x4"), "--shapes is '4x4'"),
        (("portable", "--shapes", "4,0x4x4"), "--shapes has 0x4x4, expected sizes of at least 1"),
        (
            ("hopper.tma_wgmma", "--dtype", "float32"),
            "--dtype is 'float32', expected bfloat16 or float16 for hopper.tma_wgmma",
        ),
        (
            ("cublas", "--dtype", "int8"),
            "--dtype is 'int8', expected bfloat16 or float16 or float32 for cublas",
        ),
        (("portable", "--layout", "xy"), "--layout is 'xy', expected one of"),
        (("cublas", "--config", "tile_m=64"), "--config is 'tile_m=64', expected none for cublas"),
        (("hopper.tma_wgmma", "--config", "tiles=3"), "config has 'tiles=3', expected"),
        (("portable", "--save", "/nowhere/at/all.json"), "--save is '/nowhere/at/all.json'"),
        (
            ("portable", "--phases"),
            "--phases is given for 'portable', expected a kernel of the hopper ladder",
        ),
        (("cublas", "--phases"), "--phases is given for 'cublas'"),
        (
            ("hopper.large_tile", "--phases", "--instructions"),
            "--phases and --instructions are both given",
        ),
        (("hopper.large_tile", "--phases", "--addend"), "--phases and --addend are both given"),
    ],
)
def test_arguments_that_mean_nothing_start_no_ncu(
    replay: Path, arguments: tuple[str, ...], message: str
) -> None:
    check_stops(2, message, *arguments)
    assert not replay.exists()


def test_a_kernel_for_another_gpu_starts_no_ncu(
    replay: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    check_stops(2, "kernel 'hopper.tma_wgmma' needs sm_90, but H100 is sm_80", "hopper.tma_wgmma")
    assert not replay.exists()


class TestPhases:
    """Cycles that a kernel counted; the kernels count theirs in the GPU tests."""

    ROLE = phase_profile.Role(
        "all", wait=0.0, load=1478.4, tensor=688.0, store=11182.0, total=149790.0
    )
    ROW = ("hopper.large_tile[mma_n=64]", "all", "–", "1,478", "688", "11,182", "149,790")
    ARGUMENTS = ("hopper.large_tile", "--phases", "--config", "mma_n=64")

    @pytest.fixture
    def counted(self, replay: Path, monkeypatch: pytest.MonkeyPatch) -> Mock:
        """Counts the cycles of `hopper.large_tile`, without a GPU."""
        counted = Mock(return_value=(self.ROLE,))
        environment = {"gpu": "NVIDIA H100 80GB HBM3"}
        monkeypatch.setattr(registry.load("hopper.large_tile"), "phases", counted)
        monkeypatch.setattr("outblas.bench.operands.normal", lambda *_: ("a", "b", "out"))
        monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
        monkeypatch.setattr("outblas.cli.profile._environment", lambda **_: environment)
        return counted

    def test_are_counted_with_the_config_and_without_ncu(self, counted: Mock, replay: Path) -> None:
        printed(*self.ARGUMENTS)

        config = registry.load("hopper.large_tile").Config(mma_n=64)
        counted.assert_called_once_with("a", "b", "out", config)
        assert not replay.exists()

    @pytest.mark.usefixtures("counted")
    def test_are_shown_in_a_table(self) -> None:
        assert list(self.ROW) in cells(printed(*self.ARGUMENTS))

    @pytest.mark.usefixtures("counted")
    def test_are_saved_for_reports(self, tmp_path: Path) -> None:
        saved = tmp_path / "phases.json"

        printed(*self.ARGUMENTS, "--save", str(saved))

        (entry,) = json.loads(saved.read_text())["results"]
        assert entry["phases"] == [dataclasses.asdict(self.ROLE)]
        assert "mma_n=64" in entry["resolved"]
        assert phases.rows(phases.load([saved])) == [self.ROW]
