"""The facts that determine a compiled kernel: its config, dtypes, versions and sources."""

import hashlib
import json

Facts = dict[str, object]


def digest(facts: Facts) -> str:
    """Returns the name of the kernel that `facts` determine, 32 hexadecimal digits."""
    return hashlib.sha256(text(facts).encode()).hexdigest()[:32]


def text(facts: Facts) -> str:
    """Returns the JSON of facts, the same for equal facts."""
    return json.dumps(facts, sort_keys=True, default=str)
