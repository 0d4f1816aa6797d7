"""Parameters that go by two names: torch's, which the signature shows, and the operators' own as
keywords.
"""

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any


def show_signature(function: Callable[..., Any], required: Collection[str]) -> None:
    """Gives a function the signature that its documentation has: `required` without defaults, no
    `**aliases`.
    """
    signature = inspect.signature(function)
    shown = [
        p.replace(default=p.empty) if p.name in required else p
        for p in signature.parameters.values()
        if p.kind is not p.VAR_KEYWORD
    ]
    function.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]


def renamed(
    function: str, names: Mapping[str, str], aliases: Mapping[str, Any], **given: Any
) -> tuple[Any, ...]:
    """The arguments `given` by name, completed from `aliases`.

    An argument that came under its other name is None in `given`; `names` has the parameter of each
    alias. Raises TypeError for an unknown alias, and for an argument that came twice.
    """
    for alias, value in aliases.items():
        if alias not in names:
            raise TypeError(f"{function}() got an unexpected keyword argument {alias!r}")
        if given[names[alias]] is not None:
            raise TypeError(
                f"{function}() got {names[alias]!r} twice, the second time as {alias!r}"
            )
        given[names[alias]] = value
    return tuple(given.values())
