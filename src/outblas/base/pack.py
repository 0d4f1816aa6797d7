"""Packs: compiled kernels in one file, which a deployment loads in the place of compiling.

A pack has a manifest, JSON, the code of its kernels one after the other, and the tables of tuned
configs that chose them:

    =======  ====================================================================================
    bytes
    =======  ====================================================================================
    16       `MAGIC`, which has the version of the format
    32       the SHA-256 of the manifest
    8        the size of the manifest, big-endian
    …        the manifest
    …        the objects, in the order of the manifest
    …        the tables, in the order of the manifest, to the end of the file
    =======  ====================================================================================

The manifest has the `facts` that determine each object (`base.facts`), the name of each table, and
the size and the SHA-256 of both. Every byte of the file is covered: by the magic, by the manifest's
digest, or by that of an object or a table.

Kernels are native code. A pack is loaded only from a regular file that belongs to this user or to
root, and that no other user can write; an object is loaded only if its bytes have its digest. The
file is mapped into memory, so that objects that nobody asks for are never read.
"""

import hashlib
import json
import mmap
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from outblas.base import forks, ownership
from outblas.base.facts import Facts, digest
from outblas.base.filesystems import replacing
from outblas.base.ownership import Untrusted, shown

MAGIC = b"outblas pack\n\0\0\2"
_DIGEST, _SIZE = 32, 8
_HEAD = len(MAGIC) + _DIGEST + _SIZE
LARGEST_MANIFEST = 1 << 28  # bytes; a damaged size must not ask for all memory
# Facts that describe where and with what a kernel was compiled. A pack has one value of each: of
# kernels of the CuTe DSL, and of those of Triton.
TOOLCHAIN = ("arch", "options", "machine", "dsl", "tvm_ffi", "source")
TRITON_TOOLCHAIN = ("arch", "triton", "source")


_SHOWN = {"source": "the sources of the kernels", "dsl": "the CuTe DSL", "triton": "Triton"}


class PackError(ValueError):
    """A file is no pack, or not one that may be loaded here."""


class Object(NamedTuple):
    """An object of a pack: what determines it, and where its code lies in the file."""

    facts: Facts
    offset: int
    size: int
    sha256: str


class Table(NamedTuple):
    """A table of a pack: its name, and where its text lies in the file."""

    name: str
    offset: int
    size: int
    sha256: str


@dataclass(frozen=True, eq=False)
class Pack:
    """A pack that was opened.

    Attributes:
        path: The file.
        about: What its builder says of it: `outblas`, the version; `gpu`, the model of GPU whose
            configs it has; `products`.
        objects: By the digest of their facts.
        tables: By name. `autotune.packed_tables` says what they are called and what they have.
    """

    path: Path
    about: Mapping[str, Any]
    objects: Mapping[str, Object]
    tables: Mapping[str, Table]
    _content: mmap.mmap

    @property
    def toolchain(self) -> Facts:
        """The facts that all kernels of the CuTe DSL share; empty for a pack without any."""
        return self.toolchain_of(TOOLCHAIN)

    @property
    def triton_toolchain(self) -> Facts:
        """The facts that all kernels of Triton share; empty for a pack without any."""
        return self.toolchain_of(TRITON_TOOLCHAIN)

    def toolchain_of(self, names: tuple[str, ...]) -> Facts:
        """Returns what the kernels share whose toolchain has these names."""
        for each in self.objects.values():
            if toolchain_names(each.facts) == names:
                return {name: each.facts.get(name) for name in names}
        return {}

    def code(self, name: str) -> bytes | None:
        """Returns the code of the object of this name, or None if the pack has no such object.
        Raises PackError if the code differs from what was packed.
        """
        found = self.objects.get(name)
        if found is None:
            return None
        return self._checked(found, f"the code of {found.facts.get('kernel')}")

    def table(self, name: str) -> bytes:
        """Returns the text of a table. Raises PackError if it differs from what was packed."""
        return self._checked(self.tables[name], f"the table {name}")

    def _checked(self, part: Object | Table, what: str) -> bytes:
        content = self._content[part.offset : part.offset + part.size]
        if hashlib.sha256(content).hexdigest() != part.sha256:
            raise PackError(f"{shown(self.path)}: {what} is not what was packed")
        return content

    def problems(self) -> list[str]:
        """Returns what is wrong with any of its objects and tables; empty if nothing is."""
        found = []
        for read_part, names in ((self.code, self.objects), (self.table, self.tables)):
            for name in names:
                try:
                    read_part(name)
                except PackError as error:
                    found.append(str(error))
        return found


def write(
    path: Path,
    about: Mapping[str, Any],
    objects: Iterable[tuple[Facts, bytes]],
    tables: Mapping[str, bytes] = MappingProxyType({}),
) -> None:
    """Writes a pack. It replaces the file at `path` when it is complete: a process that is killed
    before leaves that file as it was.

    Raises OSError, and PackError for objects that were compiled in different ways.
    """
    entries: list[dict[str, Any]] = []
    parts: list[bytes] = []
    for facts, code in sorted(objects, key=lambda each: digest(each[0])):
        entries.append({"facts": facts, **_described(code)})
        parts.append(code)
    _check_one_toolchain([entry["facts"] for entry in entries])
    named = [{"name": name, **_described(text)} for name, text in sorted(tables.items())]
    parts += [text for _, text in sorted(tables.items())]
    manifest = json.dumps(
        {"about": dict(about), "objects": entries, "tables": named}, sort_keys=True, default=str
    ).encode()
    head = MAGIC + hashlib.sha256(manifest).digest() + len(manifest).to_bytes(_SIZE, "big")
    with replacing(path) as file:
        file.writelines((head, manifest, *parts))
        os.fchmod(file.fileno(), 0o644)  # whoever runs the program reads it


