"""`outblas cache` on a store."""

import dataclasses
from pathlib import Path

import pytest
from support.cache_command import invoke, parsed, refused, shown
from support.stored import H100, INTERPRETED, WORKLOAD, sql, trial, winner

from outblas.autotune.store import tables, transfer
from outblas.autotune.store.store import Store
from outblas.autotune.store.tables import read_table, ship
from outblas.cli import cache as command

pytest_plugins = ("support.cached",)
pytestmark = pytest.mark.usefixtures("home")


# Listings.


@pytest.mark.parametrize(
    "text",
    [
        "NVIDIA H100 80GB HBM3",
        "NVIDIA H200",
        "4096 bfloat16 nt",
        "16x4096x4096 float16 to float32 nn",
        "Compiled kernels: 2, 0.0 MiB",
    ],
)
def test_a_listing_names_gpus_workloads_and_compiled_kernels(text: str) -> None:
    assert text in shown("ls")


def test_a_listing_says_where_results_and_compiled_kernels_are(path: Path) -> None:
    report = parsed("ls")

    assert report["store"] == str(path)
    assert report["compiled"] == {"objects": 2, "bytes": 2}


def test_a_listing_counts_the_trials_of_a_sweep() -> None:
    (found, _) = parsed("ls")["rows"]

    assert (found["kernel"], found["workload"]) == ("hopper.hilbert", dataclasses.asdict(WORKLOAD))
    assert (found["trials"], found["ok"], found["failed"]) == (3, 2, 1)


def test_a_listing_has_the_best_and_the_winner_of_a_sweep() -> None:
    found, unfinished = parsed("ls")["rows"]

    assert found["best_us"] == 90.0
    assert found["winner"]["ratio"] == 1.047
    assert unfinished["winner"] is None


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
        (("4096", "--dtype", "float16"), "0 of 0 trials"),
        (("16x4096x4096", "--layout", "nn"), "1 of 1 trials"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_trials_are_shown_of_a_kernel_a_shape_a_dtype_and_a_layout(
    arguments: tuple[str, ...], count: str
) -> None:
    assert count in shown("show", *arguments)


def test_a_trial_is_shown_with_why_it_failed() -> None:
    assert "not done in 30 s" in shown("show", "4096")


def test_the_fastest_trials_are_the_first() -> None:
    records = parsed("show", "hopper.hilbert", "--limit", 2)

    assert [record["us"] for record in records] == [90.0, 100.0]
    assert records[0]["gpu"]["name"] == H100.name


def test_ratios_of_the_interpreter_are_not_listed(home: Path) -> None:
    elsewhere = home / "cpu.sqlite"
    with Store(elsewhere) as store:
        store.merge(
            [trial(gpu=INTERPRETED, ratio=0.123)], [winner(gpu=INTERPRETED, ratio=0.321, us=7.5)]
        )

    listed, tried = (shown(*line, "--store", elsewhere) for line in (("ls",), ("show", "4096")))

    assert "7.50" in listed
    assert "0.321" not in listed
    assert "0.123" not in tried


# Exports and imports.


def test_what_is_exported_can_be_imported_once(home: Path) -> None:
    file, elsewhere = home / "found.json", home / "other" / "tuning.sqlite"

    exported = shown("export", file)
    first, again = (shown("import", file, "--store", elsewhere) for _ in range(2))

    assert "4 trials, 1 winners" in exported
    assert "4 new trials, 1 new winners" in first
    assert "0 new trials, 0 new winners" in again
    with Store() as here, Store(elsewhere) as there:
        assert there.trials() == here.trials()
        assert there.winners() == here.winners()


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        ("--kernels simt.naive", "1 trials, 0 winners"),
        ("--shapes 4096", "3 trials, 1 winners"),
        ("--kernels simt.naive --shapes 16x4096x4096", "1 trials, 0 winners"),
        ("--kernels simt.naive --shapes 512", "0 trials, 0 winners"),
    ],
)
def test_kernels_and_shapes_of_an_export_can_be_chosen(
    home: Path, options: str, counts: str
) -> None:
    assert counts in shown("export", home / "found.json", *options.split())


def test_an_export_of_a_kernel_has_its_trials(home: Path) -> None:
    file = home / "found.json"

    invoke("export", file, "--kernels", "simt.naive")

    trials, _ = transfer.read(file)
    assert [each.kernel for each in trials] == ["simt.naive"]


def test_a_file_that_was_changed_is_not_imported(home: Path) -> None:
    file = home / "found.json"
    invoke("export", file)
    file.write_text(file.read_text().replace("4096", "4097"))

    refused("sha256 is", "import", file)


def test_an_import_into_what_cannot_be_written_is_refused(home: Path) -> None:
    file = home / "found.json"
    invoke("export", file)

    refused("lost when the process ends", "import", file, "--store", file / "x.sqlite")


# Tables that ship.


def test_winners_are_shipped_in_a_table_of_their_gpu(home: Path) -> None:
    invoke("export", "--ship")

    (path,) = (home / "tables").iterdir()
    (entry,) = read_table(path).entries
    assert path.name == "NVIDIA_H100_80GB_HBM3.json"
    assert entry.workload == WORKLOAD
    # The whole text where the kernel cannot be loaded.
    assert entry.config in ("sms=2", "tile_m=128,sms=2")


def test_tables_are_shipped_to_a_folder_that_is_named(home: Path) -> None:
    invoke("export", home / "folder", "--ship")

    assert [path.name for path in (home / "folder").iterdir()] == ["NVIDIA_H100_80GB_HBM3.json"]


