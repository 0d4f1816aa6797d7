"""What `--store`, OUTBLAS_CACHE_DIR and OUTBLAS_PACK may be pointed at: whatever it is, each entry
point ends at once with what it is to end with, and leaves it as it was.
"""

import functools
import os
import socket
import sqlite3
import stat
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.commands import invoke, squeezed
from support.stored import fill, sql
from support.users import as_user

from outblas.autotune.lookup import TuningIndex
from outblas.autotune.search.gpu import imagined
from outblas.autotune.store.store import Store, StoreError
from outblas.core import cache, pack
from outblas.runtime.packs import load_pack

SECONDS = 60.0  # for all entry points at one target
Outcome = tuple[str, str]  # "ok", the class of an error or an exit code; and the message
Entries = dict[str, Callable[[], object]]

# Targets.


def be_text(path: Path) -> None:
    path.write_text("127.0.0.1 localhost\n" * 500)
    path.chmod(0o640)


def be_a_link_to_text(path: Path) -> None:
    be_text(path.with_name("text"))
    path.symlink_to("text")


def be_of_another_program(path: Path) -> None:
    sql(path, "PRAGMA journal_mode = WAL", "CREATE TABLE cookies (x)", "PRAGMA user_version = 9")


def be_in_use_by_another_program(path: Path) -> None:
    """It was killed, and left its log and a row in it."""
    be_of_another_program(path)

    def write_and_die() -> None:
        sqlite3.connect(path, isolation_level=None).execute("INSERT INTO cookies VALUES (1)")
        os._exit(0)

    with pytest.raises(EOFError):
        as_user(os.geteuid(), write_and_die)


def be_without_tables(path: Path) -> None:
    sql(path, "VACUUM")


def be_a_store_without_its_header(path: Path) -> None:
    fill(path)
    path.write_bytes(bytes(100) + path.read_bytes()[100:])
    path.with_name(path.name + ".lock").unlink()


def be_a_socket(path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as listening:  # names of sockets are short
        listening.bind(f"/proc/self/fd/{folder}/{path.name}")
    os.close(folder)


def be_a_link_to_a_fifo(path: Path) -> None:
    os.mkfifo(path.with_name("fifo"))
    path.symlink_to("fifo")


def be_a_loop(path: Path) -> None:
    path.symlink_to("other")
    path.with_name("other").symlink_to(path.name)


def be_a_device(minor: int, name: str) -> Callable[[Path], None]:
    """A device of its own where that is allowed, so that none of the system is at stake."""

    def make(path: Path) -> None:
        try:
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, minor))
        except PermissionError:
            path.symlink_to(f"/dev/{name}")

    return make


def be_a_link_to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


# By what errors call it.
NO_FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "folder": (Path.mkdir, "a folder"),
    "FIFO": (os.mkfifo, "a FIFO"),
    "link to a FIFO": (be_a_link_to_a_fifo, "a FIFO"),
    "socket": (be_a_socket, "a socket"),
    "null device": (be_a_device(3, "null"), "a device"),
    "endless device": (be_a_device(5, "zero"), "a device"),
    "loop": (be_a_loop, "a loop of links"),
}
FOREIGN: dict[str, tuple[Callable[[Path], None], str]] = {
    "another program's": (be_of_another_program, "a database of another program"),
    "another program's in use": (be_in_use_by_another_program, "a database of another program"),
    "without tables": (be_without_tables, "a database of another program"),
}
# In the cache directory these are set aside, or filled.
UNKNOWN: dict[str, tuple[Callable[[Path], None], str]] = {
    "text": (be_text, "which is no database"),
    "link to text": (be_a_link_to_text, "which is no database"),
    "of /proc": (be_a_link_to("/proc/version"), "which is no database"),
    "without a header": (be_a_store_without_its_header, "which is no database"),
    "empty": (Path.touch, "an empty file"),
}
PROC = Path("/proc/outblas.sqlite")


