"""The claims of the seed documents beside a ladder, in a checkout.

The package `docs/seed_claims` tests the claims. It is a part of the documentation and not of the
wheel, hence loaded from its folder, where there is one.
"""

import importlib.util
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ..report.evidence import Evidence
from ..report.results import ROOT, in_checkout
from ..report.table import Table

FOLDER = ROOT / "docs" / "seed_claims"
MISSING = (
    "Only a checkout of outblas can test the claims of the seed documents (docs/seed_claims). "
    "docs/claims.md lists what came out for the project's own results."
)
PACKAGE = "outblas_seed_claims"  # a name that no other package of the environment has


@dataclass(frozen=True)
class ClaimsTable:
    """The claims about a ladder, each with its verdict, as a table and as records for JSON."""

    table: Table
    records: list[dict[str, Any]]


def claims_table(evidence: Evidence, ladder: str | None) -> ClaimsTable | None:
    """The claims about a ladder (None: about all), tested; None outside a checkout."""
    package = _load()
    if package is None:
        return None
    found = package.of_ladder(package.settled(evidence), ladder)
    cells = [claim.cells() for claim in found]
    table = Table(f"Claims: {package.count(found)}", package.COLUMNS, cells)
    return ClaimsTable(table, [claim.record() for claim in found])


def _load() -> ModuleType | None:
    """The package docs/seed_claims, None where there is no such folder."""
    if PACKAGE in sys.modules:
        return sys.modules[PACKAGE]
    init = FOLDER / "__init__.py"
    if not (in_checkout() and init.is_file()):
        return None
    spec = importlib.util.spec_from_file_location(
        PACKAGE, init, submodule_search_locations=[str(FOLDER)]
    )
    if spec is None or spec.loader is None:
        return None
    package = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE] = package  # its modules import from it by this name
    try:
        spec.loader.exec_module(package)
    except BaseException:
        del sys.modules[PACKAGE]
        raise
    return package
