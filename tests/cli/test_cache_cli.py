"""`outblas cache` on a store."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from support import commands
from support.stored import H100, H200, OTHER, WORKLOAD, failed, sql, trial, winner
from typer.testing import Result

from outblas.autotune.store import tables, transfer
from outblas.autotune.store.records import Gpu, Workload
from outblas.autotune.store.store import Store
from outblas.autotune.store.tables import read_table, ship
from outblas.cli import cache as command
from outblas.cli import common
from outblas.core import cache, config_source, configs, registry


@pytest.fixture(autouse=True)
def home(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with results and two compiled kernels, and a folder of tables."""
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(path.parent))
    monkeypatch.setattr(tables, "TABLES", tmp_path / "tables")
    with Store() as store:
        for each in (
            trial(0),
            failed(1),
            trial(2, us=90.0),
            trial(3, workload=OTHER, gpu=H200, kernel="simt.naive"),
        ):
            store.add(each)
        store.record_best(winner(config="tile_m=128,sms=2"))
    for i in range(2):
        cache.fetch(
            {"i": i},
            build=lambda: "x",
            save=lambda x, at: at.write_text(x) and None,
            load=Path.read_text,
        )
    return tmp_path


def invoke(*arguments: object, code: int = 0) -> Result:
    return commands.invoke("cache", *arguments, code=code)


def shown(*arguments: object, code: int = 0) -> str:
    return invoke(*arguments, code=code).stdout


def refusal(*arguments: object) -> str:
    return " ".join(invoke(*arguments, code=2).stderr.replace("│", "").split())


def test_ls(path: Path) -> None:
    text = shown("ls")
    for piece in (
        "NVIDIA H100 80GB HBM3",
        "NVIDIA H200",
        "4096 bfloat16 nt",
        "16x4096x4096 float16 to float32 nn",
    ):
        assert piece in text
    assert "Compiled kernels: 2, 0.0 MiB" in text
    report = json.loads(shown("ls", "--json"))
    assert report["store"] == str(path)
    assert report["compiled"] == {"objects": 2, "bytes": 2}
    first, second = report["rows"]
    assert (first["kernel"], first["trials"], first["ok"], first["failed"]) == (
        "hopper.hilbert",
        3,
        2,
        1,
    )
    assert first["best_us"] == 90.0
    assert first["winner"]["ratio"] == 1.047
    assert first["workload"] == dataclasses.asdict(WORKLOAD)
    assert second["winner"] is None


def test_ls_of_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(home / "nothing"))
    assert "no results" in shown("ls")
    assert not (home / "nothing").exists()


def test_show() -> None:
    text = shown("show", "4096")
    assert "not done in 30 s" in text
    assert "3 of 3 trials" in text
    assert "1 of 1 trials" in shown("show", "simt.naive")
    assert "0 of 0 trials" in shown("show", "simt.naive", "512")
    assert "0 of 0 trials" in shown("show", "4096", "--dtype", "float16")
    assert "1 of 1 trials" in shown("show", "16x4096x4096", "--layout", "nn")
    records = json.loads(shown("show", "hopper.hilbert", "--json", "--limit", 2))
    assert [record["us"] for record in records] == [90.0, 100.0]
    assert records[0]["gpu"]["name"] == H100.name


def test_export_and_import(home: Path) -> None:
    file, elsewhere = home / "found.json", home / "other" / "tuning.sqlite"
    assert "4 trials, 1 winners" in shown("export", file)
    assert "4 new trials, 1 new winners" in shown("import", file, "--store", elsewhere)
    assert "0 new trials, 0 new winners" in shown("import", file, "--store", elsewhere)
    with Store() as here, Store(elsewhere) as there:
        assert there.trials() == here.trials()
        assert there.winners() == here.winners()
    assert "1 trials, 0 winners" in shown("export", file, "--kernels", "simt.naive")
    assert "3 trials, 1 winners" in shown("export", file, "--shapes", "4096")
    file.write_text(file.read_text().replace("4096", "4097"))
    assert "sha256 is" in refusal("import", file)


def test_export_ship(home: Path) -> None:
    invoke("export", "--ship")
    (path,) = (home / "tables").iterdir()
    assert path.name == "NVIDIA_H100_80GB_HBM3.json"
    (entry,) = read_table(path).entries
    assert entry.workload == WORKLOAD
    assert entry.config in (
        "sms=2",
        "tile_m=128,sms=2",
    )  # the whole where the kernel cannot be loaded
    invoke("export", home / "folder", "--ship")
    assert (home / "folder" / path.name).exists()


