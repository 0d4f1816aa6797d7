"""An .svg of matplotlib in a third of its bytes and the same picture: each style once, numbers as
fine as eyes are.
"""

import itertools
import re
import string
from collections.abc import Iterator
from xml.etree import ElementTree

_SVG = "{http://www.w3.org/2000/svg}"
_LINK = "{http://www.w3.org/1999/xlink}href"
_STEP = re.compile(r"([MLQCz])([^MLQCz]*)")  # all that matplotlib draws with
_NUMBER = re.compile(r"-?\d+\.\d+")
_ZERO = re.compile(r"(?<!\d)0(?=\.)")
_REFERENCE = re.compile(r"(?<=#)[\w.-]+")
_UNTURNED = re.compile(r"rotate\(-?0 [^)]*\)")
_MERGED = {"d", "class", "clip-path"}  # all that a path may have to become one with its neighbour
_TEXT = ("text", "tspan", "style")  # white space counts
_FONT = "font-family:'DejaVu Sans', sans-serif;"  # of every text
_FINE = 2  # digits of what stands in <defs>, which is small; tenths of a point are enough elsewhere


def compact(text: str, note: str = "") -> str:
    """The same picture, with `note` as its only metadata."""
    root = ElementTree.fromstring(text)
    _named_plainly(root)
    names = _names(root)
    styles: dict[str, str] = {}
    _shorten(root, names, styles, digits=1)
    _regroup(root, {name for style, name in styles.items() if "opacity" in style})
    for sheet in root.iter("style"):
        written = "".join(
            f"\n.{name}{{{style.replace(_FONT, '')}}}" for style, name in styles.items()
        )
        sheet.text = f"{_sheet(sheet.text or '')}\ntext{{{_FONT}}}{written}"
    if note:
        metadata = ElementTree.Element("metadata")
        metadata.text, metadata.tail = note, "\n"
        root.insert(0, metadata)
    root.attrib.pop("version", "")
    root.attrib |= {
        "xmlns": "http://www.w3.org/2000/svg",
        "xmlns:xlink": "http://www.w3.org/1999/xlink",
    }
    return ElementTree.tostring(root, encoding="unicode").replace(" />", "/>") + "\n"


def _named_plainly(root: ElementTree.Element) -> None:
    for element in root.iter():
        element.tag = element.tag.removeprefix(_SVG)
        if _LINK in element.attrib:
            element.attrib["xlink:href"] = element.attrib.pop(_LINK)


def _names(root: ElementTree.Element) -> dict[str, str]:
    """A short name for each id that is referred to."""
    ids = {element.get("id") for element in root.iter()}
    values = (
        value
        for element in root.iter()
        for value in element.attrib.values()
        if not value.startswith("data:")
    )
    found = dict.fromkeys(
        name for value in values for name in _REFERENCE.findall(value) if name in ids
    )
    return {name: f"i{i}" for i, name in enumerate(found)}


def _shorten(
    element: ElementTree.Element, names: dict[str, str], styles: dict[str, str], digits: int
) -> None:
    """Attributes, here and below; a style becomes a class, and `styles` says which."""
    given = dict(element.attrib)
    element.attrib.clear()
    for key, value in given.items():
        if value.startswith("data:"):
            short = "".join(value.split())
        else:
            short = _REFERENCE.sub(lambda m: names.get(m[0], m[0]), value)
        if key == "id":
            short = names.get(value, "")
        elif key == "d":
            short = _steps(value, digits)
        elif key in ("x", "y", "width", "height") and element.tag != "svg":
            short = f"{round(float(value), digits):g}"
        elif key == "transform":
            short = _NUMBER.sub(
                lambda m: f"{round(float(m[0]), _FINE):g}", _UNTURNED.sub("", value)
            )
        elif key == "style":
            key, short = "class", styles.setdefault(_sheet(short), _class(len(styles)))
        if short:
            element.set(key, short)
    for child in element:
        _shorten(child, names, styles, _FINE if element.tag == "defs" else digits)


def _class(number: int) -> str:
    return string.ascii_letters[number % 52] + (str(number // 52) if number > 51 else "")


def _sheet(style: str) -> str:
    return style.replace("; ", ";").replace(": ", ":")


def _steps(path: str, digits: int) -> str:
    """A path in steps from point to point, each rounded as its end is."""
    scale = 10**digits
    made, here = [], (0, 0)
    for kind, ends in _STEP.findall(path):
        numbers = [round(float(number) * scale) for number in ends.split()]
        steps = [number - here[i % 2] for i, number in enumerate(numbers)]
        here = (numbers[-2], numbers[-1]) if numbers else here  # what follows a "z" is an "M"
        if kind == "M":
            steps = numbers
        elif kind == "L" and 0 in steps:
            kind, steps = ("v", steps[1:]) if steps[0] == 0 else ("h", steps[:1])
        if kind in "Mz" or any(steps):
            made.append(
                (kind if kind == "M" else kind.lower())
                + " ".join(f"{step / scale:.10g}" for step in steps)
            )
    return _ZERO.sub("", "".join(made)).replace(" -", "-")


def _regroup(element: ElementTree.Element, clear: set[str]) -> None:
    """Groups that say nothing give up their children; neighbours in one style become one path
    unless in `clear`. Texts come last, where nothing covers them, and neighbours of one class say
    it once.
    """
    children: list[ElementTree.Element] = []
    for child in sorted(_children(element, clear), key=_last_if_text):
        if children and _mergeable(children[-1], child, clear):
            children[-1].attrib["d"] += child.attrib["d"]
        else:
            children.append(child)
    if element.tag not in _TEXT:
        children = list(_classed(children))
        element.text = "\n" if children else None
        for child in children:
            child.tail = "\n"
    element[:] = children


def _last_if_text(element: ElementTree.Element) -> tuple[bool, str]:
    written = element.tag == "text"
    return written, element.get("class", "") if written else ""


def _classed(children: list[ElementTree.Element]) -> Iterator[ElementTree.Element]:
    """Three texts or marks and more of one class in a group that has it."""
    for (tag, name), run in itertools.groupby(
        children, lambda child: (child.tag, child.get("class"))
    ):
        alike = list(run)
        if tag in ("text", "use") and name and len(alike) > 2:
            for child in alike:
                child.attrib.pop("class")
                child.tail = "\n"
            group = ElementTree.Element("g", {"class": name})
            group.text, group[:] = "\n", alike
            alike = [group]
        yield from alike


def _children(element: ElementTree.Element, clear: set[str]) -> Iterator[ElementTree.Element]:
    for child in element:
        if child.tag == "g" and not child.attrib:
            yield from _children(child, clear)
        elif child.tag != "metadata":
            _regroup(child, clear)
            yield child


def _mergeable(one: ElementTree.Element, other: ElementTree.Element, clear: set[str]) -> bool:
    ours, theirs = ({**each.attrib, "d": ""} for each in (one, other))
    return (
        one.tag == other.tag == "path"
        and ours == theirs
        and ours.keys() <= _MERGED
        and ours.get("class") not in clear
    )
