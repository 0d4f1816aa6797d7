"""Makes text from other sources safe for a terminal: names, paths and reasons that outblas did not
write.
"""

import unicodedata


def printable(text: str, keep: str = "") -> str:
    """Escapes every character that a terminal would interpret instead of showing.

    These are control characters, characters that change the writing direction, and characters
    without width. Each becomes its Python escape ("\\\\x1b"). Characters in `keep` are not escaped.
    """
    if text.isprintable():
        return text
    return "".join(each if each in keep or _is_shown(each) else _escaped(each) for each in text)


def _is_shown(character: str) -> bool:
    return character.isprintable() or unicodedata.category(character) == "Zs"


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()