def outcome(function: Callable[[], object]) -> Outcome:
    """What came of an entry point: what it returns, raises or warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = function()
        except Exception as error:
            return type(error).__name__, str(error)
    if hasattr(found, "exit_code"):
        done: Any = found
        if not isinstance(done.exception, SystemExit | None):
            return type(done.exception).__name__, str(done.exception)
        return str(done.exit_code), squeezed(done.output.replace("│", ""))
    return "ok", " ".join(str(warning.message) for warning in caught)


def outcomes(entries: Entries) -> dict[str, Outcome]:
    """What came of entry points in a process of their own, which is killed if it hangs."""
    found: dict[str, Outcome] = as_user(
        os.geteuid(),
        lambda: {name: outcome(entry) for name, entry in entries.items()},
        seconds=SECONDS,
    )
    return found


def invoked(*lines: tuple[str, ...], options: tuple[object, ...] = ()) -> Entries:
    """Commands as entry points, each with the same options."""
    return {" ".join(line): functools.partial(invoke, *line, *options) for line in lines}


def contents(folder: Path) -> dict[str, object]:
    """All that changes when a file below a folder is written, renamed or made."""
    found: dict[str, object] = {}
    for path in (folder, *folder.rglob("*")):
        status = path.lstat()
        data = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        found[str(path)] = status.st_mode, status.st_mtime_ns, status.st_ino, data
    return found


# Stores.


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a target is to be; the cache is elsewhere."""
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "products.txt").write_text("16x64x64\n")
    found = tmp_path / "theirs"
    found.mkdir()
    return found


TUNE = "tune", "--kernels", "portable", "--gpus", "cpu", "--shapes", "16", "--trials", "1"


def objects(path: Path | None) -> Entries:
    """The entry points of the library; None for the store in the cache directory."""
    return {
        "Store": lambda: Store(path).close(),
        "Store to read": lambda: Store(path, read_only=True).close(),
        "lookup": lambda: TuningIndex(imagined("H100"), path, Path("no tables")),
    }


COMMANDS = (
    TUNE,
    ("tune", "--kernels", "portable", "--shapes", "16", "--dry-run"),
    ("tune", "--explain", "64x64x64", "--gpu", "H100"),
    ("cache", "ls"),
    ("cache", "show", "4096"),
    ("cache", "export", "results.jsonl"),
    ("cache", "import", "results.jsonl"),
    ("cache", "verify"),
    ("cache", "prune", "--kernel", "portable"),
    ("report", "tune", "--html", "tune.html"),
    ("pack", "build", "--shapes", "products.txt", "-o", "it.outblas"),
)
TARGETS = NO_FILES | FOREIGN | UNKNOWN


