"""Stores in folders of groups and of other users, as root and as an ordinary user."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.stored import BARE, kept, trial

from outblas.autotune.store import transfer
from outblas.autotune.store.store import Store

USER, GROUP = 54321, 54322
only_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")

# Adds a trial to each of several stores and says what came of it, until one is not persistent. All
# is imported first, also the encoding with which filelock 4.3 reads a file: another user may not be
# able to read the place where Python is installed.
AS_USER = f"""{BARE}
import encodings.ascii, os, warnings
from pathlib import Path
import filelock
from outblas.autotune.store import listing, places, salvage
from outblas.autotune.store.store import Store, StoreError
from outblas.autotune.store.transfer import read
warnings.simplefilter("ignore")
uid, trials = int(sys.argv[1]), read(Path(sys.argv[2]))[0]
if uid:
    os.setgroups([])
    os.setgid({GROUP})
    os.setuid(uid)
os.umask(0o002)
for path, trial in zip(sys.argv[3:], trials, strict=True):
    with Store(Path(path)) as store:
        try:
            store.check_persistent()
        except StoreError as error:
            print(error)
            sys.exit(3)
        print(store.persistent, store.add(trial), store.warning)
"""
KEPT = "True True None"


def added(*paths: Path, uid: int = 0, first: int = 0) -> list[str]:
    """What a process of this user says of each store, to which it adds a trial: `KEPT`, or why it
    can keep none. The trials are numbered from `first`.
    """
    file = Path(os.environ["OUTBLAS_CACHE_DIR"]) / "to_add.json"
    transfer.export([trial(first + i) for i in range(len(paths))], [], file)
    command = [sys.executable, "-c", AS_USER, str(uid), str(file), *map(str, paths)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode in (0, 3), run.stderr
    lines = run.stdout.splitlines()
    assert (run.returncode == 0) == (lines == [KEPT] * len(paths)), run.stdout
    return lines


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can reach, as those of pytest are not."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@dataclass(frozen=True)
class User:
    """A user to be, 0 for this one, and a folder of theirs."""

    uid: int
    folder: Path


@pytest.fixture(params=["as this user", "as an ordinary user"])
def user(request: pytest.FixtureRequest, open_folder: Path) -> User:
    """This user, and one who is not root where this one is."""
    folder = open_folder / "theirs"
    folder.mkdir()
    if request.param == "as this user":
        return User(0, folder)
    if os.getuid() != 0:
        pytest.skip("only root can be another")
    os.chown(folder, USER, GROUP)
    return User(USER, folder)


@pytest.mark.parametrize("mode", [0o700, 0o775, 0o2775], ids=oct)
def test_a_store_in_a_folder_that_a_group_can_write_keeps_results(user: User, mode: int) -> None:
    user.folder.chmod(mode)
    path, below = user.folder / "s.sqlite", user.folder / "made" / "by it" / "s.sqlite"

    assert added(path, below, path, below, uid=user.uid) == [KEPT] * 4

    with Store(path, read_only=True) as store:
        assert store.trials() == [trial(0), trial(2)]


def test_a_folder_that_anybody_can_write_is_refused(user: User) -> None:
    user.folder.chmod(0o777)

    (said,) = added(user.folder / "s.sqlite", uid=user.uid)

    assert re.search(r"theirs can be written by others; .* lost when the process ends", said)
    assert not list(user.folder.iterdir())


def test_a_sticky_folder_of_all_takes_a_store_of_ones_own(user: User) -> None:
    user.folder.chmod(0o1777)

    assert added(user.folder / "s.sqlite", uid=user.uid) == [KEPT]


@only_root
def test_a_sticky_folder_of_all_takes_no_store_of_another_user(user: User) -> None:
    user.folder.chmod(0o1777)
    path = user.folder / "s.sqlite"
    with Store(path) as store:
        store.add(trial())
    for each in user.folder.glob("s.sqlite*"):
        os.chown(each, USER + 1, GROUP)

    (said,) = added(path, uid=user.uid)

    assert "belongs to another user, in a folder that can be written by others" in said


@only_root
def test_members_of_a_group_share_a_store(open_folder: Path) -> None:
    folder = open_folder / "shared"
    folder.mkdir()
    os.chown(folder, 0, GROUP)
    folder.chmod(0o2775)
    path = folder / "s.sqlite"

    first = added(path, uid=USER)
    for each in folder.glob("s.sqlite*"):
        each.chmod(0o664)
    second = added(path, uid=USER + 1, first=1)

    assert first == second == [KEPT]
    assert len(kept(path, read_only=True)) == 2


@only_root
def test_a_folder_that_cannot_be_looked_into_is_refused(open_folder: Path) -> None:
    folder = open_folder / "roots"
    folder.mkdir(mode=0o700)

    (said,) = added(folder / "s.sqlite", uid=USER)

    assert "Permission denied" in said


def test_a_read_only_file_is_said_before_anything_is_measured(user: User) -> None:
    if user.uid == os.getuid() == 0:
        pytest.skip("root writes in spite of modes")
    path = user.folder / "s.sqlite"
    with Store(path) as store:
        store.add(trial())
    for each in user.folder.glob("s.sqlite*"):
        os.chown(each, user.uid or os.getuid(), -1)
    path.chmod(0o444)

    (said,) = added(path, uid=user.uid)

    assert "readonly" in said
