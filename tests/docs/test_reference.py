"""The page of the Python API names every public object, and no other."""

import re

from support.paths import ROOT
from support.public_api import public_objects

REFERENCE = ROOT / "docs" / "reference"
PUBLIC = {public.name for public in public_objects()}
DOCUMENTED = {
    name
    for page in ("api.md", "configs.md")
    for name in re.findall(
        r"^\.\. auto(?:function|class|exception):: (\S+)$",
        (REFERENCE / page).read_text(encoding="utf-8"),
        re.MULTILINE,
    )
}


def test_the_pages_name_every_public_object() -> None:
    assert not PUBLIC - DOCUMENTED


def test_what_the_pages_name_is_there() -> None:
    assert not DOCUMENTED - PUBLIC
