"""Parameters that have two names: torch's, which the signature shows, and the name that outblas's
operators use, which is accepted as a keyword.
"""

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any


def show_signature(
    function: Callable[..., Any],
    required: Collection[str],
    like: Callable[..., Any] | None = None,
    *last: inspect.Parameter,
) -> None:
    """Sets the signature that the documentation shows: that of `like`, or else of the function
    itself, and the parameters `last`. Those in `required` have no defaults, and `**aliases` is
    hidden.
    """
    signature = inspect.signature(like or function)
    shown = [
        p.replace(default=p.empty) if p.name in required else p
        for p in signature.parameters.values()
        if p.kind is not p.VAR_KEYWORD
    ]
    function.__signature__ = signature.replace(parameters=[*shown, *last])  # type: ignore[attr-defined]


def renamed(
    function: str, names: Mapping[str, str], aliases: Mapping[str, Any], **given: Any
) -> tuple[Any, ...]:
    """Returns the values of `given` in order, filled in from `aliases`.

    `names` maps each alias to its parameter. An argument that was passed by its alias is None in
    `given`. Raises TypeError for an unknown alias, and for an argument that was passed twice.
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
