"""Machine code of Hopper kernels, compiled once for all tests and all processes that run them.

A compile takes a core for one to three seconds, and many tests read the same code: the snapshot,
the idea of each rung, `outblas inspect`, the demo. Here each variant is compiled by the first test
that asks for it, and kept in a folder until the run ends. Code that a compiler refuses is not kept.

A test that changes what is compiled, or how, has the mark `own_compile`.
"""

import hashlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

from outblas.core import registry
from outblas.core.artifact import Artifact
from outblas.core.configs import to_text


class Store:
    """A folder of compiled variants, which processes share. `active` is off while a test compiles
    for itself.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.active = True
        folder.mkdir(exist_ok=True)

    def share(self, kernel: str) -> None:
        """From now on `artifact` of this kernel's module takes what the folder has."""
        module = registry.load(kernel)
        compile_variant: Callable[..., Artifact] = module.artifact

        def artifact(config: Any = None, **requested: Any) -> Artifact:
            if not self.active:
                return compile_variant(config, **requested)
            text = to_text(module.Config() if config is None else config)
            return self._fetch(
                f"{kernel} {text} {sorted(requested.items())!r}",
                lambda: compile_variant(config, **requested),
            )

        vars(module)["artifact"] = artifact

    def _fetch(self, request: str, build: Callable[[], Artifact]) -> Artifact:
        path = self.folder / hashlib.sha256(request.encode()).hexdigest()
        with FileLock(f"{path}.lock"):
            if path.exists():
                found: Artifact = pickle.loads(path.read_bytes())
                return found
            made = build()
            path.write_bytes(pickle.dumps(made))
            return made
