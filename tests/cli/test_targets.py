"""What `--store`, OUTBLAS_CACHE_DIR and OUTBLAS_PACK may be pointed at: whatever it is, a command
ends at once with a message, and leaves it as it was.
"""

import os
import sqlite3
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.commands import invoke, squeezed
from support.served_by_pack import forget_packs

from outblas.base import pack
from outblas.call.packs import load_pack


def be_text(path: Path) -> None:
    path.write_text("127.0.0.1 localhost\n" * 500)
    path.chmod(0o640)


def be_of_another_program(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE cookies (x)")
        database.execute("PRAGMA user_version = 9")
    database.close()


def be_a_loop(path: Path) -> None:
    path.symlink_to("other")
    path.with_name("other").symlink_to(path.name)


def be_a_link_to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


# What makes a target, and what a refusal calls it as a store.
TARGETS: dict[str, tuple[Callable[[Path], None], str]] = {
    "text": (be_text, "which is no database"),
    "folder": (Path.mkdir, "a folder"),
    "FIFO": (os.mkfifo, "a FIFO"),
    "null device": (be_a_link_to("/dev/null"), "a device"),
    "endless device": (be_a_link_to("/dev/zero"), "a device"),
    "loop": (be_a_loop, ""),
    "of /proc": (be_a_link_to("/proc/version"), "which is no database"),
    "another program's": (be_of_another_program, "a database of another program"),
}
TUNE = ("tune", "--kernels", "portable", "--gpus", "cpu", "--shapes", "16", "--trials", "1")
COMMANDS = (
    TUNE,
    ("tune", "--explain", "64x64x64", "--gpu", "H100"),
    ("cache", "ls"),
    ("cache", "export", "results.jsonl"),
    ("cache", "prune", "--kernel", "portable"),
)


def contents(folder: Path) -> dict[str, object]:
    """All that changes when a file below a folder is written, renamed or made."""
    state: dict[str, object] = {}
    for path in (folder, *folder.rglob("*")):
        status = path.lstat()
        data = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        state[str(path)] = status.st_mode, status.st_mtime_ns, status.st_ino, data
    return state


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a target is to be, which stays as it was; the cache is elsewhere."""
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "theirs"
    place.mkdir()
    yield place
    forget_packs()


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_no_store_is_refused_by_every_command(folder: Path, target: str) -> None:
    make, kind = TARGETS[target]
    path = folder / "some.sqlite"
    make(path)
    before = contents(folder)

    for line in COMMANDS:
        done = invoke(*line, "--store", path, code=2)

        text = squeezed(done.output.replace("│", ""))
        assert "--storeis'" in text, line
        assert squeezed(f"{kind}, expected") in text, line

    assert contents(folder) == before


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_no_pack_is_refused_and_costs_no_call(
    folder: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "some.outblas"
    TARGETS[target][0](path)
    monkeypatch.setenv("OUTBLAS_PACK", str(path))
    forget_packs()
    before = contents(folder)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert pack.loaded() == ()
    assert str(caught[0].message).startswith("outblas: OUTBLAS_PACK is not used: ")
    with pytest.raises((pack.PackError, FileNotFoundError)):
        load_pack(path)
    for command in ("show", "verify"):
        invoke("pack", command, path, code=2)

    assert contents(folder) == before
