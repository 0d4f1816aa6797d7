"""The faults of `make mutation` fit the sources."""

from mutation.faults import FAULTS, StaleFault
from support.paths import ROOT


def test_every_fault_fits_the_sources_and_has_tests_and_a_sentence_of_its_own() -> None:
    stale = []
    for planned in FAULTS:
        try:
            compile(planned.planted(ROOT / "hopper"), planned.file, "exec")
            planned.check.path(ROOT / "tests")
        except (StaleFault, SyntaxError) as error:
            stale.append(str(error))

    assert stale == []
    assert len({planned.what for planned in FAULTS}) == len(FAULTS)
