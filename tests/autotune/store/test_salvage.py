"""What is carried from a damaged file to a fresh one."""

import contextlib
import random
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.stored import damage, fill, set_aside, silent, sql, trial, warned, winner

from outblas.autotune.store import salvage, sqlite
from outblas.autotune.store.records import Trial
from outblas.autotune.store.store import Store

PAGE = 4096


# Damage of every kind.

STORED = [trial(i) for i in range(200)]


@dataclass(frozen=True)
class Salvaged:
    """What became of a store of `STORED` that was damaged in some way, `what`.

    `at_once`: what was read when it was opened. `found`: what was read once a trial was added.
    `later`: what others read afterwards, to read and to write.
    """

    what: str
    at_once: list[Trial]
    found: list[Trial]
    persistent: bool
    later: list[list[Trial]]
    warnings: list[str | None]

    @property
    def kept(self) -> float:
        """The share of the trials that is left."""
        return len(set(STORED) & set(self.found)) / len(STORED)


ADDED = trial(1000)


@pytest.fixture(scope="module")
def salvaged(tmp_path_factory: pytest.TempPathFactory) -> list[Salvaged]:
    """Twenty damaged stores that were opened, added to and read again. `make chaos` has more."""
    folder = tmp_path_factory.mktemp("damaged")
    sound = folder / "sound.sqlite"
    with Store(sound) as store:
        store.merge(STORED, [winner()])
    found = []
    for seed in range(1, 21):
        path = folder / str(seed) / "tuning.sqlite"
        path.parent.mkdir()
        path.write_bytes(sound.read_bytes())
        what = f"seed {seed}: {damage(path, random.Random(seed))}"
        found.append(salvage_and_read(path, what))
    return found


def salvage_and_read(path: Path, what: str) -> Salvaged:
    with silent(), Store(path) as store:
        at_once = store.trials()
        assert store.add(ADDED), what
        found = store.trials()
        persistent = store.persistent
        store.winners()
    later, warnings = [], []
    for read_only in (True, False):
        with Store(path, read_only=read_only) as store:
            later.append(store.trials())
            warnings.append(store.warning)
    return Salvaged(what, at_once, found, persistent, later, warnings)


def test_a_damaged_store_keeps_what_it_had_and_what_is_added(salvaged: list[Salvaged]) -> None:
    """More may be found later, if it was the GPU that could not be read."""
    lost = [each.what for each in salvaged if not {*each.at_once, ADDED} <= set(each.found)]

    assert lost == []


def test_a_damaged_store_is_written_to_a_file_again(salvaged: list[Salvaged]) -> None:
    assert [each.what for each in salvaged if not each.persistent] == []


def test_no_trial_is_invented_where_pages_are_lost(salvaged: list[Salvaged]) -> None:
    """A changed byte may be in a figure of a row without a checksum."""
    invented = [each.what for each in salvaged if set(each.found) - {*STORED, ADDED}]

    assert [what for what in invented if "byte" not in what] == []


def test_a_salvaged_store_is_sound_for_others(salvaged: list[Salvaged]) -> None:
    assert [each.what for each in salvaged if each.warnings != [None, None]] == []
    assert [each.what for each in salvaged if each.later != [each.found, each.found]] == []


def test_most_trials_survive_damage(salvaged: list[Salvaged]) -> None:
    assert sum(each.kept for each in salvaged) / len(salvaged) > 0.5


# Damage of one part.


def leaves(data: bytes, page: int) -> Iterator[int]:
    """The numbers of the pages below this one that hold a table's rows, in their order.

    A page begins with its kind (13: rows), the number of its cells at byte 3, and in a page of
    links the last child at byte 8 and the places of its cells from byte 12 on, each of which begins
    with a child.
    """
    content = data[(page - 1) * PAGE : page * PAGE]
    if content[0] == 13:
        yield page
        return
    for cell in range(int.from_bytes(content[3:5], "big")):
        place = int.from_bytes(content[12 + 2 * cell : 14 + 2 * cell], "big")
        yield from leaves(data, int.from_bytes(content[place : place + 4], "big"))
    yield from leaves(data, int.from_bytes(content[8:12], "big"))


