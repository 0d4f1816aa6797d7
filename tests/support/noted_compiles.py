"""Compiles that note who ran them, and fail as they are asked to. Worker processes import this,
and no torch, which takes them seconds.
"""

import importlib.util
import os
import signal
import sys
import time
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

if "outblas" not in sys.modules:
    found = importlib.util.find_spec("outblas")
    sys.modules["outblas"] = bare = types.ModuleType("outblas")
    bare.__path__ = found.submodule_search_locations  # type: ignore[union-attr, assignment]

from outblas.base import cache


@dataclass(frozen=True)
class NotedKey:
    """The key of a compile.

    kernel: its name, unique in a test.
    notes: the file to which whoever compiles it appends its process.
    act: "", or what happens: "raise", "abort", "exit", "unsaved", "other" (as of another version),
        "nap", or "wait" until a file named like the notes and ".go" is there.
    """

    keeper: ClassVar[str] = f"{__name__}:keep"
    kernel: str
    notes: str
    act: str = ""

    @property
    def cache_key_fields(self) -> dict[str, Any]:
        return {"kernel": self.kernel, "notes": self.notes, "act": self.act}

    @property
    def processes(self) -> list[int]:
        """Those that have begun to compile it, in order."""
        path = Path(self.notes)
        lines = path.read_text().splitlines() if path.exists() else []
        return [int(line.split()[1]) for line in lines if line.split()[0] == self.kernel]

    def build(self) -> bytes:
        with open(self.notes, "a") as file:
            file.write(f"{self.kernel} {os.getpid()}\n")
        if self.act == "raise":
            raise ValueError("no such tile")
        if self.act == "abort":
            signal.signal(signal.SIGABRT, signal.SIG_DFL)
            os.abort()
        if self.act == "exit":
            os._exit(3)
        if self.act == "nap":
            time.sleep(0.1)
        while self.act == "wait" and not Path(f"{self.notes}.go").exists():
            time.sleep(0.01)
        return self.kernel.encode()

    def fetch(self) -> bytes:
        return cache.fetch(self.cache_key_fields, build=self.build, save=save, load=bytes, key=self)


def save(code: bytes, path: Path) -> None:
    path.write_bytes(code)


def keep(key: NotedKey) -> dict[str, Any]:
    if key.act == "unsaved":
        raise OSError("no space left on device")
    facts = key.cache_key_fields | ({"version": 2} if key.act == "other" else {})
    cache.warm(facts, build=key.build, save=save)
    return facts
