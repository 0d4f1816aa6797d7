"""The command `outblas inspect`."""

import json
import re
from pathlib import Path

import pytest
from support import commands
from support.inspections import RECORD_FIELDS, invoke

from outblas.core import registry


@pytest.mark.compile
def test_json_has_a_record_of_every_kernel_that_the_gpu_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = [
        registry.find(name)
        for name in ("portable", "turing.ldmatrix", "turing.cp_async", "hopper.tma_wgmma")
    ]
    monkeypatch.setattr(registry, "ladder", lambda: kernels)
    saved = tmp_path / "inspect.json"

    result = invoke("--arch", "90", "--json", "--save", saved, code=0)

    records = json.loads(result.stdout)
    assert records == json.loads(saved.read_text())
    assert [record["kernel"] for record in records] == [
        k.name for k in kernels if (k.max_arch or 90) >= 90
    ]
    assert all(list(record) == RECORD_FIELDS for record in records)
    hopper = next(record for record in records if record["kernel"] == "hopper.tma_wgmma")
    assert hopper["arch"] == "sm_90a"
    assert "HGMMA.64x64x16.F32.BF16" in hopper["instructions"]
    assert "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16" in hopper["ptx"]
    assert list(hopper["bound"]) == ["H100", "GH200", "H200", "H800", "H100 PCIe", "H20"]
    assert set(hopper["bound"]["H100"]) == {"tflops", "by", "ceilings"}


@pytest.mark.compile
def test_tables_have_the_share_of_ffma_where_there_are_some() -> None:
    output = invoke("portable", "--arch", "80", "--dtype", "float32").stdout

    assert re.search(r"\d\d\.\d%, \d\d\.\d%\s+.*\.reuse", output, re.DOTALL), output
    assert re.search(r"\d+ FFMA ", output)


@pytest.mark.compile
def test_tables_have_no_share_of_ffma_where_there_are_none() -> None:
    assert "FFMA" not in invoke("portable", "--arch", "80").stdout


@pytest.mark.compile
def test_tables_have_a_row_for_each_architecture() -> None:
    output = invoke("portable", "--arch", "75,80", code=0).stdout

    shown = "sm_75 sm_80 HMMA.16816.F32.BF16 FFMA LDGSTS T4 A100 num_stages=3"
    assert [text for text in shown.split() if text not in output] == []


@pytest.mark.compile
def test_the_shape_decides_what_is_read_of_dram_for_a_product() -> None:
    def flops_per_byte(shape: str) -> float:
        output = invoke("hopper.tma_wgmma", "--json", "--shapes", shape).stdout
        (record,) = json.loads(output)
        found: float = record["intensity"]["dram"]
        return found

    assert flops_per_byte("1024x512x256") < flops_per_byte("4096")


@pytest.mark.compile
def test_machine_code_is_printed() -> None:
    output = invoke("hopper.large_tile", "--sass", "--config", "mma_n=32").stdout

    assert "HGMMA.64x32x16.F32.BF16 R" in output
    assert "wgmma.mma_async" not in output


@pytest.mark.compile
def test_ptx_is_printed() -> None:
    output = invoke("hopper.tma_wgmma", "--ptx").stdout

    assert "wgmma.mma_async.sync.aligned.m64n64k16" in output
    assert "HGMMA" not in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing",), "kernel is 'nothing'"),
        (("hopper.tma_wgmma", "--arch", "75"), "arch is 75"),
        (("--arch", "sm_900x"), "--arch is 'sm_900x'"),
        (("--dtype", "int8"), "--dtype is 'int8'"),
        (("--shapes", "64,128"), "--shapes is '64,128'"),
        (("hopper.tma_wgmma", "--config", "tile_m=80"), "tile_m is 80"),
        (("portable", "--sass"), "name one kernel and one --arch"),
        (("hopper.tma_wgmma", "--ptx", "--json"), "--json"),
        (("--save", "/nowhere/file.json"), "--save is"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(arguments: tuple[str, ...], message: str) -> None:
    commands.refuses(message, "inspect", *arguments)
