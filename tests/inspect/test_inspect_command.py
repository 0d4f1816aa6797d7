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
    assert list(hopper["bound"]) == ["H100", "GH200", "H200"]
    assert set(hopper["bound"]["H100"]) == {"tflops", "by", "ceilings"}


@pytest.mark.compile
def test_tables_have_ffma_where_there_are_some() -> None:
    arguments = ("--arch", "80", "--layout", "nn", "--shapes", "1024x512x256")
    result = invoke("portable", *arguments, "--dtype", "float32")
    assert re.search(r"\d\d\.\d%, \d\d\.\d%\s+.*\.reuse", result.stdout, re.DOTALL), result.stdout
    assert re.search(r"\d+ FFMA ", result.stdout)
    assert "FFMA" not in invoke("portable", *arguments).stdout


@pytest.mark.compile
def test_tables_have_a_column_for_each_architecture() -> None:
    options = "--arch 75,80 --dtype float16 --layout nn --shapes 1024x512x256"

    output = invoke("portable", *options.split(), code=0).stdout

    shown = "sm_75 sm_80 HMMA.16816.F32 FFMA LDGSTS T4 A100 num_stages=3"
    for text in shown.split():
        assert text in output, text


@pytest.mark.compile
def test_machine_code_and_ptx_are_printed() -> None:
    result = invoke("hopper.tma_wgmma", "--sass", "--config", "tile_n=128")
    assert "HGMMA.64x128x16.F32.BF16 R" in result.stdout
    assert "wgmma" not in result.stdout.replace("tma_wgmma", "")
    assert "wgmma.mma_async.sync.aligned.m64n64k16" in invoke("hopper.tma_wgmma", "--ptx").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing",), "kernel is 'nothing'"),
        (("hopper.tma_wgmma", "--arch", "75"), "arch is 75"),
        (("--arch", "sm_900x"), "--arch is 'sm_900x'"),
        (("--dtype", "int8"), "--dtype is 'int8'"),
        (("--shapes", "64,128"), "--shapes is '64,128'"),
        (("hopper.tma_wgmma", "--config", "tile_m=80"), "tile_m is 80"),
        (("portable", "--sass"), "expected one kernel, one --arch"),
        (("hopper.tma_wgmma", "--ptx", "--json"), "--json"),
        (("--save", "/nowhere/file.json"), "--save is"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(arguments: tuple[str, ...], message: str) -> None:
    commands.refuses(message, "inspect", *arguments)
