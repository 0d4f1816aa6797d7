"""The example of every public docstring runs, and its parts name what the object has."""

import ast
import dataclasses
import doctest
import inspect
import re
import textwrap
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.inductor import inductor_settings
from support.public_api import Public, public_objects

_HEADING = re.compile(
    r"^(Args|Attributes|Returns|Yields|Raises|Example|Examples|Note|Warning):$", re.MULTILINE
)
_ITEM = re.compile(r"^ {4}(\*{0,2}\w+(?:, \*{0,2}\w+)*): \S", re.MULTILINE)


@dataclass(frozen=True)
class Docstring:
    """A docstring's summary, and the text of its sections by their headings."""

    summary: str
    sections: dict[str, str] = field(default_factory=dict)

    def items(self, heading: str) -> list[str]:
        """The names that a section describes, `name: text` or `name, name: text`."""
        listed = _ITEM.findall(self.sections.get(heading, ""))
        return [name.lstrip("*") for names in listed for name in names.split(", ")]


def parse(text: str) -> Docstring:
    """The parts of a docstring, as `__doc__` has it."""
    head, *parts = _HEADING.split(inspect.cleandoc(text))
    summary = " ".join(head.partition("\n\n")[0].split())
    return Docstring(summary, dict(zip(parts[::2], parts[1::2], strict=True)))


OBJECTS = public_objects()
METHODS = [method for public in OBJECTS for method in public.methods()]
INDUCTOR = "outblas.inductor_choice"
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
pytest_plugins = ("support.batch_invariance",)
pytestmark = [
    pytest.mark.xdist_group("doctests"),  # they share the import of triton
    pytest.mark.usefixtures("no_context_before"),  # an example enters a context
]


def name(public: Public) -> str:
    return public.name


def parts(public: Public) -> Docstring:
    return parse(public.value.__doc__ or "")


def parameters(value: Any) -> list[str]:
    """The parameters that a caller may give: those of `__init__` for a class."""
    if isinstance(value, type) and issubclass(value, BaseException):
        return []
    names = list(inspect.signature(value).parameters)
    return [each for each in names if each != "self" and each != "cls"]


def raised(function: Any) -> set[str]:
    """The classes of errors that the body of a function raises itself, by name: not those of the
    functions in it, which it may catch.
    """
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    within = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)][1:]
    nested = {id(node) for definition in within for node in ast.walk(definition)}
    calls = (
        node.exc
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) and id(node) not in nested
    )
    return {ast.unparse(call.func) for call in calls if isinstance(call, ast.Call)}


@pytest.mark.parametrize(
    "public",
    [pytest.param(p, marks=pytest.mark.long if p.name == INDUCTOR else ()) for p in OBJECTS],
    ids=name,
)
@pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")
def test_the_example_of_a_docstring_runs(
    public: Public, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an empty folder, with the defaults of every variable."""
    monkeypatch.chdir(tmp_path)
    for variable in ("OUTBLAS_STRICT", "OUTBLAS_TUNE", "OUTBLAS_TUNE_BUDGET"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path / "cache"))
    examples = doctest.DocTestParser().get_doctest(
        public.value.__doc__ or "", {"__name__": "__main__"}, public.name, None, 0
    )
    report: list[str] = []
    settings = inductor_settings(external_matmul=[]) if public.name == INDUCTOR else nullcontext()

    with settings:
        result = doctest.DocTestRunner(optionflags=FLAGS).run(examples, out=report.append)

    assert not result.failed, "".join(report)


FUNCTIONS = [each for each in [*OBJECTS, *METHODS] if not isinstance(each.value, type | property)]


@pytest.mark.parametrize("public", FUNCTIONS, ids=name)
def test_args_name_every_parameter_in_order(public: Public) -> None:
    described = parts(public).items("Args")

    assert described == parameters(public.value)


@pytest.mark.parametrize("public", FUNCTIONS, ids=name)
def test_errors_that_a_function_raises_are_described(public: Public) -> None:
    described = parts(public).items("Raises")

    assert raised(public.value) <= set(described)


CLASSES = [each for each in OBJECTS if isinstance(each.value, type) and not each.is_exception]


@pytest.mark.parametrize("public", CLASSES, ids=name)
def test_a_class_describes_its_fields_or_parameters(public: Public) -> None:
    described = parts(public)
    if dataclasses.is_dataclass(public.value):
        expected = [field.name for field in dataclasses.fields(public.value)]

        assert described.items("Attributes") == expected
    else:
        assert described.items("Args") == parameters(public.value)
