"""Old and current names of config fields in the texts of stores, exports and tables.

A stored config is text: `tile_m=128,slots=4`. When a field of a kernel's config class is renamed,
the class lists the old name (`ALIASES`, see `core.configs`). Files keep texts with old names, so
that an older outblas can share a store with this one. Texts are converted to the current names when
they are read, and when a config is looked up, claimed or added. Records in memory therefore have
only current names, and two spellings of one config are one trial.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from ...core import config_source, configs, registry

_UNREADABLE = (LookupError, ValueError, OSError, ImportError, SyntaxError)


def current_text(kernel: str, text: str) -> str:
    """Returns the config's text with the current names of the kernel's fields.

    Returns the text unchanged for a kernel whose source is not available, and where the text gives
    one field by two names with different values; such a text describes no valid config.
    """
    renamed = renamed_fields(kernel)
    return _with_current_names(kernel, text) if renamed else text


def spellings(kernel: str, text: str) -> tuple[str, ...]:
    """Returns the texts that a file may contain for a config: the current one first, then older
    ones.

    An older version of outblas wrote all fields with the names of its time. The n-th older text
    uses the n-th old name of each field, or the last one of a field that has fewer.
    """
    current = current_text(kernel, text)
    old_names: dict[str, list[str]] = {}
    for old, new in renamed_fields(kernel).items():
        old_names.setdefault(new, []).append(old)
    items = configs.items(current)
    count = max((len(old_names.get(name, ())) for name, _ in items), default=0)
    older = [
        ",".join(f"{_nth(old_names.get(name, [name]), i)}={value}" for name, value in items)
        for i in range(count)
    ]
    return tuple(dict.fromkeys([current, *older]))


@functools.lru_cache(maxsize=256)
def renamed_fields(kernel: str) -> Mapping[str, str]:
    """Returns the current name of each field of a kernel's config by its old name; empty for a
    kernel whose source is not available. Imports no DSL.
    """
    try:
        return config_source.source(registry.module_name(kernel), "Config").aliases
    except _UNREADABLE:
        return {}


@functools.lru_cache(maxsize=4096)
def _with_current_names(kernel: str, text: str) -> str:
    try:
        return configs.with_current_names(text, renamed_fields(kernel))
    except ValueError:
        return text


def _nth(names: list[str], i: int) -> str:
    return names[min(i, len(names) - 1)]
