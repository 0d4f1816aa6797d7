"""What compilers and tools made of kernels, once for all tests and all processes of a run.

A compile of a Hopper kernel takes a core for half a second to two, ptxas and nvdisasm a fifth of
one, and many tests look at the same code. Here the first test that asks pays, and what came out is
kept in a folder until the run ends:

- the code of a Hopper variant, by all that its compile depends on,
- what ptxas makes of Triton's PTX, by that text, its options and the architecture,
- what nvdisasm prints of a cubin, by the cubin.

Triton itself keeps its compiles on disk. What a compiler refuses is not kept. A test that changes
what is compiled, or how, has the mark `own_compile`.
"""

import hashlib
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from filelock import FileLock

from outblas.inspect import machine_code

T = TypeVar("T")

CODE_OF_HOPPER = "outblas.hopper.parts.compile"
CODE_OF_TRITON = "outblas.device.triton_artifact"


class Store:
    """A folder of what was made, which processes share. `active` is off while a test compiles for
    itself.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.active = True
        self._shared: set[str] = set()
        folder.mkdir(exist_ok=True)

    def kept(self, request: object, make: Callable[[], T]) -> T:
        """What `make` returned for this request, whichever process asked first: the text of a
        request names all that the result depends on, and the result can be pickled.
        """
        if not self.active:
            return make()
        path = self.folder / hashlib.sha256(repr(request).encode()).hexdigest()
        with FileLock(f"{path}.lock"):
            if path.exists():
                found: T = pickle.loads(path.read_bytes())
                return found
            made = make()
            path.write_bytes(pickle.dumps(made))
            return made

    def share(self) -> None:
        """From now on the tools' answers are kept, and those of the compilers that are loaded.
        Loads none: a test of Triton's kernels does without the CuTe DSL.
        """
        self._replace(machine_code, "disassemble", lambda cubin: cubin)
        if CODE_OF_HOPPER in sys.modules:
            self._replace(
                sys.modules[CODE_OF_HOPPER],
                "compile_code",
                lambda variant, build: sorted(variant.cache_key_fields.items()),
            )
        if CODE_OF_TRITON in sys.modules:
            self._replace(
                sys.modules[CODE_OF_TRITON],
                "assemble",
                lambda ptx, metadata, arch: (ptx, sorted(metadata.items(), key=str), arch),
            )

    def _replace(self, module: ModuleType, name: str, request: Callable[..., object]) -> None:
        """A function of a module becomes one that keeps what it returns, by what `request` makes of
        its arguments.
        """
        if (where := f"{module.__name__}.{name}") in self._shared:
            return
        self._shared.add(where)
        real: Callable[..., Any] = getattr(module, name)

        def kept(*given: Any) -> Any:
            return self.kept((where, request(*given)), lambda: real(*given))

        vars(module)[name] = kept
