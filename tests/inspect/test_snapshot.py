"""Snapshots of machine code: how code differs, and the file."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.recorded_code import FILE, PLAIN, RECORDED, SMALL

from outblas.inspect import snapshot
from outblas.inspect.snapshot import Difference, Entry, Snapshot
from outblas.inspect.variant import KernelVariant


# ---- the comparison
@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        pytest.param({"registers": 33}, [("registers", "32", "33")], id="registers"),
        pytest.param(
            {"spill_loads": 4, "stack": 8},
            [("stack", "0", "8"), ("spill_loads", "0", "4")],
            id="spills",
        ),
        pytest.param({"smem_bytes": 2048}, [("smem_bytes", "1024", "2048")], id="shared memory"),
        pytest.param(
            {"counts": {"BAR.SYNC": 3, "HMMA.16816.F32": 8}},
            [("BAR.SYNC", "2", "3")],
            id="one more barrier",
        ),
        pytest.param(
            {"counts": {"BAR.SYNC": 2}}, [("HMMA.16816.F32", "8", "0")], id="no MMA any more"
        ),
        pytest.param({"instructions": 202}, [], id="1% more instructions"),
        pytest.param({"instructions": 198}, [], id="1% fewer instructions"),
        pytest.param(
            {"instructions": 203},
            [("instructions", "200", "203 (+1.5%)")],
            id="1.5% more instructions",
        ),
    ],
)
def test_what_counts_as_different(
    changed: dict[str, Any], expected: list[tuple[str, str, str]]
) -> None:
    now = replace(SMALL, **changed)

    found = snapshot.differences("a", SMALL, now)

    assert found == [Difference("a", *each) for each in expected]


@pytest.mark.compile
@pytest.mark.parametrize(
    ("variant", "message"),
    [
        pytest.param(
            replace(PLAIN, config="block_m=7"),
            "ValueError: config: block_m is 7",
            id="a config that is none",
        ),
        pytest.param(
            replace(PLAIN, activation="gelu"),
            "ValueError: has no epilogue besides alpha and C, but was given gelu",
            id="an epilogue that the kernel lacks",
        ),
    ],
)
def test_a_variant_that_does_not_compile_is_a_difference(
    variant: KernelVariant, message: str
) -> None:
    (found,) = snapshot.compare("mine", Entry(variant, SMALL))

    assert (found.what, found.before) == ("compile", "compiled")
    assert found.now.startswith(message)


def test_an_entry_without_code_is_a_difference() -> None:
    (found,) = snapshot.compare("new", Entry(PLAIN))

    assert (found.what, found.before) == ("code", "missing")


# ---- the file
@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where a test writes its snapshot."""
    return tmp_path / "snapshot.json"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "not a snapshot of format 1"),
        ('{"format": 2}', "not a snapshot of format 1"),
        ('{"format": 1, "compilers": {}}', "expected the objects compilers and variants"),
        ('{"format": 1, "compilers": {}, "variants": {"a": {}}}', "variant 'a' is malformed"),
        (
            '{"format": 1, "compilers": {}, "variants": {"a": {"compile": {"arch": 80}}}}',
            "variant 'a' lacks kernel",
        ),
    ],
)
def test_malformed_files_are_refused(text: str, message: str, file: Path) -> None:
    file.write_text(text)

    with pytest.raises(ValueError, match=message):
        snapshot.load(file)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"registers": "32"}, "has code with a figure that is no whole number"),
        ({"counts": {"BAR.SYNC": 1.5}}, "has code with a figure that is no whole number"),
        ({"counts": 2}, "has malformed code"),
        ({"extra": 2}, "has malformed code, expected the fields counts"),
    ],
)
def test_malformed_code_is_refused(changed: dict[str, Any], message: str, file: Path) -> None:
    snapshot.save(file, Snapshot({}, {"a": Entry(PLAIN, SMALL)}))
    written = json.loads(file.read_text())
    written["variants"]["a"]["code"] |= changed
    file.write_text(json.dumps(written))

    with pytest.raises(ValueError, match=message):
        snapshot.load(file)


class TestAFileThatWasWritten:
    """Two entries, one of them without code, in the wrong order."""

    @pytest.fixture
    def saved(self, file: Path) -> Snapshot:
        """What is in the file."""
        entries = {"b": Entry(PLAIN, SMALL), "a": Entry(replace(PLAIN, shape=(1, 2, 3)))}
        made = Snapshot({"triton": "1"}, entries)
        snapshot.save(file, made)
        return made

    def test_is_read_as_it_was_written(self, saved: Snapshot, file: Path) -> None:
        assert snapshot.load(file) == saved

    @pytest.mark.usefixtures("saved")
    def test_has_its_entries_in_the_order_of_their_names(self, file: Path) -> None:
        assert list(snapshot.load(file).entries) == ["a", "b"]

    @pytest.mark.usefixtures("saved")
    def test_is_indented(self, file: Path) -> None:
        text = file.read_text()

        assert text == json.dumps(json.loads(text), indent=2) + "\n"

    @pytest.mark.usefixtures("saved")
    def test_is_alone_in_its_folder(self, file: Path) -> None:
        """The file that it was written to at first has taken its place."""
        assert [each.name for each in file.parent.iterdir()] == [file.name]


def test_the_file_in_the_repository_is_laid_out_as_it_is_written(file: Path) -> None:
    snapshot.save(file, RECORDED)

    assert file.read_text() == FILE.read_text()
