"""`outblas cache` on a store."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from support import commands
from support.stored import H100, H200, OTHER, WORKLOAD, failed, sql, trial, winner

from outblas.autotune.search import target
from outblas.autotune.store import tables, transfer
from outblas.autotune.store.store import Store
from outblas.base import cache

pytestmark = pytest.mark.usefixtures("home")


def invoke(*arguments: object, code: int = 0) -> Result:
    """What came of `outblas cache` with these arguments, which exits with this code."""
    return commands.invoke("cache", *arguments, code=code)


def shown(*arguments: object, code: int = 0) -> str:
    """What `outblas cache` prints on standard output."""
    return invoke(*arguments, code=code).stdout


def parsed(*arguments: object) -> Any:
    """What `outblas cache` prints with `--json`, read."""
    return json.loads(shown(*arguments, "--json"))


def refused(message: str, *arguments: object) -> None:
    """`outblas cache` refuses these arguments with this message."""
    commands.refuses(message, "cache", *arguments)


@pytest.fixture(scope="session")
def cache_to_copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with four trials of two kernels, a winner and two compiled kernels."""
    folder = tmp_path_factory.mktemp("cache_to_copy") / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTBLAS_CACHE_DIR", str(folder))
        with Store() as store:
            store.add(trial(0))
            store.add(failed(1))
            store.add(trial(2, us=90.0))
            store.add(trial(3, workload=OTHER, gpu=H200, kernel="simt.naive"))
            store.record_best(winner(config="tile_m=128,sms=2"))
        for i in range(2):
            cache.fetch({"i": i}, build=lambda: "x", save=_save, load=bytes.decode)
    return folder


def _save(text: str, at: Path) -> None:
    at.write_text(text)


