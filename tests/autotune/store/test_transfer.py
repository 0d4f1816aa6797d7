"""Exports, imports and shipped tables: what was written comes back, and nothing else gets in."""

import dataclasses
import hashlib
import json
import math
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import stored
from support.stored import H100
from support.tables import (
    FAILED,
    TRIAL,
    examples,
    figures,
    inside,
    numbers,
    places,
    put,
    signed,
    texts,
    winner,
    winners,
)

from outblas.autotune.store import exports, signed_json, transfer, validation
from outblas.autotune.store.records import (
    STATUSES,
    BestConfig,
    Finalist,
    Gpu,
    Trial,
    Workload,
)
from outblas.autotune.store.store import Store


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file of two trials and a winner."""
    transfer.export([TRIAL, FAILED], [winner()], tmp_path / "found.json")
    return tmp_path / "found.json"


def in_lines(*values):
    """An export of these lines, with a checksum that is right."""
    body = "".join(f"{json.dumps(value)}\n" for value in values).encode()
    counts = {f"{kind}s": sum(kind in value for value in values) for kind in ("trial", "winner")}
    end = {"end": {**counts, "sha256": hashlib.sha256(body).hexdigest()}}
    return body + json.dumps(end).encode() + b"\n"


def lines_of(content):
    """The lines that the content of an export of the first version makes."""
    yield {"format": "outblas-tuning", "version": 2}
    for key, facts in content["gpus"].items():
        yield {"gpu": {"key": key, **facts} if type(facts) is dict else facts}
    for kind in ("trial", "winner"):
        for fields in content[f"{kind}s"]:
            yield {kind: fields}


def test_rules_are_those_of_the_records() -> None:
    for rules, record in (
        (validation._TRIAL, Trial),
        (validation._WINNER, BestConfig),
        (validation._GPU, Gpu),
        (validation._FINALIST, Finalist),
        (validation.WORKLOAD, Workload),
    ):
        assert set(rules) == {field.name for field in dataclasses.fields(record)}


def test_round_trip(file: Path) -> None:
    assert transfer.read(file) == ([TRIAL, FAILED], [winner()])
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [next(iter(line)) for line in lines] == [
        "format",
        "gpu",
        "trial",
        "trial",
        "winner",
        "end",
    ]
    assert lines[1]["gpu"] == {"key": H100.key, **dataclasses.asdict(H100)}
    transfer.export([], [], file)
    assert transfer.read(file) == ([], [])
    transfer.check(file)


def test_exports_of_the_first_version_can_be_read(file: Path, content: dict[str, Any]) -> None:
    for options in ({}, {"indent": 3, "sort_keys": True}):
        file.write_text(json.dumps(content, **options))
        assert transfer.read(file) == ([TRIAL, FAILED], [winner()])
        transfer.check(file)
    with Store(file.with_name("tuning.sqlite")) as store:
        assert transfer.import_into(store, file) == (2, 1)


def test_a_store_goes_through_a_file(file: Path, path: Path) -> None:
    tried = [stored.trial(i) for i in range(2500)]  # more than are stored at once
    with Store(path) as store, Store(file.with_name("other.sqlite")) as other:
        store.merge(tried, [winner()])
        assert transfer.export_store(store, file) == (2500, 1)
        assert transfer.import_into(other, file) == (2500, 1)
        assert other.trials() == tried
        assert other.winners() == [winner()]
        assert transfer.import_into(other, file) == (0, 0)


def test_a_store_that_changes_while_it_is_exported(
    file: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another process writes between two looks at a file that nobody had open."""
    stored.fill(path, 5)
    write, calls = exports.write, []

    def disturbed(target, trials, winners, **options):
        found = write(target, trials, winners, **options)
        if not calls:
            process = subprocess.Popen([sys.executable, "-c", ADD_ONE, str(path)])
            assert process.wait(timeout=60) == 0
        calls.append(found)
        return found

    monkeypatch.setattr(exports, "write", disturbed)
    with Store(path, read_only=True) as store:
        assert transfer.export_store(store, file) == (6, 1)
    assert calls == [(5, 1), (6, 1)]
    assert len(transfer.read(file)[0]) == 6


