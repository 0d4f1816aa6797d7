"""The facts that determine a compiled kernel: its config, dtypes, versions and sources."""

import functools
import hashlib
import json
from importlib import metadata
from typing import Any

Facts = dict[str, Any]


def digest(facts: Facts) -> str:
    """Returns the name of the kernel that `facts` determine, 32 hexadecimal digits."""
    return hashlib.sha256(text(facts).encode()).hexdigest()[:32]


@functools.cache
def version_of(package: str) -> str:
    """Returns the version of an installed package. To look it up takes half a millisecond, so a
    process does it once. Raises PackageNotFoundError.
    """
    return metadata.version(package)


def text(facts: Facts) -> str:
    """Returns the JSON of facts, the same for equal facts."""
    return json.dumps(facts, sort_keys=True, default=str)
