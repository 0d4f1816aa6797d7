"""README as a package index shows it."""

import re

from readme_renderer import markdown

_LINK = re.compile(r'<(?:a|img|source)\b[^>]*?\b(?:href|src|srcset)="(?P<to>[^"]*)"')
_PICTURE = re.compile(r"^!\[|<img\b", re.M)


def faults(description: str) -> list[str]:
    """What is wrong with the long description of a package: it cannot be rendered, an address leads
    nowhere from there, or a picture is lost.
    """
    html = markdown.render(description)
    if html is None:
        return ["README cannot be rendered"]
    found = [
        f"README: {to} leads nowhere from a package index"
        for to in dict.fromkeys(link["to"] for link in _LINK.finditer(html))
        if not to.startswith(("https://", "#user-content-"))
    ]
    shown, meant = html.count("<img"), len(_PICTURE.findall(description))
    if shown < meant:
        found.append(f"README has {meant} pictures, of which an index shows {shown}")
    return found