def test_verify(home: Path, path: Path) -> None:
    invoke("export", "--ship")
    assert shown("verify") == "no problems\n"
    file = home / "found.json"
    sql(path, "UPDATE trials SET us = -1 WHERE id = 1")
    next((path.parent / "objects").glob("*.o")).write_text("y")
    (home / "tables" / "bad.json").write_text("{}")
    lines = shown("verify", code=1).splitlines()
    for piece, line in zip(("trials[1].us", "checksum", "bad.json"), lines, strict=True):
        assert piece in line
    invoke("export", file)
    invoke("verify", file)
    file.write_text(file.read_text()[:-10])
    assert "no JSON" in shown("verify", file, code=1)


def test_verify_of_a_damaged_store(path: Path) -> None:
    path.write_text("garbage" * 1000)
    assert "cannot be read" in shown("verify", code=1)
    assert path.read_text().startswith("garbage")
    assert "cannot be read" in invoke("ls").stderr


def test_prune_command(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        command,
        "fingerprints",
        lambda kernels: dict.fromkeys(kernels, "abc") | {"simt.naive": "new"},
    )
    assert (
        shown("prune", "--stale", "--kernel", "hopper.hilbert") == "0 trials and winners removed\n"
    )
    assert shown("prune", "--stale") == "1 trials and winners removed\n"
    text = shown("prune", "--compiled", "--older-than", "1h")
    assert text == "4 trials and winners removed\n0 compiled kernels removed, 0.0 MiB\n"
    assert shown("prune", "--compiled") == "2 compiled kernels removed, 0.0 MiB\n"
    assert not list((path.parent / "objects").glob("*.o"))


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
        (
            ("prune", "--kernel", "x", "--store", "/nowhere/x.sqlite"),
            "--store is '/nowhere/x.sqlite'",
        ),
        (("prune", "--older-than", "soon"), "--older-than is 'soon'"),
        (("prune", "--older-than", "99999w"), "expected a number from 0"),
    ],
)
def test_usage_errors(arguments: tuple[str, ...], message: str) -> None:
    assert message in refusal(*arguments)


def test_a_store_of_a_newer_version_is_a_usage_error(path: Path) -> None:
    sql(path, "PRAGMA user_version = 9")
    for arguments in (("ls",), ("show", "4096"), ("verify",), ("prune", "--kernel", "x")):
        assert "version 9" in refusal(*arguments)


def test_import_into_what_cannot_be_written_is_an_error(home: Path) -> None:
    file = home / "found.json"
    invoke("export", file)
    assert "lost when the process ends" in refusal("import", file, "--store", file / "x.sqlite")


# Names that others chose.

ESCAPES = (
    "\x1b[31mred\x1b]0;title\x07 \x9b2J \u202egnp.exe\u2066 \u200b \r\b [bold]b[/bold] \\[red]"
)
RAW = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069]")


@pytest.fixture
def foreign(home):
    """Results of a GPU and with reasons that no GPU and no compiler would have, imported."""
    gpu = dataclasses.replace(H200, name=f"GPU {ESCAPES}", driver=ESCAPES)
    file = home / "foreign.json"
    tried = [trial(0, gpu=gpu), failed(1, gpu=gpu, reason=ESCAPES)]
    transfer.export(tried, [winner(gpu=gpu, source=ESCAPES)], file)
    invoke("import", file)
    return file


@pytest.mark.parametrize(
    "arguments",
    [
        ("ls",),
        ("show", "4096"),
        ("show", "hopper.hilbert"),
        ("verify",),
        ("export", "--ship"),
    ],
    ids=" ".join,
)
def test_control_characters_are_shown_escaped(foreign, arguments) -> None:
    result = invoke(*arguments)
    assert not RAW.search(result.stdout.replace("\t", "")), result.stdout
    assert not RAW.search(result.stderr)
    if arguments[0] in ("ls", "show"):
        for piece in (
            r"\x1b[31mred\x1b]0;title\x07",
            r"\x9b2J",
            r"\u202egnp.exe\u2066",
            "[bold]b[/bold]",
            r"\[red]",
        ):
            assert piece in result.stdout.replace("\n", "")


def test_control_characters_in_json_are_escapes(foreign) -> None:
    text = shown("ls", "--json")
    assert not RAW.search(text)
    assert {row["gpu"] for row in json.loads(text)["rows"]} >= {f"GPU {ESCAPES}"}
    assert json.loads(shown("show", "4096", "--json"))[-1]["gpu"]["driver"] in (
        ESCAPES,
        H100.driver,
    )


