"""Stores where nothing can be written, and stores that are opened for reading only."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.disks import mounted_read_only, snapshot, unwritable
from support.stored import fill, kept, silent, trial, warned, winner

from outblas.autotune.store.store import Store, StoreError

# A file or folder that cannot be written.


@pytest.fixture(params=["file", "folder"])
def refused(path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A store of three trials and a winner whose file or folder cannot be written."""
    fill(path)
    with unwritable(path if request.param == "file" else path.parent):
        yield path


def test_what_cannot_be_written_is_read_all_the_same(refused: Path) -> None:
    with warned("lost when the process ends", refused) as store:
        assert store.trials() == [trial(0), trial(1), trial(2)]
        assert store.winners() == [winner()]


def test_what_is_added_where_nothing_can_be_written_is_kept_in_memory(refused: Path) -> None:
    with warned("lost when the process ends", refused) as store:
        assert store.in_memory
        assert store.add(trial(7))
        assert not store.add(trial(0))
        assert len(store.trials()) == 4


def test_what_cannot_be_written_stays_as_it_was(refused: Path) -> None:
    with warned("lost when the process ends", refused) as store:
        store.add(trial(7))

    assert kept(refused, read_only=True) == [trial(0), trial(1), trial(2)]


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_store_that_can_be_written_again_is_sound(path: Path, what: str) -> None:
    trials = fill(path)
    place = path if what == "file" else path.parent
    with unwritable(place), warned("lost when the process ends", path) as store:
        store.add(trial(7))

    assert kept(path) == trials


def test_a_copy_of_a_store_in_use_is_read_where_nothing_can_be_written(path: Path) -> None:
    """It lacks the shared memory of those who use the store: what is in the file proper is read."""
    fill(path)
    with Store(path) as store:
        store.add(trial(7))
        folder = path.parent.parent / "copy"
        shutil.copytree(path.parent, folder)
    (folder / "tuning.sqlite-shm").unlink()

    with unwritable(folder):
        assert len(kept(folder / path.name, read_only=True)) >= 3


def test_a_store_on_a_disk_that_is_mounted_for_reading_goes_on_in_memory(path: Path) -> None:
    trials = fill(path)

    with mounted_read_only(), warned("readonly", path) as store:
        assert store.in_memory
        assert store.trials() == trials
        assert store.add(trial(7))


# A place that cannot have a store.


@pytest.fixture
def below_a_file(path: Path) -> Path:
    """The path of a store below what is no folder but a file."""
    path.parent.write_text("")
    return path


def test_a_store_in_a_place_that_cannot_be_lives_in_memory(below_a_file: Path) -> None:
    with warned("lost when the process ends", below_a_file) as store:
        assert store.add(trial())
        assert store.trials() == [trial()]


def test_a_store_in_a_place_that_cannot_be_reads_as_empty(below_a_file: Path) -> None:
    with silent(), Store(below_a_file, read_only=True) as store:
        assert store.trials() == []


@pytest.fixture
def others_can_write(path: Path) -> None:
    """A store is at `path`, in a folder that all can write."""
    fill(path)
    path.parent.chmod(0o777)


@pytest.mark.usefixtures("others_can_write")
def test_a_place_that_is_not_used_is_warned_of_and_left_alone(path: Path) -> None:
    before = snapshot(path)

    with warned("can be written by others", path) as store:
        assert store.trials() == []
        assert store.add(trial())

    assert snapshot(path) == before


@pytest.mark.usefixtures("others_can_write")
def test_a_place_that_is_not_used_reads_as_empty(path: Path) -> None:
    before = snapshot(path)

    with warned("can be written by others", path, read_only=True) as store:
        assert store.trials() == []

    assert snapshot(path) == before


# Stores that are opened for reading only.


def test_reading_where_there_is_no_store_finds_nothing_and_makes_nothing(path: Path) -> None:
    with Store(path, read_only=True) as store:
        assert store.warning is None
        assert store.trials() == store.winners() == store.verify() == []

    assert not path.parent.exists()


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(lambda store: store.add(trial()), id="add"),
        pytest.param(lambda store: store.record_best(winner()), id="record_best"),
        pytest.param(lambda store: store.prune(kernel="x"), id="prune"),
    ],
)
def test_writing_to_what_was_opened_for_reading_is_an_error(
    path: Path, write: Callable[[Store], object]
) -> None:
    with Store(path, read_only=True) as store, pytest.raises(StoreError, match="for reading only"):
        write(store)


def test_reading_leaves_no_trace(path: Path) -> None:
    trials = fill(path)
    before = snapshot(path)

    found = kept(path, read_only=True)

    assert found == trials
    assert snapshot(path) == before


def test_a_reader_sees_each_trial_that_others_write(path: Path) -> None:
    with Store(path, read_only=True) as reader, Store(path) as writer:
        assert reader.trials() == []

        writer.add(trial(0))
        assert reader.trials() == [trial(0)]

        writer.add(trial(1))
        assert reader.trials() == [trial(0), trial(1)]


def test_a_reader_sees_what_others_wrote_after_they_are_gone(path: Path) -> None:
    with Store(path, read_only=True) as reader:
        for number in (0, 1):
            with Store(path) as writer:
                writer.add(trial(number))

            assert len(reader.trials()) == number + 1
