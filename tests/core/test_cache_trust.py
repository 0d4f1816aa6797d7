"""Compiled kernels that somebody else may have written are never loaded, whoever asks for them."""

import json
import os
import socket
import stat
from pathlib import Path

import pytest
from support.users import PLANTER, VICTIM, as_user, needs_root, shared_folder, with_warnings

from outblas.core import cache, ownership

pytestmark = pytest.mark.long

FACTS = {"kernel": "x", "arch": "sm_90a", "dtypes": ("bfloat16", "float32")}
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
def place(monkeypatch: pytest.MonkeyPatch):
    with shared_folder() as folder:
        monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(folder / "cache"))
        cache._warn_once.cache_clear()
        cache._warn_of_refusal.cache_clear()
        yield folder


def fetch(value=b"built", facts=FACTS):
    return cache.fetch(
        facts,
        build=lambda: value,
        save=lambda built, path: path.write_bytes(built) and None,
        load=Path.read_bytes,
    )


def object_path(place, facts=FACTS):
    return place / "cache" / "objects" / f"{cache.digest(facts)}.o"


def plant(path, code=PLANTED, facts=FACTS) -> None:
    """An object whose record is all that a record should be."""
    import hashlib

    path.write_bytes(code)
    record = {**facts, "sha256": hashlib.sha256(code).hexdigest()}
    path.with_suffix(".json").write_text(json.dumps(record, default=str))


def open_to_all(place, uid):
    """The user's cache folder, once open to others."""
    objects = place / "cache" / "objects"
    place.chmod(0o777)
    as_user(uid, lambda: objects.mkdir(parents=True))
    for folder in (objects, objects.parent):
        as_user(uid, lambda folder=folder: folder.chmod(0o777))
    return objects


def close_to_others(place, uid) -> None:
    place.chmod(0o755)
    for folder in (place / "cache" / "objects", place / "cache"):
        as_user(uid, lambda folder=folder: folder.chmod(0o700))


@needs_root
@pytest.mark.parametrize("user", USERS)
def test_what_another_planted_is_not_loaded_once_the_folder_is_closed(place, user) -> None:
    objects = open_to_all(place, user)

    def planted():
        plant(objects / object_path(place).name)
        plant(objects / object_path(place, OTHER).name, facts=OTHER)
        os.chmod(objects / object_path(place, OTHER).name, 0o666)

    as_user(PLANTER, planted)
    close_to_others(place, user)

    for facts in (FACTS, OTHER):
        found, said = as_user(user, with_warnings(lambda facts=facts: fetch(facts=facts)))
        assert found == b"built"
        assert "belongs to another user" in "".join(said)
        found, said = as_user(user, with_warnings(lambda facts=facts: fetch(b"again", facts)))
        assert (found, said) == (b"built", [])  # its own took the place of what was planted


@needs_root
@pytest.mark.parametrize("user", USERS)
def test_a_record_of_ours_does_not_vouch_for_the_code_of_another(place, user) -> None:
    os.chown(place, user, user)
    as_user(user, fetch)
    path = object_path(place)
    os.chown(path, PLANTER, PLANTER)
    found, said = as_user(user, with_warnings(lambda: fetch(b"anew")))
    assert found == b"anew"
    assert "belongs to another user" in "".join(said)


@needs_root
@pytest.mark.parametrize("user", USERS)
def test_the_folder_of_another_user_is_not_used(place, user) -> None:
    place.chmod(0o1777)  # as /tmp is
    as_user(PLANTER, lambda: (place / "cache" / "objects").mkdir(parents=True))
    as_user(PLANTER, lambda: plant(object_path(place)))
    found, said = as_user(user, with_warnings(fetch))
    assert found == b"built"
    assert "belongs to another user" in said[0]
    assert "remove" not in said[0]
    assert "set OUTBLAS_CACHE_DIR" in said[0]