@pytest.fixture
def home(cache_to_copy: Path, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose `cache` has the results and the compiled kernels of `cache_to_copy`, and whose
    `tables` is to have the tables that ship; a store is at `path`.
    """
    shutil.copytree(cache_to_copy, path.parent)
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(path.parent))
    monkeypatch.setattr(tables, "TABLES", tmp_path / "tables")
    return tmp_path


# Listings.


def test_a_listing_has_a_row_for_each_gpu_kernel_and_workload(path: Path) -> None:
    report, text = parsed("ls"), shown("ls")

    assert report["store"] == str(path)
    assert report["compiled"]["objects"] == 2
    first, second = report["rows"]
    assert (first["gpu"], first["kernel"]) == (H100.name, "hopper.hilbert")
    assert first["workload"] == dataclasses.asdict(WORKLOAD)
    assert (first["trials"], first["ok"], first["failed"], first["best_us"]) == (3, 2, 1, 90.0)
    assert first["winner"]["ratio"] == 1.047
    assert second["winner"] is None
    for shown_text in (
        "NVIDIA H100 80GB HBM3",
        "16x4096x4096 float16 to float32 nn",
        "sms=2",
        "Compiled kernels: 2, 0.0 MiB",
    ):
        assert shown_text in text


def test_a_listing_of_nothing_makes_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(home / "nothing"))

    assert "no results" in shown("ls")
    assert not (home / "nothing").exists()


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        (("4096",), "3 of 3 trials"),
        (("simt.naive",), "1 of 1 trials"),
        (("simt.naive", "512"), "0 of 0 trials"),
        (("simt.naive", "hopper.hilbert", "4096,16x4096x4096"), "4 of 4 trials"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_trials_are_shown_of_kernels_and_shapes(arguments: tuple[str, ...], count: str) -> None:
    assert count in shown("show", *arguments)


def test_the_fastest_trials_are_the_first_and_those_that_failed_have_a_reason() -> None:
    records = parsed("show", "hopper.hilbert", "--limit", 2)

    assert [record["us"] for record in records] == [90.0, 100.0]
    assert records[0]["gpu"]["name"] == H100.name
    assert "not done in 30 s" in shown("show", "4096")


# Exports and imports.


@pytest.fixture
def file(home: Path) -> Path:
    """An export of the store."""
    file = home / "found.json"
    assert shown("export", file) == "4 trials, 1 winners\n"
    return file


def test_what_is_exported_can_be_imported_once(home: Path, file: Path) -> None:
    elsewhere = home / "other" / "tuning.sqlite"

    first, again = (shown("import", file, "--store", elsewhere) for _ in range(2))

    assert "4 new trials, 1 new winners" in first
    assert "0 new trials, 0 new winners" in again
    with Store() as here, Store(elsewhere) as there:
        assert there.trials() == here.trials()
        assert there.winners() == here.winners()


# Checks.


def test_results_compiled_kernels_and_tables_are_checked(home: Path, path: Path) -> None:
    (home / "tables").mkdir()
    sql(path, "UPDATE trials SET record = replace(record, '\"M\": 4096', '\"M\": -1') WHERE id = 1")
    next((path.parent / "objects").glob("*.o")).write_text("y")
    (home / "tables" / "bad.json").write_text("{}")

    of_trial, of_kernel, of_table = shown("verify", code=1).splitlines()

    assert "row 1: M is -1, expected an integer" in of_trial
    assert ".o" in of_kernel
    assert "bad.json" in of_table


def test_an_export_that_was_cut_off_is_a_problem(file: Path) -> None:
    invoke("verify", file)
    file.write_text(file.read_text()[:-10])

    assert "not JSON" in shown("verify", file, code=1)


def test_a_damaged_store_is_a_problem_and_left_as_it_is(path: Path) -> None:
    path.write_text("garbage" * 1000)

    assert "file is not a database" in shown("verify", code=1)
    refused("file is not a database", "ls")
    assert path.read_text() == "garbage" * 1000


def test_a_damaged_store_is_put_aside_by_what_writes_to_it(path: Path, file: Path) -> None:
    path.write_text("garbage" * 1000)

    result = invoke("import", file)

    assert "is damaged (file is not a database): it was renamed to" in result.stderr
    assert result.stdout == "4 new trials, 1 new winners\n"


# Pruning.


def test_results_of_older_sources_alone_are_removed(path: Path) -> None:
    with Store(path) as store:
        store.add(trial(source=target.of("hopper.hilbert").fingerprint))

    assert shown("prune", "--stale", "--kernel", "hopper.hilbert") == (
        "4 trials and winners removed\n"
    )
    assert shown("prune", "--stale", "--kernel", "hopper.hilbert") == (
        "0 trials and winners removed\n"
    )


def test_old_results_are_removed_and_new_compiled_kernels_kept() -> None:
    removed = shown("prune", "--compiled", "--older-than", "1h")

    assert removed == "5 trials and winners removed\n0 compiled kernels removed, 0.0 MiB\n"


@pytest.mark.parametrize(
    "options",
    [
        ("--older-than", "30d"),
        ("--kernel", "hopper.hilbert"),
        ("--kernel", "portable"),
        ("--compiled",),
    ],
    ids=" ".join,
)
def test_what_was_counted_is_what_goes(options: tuple[str, ...]) -> None:
    counted = shown("prune", *options, "--dry-run")

    assert shown("prune", *options) == counted.replace("would be removed", "removed")


def test_results_of_kernels_that_are_not_here_stay(path: Path) -> None:
    with Store(path) as store:
        store.add(trial(kernel="nothing.here"))

    result = invoke("prune", "--stale")

    assert result.stdout == "5 trials and winners removed\n"
    assert "The source of nothing.here is not installed here" in result.stderr


# Arguments.


def test_the_winner_of_a_shape_is_marked(path: Path) -> None:
    with Store(path) as store:
        store.record_best(winner(config=trial(2).config))

    (row,) = [line for line in shown("show", "4096").splitlines() if " winner " in line]
    assert "sms=2" in row


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("show", "nothing"), "kernel is 'nothing'"),
        (("show", "4x4"), "MxNxK is '4x4'"),
        (("show", "\udcff"), "kernel is"),
        (("ls", "--store", "/nowhere/x.sqlite"), "--store is '/nowhere/x.sqlite'"),
        (("export", "/nowhere/x.json"), "FILE is '/nowhere/x.json'"),
        (("import", "/nowhere/x.json"), "/nowhere/x.json: No such file"),
        (("prune",), "expected at least one of"),
        (("prune", "--stale", "--store", "/nowhere/x"), "--store is '/nowhere/x', expected a file"),
        (("prune", "--older-than", "soon"), "--older-than is 'soon'"),
        (("prune", "--older-than", "99999w"), "expected a number from 0"),
    ],
)
def test_a_bad_argument_is_refused_by_its_name(arguments: tuple[str, ...], message: str) -> None:
    refused(message, *arguments)


@pytest.mark.parametrize("line", ["ls", "show 4096", "verify", "prune --kernel x"])
def test_a_store_of_a_newer_version_is_refused(path: Path, line: str) -> None:
    sql(path, "PRAGMA user_version = 9")

    refused("version 9", *line.split())


# Names that others chose.

ESCAPES = (
    "\x1b[31mred\x1b]0;title\x07 \x9b2J \u202egnp.exe\u2066 \u200b \r\b [bold]b[/bold] \\[red]"
)
RAW = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069]")


@pytest.fixture
def foreign(home: Path) -> None:
    """Results of a GPU and with reasons that no GPU and no compiler would have, imported."""
    gpu = dataclasses.replace(H200, name=f"GPU {ESCAPES}", driver=ESCAPES)
    file = home / "foreign.json"
    tried = [trial(0, gpu=gpu), failed(1, gpu=gpu, reason=ESCAPES)]
    transfer.write(file, tried, [winner(gpu=gpu, source=ESCAPES)])
    invoke("import", file)


@pytest.mark.usefixtures("foreign")
@pytest.mark.parametrize("line", ["ls", "show 4096", "verify"])
def test_no_control_character_reaches_the_terminal(line: str) -> None:
    result = invoke(*line.split())

    assert not RAW.search(result.stdout.replace("\t", "")), result.stdout
    assert not RAW.search(result.stderr), result.stderr


def test_control_characters_in_problems_are_shown_escaped(home: Path, path: Path) -> None:
    sql(
        path, "UPDATE trials SET record = replace(record, '\"nt\"', '\"\\u001b[31m\"') WHERE id = 1"
    )
    odd = home / "odd\x1b[31m\u202e.json"
    odd.write_text("{}")

    for arguments, part in (([], r"\x1b[31m"), ([odd], r"odd\x1b[31m\u202e.json")):
        text = shown("verify", *arguments, code=1)
        assert not RAW.search(text)
        assert part in text
    assert not RAW.search(invoke("import", odd, code=2).stderr)
    assert not RAW.search(invoke("ls", "--store", home / "no\x1b[31m.sqlite", code=2).stderr)