ADD_ONE = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1])
names = [row[1] for row in connection.execute("PRAGMA table_info(trials)")]
listed = ", ".join(f'"{name}"' for name in names if name not in ("id", "config", "digest"))
copied = f"SELECT {listed}, 'a=1' FROM trials LIMIT 1"
connection.execute(f"INSERT INTO trials ({listed}, config) {copied}")
connection.commit()
connection.close()
"""


def test_an_export_that_the_disk_refuses_is_not_the_stores_fault(
    path: Path, tmp_path: Path
) -> None:
    stored.fill(path)
    with Store(path, read_only=True) as store:
        with pytest.raises(OSError, match="x"):
            transfer.export_store(store, tmp_path / "x" / "found.json")
        assert store.warning is None
        assert len(store.trials()) == 3


def test_export_is_all_or_nothing(file: Path) -> None:
    before = file.read_bytes()
    with pytest.raises(ValueError, match=r"trials\[1\]\.us is nan"):
        transfer.export([TRIAL, dataclasses.replace(TRIAL, us=math.nan)], [], file)
    with pytest.raises(OSError, match="x"):
        transfer.export([TRIAL], [], file.parent / "x" / "found.json")
    assert file.read_bytes() == before
    assert list(file.parent.iterdir()) == [file]


others = dict.fromkeys(("clock_mhz", "predicted_us", "compile_s"), numbers)
failed = st.sampled_from([status for status in STATUSES if status != "ok"])
trials = st.builds(
    Trial, **places, **figures, **others, status=st.just("ok"), reason=texts
) | st.builds(Trial, **places, **others, status=failed, reason=texts)


@examples
@given(st.lists(trials, max_size=4), st.lists(winners, max_size=3))
def test_whatever_is_valid_goes_through_files_and_stores(
    tmp_path_factory: pytest.TempPathFactory, tried: list[Trial], won: list[BestConfig]
) -> None:
    file = tmp_path_factory.mktemp("found") / "found.json"
    transfer.export(tried, won, file)
    assert transfer.read(file) == (tried, won)
    with Store(file.with_name("tuning.sqlite")) as store:
        identities = {trial.identity for trial in tried}
        assert transfer.import_into(store, file)[0] == len(identities)
        assert store.verify() == []
        assert {trial.identity for trial in store.trials()} == identities
        assert all(trial in tried for trial in store.trials())
        assert all(each in won for each in store.winners())
        assert transfer.import_into(store, file) == (0, 0)


# Nothing else gets in.

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
KINDS = {
    "float | None": (True, "1", math.nan, math.inf, -1, 1e300, 10**400),
    "int": (True, "1", 1.0, math.nan, -1, 1 << 60, None),
    "str": (7, None, "x" * 5000, "\udcff"),
    "str | None": (7, "x" * 5000, "\udcff"),
    "bool": (1, 0, "true", None),
    "tuple[Finalist, ...]": (7, None, [7], [None] * 20000),
    "Workload": (7, None, [], {}),
    "Gpu": (7, None, [], "", "no such key"),
}
KINDS |= {"float": (*KINDS["float | None"], None, 0), "Status": (*KINDS["str"], "OK")}
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


def shown(place: tuple[Any, ...]) -> str:
    """`trials[0].workload`."""
    first, second, *rest = place
    return f"{first}[{second!r}]" + "".join(
        f"[{step}]" if isinstance(step, int) else f".{step}" for step in rest
    )


def shown_in_line(place):
    """`trial.workload`."""
    return f"{place[0][:-1]}{shown(('', '', *place[2:]))[4:]}"


def in_line(place):
    return re.escape(shown_in_line(place))


def refusal(file: Path, content: dict[str, Any]) -> str:
    """What is said of content in the first version."""
    file.write_text(signed(content))
    return refused_import(file)


def refusal_of_lines(file, content):
    file.write_bytes(in_lines(*lines_of(content)))
    return refused_import(file)


def refused_import(file):
    with Store(file.with_name("tuning.sqlite")) as store:
        with pytest.raises(ValueError, match=r".") as caught:
            transfer.import_into(store, file)
        assert store.trials() == store.winners() == []
    return str(caught.value)


@pytest.mark.parametrize(
    ("place", "field"), FIELDS, ids=[f"{shown(place)}.{field.name}" for place, field in FIELDS]
)
def test_tampered_fields_are_refused(
    file: Path, content: dict[str, Any], place: tuple[Any, ...], field: dataclasses.Field[Any]
) -> None:
    fields, name = inside(content, place), field.name
    for value in KINDS[str(field.type)] + MORE.get(name, ()):
        fields[name] = value
        assert refusal(file, content).startswith(f"{shown(place)}.{name}"), value
        assert re.match(
            rf"line [2-5]: {in_line(place)}\.{name}", refusal_of_lines(file, content)
        ), value
    del fields[name]
    assert refusal(file, content) == f"{shown(place)} has no {name}"
    assert refusal_of_lines(file, content).endswith(f": {shown_in_line(place)} has no {name}")


@pytest.mark.parametrize("place", RECORDS, ids=shown)
def test_unknown_fields_are_refused(
    file: Path, content: dict[str, Any], place: tuple[Any, ...]
) -> None:
    inside(content, place)["__class__"] = "os.system"
    for said in (refusal(file, content), refusal_of_lines(file, content)):
        assert re.search(r"\S+ has '__class__', expected only", said)


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
def test_tampered_files_are_refused(
    file: Path, content: dict[str, Any], place: tuple[Any, ...], value: Any, message: str
) -> None:
    put(content, place, value)
    assert message in refusal(file, content)


def test_files_that_lack_a_field_are_refused(file: Path, content: dict[str, Any]) -> None:
    del content["gpus"]
    assert "the file has no gpus" in refusal(file, content)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b'{"a": ' * 100_000, "no JSON"),
        (b"7", "the file is 7, expected an object"),
        (b'{"format": 1, "format": 2}', "a field is there twice"),
        (b'{"version": %s}' % (b"9" * 5000), "no JSON"),
        (b"\xff\xfe{}", "is no UTF-8"),
        (b"cos\nsystem\n(S'x'\ntR.", "no JSON"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: bytes, message: str) -> None:
    file = tmp_path / "found.json"
    file.write_bytes(text)
    with pytest.raises(ValueError, match=message):
        transfer.read(file)


def test_changed_files_are_refused(
    file: Path, content: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = json.dumps(content)
    for old, new in (
        ("200.5", "200.4"),
        ("hilbert", "gilbert"),
        ("0.99", "1.00"),
        (content["sha256"], "0" * 64),
    ):
        file.write_text(text.replace(old, new, 1))
        with pytest.raises(ValueError, match=r"sha256 is .* the file was changed or is not whole"):
            transfer.read(file)
    for size in range(0, len(text) - 2, 101):
        file.write_text(text[:size])
        with pytest.raises(ValueError, match="no JSON"):
            transfer.read(file)
    file.write_text(text)
    monkeypatch.setattr(signed_json, "SIZE_LIMIT", 1000)
    with pytest.raises(ValueError, match="is larger than"):
        transfer.read(file)


def test_changed_lines_are_refused(file: Path) -> None:
    text = file.read_text()
    for old, new in (
        ("200.5", "200.4"),
        ("hilbert", "gilbert"),
        ("0.99", "1.00"),
        ('"sha256":"', '"sha256":"0'),
    ):
        file.write_text(text.replace(old, new, 1))
        assert re.search(r"sha256 is .* the file was changed or is not whole", refused_import(file))
    for size in range(text.index("\n") + 1, len(text) - 2, 101):
        file.write_text(text[:size])
        assert re.search("no JSON|it is not whole", refused_import(file))
    lines = text.splitlines(keepends=True)
    file.write_text("".join(lines[:-1]))
    assert (
        refused_import(file)
        == "the file ends at line 6, expected its checksum there: it is not whole"
    )
    file.write_text("".join([*lines, lines[0]]))
    assert refused_import(file) == "line 7 follows the last, expected the end of the file"


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
)
def test_lines_that_are_no_records_are_refused(file: Path, lines, message: str) -> None:
    file.write_bytes(in_lines(*lines))
    assert message in refused_import(file)


def test_a_line_without_end_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exports, "LINE_LIMIT", 1 << 12)
    file.write_bytes(in_lines(HEAD, {"x" * 8192: 1}))
    assert "line 2 is longer than" in refused_import(file)


def test_a_file_that_changes_while_it_is_imported_is_refused(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its check and the moment at which it is stored."""
    monkeypatch.setattr(exports, "BATCH", 1)
    batches, reads = exports._batches, []

    def disturbed(path):
        yield from batches(path)
        if not reads:
            transfer.export([TRIAL, dataclasses.replace(FAILED, reason="another")], [], path)
        reads.append(path)

    monkeypatch.setattr(exports, "_batches", disturbed)
    with Store(file.with_name("tuning.sqlite")) as store:
        with pytest.raises(ValueError, match="was changed while it was read"):
            transfer.import_into(store, file)
        assert store.trials() == [TRIAL]  # which is as it was checked


