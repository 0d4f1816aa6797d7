"""The mutation check itself: its faults fit the sources, and it tells what is caught from what is
not.
"""

from pathlib import Path

import pytest
from mutation.__main__ import ROOT
from mutation.fault import Check, Fault, StaleFault
from mutation.faults import FAULTS
from mutation.runner import BROKEN, CAUGHT, SURVIVED, BaselineFailed, Runner, error_class
from mutation.shadow import Project, Shadow

pytestmark = pytest.mark.long

TOY = Check("test_toy.py")
SOURCE = "src/toy/numbers.py"
PYPROJECT = """
[tool.setuptools]
packages = ["toy"]
[tool.setuptools.package-dir]
"" = "src"
"""
NUMBERS = "def double(x):\n    return 2 * x\n\n\ndef triple(x):\n    return 3 * x\n"
TESTS = """
from toy.numbers import double


def test_double():
    assert double(3) == 6
"""


@pytest.fixture
def toy(tmp_path: Path) -> Project:
    """A project of one package and one test, which says nothing of `triple`."""
    root = tmp_path / "checkout"
    files = {
        "pyproject.toml": PYPROJECT,
        "src/toy/__init__.py": "",
        SOURCE: NUMBERS,
        "tests/test_toy.py": TESTS,
    }
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return Project.at(root)


@pytest.fixture
def runner(toy: Project, tmp_path: Path) -> Runner:
    """Of the toy's faults, one at a time."""
    return Runner(toy, tmp_path / "shadows", jobs=1)


def fault(old: str, new: str, name: str = "toy") -> Fault:
    """A fault of the toy."""
    return Fault(name, SOURCE, old, new, (TOY,), "The toy is wrong.")


# ---- the faults of the project
def test_every_fault_fits_the_sources() -> None:
    stale = []
    for each in FAULTS:
        try:
            each.planted(ROOT)
        except StaleFault as error:
            stale.append(str(error))

    assert stale == []


def test_every_fault_has_tests_and_a_name_of_its_own() -> None:
    names = [each.name for each in FAULTS]
    missing = []
    for check in {check for each in FAULTS for check in each.checks}:
        try:
            check.path(ROOT / "tests")
        except StaleFault as error:
            missing.append(str(error))

    assert missing == []
    assert sorted(names) == sorted(set(names))


def test_every_fault_lies_in_a_package_that_is_shadowed(tmp_path: Path) -> None:
    shadow = Shadow(Project.at(ROOT), tmp_path / "shadow")

    for file in {each.file for each in FAULTS}:
        assert shadow.path_of(file).readlink() == ROOT / file, file


def test_every_package_is_imported_from_the_shadow(tmp_path: Path) -> None:
    """`outblas.results` too, which has no `__init__.py`."""
    Shadow(Project.at(ROOT), tmp_path / "shadow").check_imported()


# ---- what is told of a fault
@pytest.mark.parametrize(
    ("old", "new", "verdict", "error"),
    [
        pytest.param("2 * x", "3 * x + 1", CAUGHT, "AssertionError", id="caught"),
        pytest.param("2 * x", "x.no_such_name", BROKEN, "AttributeError", id="breaks a call"),
        pytest.param("def double", "import no_such_module\ndef double", BROKEN, "", id="import"),
        pytest.param("def triple", "def fourfold", SURVIVED, "", id="not caught"),
    ],
)
def test_only_a_test_that_fails_for_what_it_asserts_catches_a_fault(
    runner: Runner, old: str, new: str, verdict: str, error: str
) -> None:
    outcome = runner.try_fault(fault(old, new))

    assert (outcome.verdict, outcome.error) == (verdict, error), outcome.detail


def test_a_check_that_selects_no_test_catches_nothing(runner: Runner) -> None:
    selecting = Check("test_toy.py", "no_such_test")

    outcome = runner.try_fault(
        Fault("toy", SOURCE, "2 * x", "3 * x", (selecting,), "The toy is wrong.")
    )

    assert outcome.verdict == BROKEN


def test_a_check_that_fails_without_a_fault_is_told(toy: Project, runner: Runner) -> None:
    (toy.root / SOURCE).write_text(NUMBERS.replace("2 * x", "5 * x"))

    with pytest.raises(BaselineFailed, match=r"test_toy\.py: .*::test_double AssertionError"):
        runner.check_baseline([TOY], lambda check, outcome: None)


@pytest.mark.parametrize(
    ("message", "name"),
    [
        ("assert 1 == 2", "AssertionError"),
        ("AssertionError: C at 3", "AssertionError"),
        ("protocol.machine.ProtocolFault: deadlock", "ProtocolFault"),
        ("ImportError: no module", "ImportError"),
    ],
)
def test_the_class_of_an_error_is_read_from_its_report(message: str, name: str) -> None:
    assert error_class(message) == name


# ---- where a fault is planted
def test_the_tree_stays_as_it_is_while_a_fault_is_planted(toy: Project, tmp_path: Path) -> None:
    shadow = Shadow(toy, tmp_path / "shadow")

    with shadow.with_fault(fault("2 * x", "3 * x")):
        planted = shadow.path_of(SOURCE).read_text()

    assert "3 * x\n\n" in planted
    assert (toy.root / SOURCE).read_text() == NUMBERS
    assert shadow.path_of(SOURCE).readlink() == toy.root / SOURCE


@pytest.mark.parametrize(
    ("old", "message"),
    [("4 * x", "0 times"), ("* x", "2 times")],
    ids=["gone", "there twice"],
)
def test_a_fault_that_the_sources_have_outgrown_is_refused(
    toy: Project, old: str, message: str
) -> None:
    with pytest.raises(StaleFault, match=message):
        fault(old, "0").planted(toy.root)


def test_a_fault_that_does_not_parse_is_refused(toy: Project) -> None:
    with pytest.raises(StaleFault, match="does not parse"):
        fault("2 * x", "2 *").planted(toy.root)
