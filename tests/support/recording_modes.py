"""Modes of torch that note what is called while they are on."""

from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class RecordingFunctions(TorchFunctionMode):
    """Notes every function, and calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Callable[..., Any]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class RecordingDispatch(TorchDispatchMode):
    """Notes every operator, and runs it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))
