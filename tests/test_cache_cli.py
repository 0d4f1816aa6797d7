"""`outblas cache` on a store."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from stored import H100, H200, OTHER, WORKLOAD, failed, sql, trial, winner
from typer.testing import CliRunner, Result

from outblas import cache
from outblas.autotune import transfer
from outblas.autotune.store import Store
from outblas.cli import cache as command


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with results and two compiled kernels, and a folder of tables."""
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(transfer, "TABLES", tmp_path / "tables")
    with Store() as store:
        for each in (trial(0), failed(1), trial(2, us=90.0), trial(3, workload=OTHER, gpu=H200, kernel="simt.naive")):
            store.add(each)
        store.crown(winner(config="tile_m=128,slots=2"))
    for i in range(2):
        facts: dict[str, object] = {"i": i}
        cache.fetch(facts, build=lambda: "x", save=lambda x, path: path.write_text(x) and None, load=Path.read_text)
    return tmp_path


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(command.app, [str(argument) for argument in arguments])


def test_ls(home: Path) -> None:
    result = invoke("ls")
    assert result.exit_code == 0, result.output
    for text in ("NVIDIA H100 80GB HBM3", "NVIDIA H200", "4096 bfloat16 nt", "16x4096x4096 float16 to float32 nn"):
        assert text in result.stdout
    assert "Compiled kernels: 2, 0.0 MiB" in result.stdout
    report = json.loads(invoke("ls", "--json").stdout)
    assert report["store"] == str(home / "cache" / "tuning.sqlite")
    assert report["compiled"] == {"objects": 2, "bytes": 2}
    first, second = report["rows"]
    assert (first["kernel"], first["trials"], first["ok"], first["failed"]) == ("hopper.hilbert", 3, 2, 1)
    assert first["best_us"] == 90.0
    assert first["winner"]["ratio"] == 1.047
    assert first["workload"] == dataclasses.asdict(WORKLOAD)
    assert second["winner"] is None


def test_ls_of_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path / "cache"))
    result = invoke("ls")
    assert result.exit_code == 0
    assert "no results" in result.stdout
    assert not (tmp_path / "cache").exists()


def test_show(home: Path) -> None:
    result = invoke("show", "4096")
    assert result.exit_code == 0, result.output
    assert "not done in 30 s" in result.stdout
    assert "3 of 3 trials" in result.stdout
    assert "1 of 1 trials" in invoke("show", "simt.naive").stdout
    assert "0 of 0 trials" in invoke("show", "simt.naive", "512").stdout
    assert "0 of 0 trials" in invoke("show", "4096", "--dtype", "float16").stdout
    assert "1 of 1 trials" in invoke("show", "16x4096x4096", "--layout", "nn").stdout
    records = json.loads(invoke("show", "hopper.hilbert", "--json", "--limit", 2).stdout)
    assert [record["us"] for record in records] == [90.0, 100.0]
    assert records[0]["gpu"]["name"] == H100.name


def test_export_and_import(home: Path) -> None:
    file = home / "found.json"
    result = invoke("export", file)
    assert result.exit_code == 0, result.output
    assert "4 trials, 1 winners" in result.stdout
    elsewhere = home / "other" / "tuning.sqlite"
    assert "4 new trials, 1 new winners" in invoke("import", file, "--store", elsewhere).stdout
    assert "0 new trials, 0 new winners" in invoke("import", file, "--store", elsewhere).stdout
    with Store() as here, Store(elsewhere) as there:
        assert there.trials() == here.trials()
        assert there.winners() == here.winners()
    assert "1 trials, 0 winners" in invoke("export", file, "--kernels", "simt.naive").stdout
    assert "3 trials, 1 winners" in invoke("export", file, "--shapes", "4096").stdout
    file.write_text(file.read_text().replace("4096", "4097"))
    result = invoke("import", file)
    assert result.exit_code == 2
    assert "sha256 is" in result.stderr


def test_export_ship(home: Path) -> None:
    result = invoke("export", "--ship")
    assert result.exit_code == 0, result.output
    (path,) = (home / "tables").iterdir()
    assert path.name == "NVIDIA_H100_80GB_HBM3.json"
    (entry,) = transfer.read_table(path).entries
    assert entry.workload == WORKLOAD
    assert entry.config in ("slots=2", "tile_m=128,slots=2")  # the whole where the kernel cannot be loaded
    assert invoke("export", home / "folder", "--ship").exit_code == 0
    assert (home / "folder" / path.name).exists()