def test_control_characters_in_problems_and_paths(home: Path, path: Path) -> None:
    sql(path, "UPDATE trials SET layout = 'x' || char(27) || '[31m' WHERE id = 1")
    text = shown("verify", code=1)
    assert not RAW.search(text)
    assert r"\x1b[31m" in text
    odd = home / "odd\x1b[31m\u202e.json"
    odd.write_text("{}")
    text = shown("verify", odd, code=1)
    assert not RAW.search(text)
    assert r"odd\x1b[31m\u202e.json" in text
    assert not RAW.search(invoke("import", odd, code=2).stderr)
    assert not RAW.search(invoke("ls", "--store", home / "no\x1b[31m.sqlite", code=2).stderr)


def test_notes_and_tables_escape_what_they_are_given(capsys: pytest.CaptureFixture[str]) -> None:
    common.note(ESCAPES)
    common.table(ESCAPES, [ESCAPES], [[ESCAPES]])
    common.say(f"{ESCAPES}\nsecond line")
    text = capsys.readouterr().out
    assert not RAW.search(text)
    assert "\nsecond line" in text
    assert common.printable("µs × 4–8 ✓ 日本 é\u00a0 \t\n") == "µs × 4–8 ✓ 日本 é\u00a0 \\t\\n"
    assert common.printable("\udcff\U000e0001") == r"\udcff\U000e0001"


# Many results.


@pytest.fixture
def many(path) -> None:
    with Store(path) as store:
        for i in range(150):
            store.merge([trial(j, workload=Workload(16 + i, 16, 16)) for j in range(2)], [])


def test_the_first_are_shown_unless_more_are_asked_for(many: None) -> None:
    text = shown("show", "hopper.hilbert")
    assert "100 of 303 trials; --limit shows more" in text
    assert "303 of 303 trials" in shown("show", "hopper.hilbert", "--limit", 1000)
    assert len(json.loads(shown("show", "hopper.hilbert", "--json"))) == 303
    assert len(json.loads(shown("show", "hopper.hilbert", "--json", "--limit", 7))) == 7
    assert "100 of 152 sweeps; --limit shows more" in shown("ls")
    assert "152 sweeps" in shown("ls", "--limit", 1000)
    assert len(json.loads(shown("ls", "--json"))["rows"]) == 152


def test_a_listing_loads_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """DSLs take seconds to import."""
    monkeypatch.setattr(registry, "load", lambda name: pytest.fail(f"{name} is loaded"))
    assert "sms=2" in shown("ls")
    assert "sms=1" in shown("show", "4096")


@pytest.mark.parametrize("kernel", [kernel.name for kernel in registry.ladder()])
def test_defaults_are_read_from_the_source(kernel) -> None:
    try:
        module = registry.load(kernel)
    except ImportError as error:
        pytest.skip(str(error))
    own = configs.to_text(module.Config())
    assert config_source.brief(kernel, own) == ""
    name, value = configs.items(own)[0]
    assert (
        config_source.brief(kernel, own.replace(f"{name}={value}", f"{name}=7", 1)) == f"{name}=7"
    )
    assert config_source.brief(kernel, f"{own},unheard_of=1") == f"{own},unheard_of=1"
    assert config_source.brief("no.kernel", own) == own


# Tables that ship.


def test_results_of_the_interpreter_are_not_shipped(home: Path) -> None:
    with Store() as store:
        store.record_best(winner(gpu=Gpu("CPU, interpreted, x86_64", 0, 0)))
    result = invoke("export", "--ship")
    assert "1 winners of the interpreter are left out" in result.stderr
    assert [path.name for path in (home / "tables").iterdir()] == ["NVIDIA_H100_80GB_HBM3.json"]
    assert result.stdout.endswith("1 winners\n")
    with pytest.raises(
        ValueError,
        match=r"winners\[0\] is of CPU, interpreted, x86_64, expected one that was measured",
    ):
        ship([winner(gpu=Gpu("CPU, interpreted, x86_64", 0, 0))], home)


def test_an_installed_package_is_not_written_to(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = home / "site-packages" / "outblas" / "autotune" / "store" / "tables.py"
    monkeypatch.setattr(tables, "__file__", str(installed))
    assert "belong to an installed package, expected a FOLDER" in refusal("export", "--ship")
    assert not (home / "tables").exists()
    invoke("export", home / "named", "--ship")
    assert list((home / "named").iterdir())


def test_kernels_and_shapes_of_an_export_are_chosen_in_the_store(home: Path) -> None:
    file = home / "found.json"
    assert "1 trials, 0 winners" in shown(
        "export", file, "--kernels", "simt.naive", "--shapes", "16x4096x4096"
    )
    assert transfer.read(file)[0][0].kernel == "simt.naive"
    assert "0 trials, 0 winners" in shown(
        "export", file, "--kernels", "simt.naive", "--shapes", "512"
    )