@pytest.fixture(autouse=True, scope="module")
def _imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The processes below are forks: what this one has imported, they need not import each."""
    from outblas.autotune.sweeps import sweep  # noqa: F401

    path = tmp_path_factory.mktemp("first") / "text"
    be_text(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTBLAS_CACHE_DIR", str(path.parent / "cache"))
        patch.chdir(path.parent)
        for each in (objects(path) | invoked(*COMMANDS, options=("--store", path))).values():
            outcome(each)


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_no_store_is_refused_by_all_and_stays_as_it_was(folder: Path, target: str) -> None:
    make, kind = TARGETS[target]
    path = folder / "some.sqlite"
    make(path)
    before = contents(folder)

    found = outcomes(objects(path) | invoked(*COMMANDS, options=("--store", path)))

    assert contents(folder) == before
    for name in ("Store", "Store to read"):
        error, message = found.pop(name)
        assert error == "StoreError"
        assert message.startswith("store is '")
        assert f"', {kind}, expected a file of tuning results that outblas wrote" in message
    state, message = found.pop("lookup")
    assert (state, kind in message) == ("ok", True), message
    for name, (code, message) in found.items():
        assert code == "2", (name, code, message)
        assert "--storeis'" in message, (name, message)
        assert "expected" in message, (name, message)


@pytest.mark.parametrize("target", NO_FILES | FOREIGN)
def test_what_is_in_the_place_of_the_store_of_the_cache_is_left_there(
    folder: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, kind = TARGETS[target]
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(folder))
    make(folder / "tuning.sqlite")
    before = contents(folder)

    lines = TUNE, ("cache", "ls"), ("cache", "prune", "--kernel", "x")
    found = outcomes(objects(None) | invoked(*lines))

    assert contents(folder) == before
    for name, (state, message) in found.items():
        assert squeezed(kind) in squeezed(message), (name, state, message)
        assert state == {"lookup": "ok"}.get(name, "StoreError" if "Store" in name else "2"), name


@pytest.mark.parametrize("target", ["text", "without a header", "empty"])
def test_what_is_damaged_in_the_cache_makes_room_for_a_store(
    folder: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(folder))
    TARGETS[target][0](folder / "tuning.sqlite")

    found = outcomes({"Store": lambda: Store().check_persistent()})

    assert found["Store"][0] == "ok"
    assert ("is damaged" in found["Store"][1]) is (target != "empty")


def test_an_empty_file_that_a_stopped_process_left_is_a_store(folder: Path) -> None:
    """It creates the lock first, then the file."""
    path = folder / "some.sqlite"
    path.touch()
    path.with_name(path.name + ".lock").touch()

    with Store(path) as store:
        store.check_persistent()


def test_a_store_that_others_overwrite_while_it_is_open_is_left_to_them(folder: Path) -> None:
    path = folder / "some.sqlite"
    fill(path)

    with warnings.catch_warnings(), Store(path) as store:
        warnings.simplefilter("ignore")
        path.unlink()
        be_text(path)
        before = contents(folder)[str(path)]

        with pytest.raises(StoreError, match="lost when the process ends"):
            store.check_persistent()
        assert len(store.trials()) == 3

    assert contents(folder)[str(path)] == before


def test_two_stores_of_one_file_keep_their_locks(folder: Path) -> None:
    """Closing any descriptor of the file would drop them: no header is read while it is open."""
    path = folder / "some.sqlite"
    trials = fill(path)

    def is_last() -> bool:
        """Whether SQLite removes the log, as it does for whoever closes the file last."""
        connection = sqlite3.connect(path)
        connection.execute("SELECT count(*) FROM trials").fetchone()
        connection.close()
        return not path.with_name(path.name + "-wal").exists()

    with Store(path):
        with Store(path) as second:
            assert second.trials() == trials
        assert not as_user(os.geteuid(), is_last)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no /proc")
def test_a_folder_that_takes_no_files_is_said(folder: Path) -> None:
    lines = TUNE, ("cache", "ls"), ("cache", "import", "results.jsonl")
    found = outcomes(objects(PROC) | invoked(*lines, options=("--store", PROC)))

    assert found.pop("Store")[1].startswith(f"{PROC}: unable to open database file; results are")
    assert found.pop("Store to read") == found.pop("lookup") == ("ok", "")
    for name, (code, message) in found.items():
        assert code == "2", (name, message)
        assert str(PROC) in message, (name, message)


# The folder of the cache.


CACHES = {
    "text": (be_text, "is not a folder"),
    "FIFO": (os.mkfifo, "is not a folder"),
    "socket": (be_a_socket, "is not a folder"),
    "device": (be_a_device(3, "null"), "is not a folder"),
    "loop": (be_a_loop, "is not a folder"),
    "/proc": (be_a_link_to("/proc/outblas"), "No such file"),
}


@pytest.mark.parametrize("target", CACHES)
def test_what_is_no_folder_keeps_nothing_and_costs_no_call(
    folder: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, reason = CACHES[target]
    path = folder / "cache"
    make(path)
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(path))
    before = contents(folder)

    def fetch() -> None:
        assert cache.fetch({"i": 1}, build=lambda: 7, save=lambda *_: None, load=lambda _: 8) == 7

    lines = ("cache", "ls"), ("cache", "verify"), ("cache", "prune", "--compiled"), TUNE
    found = outcomes(objects(None) | {"fetch": fetch} | invoked(*lines))

    assert contents(folder) == before
    state, message = found.pop("fetch")
    assert state == "ok"
    assert reason in message
    assert found.pop("lookup")[0] == "ok"
    assert found.pop(" ".join(TUNE))[0] == "2"
    for name in ("Store", "Store to read"):
        assert found.pop(name)[0] in ("ok", "StoreError")  # in memory, or a loop
    assert {state for state, _ in found.values()} <= {"0", "1", "2"}, found


# Packs.

PACKS = TARGETS | {"/proc": (be_a_link_to("/proc/outblas"), "No such file")}


@pytest.mark.parametrize("target", PACKS)
def test_what_is_no_pack_is_refused_and_costs_no_call(
    folder: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "some.outblas"
    PACKS[target][0](path)
    monkeypatch.setenv("OUTBLAS_PACK", str(path))
    pack.unload()
    before = contents(folder)

    commands = invoked(("pack", "show"), ("pack", "verify"), options=(path,))
    found = outcomes({"environment": pack.loaded, "load_pack": lambda: load_pack(path)} | commands)

    assert contents(folder) == before
    state, message = found["environment"]
    assert state == "ok"
    assert message.startswith("outblas: OUTBLAS_PACK is not used: ")
    assert found["load_pack"][0] in ("PackError", "FileNotFoundError")
    assert {found[name][0] for name in ("pack show", "pack verify")} == {"2"}, found