def pages_of_trials(path: Path) -> list[int]:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        query = "SELECT rootpage FROM sqlite_master WHERE name = 'trials'"
        (root,) = connection.execute(query).fetchone()
    return list(leaves(path.read_bytes(), root))


def test_rows_around_a_damaged_page_are_carried(path: Path) -> None:
    with Store(path) as store:
        store.merge([trial(i) for i in range(2000)], [])
    pages = pages_of_trials(path)
    assert len(pages) > 50
    with path.open("r+b") as file:
        for page in (pages[10], pages[30]):
            file.seek((page - 1) * PAGE)
            file.write(b"\xa5" * PAGE)

    with silent(), Store(path) as store:
        found = store.trials()

        assert 2000 - 2 * 40 < len(found) < 2000  # no page has 40 rows
        assert f"with the {len(found)} trials" in str(store.warning)
        assert store.verify() == [store.warning]


def test_trials_whose_gpu_cannot_be_read_come_back_with_its_next_result(path: Path) -> None:
    fill(path, 50)
    sql(path, "DELETE FROM gpus", "DROP TABLE leases")

    with silent(), Store(path) as store:
        assert "with the 50 trials and 1 winners" in str(store.warning)
        assert store.trials() == []
        assert store.add(trial(50))
        assert len(store.trials()) == 51


def test_altered_rows_are_not_carried(path: Path) -> None:
    fill(path, 5)
    sql(path, "UPDATE trials SET us = us * 2 WHERE id = 3")

    with (
        contextlib.closing(sqlite3.connect(path)) as source,
        contextlib.closing(sqlite.empty()) as target,
    ):
        source.row_factory = sqlite3.Row
        carried = salvage.carry(source, target)

    assert carried.trials == 4


@pytest.mark.parametrize(
    "offset",
    [
        pytest.param(0, id="the name of the format"),
        pytest.param(16, id="the size of a page, upper byte"),
        pytest.param(17, id="the size of a page, lower byte"),
        pytest.param(18, id="the version for writers"),
        pytest.param(19, id="the version for readers"),
        pytest.param(21, id="the largest payload"),
        pytest.param(47, id="the format of the schema"),
    ],
)
def test_a_header_that_sqlite_refuses_costs_no_row(
    path: Path, offset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(path.parent))
    fill(path, 50)
    content = bytearray(path.read_bytes())
    content[offset] ^= 0x55
    path.write_bytes(content)

    with warned("is damaged", path) as store:
        assert store.persistent
        assert store.trials() == [trial(i) for i in range(50)]
        assert store.add(trial(50))


# Salvages that are not completed.


@pytest.fixture
def ended(path: Path) -> Path:
    """The path of a store of 50 trials and a winner whose salvage was ended between its steps: the
    file was set aside, and nothing carried.
    """
    fill(path, 50)
    path.rename(path.with_name(f"{path.name}.salvaging"))
    return path


def test_a_salvage_that_was_ended_is_done_by_the_next(ended: Path) -> None:
    done = "the process that set it aside ended .* with the 50 trials and 1 winners"

    with warned(done, ended) as store:
        assert len(store.trials()) == 50

    assert len(set_aside(ended)) == 1


def test_a_salvage_is_done_once(ended: Path) -> None:
    warned("the process that set it aside ended", ended).close()

    with Store(ended) as store:
        assert store.warning is None
        assert len(store.trials()) == 50


def test_a_salvage_without_room_is_done_when_there_is_some(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(path, 50)
    sql(path, "DROP TABLE leases")

    def refuse(source: sqlite3.Connection, target: sqlite3.Connection) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(salvage, "carry", refuse)
        with warned("is full.*, which is tried again when the store is next opened", path) as store:
            assert store.persistent
            assert store.add(trial(100))

    with warned("with the 50 trials and 1 winners", path) as store:
        assert len(store.trials()) == 51


def test_what_is_newer_than_the_damaged_file_stays(path: Path) -> None:
    fill(path, 3)
    path.rename(path.with_name(f"{path.name}.salvaging"))
    with silent(), Store(path.with_name("other")) as other:
        other.add(trial(0, us=7.0))
    path.with_name("other").rename(path)

    with silent(), Store(path) as store:
        assert {each.us for each in store.trials()} == {7.0, 101.0, 102.0}
