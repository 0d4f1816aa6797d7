"""Files that hold one JSON object with its format, its version and a checksum of the rest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...core import ownership
from . import exports, validation
from .validation import Fields, shown

SIZE_LIMIT = 1 << 30  # bytes of a file; the parsed object takes about ten times that in memory


def parse(text: str, kind: str, names_by_version: Mapping[int, Sequence[str]]) -> Fields:
    """Parses the object in `text`, and checks its format, version, names of fields and checksum.

    `kind` is the expected format. `names_by_version` has, for each readable version, the names of
    the fields besides the format, the version and the checksum; their values are not checked.
    Raises ValueError with the reason.
    """
    try:
        content = json.loads(text, object_pairs_hook=validation.once)
        expected = checksum(content) if type(content) is dict else ""
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the file is not JSON: {error}") from None
    if type(content) is not dict:
        raise ValueError(f"the file is {shown(content)}, expected an object")
    if content.get("format") != kind:
        raise ValueError(f"format is {shown(content.get('format'))}, expected {kind!r}")
    version = content.get("version")
    if type(version) is not int or version not in names_by_version:
        known = " or ".join(map(str, sorted(names_by_version)))
        raise ValueError(f"version is {shown(version)}, expected {known}")
    names = ("format", "version", "sha256", *names_by_version[version])
    validation.check_names(content, names, "the file")
    if content["sha256"] != expected:
        raise ValueError(
            f"sha256 is {shown(content['sha256'])}, expected {expected!r}: the file was changed or "
            "is incomplete"
        )
    return content


def write(path: Path, kind: str, version: int, payload: Fields) -> None:
    """Replaces the file atomically by the indented object. Raises OSError."""
    with exports.replacing(path) as file:
        file.write(to_bytes(kind, version, payload))


def to_bytes(kind: str, version: int, payload: Fields) -> bytes:
    """Returns what `write` writes."""
    content = {"format": kind, "version": version, **payload}
    signed = {"format": kind, "version": version, "sha256": checksum(content), **payload}
    return json.dumps(signed, indent=2).encode() + b"\n"


def checksum(content: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of everything except the checksum itself, independent of the file's
    layout.
    """
    payload = {name: value for name, value in content.items() if name != "sha256"}
    plain = json.dumps(payload, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(plain.encode()).hexdigest()


def text_of(path: Path) -> str:
    """Returns the contents of a file. Raises ValueError that names the file and the reason."""
    try:
        return ownership.read_regular(path, SIZE_LIMIT).decode("utf-8")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from None
