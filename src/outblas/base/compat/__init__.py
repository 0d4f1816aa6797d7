"""The private names of torch, Triton and the CuTe DSL that outblas uses, and their replacements.

Any release may remove a private name. Each name is looked up here, in one module per library, by
`take`, which records its purpose and what happens without it. Where a slower public name does the
same, it replaces the private one; otherwise the feature is switched off and an error says so.
`tests/base/test_private_names.py` lists the names that the installed versions lack, and runs
outblas without each name.
"""

import importlib
from typing import Any, NamedTuple


class PrivateName(NamedTuple):
    """A private name, as `module:attribute`."""

    name: str
    purpose: str
    without: str  # what happens where the name is missing
    found: bool


# The names that the modules of this package have looked up so far, by name.
taken: dict[str, PrivateName] = {}
_MISSING = object()


def find(name: str) -> tuple[bool, Any]:
    """Returns whether `module:attribute` exists, and its value."""
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
    """Returns the object of a private name, or `default` where it is missing."""
    found, value = find(name)
    taken[name] = PrivateName(name, purpose, without, found)
    return value if found else default


def lacking() -> list[PrivateName]:
    """Returns the names looked up so far that the installed versions lack."""
    return [each for each in taken.values() if not each.found]
