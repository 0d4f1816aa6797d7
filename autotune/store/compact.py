"""Config texts of one kernel in little space: a base for all, and of each what it changes."""

from collections.abc import Sequence

from ...core.configs import items


def form(config: str) -> tuple[str, ...]:
    """Configs share a base if this is equal: the names of the fields, or the whole text where one
    is there twice.
    """
    names = tuple(name for name, _ in items(config))
    return names if len(set(names)) == len(names) else (config,)


def common(configs: Sequence[str]) -> str:
    """Of configs of one form the most common value of each field; of several the first in the
    alphabet.
    """
    columns = zip(*map(items, configs), strict=True)
    return _joined([max(sorted(set(column)), key=column.count) for column in columns])


def families(configs: Sequence[str]) -> list[list[str]]:
    """Configs of one form in groups whose bases and differences take least space together: split
    again and again by the values of a field, as long as that saves more than the bases cost.
    """
    found = [list(configs)]
    for i in range(len(items(configs[0]))):
        parts: dict[str, list[str]] = {}
        for config in configs:
            parts.setdefault(items(config)[i][1], []).append(config)
        split = [parts[value] for value in sorted(parts)]
        found = min(found, split, key=lambda groups: sum(map(_room, groups)))
    if len(found) == 1:
        return found
    return [family for group in found for family in families(group)]


def _room(configs: Sequence[str]) -> int:
    base = common(configs)
    return len(base) + sum(len(difference(config, base)) for config in configs)


def difference(config: str, base: str) -> str:
    """The fields in which a config differs from a base of its form."""
    return _joined(
        [item for item, own in zip(items(config), items(base), strict=True) if item != own]
    )


def applied(base: str, changes: str) -> str:
    """The config with these changes. Raises ValueError for a field that the base lacks."""
    own, changed = items(base), dict(items(changes))
    for name in changed.keys() - {name for name, _ in own}:
        raise ValueError(f"{name!r} is no field of the base")
    return _joined([(name, changed.get(name, value)) for name, value in own])


def _joined(pairs: Sequence[tuple[str, str]]) -> str:
    return ",".join(map("=".join, pairs))
