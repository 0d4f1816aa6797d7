"""Loads kernels that the CuTe DSL has compiled and exported, without importing the DSL.

An exported kernel is an object file for the processor: a function for TVM FFI, which checks its
arguments, makes the maps of tensors and launches, and the machine code of the GPU as data. What it
calls is in two libraries, TVM FFI's and the DSL's runtime. Its sections are copied into memory of
this process and linked there. On x86-64 the exporter writes five kinds of relocations, all of 64
bits; an object that has anything else is left to the loader of the DSL, which is imported for it.

Nothing is unloaded: kernels, and CUDA graphs with them, may run at any later time.
"""

import ctypes
import functools
import importlib.util
import mmap
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from outblas.device import driver

Array = np.ndarray[Any, Any]

_X86_64 = 62
# Types and flags of sections, and indices of symbols' sections that stand for something else.
_SYMTAB, _RELA, _NOBITS, _INIT_ARRAY, _FINI_ARRAY, _UNWIND = 2, 4, 8, 14, 15, 0x70000001
_WRITABLE, _ALLOCATED = 1, 2
_UNDEFINED, _FIRST_RESERVED, _ABSOLUTE = 0, 0xFF00, 0xFFF1
# R_X86_64_64, PC64, GOTOFF64, GOT64, GOTPC64: an address, or where it lies from the relocation or
# from the table of addresses, the place of its entry in that table, and where the table lies.
_ADDRESS, _FROM_HERE, _FROM_TABLE, _ENTRY, _TABLE = 1, 24, 25, 27, 29


def _record(**fields: str) -> Any:
    """Returns the type of a record of an object file, little-endian."""
    return np.dtype([(name, f"<{kind}") for name, kind in fields.items()])


_SECTIONS = _record(
    name="u4",
    type="u4",
    flags="u8",
    address="u8",
    offset="u8",
    size="u8",
    link="u4",
    info="u4",
    align="u8",
    entry="u8",
)
_SYMBOLS = _record(name="u4", info="u1", other="u1", section="u2", value="u8", size="u8")
_RELOCATIONS = _record(offset="u8", type="u4", symbol="u4", addend="i8")


class _Foreign(Exception):
    """An object has what this loader does not know."""


def load(code: bytes, name: str) -> Callable[..., None]:
    """Returns the function of this name of an object file. Raises whatever the loader of the DSL
    does where the code is no such object.
    """
    try:
        return _function(code, name)
    except _Foreign:
        from cutlass.cute.runtime import load_module

        with tempfile.NamedTemporaryFile(prefix="outblas-") as file:  # of this user alone
            file.write(code)
            file.flush()
            function: Callable[..., None] = load_module(file.name, enable_tvm_ffi=True)[name]
        return function


@functools.cache
def cuda_of_dsl() -> int:
    """Returns the major version of CUDA whose libraries of the DSL are used here: the newest
    installed ones that the driver supports, or without a driver the newest. Raises
    ModuleNotFoundError without the DSL.
    """
    versions = _runtimes()
    driver_version = driver.cuda_version()
    supported = [v for v in versions if driver_version is None or v * 1000 <= driver_version]
    if not supported:
        raise ModuleNotFoundError(
            f"no libraries of the CuTe DSL for CUDA {driver_version}", name="cutlass"
        )
    return max(supported)


@functools.cache
def _runtimes() -> dict[int, Path]:
    """Returns the runtime libraries of the DSL that are installed, by the version of CUDA."""
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    folders = [] if spec is None else spec.submodule_search_locations or []
    name = "cu*/lib/libcute_dsl_runtime.so"
    paths = [path for folder in folders for path in Path(folder).glob(name)]
    return {int(path.parent.parent.name.removeprefix("cu")): path for path in paths}


@functools.cache
def _libraries() -> tuple[ctypes.CDLL, ...]:
    """Returns what exported kernels call. A library is loaded once in a process, so the DSL takes
    the same one.
    """
    from tvm_ffi.libinfo import find_libtvm_ffi

    return ctypes.CDLL(str(_runtimes()[cuda_of_dsl()])), ctypes.CDLL(find_libtvm_ffi())


@functools.cache
def _imported(name: str) -> int:
    """Returns the address of a function that exported kernels call."""
    for library in _libraries():
        if function := getattr(library, name, None):
            return ctypes.cast(function, ctypes.c_void_p).value or 0
    raise _Foreign(name)


def _function(code: bytes, name: str) -> Callable[..., None]:
    """Returns a function of an object file, linked into memory of this process."""
    import tvm_ffi

    linked = _Linked(code)
    entry = linked.address_of(f"__tvm_ffi_{name}")
    return tvm_ffi.Function.__from_extern_c__(entry, keep_alive_object=linked)