def peak_of(work):
    """MiB that Python allocates while it works."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1] / 2**20
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_what_is_exported_and_imported(
    path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exports, "BATCH", 50)
    count = 1200
    with Store(path) as store:
        store.merge([stored.trial(i) for i in range(count)], [])
    with Store(path, read_only=True) as store, Store(file.with_name("other.sqlite")) as other:
        assert peak_of(lambda: transfer.export_store(store, file)) < 0.5
        assert peak_of(lambda: transfer.check(file)) < 0.5
        assert peak_of(lambda: transfer.import_into(other, file)) < 0.5
        assert peak_of(lambda: transfer.read(file)) > 1  # which keeps them all
        assert len(other.trials()) == count


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing", Path("/dev/zero")):
        with pytest.raises(ValueError, match="is no file"):
            transfer.read(path)


def test_import_keeps_what_is_there(file: Path) -> None:
    own, newer = (
        dataclasses.replace(TRIAL, us=1.0),
        winner(when="2026-03-01T00:00:00+00:00", ratio=1.2),
    )
    with Store(file.with_name("tuning.sqlite")) as store:
        store.add(own)
        store.record_best(newer)
        assert transfer.import_into(store, file) == (1, 0)
        assert store.trials() == [own, FAILED]
        assert store.winners() == [newer]
