"""Compiled kernels that somebody else may have written are never loaded, whoever asks for them."""

import contextlib
import ctypes
import os
import pickle
import shutil
import socket
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import children

from outblas.base import cache, ownership

pytestmark = pytest.mark.long

VICTIM, PLANTER = 54321, 54322  # uids that no account has
PR_SET_DUMPABLE = 4

needs_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root, to act as two users"
)


def as_user(uid: int, function: Callable[[], Any], *, seconds: float = 10.0) -> Any:
    """What `function` returns in a child process of user `uid` (its own if it is that already).

    An exception of the child is raised here; so is TimeoutError for one that takes too long, which
    is killed.
    """
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(receiving)
            with open(sending, "wb") as pipe:
                pickle.dump(_outcome(uid, function), pipe)
            status = 0
        finally:
            os._exit(status)
    os.close(sending)
    with open(receiving, "rb") as pipe:
        children.wait(child, seconds)
        ok, value = pickle.load(pipe)
    if not ok:
        raise value
    return value


def _outcome(uid: int, function: Callable[[], Any]) -> tuple[bool, Any]:
    try:
        if os.geteuid() != uid:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            if sys.platform == "linux":  # as a program that the user started: /proc/self is its own
                ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
        return True, function()
    except BaseException as error:
        return False, error


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder that every user can enter, which pytest's are not."""
    folder = Path(tempfile.mkdtemp(prefix="outblas-test-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def with_warnings(function: Callable[[], Any]) -> Callable[[], tuple[Any, list[str]]]:
    """The function, which returns what it warned of as well."""

    def run() -> tuple[Any, list[str]]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            value = function()
        return value, [str(warning.message) for warning in caught]

    return run


FACTS: dict[str, Any] = {"kernel": "x", "arch": "sm_90a", "dtypes": ("bfloat16", "float32")}
OTHER = {**FACTS, "arch": "sm_100a"}

# Whoever uses the cache: an ordinary user where the tests run as root, else the user who runs them.
USER = VICTIM if os.geteuid() == 0 else os.geteuid()


@pytest.fixture(autouse=True, scope="module")
def _imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A process that has given up root may find no module any more: all that is needed is loaded
    before.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path_factory.mktemp("first")))
        fetch()
        assert "a".encode("ascii")


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of `USER` that every user can enter, in which the cache's is to be made."""
    with shared_folder() as folder:
        monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(folder / "cache"))
        give(folder, USER)
        yield folder


@pytest.fixture
def own_place(place: Path) -> Path:
    """The same, of the user who runs the tests."""
    os.chown(place, os.geteuid(), -1)
    return place


def give(path: Path, user: int) -> None:
    """Gives a file or folder to a user, where that is another one than runs the tests."""
    if user != os.geteuid():
        os.chown(path, user, user)


def fetch(value: bytes = b"built", facts: dict[str, Any] = FACTS) -> bytes:
    """The object of these facts, which is the value where it has to be built."""

    def save(built: bytes, path: Path) -> None:
        path.write_bytes(built)

    return cache.fetch(facts, build=lambda: value, save=save, load=bytes)


def object_path(place: Path, facts: dict[str, Any] = FACTS) -> Path:
    return place / "cache" / "objects" / f"{cache.digest(facts)}.o"


def fetched(*actions: Callable[[], object], user: int = USER) -> tuple[bytes, str]:
    """What a user fetches after these actions of hers, and what she is warned of."""

    def act() -> Any:
        for action in actions:
            action()
        return with_warnings(lambda: fetch(b"anew"))()

    code, said = as_user(user, act)
    return code, "".join(said)


# ---- what another user has written
@needs_root
@pytest.mark.parametrize("mode", [0o600, 0o666], ids=["closed", "open to all"])
def test_what_another_planted_is_not_loaded_once_the_folder_is_closed(
    mode: int, place: Path
) -> None:
    fetched()
    give(object_path(place), PLANTER)
    object_path(place).chmod(mode)

    code, said = fetched()

    assert code == b"anew"
    assert "belongs to another user" in said


@needs_root
def test_the_folder_of_another_user_is_not_used(own_place: Path) -> None:
    own_place.chmod(0o1777)  # as /tmp is
    as_user(PLANTER, fetch)

    code, said = fetched()

    assert code == b"anew"
    assert "belongs to another user" in said
    assert "set OUTBLAS_CACHE_DIR" in said


@needs_root
def test_a_link_to_a_folder_is_judged_where_it_leads(place: Path) -> None:
    """The parents of the link are sound, those of where it leads are open to others."""
    outside = place / "outside"
    outside.mkdir()
    (outside / "mine").mkdir(mode=0o700)
    give(outside / "mine", USER)
    (place / "cache").symlink_to(outside / "mine")
    outside.chmod(0o777)

    code, said = fetched()

    assert code == b"anew"
    assert f"{outside} can be written by others" in said
    assert not list((outside / "mine").iterdir())


