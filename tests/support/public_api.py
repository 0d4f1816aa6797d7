"""The public objects of outblas, by the name under which a user imports them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

# Modules, and what of each is public; None: what its `__all__` names.
MODULES: dict[str, tuple[str, ...] | None] = {
    "outblas": None,
    "outblas.nn": None,
    "outblas.inductor": None,
    "outblas.autotune": None,
    "outblas.inspect": None,
    "outblas.call.shape_recorder": ("RecordedShapes",),
    "outblas.torch_ops.aten": ("Enabled", "Product"),
    "outblas.hopper.config": ("HopperConfig",),
    "outblas.kernels.simt_config": ("SimtConfig",),
    "outblas.kernels.portable_config": ("PortableConfig",),
    "outblas.turing.config": ("TuringConfig",),
}


@dataclass(frozen=True)
class Public:
    """A public object, and the name that a user imports it by."""

    name: str
    value: Any

    @property
    def is_exception(self) -> bool:
        return isinstance(self.value, type) and issubclass(self.value, BaseException)

    def methods(self) -> Iterator[Public]:
        """The public methods of a class of ours that have a docstring to write: an override takes
        that of the method it overrides.
        """
        if not isinstance(self.value, type):
            return
        for name in dir(self.value):
            owner = next((kind for kind in self.value.__mro__ if name in vars(kind)), None)
            if name.startswith("_") or owner is None or not owner.__module__.startswith("outblas"):
                continue
            method = vars(owner)[name]
            if isinstance(method, classmethod | staticmethod):
                method = method.__func__
            inherits = method.__doc__ is None and any(
                name in vars(kind) for kind in owner.__mro__[1:]
            )
            if (inspect.isfunction(method) or isinstance(method, property)) and not inherits:
                yield Public(f"{self.name}.{name}", method)


def public_objects() -> list[Public]:
    """Every public object once, under the first of its names; former names are left out."""
    found: dict[int, Public] = {}
    for module_name, names in MODULES.items():
        module = import_module(module_name)
        for name in names or module.__all__:
            value = getattr(module, name)
            if value.__name__ == name:
                found.setdefault(id(value), Public(f"{module_name}.{name}", value))
    return list(found.values())