def test_verify(home: Path) -> None:
    invoke("export", "--ship")
    result = invoke("verify")
    assert (result.exit_code, result.stdout) == (0, "no problems\n")
    sql(home / "cache" / "tuning.sqlite", "UPDATE trials SET us = -1 WHERE id = 1")
    next((home / "cache" / "objects").glob("*.o")).write_text("y")
    (home / "tables" / "bad.json").write_text("{}")
    result = invoke("verify")
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert [piece in line for piece, line in zip(("trials[1].us", "checksum", "bad.json"), lines, strict=True)] == [
        True
    ] * 3
    file = home / "found.json"
    invoke("export", file)
    assert invoke("verify", file).exit_code == 0
    file.write_text(file.read_text()[:-10])
    result = invoke("verify", file)
    assert result.exit_code == 1
    assert "no JSON" in result.stdout


def test_verify_of_a_damaged_store(home: Path) -> None:
    path = home / "cache" / "tuning.sqlite"
    path.write_text("garbage" * 1000)
    result = invoke("verify")
    assert result.exit_code == 1
    assert "cannot be read" in result.stdout
    assert path.read_text().startswith("garbage")
    assert "cannot be read" in invoke("ls").stderr


def test_prune_command(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "fingerprints", lambda kernels: dict.fromkeys(kernels, "abc") | {"simt.naive": "new"})
    assert "0 trials and winners removed" in invoke("prune", "--stale", "--kernel", "hopper.hilbert").stdout
    result = invoke("prune", "--stale")
    assert result.exit_code == 0, result.output
    assert result.stdout == "1 trials and winners removed\n"
    result = invoke("prune", "--compiled", "--older-than", "1h")
    assert result.stdout == "4 trials and winners removed\n0 compiled kernels removed, 0.0 MiB\n"
    assert invoke("prune", "--compiled").stdout == "2 compiled kernels removed, 0.0 MiB\n"
    assert not list((home / "cache" / "objects").glob("*.o"))


def test_fingerprints(capsys: pytest.CaptureFixture[str]) -> None:
    found = command.fingerprints(["hopper.hilbert", "portable", "nothing.here"])
    assert sorted(found) == ["hopper.hilbert", "portable"]
    assert all(found.values())
    assert "nothing.here is not here to compare with" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("show", "nothing"), "kernel is 'nothing'"),
        (("show", "4x4"), "MxNxK is '4x4'"),
        (("show", "4096", "--dtype", "int8"), "--dtype is 'int8'"),
        (("show", "4096", "--layout", "xy"), "--layout is 'xy'"),
        (("show", "\udcff"), "kernel is"),
        (("ls", "--store", "/nowhere/x.sqlite"), "--store is '/nowhere/x.sqlite'"),
        (("export",), "expected a FILE to write, or --ship"),
        (("export", "/nowhere/x.json"), "FILE is '/nowhere/x.json'"),
        (("export", "--shapes", "x", "f.json"), "--shapes is 'x'"),
        (("export", "--kernels", "nothing", "f.json"), "kernel is 'nothing'"),
        (("import", "/nowhere/x.json"), "is no file"),
        (("prune",), "expected at least one of"),
        (("prune", "--kernel", "x", "--store", "/nowhere/x.sqlite"), "--store is '/nowhere/x.sqlite'"),
        (("prune", "--older-than", "soon"), "--older-than is 'soon'"),
        (("prune", "--older-than", "99999w"), "expected a number from 0"),
    ],
)
def test_usage_errors(home: Path, arguments: tuple[str, ...], message: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.split()).replace("│ ", "")


def test_a_store_of_a_newer_version_is_a_usage_error(home: Path) -> None:
    sql(home / "cache" / "tuning.sqlite", "PRAGMA user_version = 9")
    for arguments in (("ls",), ("show", "4096"), ("verify",), ("prune", "--kernel", "x")):
        result = invoke(*arguments)
        assert result.exit_code == 2, result.output
        assert "version 9" in result.stderr


def test_import_into_what_cannot_be_written_is_an_error(home: Path) -> None:
    invoke("export", home / "found.json")
    (home / "file").write_text("")
    result = invoke("import", home / "found.json", "--store", home / "file" / "x.sqlite")
    assert result.exit_code == 2
    assert "lost when the process ends" in " ".join(result.stderr.replace("│", "").split())
