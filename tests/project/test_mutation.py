"""The faults of `make mutation` fit the sources."""

from pathlib import Path

import pytest
from mutation.faults import FAULTS, Check, Fault, StaleFault
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


@pytest.mark.parametrize("old", ["4 * x", "* x"], ids=["gone", "there twice"])
def test_a_fault_that_the_sources_have_outgrown_is_refused(old: str, tmp_path: Path) -> None:
    (tmp_path / "numbers.py").write_text("double = 2 * x\ntriple = 3 * x\n")
    fault = Fault("numbers.py", old, "0", Check("test_toy.py"), "The toy is wrong.")

    with pytest.raises(StaleFault, match="expected once"):
        fault.planted(tmp_path)
