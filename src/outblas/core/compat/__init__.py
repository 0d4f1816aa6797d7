"""What outblas takes from private parts of torch, Triton and the CuTe DSL, and what replaces it.

A private name may go with any release. Each is taken here, in a module for each library, by
`take`, which says what the name is for and what happens without it. Where a public name does the
same, only slower, it replaces the private one; where none does, the feature is off, and says so.
`tests/core/test_private_names.py` names what the installed versions lack, and runs outblas
without each name.
"""

import importlib
from typing import Any, NamedTuple


class PrivateName(NamedTuple):
    """A private name, as `module:attribute`."""

    name: str
    purpose: str
    without: str  # what happens where the name is missing
    found: bool


# What the modules of this package have taken so far, by name.
taken: dict[str, PrivateName] = {}
_MISSING = object()


def find(name: str) -> tuple[bool, Any]:
    """Whether `module:attribute` exists, and what it is."""
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ImportError:
        return False, None
    for part in path.split("."):
        found = getattr(found, part, _MISSING)
        if found is _MISSING:
            return False, None
    return True, found


def take(name: str, default: Any, purpose: str, without: str) -> Any:
    """The object of a private name, `default` where it is missing."""
    found, value = find(name)
    taken[name] = PrivateName(name, purpose, without, found)
    return value if found else default


def lacking() -> list[PrivateName]:
    """The names that the installed versions lack, of those that were taken so far."""
    return [each for each in taken.values() if not each.found]
