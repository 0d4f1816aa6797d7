"""Foreign text as a terminal may be given it: names, paths and reasons that others chose."""

import unicodedata


def printable(text: str, keep: str = "") -> str:
    """Escapes everything that a terminal would act on and not show.

    That is control characters, what changes the direction of writing, and what has no width: each
    becomes its escape in Python ("\\\\x1b"). `keep`: characters that stay.
    """
    if text.isprintable():
        return text
    return "".join(each if each in keep or _is_shown(each) else _escaped(each) for each in text)


def _is_shown(character: str) -> bool:
    return character.isprintable() or unicodedata.category(character) == "Zs"


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()
