"""STUB, to be replaced: whether a store reaches its file. The store's own methods of these names take its place."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .database import StoreError

if TYPE_CHECKING:
    from .rows import Operation


class Persistence:
    """A base of `Store` with the least that sweeps ask for."""

    path: Path
    warning: str | None
    _waiting: list[Operation[Any]]
    _file: Any

    @property
    def persistent(self) -> bool:
        return self._file is not None and not self._waiting

    @property
    def unsaved(self) -> int:
        if self._file is not None:
            return len(self._waiting)
        trials: list[Any] = self.trials()  # type: ignore[attr-defined]
        return len(trials)

    def check_persistent(self) -> None:
        if self._file is None:
            raise StoreError(f"{self.path} cannot be written: {self.warning}")

    def emergency_export(self, folder: Path | None = None) -> Path:
        from . import transfer

        target = Path(folder or tempfile.mkdtemp()) / "outblas-rescued.json"
        transfer.export(self.trials(), self.winners(), target)  # type: ignore[attr-defined]
        return target
