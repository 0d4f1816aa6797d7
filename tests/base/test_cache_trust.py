"""Compiled kernels that somebody else may have written are never loaded, whoever asks for them."""

import hashlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.users import PLANTER, VICTIM, as_user, needs_root, shared_folder, with_warnings

from outblas.base import cache, ownership

pytestmark = pytest.mark.long

FACTS: dict[str, Any] = {"kernel": "x", "arch": "sm_90a", "dtypes": ("bfloat16", "float32")}
OTHER = {**FACTS, "arch": "sm_100a"}
PLANTED = b"planted"

# Whoever uses the cache: root or an ordinary user, where the tests run as root; else the user who
# runs them.
OWN = os.geteuid() if hasattr(os, "geteuid") else None
USERS = [pytest.param(0, id="root"), pytest.param(VICTIM, id="user")] if OWN == 0 else [OWN]


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
    """A folder that every user can enter, in which the cache's is to be made."""
    with shared_folder() as folder:
        monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(folder / "cache"))
        yield folder


def save(built: bytes, path: Path) -> None:
    path.write_bytes(built)


def fetch(value: bytes = b"built", facts: dict[str, Any] = FACTS) -> bytes:
    """The object of these facts, which is the value where it has to be built."""
    return cache.fetch(
        facts,
        build=lambda: value,
        save=save,
        load=Path.read_bytes,
    )


def object_path(place: Path, facts: dict[str, Any] = FACTS) -> Path:
    return place / "cache" / "objects" / f"{cache.digest(facts)}.o"


def plant(path: Path, facts: dict[str, Any] = FACTS) -> None:
    """An object whose record is all that a record should be."""
    path.write_bytes(PLANTED)
    record = {**facts, "sha256": hashlib.sha256(PLANTED).hexdigest()}
    path.with_suffix(".json").write_text(json.dumps(record, default=str))


def belong_to(folder: Path, user: int) -> None:
    """Gives a folder to the user, where that is another one."""
    if user != OWN:
        os.chown(folder, user, user)


@pytest.fixture(params=USERS)
def planted(request: pytest.FixtureRequest, place: Path) -> int:
    """The user whose cache folder was open to others until somebody else had planted an object in
    it, and a second one that others may write.
    """
    user: int = request.param
    objects = place / "cache" / "objects"

    def set_modes(mode: int) -> None:
        for folder in (objects, objects.parent):
            folder.chmod(mode)

    def make_open() -> None:
        objects.mkdir(parents=True)
        set_modes(0o777)

    def plant_both() -> None:
        plant(object_path(place))
        plant(object_path(place, OTHER), OTHER)
        object_path(place, OTHER).chmod(0o666)

    place.chmod(0o777)
    as_user(user, make_open)
    as_user(PLANTER, plant_both)
    place.chmod(0o755)
    as_user(user, lambda: set_modes(0o700))
    return user


# ---- what another user has written
@needs_root
@pytest.mark.parametrize("facts", [FACTS, OTHER], ids=["closed", "open to all"])
def test_what_another_planted_is_not_loaded_once_the_folder_is_closed(
    planted: int, facts: dict[str, Any]
) -> None:
    found, said = as_user(planted, with_warnings(lambda: fetch(facts=facts)))

    assert found == b"built"
    assert "belongs to another user" in "".join(said)


@needs_root
@pytest.mark.parametrize("user", USERS)
def test_a_record_of_ours_does_not_vouch_for_the_code_of_another(place: Path, user: int) -> None:
    os.chown(place, user, user)
    as_user(user, fetch)
    os.chown(object_path(place), PLANTER, PLANTER)

    found, said = as_user(user, with_warnings(lambda: fetch(b"anew")))

    assert found == b"anew"
    assert "belongs to another user" in "".join(said)


@needs_root
@pytest.mark.parametrize("user", USERS)
def test_the_folder_of_another_user_is_not_used(place: Path, user: int) -> None:
    place.chmod(0o1777)  # as /tmp is

    def make() -> None:
        object_path(place).parent.mkdir(parents=True)
        plant(object_path(place))

    as_user(PLANTER, make)

    found, said = as_user(user, with_warnings(fetch))

    assert found == b"built"
    assert "belongs to another user" in said[0]
    assert "remove" not in said[0]
    assert "set OUTBLAS_CACHE_DIR" in said[0]


@pytest.fixture(params=USERS)
def linked(request: pytest.FixtureRequest, place: Path) -> int:
    """The user whose cache folder is a link: its parents are sound, those of where it leads are
    open to others.
    """
    user: int = request.param
    outside = place / "outside"
    outside.mkdir()
    (outside / "mine").mkdir(mode=0o700)
    (place / "cache").symlink_to(outside / "mine")
    outside.chmod(0o777)
    belong_to(outside / "mine", user)
    belong_to(place, user)
    return user


@needs_root
def test_a_link_to_a_folder_is_judged_where_it_leads(place: Path, linked: int) -> None:
    found, said = as_user(linked, with_warnings(fetch))

    assert found == b"built"
    assert f"{place / 'outside'} can be written by others" in said[0]
    assert not list((place / "outside" / "mine").iterdir())


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


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("kind", REFUSALS)
@pytest.mark.parametrize("which", [".o", ".json"])
def test_only_regular_files_of_ones_own_are_loaded(
    place: Path, user: int, kind: str, which: str
) -> None:
    belong_to(place, user)
    path = object_path(place).with_suffix(which)

    def fetch_twice() -> tuple[bytes, list[str]]:
        fetch()
        put_in_place(path, kind, place / "elsewhere")
        found: tuple[bytes, list[str]] = with_warnings(lambda: fetch(b"anew"))()
        return found

    found, said = as_user(user, fetch_twice)

    assert found == b"anew"
    assert any(REFUSALS[kind] in line for line in said), said
    assert all(str(path.parent) in line for line in said), said