class _Linked:
    """An object file in memory: what is never written, which becomes executable, then the table of
    the symbols' addresses, then pages that are written.
    """

    def __init__(self, code: bytes) -> None:
        self._code = np.frombuffer(code, np.uint8)
        machine, first = self._read(18, "<u2"), self._read(40, "<u8")
        if code[:6] != b"\x7fELF\2\1" or machine != _X86_64:
            raise _Foreign("no object for x86-64")
        count = self._read(60, "<u2")
        self._sections = np.frombuffer(code, _SECTIONS, count, first)
        if (self._sections["type"] == _INIT_ARRAY).any():
            raise _Foreign("it has constructors")
        (symbols,) = self._of_type(_SYMTAB)
        self._symbols = self._content(symbols).view(_SYMBOLS)
        self._strings = self._content(self._sections[symbols["link"]]).tobytes()
        self._place()
        self._addresses = self._resolved()
        self._view(self._table, 8 * len(self._addresses)).view("<u8")[:] = self._addresses
        for relocations in self._of_type(_RELA):
            self._relocate(relocations)
        _protect(self._base, self._fixed)

    def address_of(self, name: str) -> int:
        """Returns the address of a symbol that the object defines."""
        for symbol, address in zip(self._symbols, self._addresses, strict=True):
            if symbol["section"] != _UNDEFINED and self._name(symbol) == name:
                return int(address)
        raise _Foreign(name)

    def _read(self, offset: int, kind: str) -> int:
        return int(self._code[offset:].view("u1")[: np.dtype(kind).itemsize].view(kind)[0])

    def _of_type(self, kind: int) -> Array:
        sections: Array = self._sections[self._sections["type"] == kind]
        return sections

    def _content(self, section: Any) -> Array:
        return self._code[int(section["offset"]) :][: int(section["size"])]

    def _name(self, symbol: Any) -> str:
        start = int(symbol["name"])
        return self._strings[start : self._strings.index(0, start)].decode()

    def _place(self) -> None:
        """Copies the sections of the program into memory. How to unwind the stack and what to do at
        the end of the process is left out: nothing there raises, and nothing is unloaded.
        """
        flags, kinds = self._sections["flags"], self._sections["type"]
        present = (flags & _ALLOCATED > 0) & (kinds != _UNWIND) & (kinds != _FINI_ARRAY)
        places, end = np.full(len(flags), -1, np.int64), 0
        for writable in (False, True):
            if writable:
                self._table = -(-end // 8) * 8
                end = -(-(self._table + 8 * len(self._symbols)) // mmap.PAGESIZE) * mmap.PAGESIZE
                self._fixed = end
            for i in np.flatnonzero(present & ((flags & _WRITABLE > 0) == writable)):
                align = max(1, int(self._sections[i]["align"]))
                places[i] = end = -(-end // align) * align
                end += int(self._sections[i]["size"])
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = np.frombuffer(mmap.mmap(-1, end + 1, private), np.uint8)
        self._base, self._places = self._memory.ctypes.data, places
        for section, place in zip(self._sections, places, strict=True):
            if place >= 0 and section["type"] != _NOBITS:
                content = self._content(section)
                self._view(int(place), len(content))[:] = content

    def _view(self, place: int, size: int) -> Array:
        return self._memory[place : place + size]

    def _resolved(self) -> Array:
        """Returns the address of each symbol; 0 of those that belong to no section."""
        addresses = np.zeros(len(self._symbols), np.uint64)
        for i, symbol in enumerate(self._symbols):
            section = int(symbol["section"])
            if section == _UNDEFINED:
                name = self._name(symbol)
                addresses[i] = 0 if name in ("", "_GLOBAL_OFFSET_TABLE_") else _imported(name)
            elif section < _FIRST_RESERVED and self._places[section] >= 0:
                addresses[i] = self._base + int(self._places[section]) + int(symbol["value"])
            elif section >= _FIRST_RESERVED and section != _ABSOLUTE:
                raise _Foreign("it has symbols without a section")
        return addresses

    def _relocate(self, relocations: Any) -> None:
        """Writes the addresses into the section that these relocations are for."""
        place = int(self._places[relocations["info"]])
        if place < 0:
            return
        records = self._content(relocations).view(_RELOCATIONS)
        at = place + records["offset"].astype(np.int64)
        symbol = self._addresses[records["symbol"]].astype(np.int64)
        table = self._base + self._table
        values = {
            _ADDRESS: symbol,
            _FROM_HERE: symbol - (self._base + at),
            _FROM_TABLE: symbol - table,
            _ENTRY: 8 * records["symbol"].astype(np.int64),
            _TABLE: table - (self._base + at),
        }
        if not np.isin(records["type"], list(values)).all():
            raise _Foreign("it has relocations of another kind")
        chosen = np.select([records["type"] == kind for kind in values], list(values.values()))
        written = (chosen + records["addend"]).astype("<i8").view(np.uint8).reshape(-1, 8)
        self._memory[at[:, None] + np.arange(8)] = written


def _protect(address: int, size: int) -> None:
    """Makes pages of this process executable, and read-only. Raises OSError."""
    executable = mmap.PROT_READ | mmap.PROT_EXEC
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), executable):
        raise OSError(ctypes.get_errno(), "mprotect failed")