def _described(part: bytes) -> dict[str, Any]:
    return {"size": len(part), "sha256": hashlib.sha256(part).hexdigest()}


def read(path: Path) -> Pack:
    """Opens a pack, and checks its manifest and its size. A symbolic link, as in the volumes of
    Kubernetes, stands for what it leads to. Raises PackError with the reason, and OSError.
    """
    try:
        descriptor = ownership.open_own(Path(os.path.realpath(path)), roots=True)
    except Untrusted as refusal:
        raise PackError(f"{refusal}: a pack has native code") from None
    try:
        size = os.fstat(descriptor).st_size
        if size < _HEAD:
            raise PackError(f"{shown(path)} has {size} bytes, expected a pack")
        content = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    finally:
        os.close(descriptor)  # the map has a descriptor of its own
    try:
        about, objects, tables = _manifest(path, content, size)
    except PackError:
        content.close()
        raise
    return Pack(path, about, objects, tables, content)


def _manifest(
    path: Path, content: mmap.mmap, size: int
) -> tuple[Mapping[str, Any], Mapping[str, Object], Mapping[str, Table]]:
    if content[: len(MAGIC)] != MAGIC:
        raise PackError(f"{shown(path)} does not begin as a pack of this version of the format")
    expected = content[len(MAGIC) : len(MAGIC) + _DIGEST]
    length = int.from_bytes(content[len(MAGIC) + _DIGEST : _HEAD], "big")
    text = content[_HEAD : _HEAD + min(length, LARGEST_MANIFEST)]
    if len(text) != length or hashlib.sha256(text).digest() != expected:
        raise PackError(f"{shown(path)}: the manifest is not what was written")
    objects: dict[str, Object] = {}
    tables: dict[str, Table] = {}
    end = _HEAD + length
    try:
        parsed = json.loads(text)
        about = dict(parsed["about"])
        for entry in (*parsed["objects"], *parsed["tables"]):
            if type(entry["size"]) is not int or entry["size"] < 0:
                raise ValueError
            place = end, entry["size"], str(entry["sha256"])
            if "facts" in entry:
                found = Object(dict(entry["facts"]), *place)
                objects[digest(found.facts)] = found
            else:
                name = str(entry["name"])
                tables[name] = Table(name, *place)
            end += entry["size"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise PackError(f"{shown(path)}: the manifest is not that of a pack") from None
    if end != size:
        raise PackError(f"{shown(path)} has {size} bytes, expected {end}")
    _check_one_toolchain([each.facts for each in objects.values()])
    return about, objects, tables


def toolchain_names(facts: Facts) -> tuple[str, ...]:
    """Returns the names of the facts that kernels share which were compiled as this one was."""
    return TRITON_TOOLCHAIN if "triton" in facts else TOOLCHAIN


def _check_one_toolchain(facts: list[Facts]) -> None:
    for names in (TOOLCHAIN, TRITON_TOOLCHAIN):
        alike = [each for each in facts if toolchain_names(each) == names]
        for name in names:
            values = {str(each.get(name)) for each in alike}
            if len(values) > 1:
                raise PackError(f"objects differ in {name}: {', '.join(sorted(values))}")


# ---- packs that are loaded
_loaded: list[Pack] = []
_warned: set[str] = set()
_lock = forks.Lock()
_environment_read = False


def load(path: Path) -> None:
    """Asks a pack for kernels from now on. Raises PackError and OSError."""
    pack = read(path)
    with _lock:
        _loaded.append(pack)


def loaded() -> tuple[Pack, ...]:
    """Returns the packs that are asked for kernels, that of the environment among them."""
    _load_from_environment()
    return tuple(_loaded)


def packed_code(facts: Facts) -> bytes | None:
    """Returns the code that a loaded pack has for a kernel, or None. Warns, once each, of packs
    that were built for other versions, and of code that was altered.
    """
    name = digest(facts)
    for pack in loaded():
        try:
            code = pack.code(name)
        except PackError as error:
            warn_once(f"{error}; the kernel is compiled instead")
            continue
        if code is not None:
            return code
        _warn_of_other_versions(pack, facts)
    return None


def _load_from_environment() -> None:
    global _environment_read
    if _environment_read:
        return
    with _lock:
        if _environment_read:
            return
        try:
            if path := os.environ.get("OUTBLAS_PACK"):
                _loaded.append(read(Path(path)))
        except (PackError, OSError) as error:
            warn_once(f"OUTBLAS_PACK is not used: {error}")
        finally:  # other threads wait until the pack is there
            _environment_read = True


def _warn_of_other_versions(pack: Pack, facts: Facts) -> None:
    names = toolchain_names(facts)
    wanted = json.loads(json.dumps({name: facts.get(name) for name in names}, default=str))
    for name, value in pack.toolchain_of(names).items():
        if value != wanted[name]:
            what = _SHOWN.get(name, name)
            warn_once(
                f"{shown(pack.path)} is not used: it was built with another version of {what} "
                f"({value}, here {wanted[name]})"
            )
            return


def warn_once(message: str) -> None:
    """Warns, once, of a pack that costs speed only."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(f"outblas: {message}", RuntimeWarning, stacklevel=6)
