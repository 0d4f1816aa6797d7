"""Files that are replaced as a whole, and file systems that other machines share."""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO

# How the types of shared file systems begin in /proc/self/mountinfo. Locks on these may be local to
# one machine or missing, and SQLite's shared memory does not work across machines. It is compiled
# where it is first matched, for that takes longer than this module's import.
_SHARED = (
    r"(fuse\.)?(9p|acfs|afs|auristorfs|beegfs|ceph|cifs|coda|cvmfs|davfs|gcsfuse|gfs2|gluster|"
    r"goofys|gpfs|gvfs|juicefs|lizardfs|lustre|mfs|moosefs|mount\.davfs|nfs|ocfs2|orangefs|panfs|"
    r"prl_fs|pvfs2|quobyte|rclone|s3fs|seaweedfs|smb|sshfs|vboxsf|virtiofs|vmhgfs|weka)"
)
_MOUNTS = Path("/proc/self/mountinfo")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Yields a file that replaces `path` once it is written and on disk, unless an exception is
    raised. Raises OSError.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}")
    try:
        with scratch.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def network_filesystem(path: Path | str) -> str | None:
    """Returns the type ("nfs4") of a file system that other machines share, if a path lies or would
    lie on one; None for a local one, and where the system does not tell (outside Linux).
    """
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        real = os.path.realpath(path)
    except (OSError, ValueError):
        return None
    kind, longest = "", -1
    for line in lines:
        mount, _, device = line.partition(" - ")
        fields = mount.split(" ")
        if len(fields) < 5:
            continue
        # Blanks and backslashes are octal escapes.
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
        # A later mount at the same place covers the earlier one.
        if len(point) >= longest and f"{real}/".startswith(f"{point.rstrip('/')}/"):
            kind, longest = device.split(" ")[0], len(point)
    return kind if re.match(_SHARED, kind) else None