@needs_root
@pytest.mark.parametrize("user", USERS)
def test_a_folder_below_that_of_another_user_is_not_used(
    place, user, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner can put another in its place."""
    os.chown(place, PLANTER, PLANTER)
    os.mkdir(place / "cache", 0o700)
    os.chown(place / "cache", user, user)
    found, said = as_user(user, with_warnings(fetch))
    assert found == b"built"
    assert f"{place} belongs to another user" in said[0]


@needs_root
@pytest.mark.parametrize("user", USERS)
def test_a_link_to_a_folder_is_judged_where_it_leads(
    place, user, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parents of the link are sound, those of the folder are not."""
    outside = place / "outside"
    outside.mkdir()
    (outside / "mine").mkdir(mode=0o700)
    os.chown(outside / "mine", user, user)
    outside.chmod(0o777)
    os.chown(place, user, user)
    (place / "cache").symlink_to(outside / "mine")
    found, said = as_user(user, with_warnings(fetch))
    assert found == b"built"
    assert f"{outside} can be written by others" in said[0]
    assert not list((outside / "mine").iterdir())

    outside.chmod(0o755)
    assert as_user(user, with_warnings(fetch)) == (b"built", [])
    assert (outside / "mine" / "objects").is_dir()


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize(
    "kind", ["symlink", "symlink to own", "fifo", "socket", "folder", "hard link", "mode"]
)
@pytest.mark.parametrize("which", [".o", ".json"])
def test_only_regular_files_of_ones_own_are_loaded(
    place, user, kind: str, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if user != OWN:
        os.chown(place, user, user)
    as_user(user, fetch)
    path = object_path(place).with_suffix(which)

    def change():
        content, elsewhere = path.read_bytes(), place / "elsewhere"
        if kind != "mode":
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
                monkeypatch.chdir(path.parent)  # names of sockets are short
                socket.socket(socket.AF_UNIX).bind(path.name)
            case "folder":
                path.mkdir()
            case "hard link":
                elsewhere.write_bytes(content)
                elsewhere.chmod(0o600)
                os.link(elsewhere, path)
            case "mode":
                path.chmod(0o662)

    as_user(user, change)
    found, said = as_user(user, with_warnings(lambda: fetch(b"anew")))
    assert found == b"anew"
    expected = {"hard link": "2 names", "mode": "can be written by others"}.get(
        kind, "regular file"
    )
    assert any(expected in line for line in said)
    assert all(str(path.parent) in line for line in said)


@pytest.mark.parametrize("user", USERS)
def test_the_record_of_another_kernel_is_refused(place, user) -> None:
    """Sound files under a wrong name: of another architecture, version or config."""
    if user != OWN:
        os.chown(place, user, user)
    as_user(user, lambda: fetch(b"other", OTHER))
    wanted, other = object_path(place), object_path(place, OTHER)
    for suffix in (".o", ".json"):
        as_user(
            user,
            lambda suffix=suffix: os.rename(other.with_suffix(suffix), wanted.with_suffix(suffix)),
        )
    found, said = as_user(user, with_warnings(fetch))
    assert found == b"built"
    assert "the record of another kernel" in said[0]
    assert as_user(user, with_warnings(lambda: fetch(b"again"))) == (b"built", [])


def test_facts_are_compared_even_where_digests_agree(
    place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "digest", lambda facts: "0" * 32)
    fetch(b"other", OTHER)
    with pytest.warns(UserWarning, match="the record of another kernel"):
        assert fetch(b"built") == b"built"


@pytest.mark.filterwarnings("ignore:outblas does not load")
def test_a_record_is_no_program(place) -> None:
    """Whatever JSON it is, the kernel is built anew."""
    fetch()
    for i, text in enumerate(
        ["[]", "3", "null", "{}", '{"sha256": 3}', "[" * 100_000, '{"sha256": "', "\0"]
    ):
        object_path(place).with_suffix(".json").write_text(text)
        assert fetch(b"%d" % i) == b"%d" % i


def test_what_is_loaded_is_what_was_checked(place) -> None:
    """Another process changes the file after it was checked, before it is loaded."""
    fetch(b"sound")
    path = object_path(place)

    def load(copy):
        path.write_bytes(PLANTED)
        return copy.read_bytes()

    assert cache.fetch(FACTS, build=lambda: b"new", save=lambda *_: None, load=load) == b"sound"
    assert fetch(b"anew") == b"anew"


@pytest.mark.parametrize("missing", ["memfd_create", "proc"])
def test_loads_without_files_in_memory(
    place, monkeypatch: pytest.MonkeyPatch, missing: str
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
    found = cache.fetch(
        FACTS,
        build=lambda: b"new",
        save=lambda *_: None,
        load=lambda path: (seen.append(path), path.read_bytes())[1],
    )
    assert found == b"sound"
    assert seen[0].parent == cache.objects_folder()
    assert not seen[0].exists()


def test_whatever_the_umask_others_cannot_write(place) -> None:
    before = os.umask(0)
    try:
        fetch()
    finally:
        os.umask(before)
    for path in (place / "cache").rglob("*"):
        assert not path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO), path
    assert fetch(b"again") == b"built"


def test_advice_is_to_remove_what_is_ours_alone(place) -> None:
    """Not to change modes, which leaves what was planted, and nothing of a system's folder or a
    parent.
    """
    folder = place / "cache"
    folder.mkdir()
    folder.chmod(0o777)
    advice = cache.unusable_reason(folder)
    assert f"remove {folder}" in advice
    assert "chmod" not in advice

    for shared in (Path("/tmp"), Path("/")):
        advice = cache.unusable_reason(shared)
        assert advice is None or ("remove" not in advice and "chmod" not in advice)
    folder.chmod(0o700)
    place.chmod(0o777)
    advice = cache.unusable_reason(folder)
    assert "remove" not in advice
    assert "chmod" not in advice


def test_control_characters_of_a_path_are_shown_escaped(
    place, monkeypatch: pytest.MonkeyPatch
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
def test_who_has_given_up_root_without_a_new_program_loads_too(place) -> None:
    """/proc/self is closed to such a process, and with it files in memory."""
    import ctypes

    os.chown(place, VICTIM, VICTIM)

    def undumpable():
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
        return fetch(b"first"), fetch(b"second")

    assert as_user(VICTIM, undumpable) == (b"first", b"first")


@needs_root
def test_root_of_the_host_is_trusted_in_a_container(place) -> None:
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


def test_objects_are_read_without_waiting(place) -> None:
    """A FIFO without a writer would hold up whoever opens it."""
    fetch()
    object_path(place).unlink()
    os.mkfifo(object_path(place))

    with pytest.raises(ownership.Refused, match="FIFO"):  # without end, if it waited
        ownership.read(object_path(place))
