"""The faults of `make mutation` fit the sources, and it tells what is caught from what is not."""

from pathlib import Path

import pytest
from mutation.__main__ import (
    BROKEN,
    CAUGHT,
    HUNG,
    ROOT,
    SURVIVED,
    copy_packages,
    run_check,
    try_fault,
)
from mutation.faults import FAULTS, Check, Fault, StaleFault

TOY = Check("test_toy.py")
NUMBERS = "def double(x):\n    return 2 * x\n\n\ndef triple(x):\n    return 3 * x\n"
TESTS = """
from outblas.numbers import double


def test_double():
    assert double(3) == 6
"""


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A checkout of one package and one test, which says nothing of `triple`."""
    files = {
        "src/outblas/__init__.py": "",
        "src/outblas/numbers.py": NUMBERS,
        "tests/test_toy.py": TESTS,
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    return tmp_path


def fault(old: str, new: str, check: Check = TOY) -> Fault:
    return Fault("outblas", "numbers.py", old, new, check, "The toy is wrong.")


def test_every_fault_fits_the_sources_and_has_tests_and_a_name_of_its_own() -> None:
    stale = []
    for planned in FAULTS:
        try:
            compile(planned.planted(ROOT / "hopper"), planned.file, "exec")
            planned.check.path(ROOT / "tests")
        except (StaleFault, SyntaxError) as error:
            stale.append(str(error))

    assert stale == []
    assert len({planned.name for planned in FAULTS}) == len(FAULTS)


@pytest.mark.long
@pytest.mark.parametrize(
    ("old", "new", "check", "verdict"),
    [
        pytest.param("2 * x", "3 * x + 1", TOY, CAUGHT, id="caught"),
        pytest.param("2 * x", "x.no_such_name", TOY, BROKEN, id="breaks a call"),
        pytest.param("def double", "import absent\ndef double", TOY, BROKEN, id="breaks imports"),
        pytest.param("def triple", "def fourfold", TOY, SURVIVED, id="not caught"),
        pytest.param("2 * x", "3 * x", Check("test_toy.py", "absent"), BROKEN, id="no test"),
    ],
)
def test_only_a_test_that_fails_for_what_it_asserts_catches_a_fault(
    toy: Path, old: str, new: str, check: Check, verdict: str
) -> None:
    assert try_fault(toy, "outblas", fault(old, new, check)).verdict == verdict
    assert (toy / "src/outblas/numbers.py").read_text() == NUMBERS


@pytest.mark.long
def test_a_check_without_an_end_is_ended(toy: Path, tmp_path: Path) -> None:
    (toy / "tests/test_toy.py").write_text("import time\n\ndef test():\n    time.sleep(600)\n")
    copy_packages(toy, tmp_path / "packages")

    assert run_check(toy, tmp_path / "packages", TOY, seconds=3).verdict == HUNG


@pytest.mark.parametrize("old", ["4 * x", "* x"], ids=["gone", "there twice"])
def test_a_fault_that_the_sources_have_outgrown_is_refused(toy: Path, old: str) -> None:
    with pytest.raises(StaleFault, match="expected once"):
        fault(old, "0").planted(toy / "src/outblas")
