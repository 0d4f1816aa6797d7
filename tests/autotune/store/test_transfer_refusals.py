"""What no import takes: files that were tampered with, are not whole, or are no exports."""

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.stored import H100
from support.tables import (
    FAILED,
    TRIAL,
    first_version,
    inside,
    put,
    signed,
    winner,
)

from outblas.autotune.store import exports, signed_json, transfer, validation
from outblas.autotune.store.records import BestConfig, Finalist, Gpu, Trial, Workload
from outblas.autotune.store.store import Store

Content = dict[str, Any]  # of an export of the first version
Place = tuple[Any, ...]  # the steps to a value in it


@pytest.fixture
def content() -> Content:
    """The same in an export of the first version, which was one JSON object."""
    return first_version()


def in_lines(*values: Any) -> bytes:
    """An export of these lines, with a checksum that is right."""
    body = "".join(f"{json.dumps(value)}\n" for value in values).encode()
    counts = {f"{kind}s": sum(kind in value for value in values) for kind in ("trial", "winner")}
    end = {"end": {**counts, "sha256": hashlib.sha256(body).hexdigest()}}
    return body + json.dumps(end).encode() + b"\n"


def lines_of(content: Content) -> Iterator[Any]:
    """The lines that the content of an export of the first version makes."""
    yield {"format": "outblas-tuning", "version": 2}
    for key, facts in content["gpus"].items():
        yield {"gpu": {"key": key, **facts} if type(facts) is dict else facts}
    for kind in ("trial", "winner"):
        for fields in content[f"{kind}s"]:
            yield {kind: fields}


