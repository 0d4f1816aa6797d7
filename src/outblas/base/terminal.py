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
    return "".join(
        c
        if c in keep or c.isprintable() or unicodedata.category(c) == "Zs"
        else c.encode("unicode_escape").decode()
        for c in text
    )
