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

The manifest has what all kernels of a compiler share, the digest of the facts that determine each
object (`base.facts`), the name of each table, and the size and the SHA-256 of both. Objects are
compressed. Every byte of the file is covered: by the magic, by the manifest's digest, or by that of
an object or a table.

Kernels are native code. A pack is loaded only from a regular file that belongs to this user or to
root, and that no other user can write; an object is loaded only if its bytes have its digest. The
file is mapped into memory, so that objects that nobody asks for are never read.

Packs that lie in the folder `packs` of this package, as those of a release do, are asked after all
others, and where they were built for other versions nothing is said.
"""

import hashlib
import json
import mmap
import os
import warnings
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from outblas.base import forks, ownership
from outblas.base.facts import Facts, digest
from outblas.base.filesystems import replacing
from outblas.base.ownership import Untrusted, shown

MAGIC = b"outblas pack\n\0\0\3"
_DIGEST, _SIZE = 32, 8
_HEAD = len(MAGIC) + _DIGEST + _SIZE
LARGEST_MANIFEST = 1 << 28  # bytes; a damaged size must not ask for all memory
SHIPPED = Path(__file__).parents[1] / "packs"
# Facts that describe where and with what a kernel was compiled. A pack has one value of each: of
# kernels of the CuTe DSL, and of those of Triton.
TOOLCHAIN = ("arch", "options", "machine", "dsl", "cuda", "tvm_ffi", "source")
TRITON_TOOLCHAIN = ("arch", "triton", "source")


_SHOWN = {
    "source": "the sources of the kernels",
    "dsl": "the CuTe DSL",
    "cuda": "CUDA",
    "triton": "Triton",
}


class PackError(ValueError):
    """A file is no pack, or not one that may be loaded here."""


class Object(NamedTuple):
    """An object of a pack: the kernel's name, and where its code lies in the file, compressed."""

    kernel: str
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
        toolchain: The facts that all kernels of the CuTe DSL share; empty for a pack without any.
        triton_toolchain: The facts that all kernels of Triton share, likewise.
    """

    path: Path
    about: Mapping[str, Any]
    objects: Mapping[str, Object]
    tables: Mapping[str, Table]
    toolchain: Facts
    triton_toolchain: Facts
    _content: mmap.mmap

    def differences(self, facts: Facts) -> Facts:
        """Returns those facts of its toolchain with which a kernel of these facts cannot be loaded.

        Code that was compiled for an older CUDA runs with a newer driver, and every version of TVM
        FFI that outblas takes has the same binary interface.
        """
        built = self.triton_toolchain if "triton" in facts else self.toolchain
        differing = {name: old for name, old in built.items() if old != facts.get(name)}
        differing.pop("tvm_ffi", None)
        if "cuda" in differing and int(built["cuda"]) < int(facts["cuda"]):
            del differing["cuda"]
        return differing

    def name_of(self, facts: Facts) -> str:
        """Returns the name under which a pack of this toolchain has the kernel of these facts."""
        built = self.triton_toolchain if "triton" in facts else self.toolchain
        return digest(facts | built) if built and not self.differences(facts) else digest(facts)

    def code(self, name: str) -> bytes | None:
        """Returns the code of the object of this name, or None if the pack has no such object.
        Raises PackError if the code differs from what was packed.
        """
        found = self.objects.get(name)
        if found is None:
            return None
        what = f"the code of {found.kernel}"
        try:
            return zlib.decompress(self._checked(found, what))
        except zlib.error as error:
            raise PackError(f"{shown(self.path)}: {what} is not compressed: {error}") from None

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
    toolchains: dict[str, Facts] = {"dsl": {}, "triton": {}}
    for facts, code in sorted(objects, key=lambda each: digest(each[0])):
        parts.append(zlib.compress(code))
        described = {"name": digest(facts), "kernel": str(facts.get("kernel"))}
        entries.append(described | _described(parts[-1]))
        kind = "triton" if "triton" in facts else "dsl"
        toolchain = {name: facts.get(name) for name in toolchain_names(facts)}
        _check_same(toolchains[kind] or toolchain, toolchain)
        toolchains[kind] = toolchain
    named = [{"name": name, **_described(text)} for name, text in sorted(tables.items())]
    parts += [text for _, text in sorted(tables.items())]
    content = {"about": dict(about), "objects": entries, "tables": named, "toolchains": toolchains}
    manifest = json.dumps(content, sort_keys=True, default=str).encode()
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
        pack = _manifest(path, content, size)
    except PackError:
        content.close()
        raise
    return pack


def _manifest(path: Path, content: mmap.mmap, size: int) -> Pack:
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
        about, toolchains = dict(parsed["about"]), dict(parsed["toolchains"])
        toolchain, of_triton = dict(toolchains["dsl"]), dict(toolchains["triton"])
        for entry in (*parsed["objects"], *parsed["tables"]):
            if type(entry["size"]) is not int or entry["size"] < 0:
                raise ValueError
            name = str(entry["name"])
            place = end, entry["size"], str(entry["sha256"])
            if "kernel" in entry:
                objects[name] = Object(str(entry["kernel"]), *place)
            else:
                tables[name] = Table(name, *place)
            end += entry["size"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise PackError(f"{shown(path)}: the manifest is not that of a pack") from None
    if end != size:
        raise PackError(f"{shown(path)} has {size} bytes, expected {end}")
    return Pack(path, about, objects, tables, toolchain, of_triton, content)


def toolchain_names(facts: Facts) -> tuple[str, ...]:
    """Returns the names of the facts that kernels share which were compiled as this one was."""
    return TRITON_TOOLCHAIN if "triton" in facts else TOOLCHAIN


def _check_same(before: Facts, toolchain: Facts) -> None:
    for name, value in toolchain.items():
        if str(value) != str(before[name]):
            raise PackError(
                f"objects differ in {name}: {', '.join(sorted(map(str, (value, before[name]))))}"
            )


# ---- packs that are loaded
_loaded: list[Pack] = []
_shipped: list[Pack] = []
_warned: set[str] = set()
_lock = forks.Lock()
_environment_read = False


def load(path: Path) -> None:
    """Asks a pack for kernels from now on. Raises PackError and OSError."""
    pack = read(path)
    with _lock:
        _loaded.append(pack)


def loaded() -> tuple[Pack, ...]:
    """Returns the packs that are asked for kernels: those that were loaded, that of the environment
    among them, and those that lie in this package.
    """
    _load_by_itself()
    return (*_loaded, *_shipped)


def packed_code(facts: Facts) -> bytes | None:
    """Returns the code that a loaded pack has for a kernel, or None. Warns, once each, of packs
    that were built for other versions, and of code that was altered.
    """
    for pack in loaded():
        try:
            code = pack.code(pack.name_of(facts))
        except PackError as error:
            warn_once(f"{error}; the kernel is compiled instead")
            continue
        if code is not None:
            return code
        if pack not in _shipped:
            _warn_of_other_versions(pack, facts)
    return None


def _load_by_itself() -> None:
    global _environment_read
    if _environment_read:
        return
    with _lock:
        if _environment_read:
            return
        try:
            if chosen := os.environ.get("OUTBLAS_PACK"):
                _load_quietly(Path(chosen), _loaded, "OUTBLAS_PACK")
            for path in sorted(SHIPPED.glob("*.pack")):
                _load_quietly(path, _shipped, path.name)
        finally:  # other threads wait until the pack is there
            _environment_read = True


def _load_quietly(path: Path, packs: list[Pack], name: str) -> None:
    try:
        packs.append(read(path))
    except (PackError, OSError) as error:
        warn_once(f"{name} is not used: {error}")


def _warn_of_other_versions(pack: Pack, facts: Facts) -> None:
    for name, value in pack.differences(facts).items():
        what = _SHOWN.get(name, name)
        warn_once(
            f"{shown(pack.path)} is not used: it was built with another version of {what} "
            f"({value}, here {facts[name]})"
        )
        return


def warn_once(message: str) -> None:
    """Warns, once, of a pack that costs speed only."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(f"outblas: {message}", RuntimeWarning, stacklevel=6)