@dataclasses.dataclass(frozen=True)
class Importable:
    """A file of two trials and a winner, to be altered, and an empty store that is to import it."""

    path: Path
    store: Store

    def refusal(self) -> str:
        """What an import of the file says, which stores nothing."""
        with pytest.raises(ValueError, match=r".") as caught:
            transfer.import_into(self.store, self.path)
        assert self.store.trials() == self.store.winners() == []
        return str(caught.value)

    def refusal_of_object(self, content: Content) -> str:
        """What is said of content in the first version, one JSON object."""
        self.path.write_text(signed(content))
        return self.refusal()

    def refusal_of_lines(self, content: Content) -> str:
        """What is said of the same content in lines, the second version."""
        self.path.write_bytes(in_lines(*lines_of(content)))
        return self.refusal()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A store that stays empty: to open one takes longer than to refuse a file."""
    with Store(tmp_path_factory.mktemp("store") / "tuning.sqlite") as store:
        yield store


@pytest.fixture
def file(tmp_path: Path, store: Store) -> Importable:
    """A file of two trials and a winner, and a store that is to import it."""
    path = tmp_path / "found.json"
    transfer.export([TRIAL, FAILED], [winner()], path)
    return Importable(path, store)


# Fields.

RECORDS = {
    ("gpus", H100.key): Gpu,
    ("trials", 0): Trial,
    ("trials", 0, "workload"): Workload,
    ("winners", 0): BestConfig,
    ("winners", 0, "workload"): Workload,
    ("winners", 0, "finalists", 1): Finalist,
}
FIELDS = [
    (place, field) for place, record in RECORDS.items() for field in dataclasses.fields(record)
]
KINDS: dict[str, tuple[object, ...]] = {
    "float | None": (True, "1", math.nan, math.inf, -1, 1e300, 10**400),
    "int": (True, "1", 1.0, math.nan, -1, 1 << 60, None),
    "str": (7, None, "x" * 5000, "\udcff"),
    "str | None": (7, "x" * 5000, "\udcff"),
    "bool": (1, 0, "true", None),
    "tuple[Finalist, ...]": (7, None, [7], [None] * 20000),
    "Workload": (7, None, [], {}),
    "Gpu": (7, None, [], "", "no such key"),
}
KINDS |= {
    "float": (*KINDS["float | None"], None, 0),
    "Status": (*KINDS["str"], "OK"),
    "Weights": (*KINDS["str"], "tepid"),
}
MORE = {
    "M": (0,),
    "kernel": ("", "A", "a b"),
    "config": ("a", "a=1;b=2", "a=1,,b=2", "=1", "a=[1]", "a=1\n"),
    "when": ("", "now", "2026-01-01", "2026-13-01T00:00:00+00:00", "2026-01-01T00:00:00+01:00"),
    "dtype": ("int8",),
    "out_dtype": ("", "bfloat16"),
    "layout": ("xy",),
    "confidence": (1.01,),
    "rounds": (0,),
}


def named(place: Place) -> str:
    """How an error names a place: `trials[0].workload`."""
    first, second, *rest = place
    steps = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in rest]
    return f"{first}[{second!r}]{''.join(steps)}"


def named_in_line(place: Place) -> str:
    """How an error names it in a line of its own: `trial.workload`."""
    first, second, *_ = place
    return first[:-1] + named(place).removeprefix(f"{first}[{second!r}]")


IN_EACH_FIELD = pytest.mark.parametrize(
    ("place", "field"), FIELDS, ids=[f"{named(place)}.{field.name}" for place, field in FIELDS]
)


# Fields that older versions did not write may be missing.
NEEDED = [(place, field) for place, field in FIELDS if field.name not in validation.NEW_IN_WORKLOAD]


def wrong_values(field: dataclasses.Field[Any]) -> tuple[Any, ...]:
    return KINDS[str(field.type)] + MORE.get(field.name, ())


@IN_EACH_FIELD
def test_a_wrong_value_is_refused_by_the_name_of_its_field(
    file: Importable, content: Content, place: Place, field: dataclasses.Field[Any]
) -> None:
    taken = {}
    for value in wrong_values(field):
        inside(content, place)[field.name] = value
        message = file.refusal_of_object(content)
        if not message.startswith(f"{named(place)}.{field.name}"):
            taken[repr(value)] = message

    assert taken == {}


@IN_EACH_FIELD
def test_a_wrong_value_in_a_line_is_refused_by_the_names_of_line_and_field(
    file: Importable, content: Content, place: Place, field: dataclasses.Field[Any]
) -> None:
    expected = rf"line [2-5]: {re.escape(named_in_line(place))}\.{field.name}"
    taken = {}
    for value in wrong_values(field):
        inside(content, place)[field.name] = value
        message = file.refusal_of_lines(content)
        if not re.match(expected, message):
            taken[repr(value)] = message

    assert taken == {}


@pytest.mark.parametrize(
    ("place", "field"), NEEDED, ids=[f"{named(place)}.{field.name}" for place, field in NEEDED]
)
def test_a_record_that_lacks_a_field_is_refused(
    file: Importable, content: Content, place: Place, field: dataclasses.Field[Any]
) -> None:
    del inside(content, place)[field.name]

    assert file.refusal_of_object(content) == f"{named(place)} has no {field.name}"
    assert file.refusal_of_lines(content).endswith(f": {named_in_line(place)} has no {field.name}")


@pytest.mark.parametrize(
    "refuse", [Importable.refusal_of_object, Importable.refusal_of_lines], ids=["object", "lines"]
)
@pytest.mark.parametrize("place", RECORDS, ids=named)
def test_a_field_that_no_record_has_is_refused(
    file: Importable, content: Content, place: Place, refuse: Callable[[Importable, Content], str]
) -> None:
    inside(content, place)["__class__"] = "os.system"

    assert re.search(r"\S+ has '__class__', expected only", refuse(file, content))


# Objects: exports of the first version.


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("format",), "outblas-table", "format is 'outblas-table', expected 'outblas-tuning'"),
        (("version",), 2, "version is 2, expected 1"),
        (("version",), True, "version is True"),
        (("version",), 1.0, "version is 1.0"),
        (("trials",), {}, "trials is {}, expected a JSON list"),
        (("winners",), None, "winners is None"),
        (("gpus",), [], "gpus is []"),
        (("trials", 0), [], "trials[0] is [], expected an object"),
        (("winners", 0, "finalists", 0), None, "winners[0].finalists[0] is None"),
        (("gpus", "0" * 16), dataclasses.asdict(H100), "is the key of another GPU"),
        (("gpus", H100.key, "sms"), 131, "is the key of another GPU"),
        (("trials", 1, "us"), 3.0, "trials[1].us is 3.0, expected null where status is 'hang'"),
        (("trials", 0, "us"), None, "trials[0].us is None, expected a number where status is 'ok'"),
        (("more",), 1, "the file has 'more'"),
    ],
)
def test_an_object_with_a_wrong_value_is_refused(
    file: Importable, content: Content, place: Place, value: Any, message: str
) -> None:
    put(content, place, value)

    assert message in file.refusal_of_object(content)


def test_an_object_that_lacks_a_field_is_refused(file: Importable, content: Content) -> None:
    del content["gpus"]

    assert "the file has no gpus" in file.refusal_of_object(content)


CHANGES = [
    pytest.param("200.5", "200.4", id="a figure"),
    pytest.param("hilbert", "gilbert", id="a kernel"),
    pytest.param("0.99", "1.00", id="a confidence"),
]
CHANGED = r"sha256 is .* the file was changed or is incomplete"


@pytest.mark.parametrize(("old", "new"), CHANGES)
def test_an_object_that_was_changed_is_refused(
    file: Importable, content: Content, old: str, new: str
) -> None:
    file.path.write_text(json.dumps(content).replace(old, new, 1))

    with pytest.raises(ValueError, match=CHANGED):
        transfer.read(file.path)


def test_an_object_with_another_checksum_is_refused(file: Importable, content: Content) -> None:
    file.path.write_text(json.dumps(content | {"sha256": "0" * 64}))

    with pytest.raises(ValueError, match=CHANGED):
        transfer.read(file.path)


def test_an_object_that_was_cut_off_is_refused(file: Importable, content: Content) -> None:
    text = json.dumps(content)
    for size in range(0, len(text) - 2, 101):
        file.path.write_text(text[:size])

        with pytest.raises(ValueError, match="not JSON"):
            transfer.read(file.path)


def test_an_object_that_is_too_large_is_refused(
    file: Importable, content: Content, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.path.write_text(json.dumps(content))
    monkeypatch.setattr(signed_json, "SIZE_LIMIT", 1000)

    with pytest.raises(ValueError, match=r"has more than \d+ MiB"):
        transfer.read(file.path)


# Lines: exports of the second version.


@pytest.mark.parametrize(
    ("old", "new"), [*CHANGES, pytest.param('"sha256":"', '"sha256":"0', id="the checksum")]
)
def test_lines_that_were_changed_are_refused(file: Importable, old: str, new: str) -> None:
    file.path.write_text(file.path.read_text().replace(old, new, 1))

    assert re.search(CHANGED, file.refusal())


def test_lines_that_were_cut_off_are_refused(file: Importable) -> None:
    text = file.path.read_text()
    for size in range(text.index("\n") + 1, len(text) - 2, 101):
        file.path.write_text(text[:size])

        assert re.search("not JSON|it is incomplete", file.refusal()), size


def test_lines_without_their_checksum_are_refused(file: Importable) -> None:
    lines = file.path.read_text().splitlines(keepends=True)
    file.path.write_text("".join(lines[:-1]))

    assert file.refusal() == (
        "the file ends at line 6, expected its checksum there: it is incomplete"
    )


def test_a_line_behind_the_last_is_refused(file: Importable) -> None:
    lines = file.path.read_text().splitlines(keepends=True)
    file.path.write_text("".join([*lines, lines[0]]))

    assert file.refusal() == "line 7 follows the last, expected the end of the file"


HEAD = {"format": "outblas-tuning", "version": 2}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{**HEAD, "version": 3}], "version is 3, expected 1 or 2"),
        ([{**HEAD, "format": "x"}], "format is 'x'"),
        (
            [HEAD, {"trial": {}, "winner": {}}],
            "line 2 has ['trial', 'winner'], expected one of gpu, trial, winner",
        ),
        ([HEAD, {}], "line 2 has [], expected one of"),
        ([HEAD, []], "line 2 is [], expected an object"),
        ([HEAD, {"gpu": {"key": "x", **vars(H100)}}], "line 2: gpu.key is 'x'"),
        ([HEAD, {"gpu": 3}], "line 2: gpu is 3"),
        ([HEAD, {"trial": validation.fields_of(TRIAL)}], "line 2: trial.gpu is"),
    ],
    ids=[
        "a newer version",
        "another format",
        "two records",
        "no record",
        "a list",
        "a GPU of another key",
        "a GPU that is a number",
        "a trial of no GPU",
    ],
)
def test_lines_that_are_no_records_are_refused(
    file: Importable, lines: list[Any], message: str
) -> None:
    file.path.write_bytes(in_lines(*lines))

    assert message in file.refusal()


def test_a_line_without_end_is_refused(file: Importable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exports, "LINE_LIMIT", 1 << 12)
    file.path.write_bytes(in_lines(HEAD, {"x" * 8192: 1}))

    assert "line 2 is longer than" in file.refusal()


# Other files.


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"a": ' * 100_000, "not JSON"),
        (b"7", "the file is 7, expected an object"),
        (b'{"format": 1, "format": 2}', "a field occurs twice"),
        (b'{"version": %s}' % (b"9" * 5000), "not JSON"),
        (b"\xff\xfe{}", "is not UTF-8"),
        (b"cos\nsystem\n(S'x'\ntR.", "not JSON"),
    ],
    ids=[
        "empty",
        "nested lists",
        "nested objects",
        "a number",
        "a field twice",
        "a version of 5000 digits",
        "no UTF-8",
        "a pickle",
    ],
)
def test_a_file_that_is_no_export_is_refused(tmp_path: Path, text: bytes, message: str) -> None:
    file = tmp_path / "found.json"
    file.write_bytes(text)

    with pytest.raises(ValueError, match=message):
        transfer.read(file)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        pytest.param(".", "is a folder, expected a regular file", id="a folder"),
        pytest.param("nothing", "No such file", id="nothing"),
        pytest.param("/dev/zero", "is a device, expected a regular file", id="a device"),
    ],
)
def test_what_is_no_file_is_refused(tmp_path: Path, place: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        transfer.read(tmp_path / place)