@pytest.mark.parametrize("user", USERS)
def test_the_record_of_another_kernel_is_refused(place: Path, user: int) -> None:
    """Sound files under a wrong name: of another architecture, version or config."""
    belong_to(place, user)

    def fetch_renamed() -> tuple[bytes, list[str]]:
        fetch(b"other", OTHER)
        for suffix in (".o", ".json"):
            name = object_path(place).with_suffix(suffix)
            object_path(place, OTHER).with_suffix(suffix).rename(name)
        found: tuple[bytes, list[str]] = with_warnings(fetch)()
        return found

    found, said = as_user(user, fetch_renamed)
    again = as_user(user, with_warnings(lambda: fetch(b"again")))

    assert found == b"built"
    assert "the record of another kernel" in said[0]
    assert again == (b"built", [])


NO_RECORDS = {
    "list": "[]",
    "number": "3",
    "null": "null",
    "empty": "{}",
    "digest that is a number": '{"sha256": 3}',
    "deep": "[" * 100_000,
    "cut off": '{"sha256": "',
    "NUL": "\0",
}


@pytest.mark.filterwarnings("ignore:outblas does not load")
@pytest.mark.parametrize("text", NO_RECORDS.values(), ids=NO_RECORDS)
def test_whatever_a_record_says_the_kernel_is_built_anew(place: Path, text: str) -> None:
    fetch()
    object_path(place).with_suffix(".json").write_text(text)

    assert fetch(b"anew") == b"anew"


# ---- how an object is read
def test_what_is_loaded_is_what_was_checked(place: Path) -> None:
    """Another process changes the file after it was checked, before it is loaded."""
    fetch(b"sound")
    path = object_path(place)

    def load(copy: Path) -> bytes:
        path.write_bytes(PLANTED)
        return copy.read_bytes()

    assert cache.fetch(FACTS, build=lambda: b"new", save=lambda *_: None, load=load) == b"sound"
    assert fetch(b"anew") == b"anew"


@pytest.mark.parametrize("missing", ["memfd_create", "proc"])
def test_loads_without_files_in_memory(
    place: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    fetch(b"sound")
    if missing == "proc":
        exists = os.path.exists
        monkeypatch.setattr(
            os.path, "exists", lambda path: not str(path).startswith("/proc") and exists(path)
        )
    else:
        monkeypatch.delattr(os, "memfd_create")
    seen = []

    def load(path: Path) -> bytes:
        seen.append(path)
        return path.read_bytes()

    found = cache.fetch(FACTS, build=lambda: b"new", save=lambda *_: None, load=load)

    assert found == b"sound"
    assert seen[0].parent == cache.objects_folder()
    assert not seen[0].exists()


@pytest.mark.parametrize("bit", [1 << i for i in range(12)], ids=oct)
@pytest.mark.parametrize("which", ["cache", "objects", ".o", ".json"])
def test_nothing_is_loaded_where_a_bit_lets_others_write(place: Path, which: str, bit: int) -> None:
    fetch()
    entry = object_path(place)
    places = {"cache": place / "cache", "objects": entry.parent}
    path = places.get(which) or entry.with_suffix(which)
    path.chmod((0o700 if path.is_dir() else 0o600) | bit)

    found, said = with_warnings(lambda: fetch(b"anew"))()

    others_write = bit in (0o020, 0o002)
    assert found == (b"anew" if others_write else b"built")
    assert any("can be written by others" in line for line in said) == others_write


# ---- advice
def test_advice_is_to_remove_what_is_ours_alone(place: Path) -> None:
    """Not to change modes, which leaves what was planted."""
    folder = place / "cache"
    folder.mkdir()
    folder.chmod(0o777)

    advice = cache.unusable_reason(folder)

    assert f"remove {folder}" in advice
    assert "chmod" not in advice


def test_control_characters_of_a_path_are_shown_escaped(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = place / "a\x1b[31mred\nline\u202e"
    folder.mkdir()
    folder.chmod(0o777)
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(folder))
    with pytest.warns(UserWarning, match="can be written by others") as caught:
        fetch()
    assert "\\x1b[31mred\\nline\\u202e" in str(caught[0].message)
    assert all(character.isprintable() for character in str(caught[0].message))


@needs_root
def test_who_has_given_up_root_without_a_new_program_loads_too(place: Path) -> None:
    """/proc/self is closed to such a process, and with it files in memory."""
    import ctypes

    os.chown(place, VICTIM, VICTIM)

    def undumpable():
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
        return fetch(b"first"), fetch(b"second")

    assert as_user(VICTIM, undumpable) == (b"first", b"first")


@needs_root
def test_root_of_the_host_is_trusted_in_a_container(place: Path) -> None:
    """In a user namespace the host's root shows as the overflow uid, which is nobody's there."""
    import ctypes

    os.chown(place, VICTIM, VICTIM)

    def in_namespace():
        if ctypes.CDLL(None, use_errno=True).unshare(0x10000000) != 0:
            return None
        Path("/proc/self/uid_map").write_text(f"{VICTIM} {VICTIM} 1")
        ownership._overflow_uid.cache_clear()
        return os.stat("/").st_uid, fetch(b"first"), fetch(b"second")

    found = as_user(VICTIM, in_namespace)
    if found is None:
        pytest.skip("user namespaces are not allowed here")
    assert found[0] not in (0, VICTIM)
    assert found[1:] == (b"first", b"first")
