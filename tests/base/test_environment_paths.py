"""Nonsense in the environment is told in a line: commands end with it, and products go on without a
cache.
"""

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands import invoke

from outblas.autotune import automatic, lookup
from outblas.base import cache, filesystems

LONG = "a" * 5000
# Places that a cache cannot have, but for "relative"; {own} is a folder of the test alone.
VALUES = {
    "long": f"{{own}}/{LONG}",
    "deep": "{own}/" + "/".join(["b" * 60] * 80),
    "no such user": "~nobody-of-this-name/{own}",
    "below a file": "{own}/file/cache",
    "a file": "{own}/file",
    "relative": "some/folder",
    "control": "/proc/x/{own}/\x1b[31m\n",
}
COMMANDS = [
    ("doctor",),
    ("cache", "ls"),
    ("cache", "prune", "--compiled"),
    ("tune", "--kernels", "portable", "--shapes", "64", "--dry-run"),
]


@pytest.fixture(params=VALUES)
def environment(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """The kind of nonsense that OUTBLAS_CACHE_DIR is set to."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", VALUES[request.param].format(own=tmp_path))
    lookup.clear_cache()
    yield request.param
    lookup.clear_cache()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_commands_say_what_is_wrong(environment: str, command: tuple[str, ...]) -> None:
    done = invoke(*command)

    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code in (0, 1, 2)
    assert LONG[:1000] not in done.output
    assert "\x1b[31m" not in done.output
    if environment in ("long", "deep", "no such user") and command[0] in ("doctor", "cache"):
        assert "OUTBLAS_CACHE_DIR is" in done.output
        assert done.exit_code in (1, 2)


UNUSABLE = [name for name in VALUES if name != "relative"]


def fetch() -> str:
    return cache.fetch(
        {"kernel": 1}, build=lambda: "built", save=lambda *_: None, load=bytes.decode
    )


@pytest.mark.parametrize("environment", UNUSABLE, indirect=True)
def test_compiled_kernels_are_built_with_one_warning(environment: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        built = fetch(), fetch()

    assert built == ("built", "built")
    (said,) = [str(warning.message) for warning in caught]
    assert said.startswith("outblas keeps no compiled kernels")
    assert len(said) < 500
    assert said.isprintable()


@pytest.mark.parametrize("text", ["soon", LONG, "nan", "0", "\x1b"])
def test_a_budget_that_is_none_is_told(monkeypatch: pytest.MonkeyPatch, text) -> None:
    monkeypatch.setenv("OUTBLAS_TUNE_BUDGET", text)
    with pytest.raises(
        ValueError, match=r"OUTBLAS_TUNE_BUDGET is .*, expected a number of s"
    ) as it:
        automatic.first_seconds()
    assert len(str(it.value)) < 300


def test_a_null_character_is_no_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's environment has none, but a program may put its own in place of os.environ."""
    monkeypatch.setattr(os, "environ", {**os.environ, "OUTBLAS_CACHE_DIR": "/tmp/a\0b"})
    with pytest.raises(ValueError, match=r"/tmp/a\\x00b', expected a path without NUL"):
        cache.directory()
    with pytest.raises(OSError, match="without NUL"):
        cache.objects_folder()


def test_without_a_home_nothing_is_written_to_where_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`~` stays where there is no home; it would be a folder of that name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OUTBLAS_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(OSError, match=r"expected the home of a user|the home directory"):
        cache.objects_folder()
    assert not list(tmp_path.iterdir())


MOUNTS = """\
22 1 259:1 / / rw,relatime shared:1 - ext4 /dev/root rw
30 22 0:28 / /home rw - nfs4 server:/home rw,vers=4.2
31 30 0:29 / /home/me/local rw - xfs /dev/sdb rw
32 22 0:30 / /mnt/with\\040blank rw - fuse.sshfs host:/ rw
33 22 0:31 / /mnt/gpfs rw - gpfs gpfs0 rw
34 22 0:32 / /mnt/covered rw - lustre a:/b rw
35 22 0:33 / /mnt/covered rw - tmpfs tmpfs rw
36 22 0:34 / /mnt/ntfs rw - fuseblk /dev/sdc rw
37 22 0:42 / /mnt/overlay rw - fuse.fuse-overlayfs overlay rw
broken line
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", None),
        ("/home", "nfs4"),
        ("/home/me/.cache/outblas", "nfs4"),
        ("/homes", None),
        ("/home/me/local/x", None),
        ("/mnt/with blank/x", "fuse.sshfs"),
        ("/mnt/gpfs/", "gpfs"),
        ("/mnt/covered/x", None),
        ("/mnt/ntfs/x", None),
        ("/mnt/overlay/x", None),
    ],
)
def test_network_file_systems_are_recognised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: Path, kind: str | None
) -> None:
    (tmp_path / "mountinfo").write_text(MOUNTS)
    monkeypatch.setattr(filesystems, "_MOUNTS", tmp_path / "mountinfo")
    assert cache.network_filesystem(path) == kind
    assert cache.network_filesystem(Path(path)) == kind


def test_a_link_lies_where_it_leads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mountinfo").write_text(
        f"1 0 0:1 / / rw - ext4 x rw\n2 1 0:2 / {tmp_path}/far rw - nfs x rw\n"
    )
    (tmp_path / "far").mkdir()
    (tmp_path / "near").symlink_to("far")
    monkeypatch.setattr(filesystems, "_MOUNTS", tmp_path / "mountinfo")
    assert cache.network_filesystem(tmp_path / "near" / "not there yet") == "nfs"


@pytest.mark.parametrize("text", [None, "", "nonsense - \n - - -\n"])
def test_where_the_system_does_not_say_nothing_is_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    if text is not None:
        (tmp_path / "mountinfo").write_text(text)
    monkeypatch.setattr(filesystems, "_MOUNTS", tmp_path / "mountinfo")
    assert cache.network_filesystem("/home") is None
    assert cache.network_filesystem("a\0b") is None