def test_a_store_that_has_winners_of_the_interpreter_alone_is_not_shipped(home: Path) -> None:
    elsewhere = home / "cpu.sqlite"
    with Store(elsewhere) as store:
        store.record_best(winner(gpu=INTERPRETED))

    refused(
        "--ship needs winners that were measured on a GPU, and all 1 were measured by Triton's",
        "export",
        "--ship",
        "--store",
        elsewhere,
    )

    assert not (home / "tables").exists()


def test_results_of_the_interpreter_are_left_out_of_tables(home: Path) -> None:
    with Store() as store:
        store.record_best(winner(gpu=INTERPRETED))

    result = invoke("export", "--ship")

    assert "1 winners are left out: Triton's interpreter measured them" in result.stderr
    assert [path.name for path in (home / "tables").iterdir()] == ["NVIDIA_H100_80GB_HBM3.json"]
    assert result.stdout.endswith("1 winners\n")


def test_a_winner_of_the_interpreter_cannot_be_shipped(home: Path) -> None:
    message = r"winners\[0\] was measured on CPU, interpreted, x86_64, expected a winner of a GPU"

    with pytest.raises(ValueError, match=message):
        ship([winner(gpu=INTERPRETED)], home)


def test_an_installed_package_is_not_written_to(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = home / "site-packages" / "outblas" / "autotune" / "store" / "tables.py"
    monkeypatch.setattr(tables, "__file__", str(installed))

    refused("belong to an installed package, expected a FOLDER", "export", "--ship")

    assert not (home / "tables").exists()


def test_an_installed_package_ships_to_a_folder_that_is_named(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = home / "site-packages" / "outblas" / "autotune" / "store" / "tables.py"
    monkeypatch.setattr(tables, "__file__", str(installed))

    invoke("export", home / "named", "--ship")

    assert list((home / "named").iterdir())


# Checks.


def test_a_cache_in_order_has_no_problems() -> None:
    invoke("export", "--ship")

    assert shown("verify") == "no problems\n"


def test_results_compiled_kernels_and_tables_are_checked(home: Path, path: Path) -> None:
    invoke("export", "--ship")
    sql(path, "UPDATE trials SET us = -1 WHERE id = 1")
    next((path.parent / "objects").glob("*.o")).write_text("y")
    (home / "tables" / "bad.json").write_text("{}")

    of_trial, of_kernel, of_table = shown("verify", code=1).splitlines()

    assert "trials[1].us" in of_trial
    assert "checksum" in of_kernel
    assert "bad.json" in of_table


def test_an_export_can_be_checked(home: Path) -> None:
    file = home / "found.json"
    invoke("export", file)

    invoke("verify", file)


def test_an_export_that_was_cut_off_is_a_problem(home: Path) -> None:
    file = home / "found.json"
    invoke("export", file)
    file.write_text(file.read_text()[:-10])

    assert "not JSON" in shown("verify", file, code=1)


def test_a_damaged_store_is_a_problem_and_left_as_it_is(path: Path) -> None:
    path.write_text("garbage" * 1000)

    assert "cannot be read" in shown("verify", code=1)
    assert path.read_text().startswith("garbage")


def test_a_damaged_store_is_listed_with_a_warning(path: Path) -> None:
    path.write_text("garbage" * 1000)

    assert "cannot be read" in invoke("ls").stderr


# Pruning.


@pytest.fixture
def newer_naive(monkeypatch: pytest.MonkeyPatch) -> None:
    """The source of simt.naive has changed since it was tuned."""
    sources = {"simt.naive": "new"}
    monkeypatch.setattr(
        command, "fingerprints", lambda kernels: dict.fromkeys(kernels, "abc") | sources
    )


@pytest.mark.usefixtures("newer_naive")
def test_results_of_older_sources_are_removed() -> None:
    assert shown("prune", "--stale") == "1 trials and winners removed\n"


@pytest.mark.usefixtures("newer_naive")
def test_results_of_the_same_sources_are_kept() -> None:
    removed = shown("prune", "--stale", "--kernel", "hopper.hilbert")

    assert removed == "0 trials and winners removed\n"


def test_old_results_are_removed_and_new_compiled_kernels_kept() -> None:
    removed = shown("prune", "--compiled", "--older-than", "1h")

    assert removed == "5 trials and winners removed\n0 compiled kernels removed, 0.0 MiB\n"


def test_compiled_kernels_are_removed(path: Path) -> None:
    assert shown("prune", "--compiled") == "2 compiled kernels removed, 0.0 MiB\n"
    assert not list((path.parent / "objects").glob("*.o"))


def test_fingerprints_are_of_kernels_that_are_here(capsys: pytest.CaptureFixture[str]) -> None:
    found = command.fingerprints(["hopper.hilbert", "portable", "nothing.here"])

    assert sorted(found) == ["hopper.hilbert", "portable"]
    assert all(found.values())
    assert "The source of nothing.here is not installed here" in capsys.readouterr().err


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
        (("show", "4096", "--dtype", "int8"), "--dtype is 'int8'"),
        (("show", "4096", "--layout", "xy"), "--layout is 'xy'"),
        (("show", "\udcff"), "kernel is"),
        (("ls", "--store", "/nowhere/x.sqlite"), "--store is '/nowhere/x.sqlite'"),
        (("export",), "expected a FILE to write, or --ship"),
        (("export", "/nowhere/x.json"), "FILE is '/nowhere/x.json'"),
        (("export", "--shapes", "x", "f.json"), "--shapes is 'x'"),
        (("export", "--kernels", "nothing", "f.json"), "kernel is 'nothing'"),
        (("import", "/nowhere/x.json"), "/nowhere/x.json: No such file"),
        (("prune",), "expected at least one of"),
        (
            ("prune", "--kernel", "x", "--store", "/nowhere/x.sqlite"),
            "--store is '/nowhere/x.sqlite'",
        ),
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