# ---- files that are not the user's own
def put_in_place(path: Path, kind: str, elsewhere: Path) -> None:
    """Puts something of this kind in place of a file."""
    content = path.read_bytes()
    if kind == "mode":
        path.chmod(0o662)
        return
    path.unlink()
    match kind:
        case "symlink":
            path.symlink_to("/etc/passwd")
        case "symlink to own":
            elsewhere.write_bytes(content)
            path.symlink_to(elsewhere)
        case "fifo":
            os.mkfifo(path, 0o600)
        case "socket":
            os.chdir(path.parent)  # names of sockets are short
            socket.socket(socket.AF_UNIX).bind(path.name)
        case "folder":
            path.mkdir()
        case "hard link":
            elsewhere.write_bytes(content)
            elsewhere.chmod(0o600)
            os.link(elsewhere, path)


REFUSALS = {
    "symlink": "regular file",
    "symlink to own": "regular file",
    "fifo": "regular file",
    "socket": "regular file",
    "folder": "regular file",
    "hard link": "2 names",
    "mode": "can be written by others",
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_only_regular_files_of_ones_own_are_loaded(place: Path, kind: str) -> None:
    path = object_path(place)

    code, said = fetched(fetch, lambda: put_in_place(path, kind, place / "elsewhere"))

    assert code == b"anew"
    assert REFUSALS[kind] in said
    assert str(path) in said


@pytest.mark.filterwarnings("ignore:outblas does not load")
def test_the_object_of_another_kernel_is_refused(own_place: Path) -> None:
    """A sound file under a wrong name: of another architecture, version or config."""
    fetch(b"other", OTHER)
    object_path(own_place, OTHER).rename(object_path(own_place))

    assert "the record of another kernel" in str(cache.object_problem(object_path(own_place)))
    assert fetch() == b"built"
    assert fetch(b"again") == b"built"


@pytest.mark.parametrize("which", ["cache", ".o"])
def test_nothing_is_loaded_where_a_bit_lets_others_write(own_place: Path, which: str) -> None:
    fetch()
    path = own_place / "cache" if which == "cache" else object_path(own_place)
    whole = 0o700 if path.is_dir() else 0o600

    refused = []
    for bit in (1 << i for i in range(12)):
        path.chmod(whole | bit)
        problem = cache.unusable_reason(path) if which == "cache" else cache.object_problem(path)
        if problem:
            assert "can be written by others" in problem
            refused.append(bit)

    assert refused == [0o002, 0o020]


# ---- how an object is read
def test_what_is_loaded_is_what_was_checked(own_place: Path) -> None:
    """Another process changes the file after it was checked, before it is loaded."""
    fetch(b"sound")
    path = object_path(own_place)

    def load(code: bytes) -> bytes:
        path.write_bytes(b"planted")
        return code

    assert cache.fetch(FACTS, build=lambda: b"new", save=lambda *_: None, load=load) == b"sound"
    assert fetch(b"anew") == b"anew"


def test_control_characters_of_a_path_are_shown_escaped(
    own_place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = own_place / "a\x1b[31mred\nline\u202e"
    folder.mkdir()
    folder.chmod(0o777)
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(folder))

    with pytest.raises(OSError, match=r"can be written by others") as caught:
        cache.objects_folder()

    assert "\\x1b[31mred\\nline\\u202e" in str(caught.value)
    assert str(caught.value).isprintable()


# ---- processes that have given up root
@needs_root
def test_who_has_given_up_root_without_a_new_program_loads_too(place: Path) -> None:
    """/proc/self is closed to such a process, and with it files in memory."""

    def undumpable() -> tuple[bytes, bytes]:
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
        return fetch(b"first"), fetch(b"second")

    assert as_user(VICTIM, undumpable) == (b"first", b"first")


@needs_root
def test_root_of_the_host_is_trusted_in_a_container(place: Path) -> None:
    """In a user namespace the host's root shows as the overflow uid, which is nobody's there."""

    def in_namespace() -> tuple[int, bytes, bytes] | None:
        if ctypes.CDLL(None, use_errno=True).unshare(0x10000000) != 0:
            return None
        Path("/proc/self/uid_map").write_text(f"{VICTIM} {VICTIM} 1")
        ownership._overflow_uid.cache_clear()
        return os.stat("/").st_uid, fetch(b"first"), fetch(b"second")

    result = as_user(VICTIM, in_namespace)
    if result is None:
        pytest.skip("user namespaces are not allowed here")
    assert result[0] not in (0, VICTIM)
    assert result[1:] == (b"first", b"first")
