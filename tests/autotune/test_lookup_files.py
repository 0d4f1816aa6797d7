"""What a lookup makes of stores and tables that cannot be read."""

import json
import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.known import CONFIGS, H100, SQUARE, winner
from support.stored import sql

from outblas.autotune.lookup import TuningIndex
from outblas.autotune.store.store import Store
from outblas.autotune.store.tables import ship

NEAR = replace(SQUARE, M=2048)


def configs(known: TuningIndex) -> list[int]:
    """The numbers of the choices' configs."""
    return [CONFIGS.index(choice.config) for choice in known.choices(SQUARE)]


# Stores that cannot be read.


@pytest.fixture
def path(path: Path) -> Path:
    """The path of a store that has a winner."""
    with Store(path) as store:
        store.record_best(winner(3))
    return path


def read(store: Path) -> TuningIndex:
    """What is known from a store, and from the tables beside it."""
    return TuningIndex(H100, store, store.parent)


def be_garbage(path: Path) -> None:
    path.write_bytes(os.urandom(1 << 16))


def be_text(path: Path) -> None:
    path.write_text("no database at all " * 1000)


def be_half_a_store(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def be_of_another_program(path: Path) -> None:
    path.unlink()
    sql(path, "CREATE TABLE shopping (item)")


def be_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def be_of_a_newer_version(path: Path) -> None:
    sql(path, "PRAGMA user_version = 99")


def file_content(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


@pytest.mark.parametrize(
    "damage",
    [
        be_garbage,
        be_text,
        be_half_a_store,
        be_of_another_program,
        be_a_folder,
        be_of_a_newer_version,
    ],
)
def test_a_store_that_cannot_be_read_is_left_out_with_a_warning(
    path: Path, damage: Callable[[Path], None]
) -> None:
    damage(path)
    before = file_content(path)

    with pytest.warns(UserWarning, match="cannot be read|outblas cannot read its tuning store"):
        known = read(path)

    assert known.entries == known.choices(SQUARE) == ()
    assert file_content(path) == before


def test_a_store_that_this_user_may_not_read_is_left_out(path: Path) -> None:
    """Root may."""
    path.chmod(0)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        known = read(path)

    may_read = os.getuid() == 0
    assert len(known.entries) == may_read
    assert bool(caught) is not may_read


def test_a_link_to_nothing_is_a_store_that_is_not_there(path: Path) -> None:
    path.unlink()
    path.symlink_to("/nonexistent/store")

    assert read(path).entries == ()


def test_a_store_in_a_folder_that_cannot_be_written_is_read(path: Path) -> None:
    files = sorted(path.parent.iterdir())
    path.chmod(0o400)
    path.parent.chmod(0o500)

    try:
        assert configs(read(path)) == [3]
        assert sorted(path.parent.iterdir()) == files
    finally:
        path.parent.chmod(0o700)


def test_rows_that_are_no_winners_are_left_out(path: Path) -> None:
    with Store(path) as store:
        store.record_best(winner(1, workload=NEAR))
    sql(path, "UPDATE winners SET config = '; rm -rf /' WHERE M = 4096")

    assert [entry.workload for entry in read(path).entries] == [NEAR]


def test_a_winner_of_a_wrong_clock_does_not_count_as_the_newest(path: Path) -> None:
    """It is of another source, and no newer result replaces it."""
    with Store(path) as store:
        store.record_best(winner(1, source="old", when="2099-01-01T00:00:00+00:00"))

    assert configs(read(path)) == [3]


# Tables that cannot be read.


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[1, 2]", b"\xff\xfe", b'{"format": "outblas-table"}', b"[" * 100_000],
    ids=["empty", "no fields", "a list", "no UTF-8", "a format alone", "deeply nested"],
)
def test_tables_that_cannot_be_read_are_left_out(content: bytes, tmp_path: Path) -> None:
    ship([winner(1)], tmp_path)
    (tmp_path / "0.json").write_bytes(content)

    with pytest.warns(UserWarning, match=r"outblas ignores the tuning table 0\.json"):
        known = read(tmp_path / "no.sqlite")

    assert configs(known) == [1]


def test_tables_that_were_changed_are_left_out(tmp_path: Path) -> None:
    (path,) = ship([winner(1)], tmp_path)
    content = json.loads(path.read_text())
    content["entries"][0]["ratio_high"] = 9.0
    path.write_text(json.dumps(content))

    with pytest.warns(UserWarning, match="sha256"):
        known = read(tmp_path / "no.sqlite")

    assert known.entries == ()
