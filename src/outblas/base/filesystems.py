"""Which file system a path lies on, and whether it is shared with other machines."""

import os
import re
from pathlib import Path

# File-system types as the kernel names them in /proc/self/mountinfo. Locks on these may be local to
# one machine or missing, and SQLite's shared memory does not work across machines.
_NFS = ("nfs", "nfs4")
_SMB = ("cifs", "smb", "smb2", "smb3", "smbfs", "ncpfs")
_CLUSTER = (
    "beegfs",
    "ceph",
    "gfs2",
    "glusterfs",
    "gpfs",
    "lustre",
    "ocfs2",
    "orangefs",
    "panfs",
    "pvfs2",
    "wekafs",
)
_DISTRIBUTED = ("acfs", "afs", "auristorfs", "coda", "mfs")
_OF_THE_HOST = ("9p", "prl_fs", "vboxsf", "virtiofs", "vmhgfs")
NETWORK = frozenset((*_NFS, *_SMB, *_CLUSTER, *_DISTRIBUTED, *_OF_THE_HOST))

# File systems in user space: their type is "fuse." followed by the name of the program.
_FUSE_CLUSTER = (
    "beegfs",
    "ceph",
    "ceph-fuse",
    "glusterfs",
    "lizardfs",
    "mfs",
    "moosefs",
    "quobyte",
    "seaweedfs",
)
_FUSE_OBJECTS = ("davfs", "gcsfuse", "goofys", "juicefs", "mount.davfs", "rclone", "s3fs")
_FUSE_REMOTE = ("cvmfs2", "gvfsd-fuse", "sshfs", "vmhgfs-fuse")
NETWORK_FUSE = frozenset((*_FUSE_CLUSTER, *_FUSE_OBJECTS, *_FUSE_REMOTE))

_MOUNTS = Path("/proc/self/mountinfo")


def network_filesystem(path: Path | str) -> str | None:
    """Returns the type ("nfs4") of a file system that other machines share, if a path lies or would
    lie on one.

    Returns None for a local file system, and where the system does not tell (outside Linux).
    """
    kind = filesystem(path)
    if kind is None:
        return None
    name, _, program = kind.partition(".")
    shared = program in NETWORK_FUSE if name in ("fuse", "fuseblk") else kind in NETWORK
    return kind if shared else None


def filesystem(path: Path | str) -> str | None:
    """Returns the type of the file system on which a path lies, or would lie ("ext4"); None where
    the system does not tell.
    """
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        real = os.path.realpath(path)
    except (OSError, ValueError):
        return None

    found, longest = None, -1
    for line in lines:
        fields, separator, rest = line.partition(" - ")
        if not separator or len(fields.split(" ")) < 5:
            continue
        point = _unescaped(fields.split(" ")[4])
        # A later mount at the same place covers the earlier one.
        if _is_below(real, point) and len(point) >= longest:
            found, longest = rest.split(" ")[0], len(point)
    return found


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _unescaped(field: str) -> str:
    """Decodes a field of mountinfo, in which blanks and backslashes are octal escapes."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)
