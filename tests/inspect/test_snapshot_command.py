"""Snapshots by the command: `outblas inspect --snapshot` and `--against`."""

from dataclasses import replace
from pathlib import Path

import pytest
from support import commands
from support.inspections import invoke
from support.recorded_code import FILE, PLAIN, SMALL

from outblas.inspect import snapshot
from outblas.inspect.snapshot import Entry, Snapshot

ON_SM_75, ON_SM_80 = (f"simt.naive sm_{arch} float32 nn 4096" for arch in (75, 80))


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A snapshot of one kernel for two architectures, by the command."""
    file = tmp_path / "snapshot.json"
    invoke("simt.naive", "--arch", "75,80", "--snapshot", file, code=0)
    return file


@pytest.mark.compile
class TestASnapshotThatWasWritten:
    def test_names_its_variants_and_their_compilers(self, written: Path) -> None:
        found = snapshot.load(written)

        assert list(found.entries) == [ON_SM_75, ON_SM_80]
        assert found.compilers == snapshot.compilers()

    def test_has_the_code_that_is_compiled_now(self, written: Path) -> None:
        output = invoke("simt.naive", "--against", written, code=0).stdout

        assert "2 variants have the same machine code as in the snapshot" in output

    def test_takes_further_variants(self, written: Path) -> None:
        other = ("--config", "group_m=4", "--arch", "80")

        invoke("simt.naive", *other, "--snapshot", written, code=0)

        added = f"{ON_SM_80} group_m=4"
        assert list(snapshot.load(written).entries) == [ON_SM_75, ON_SM_80, added]

    def test_fails_where_it_lacks_kernels_of_the_registry(self, written: Path) -> None:
        output = invoke("--against", written, code=1).stdout

        expected = ("no variant", "hopper.gemm", "simt.naive")  # the last for sm_90
        assert [text for text in expected if text not in output] == []


@pytest.mark.compile
class TestASnapshotOfOtherCode:
    @pytest.fixture
    def true_code(self, written: Path) -> Snapshot:
        """What the snapshot said before its registers were changed."""
        before = snapshot.load(written)
        entry = before.entries[ON_SM_80]
        assert entry.code is not None
        changed = replace(entry, code=replace(entry.code, registers=7))
        snapshot.save(written, replace(before, entries={**before.entries, ON_SM_80: changed}))
        return before

    @pytest.mark.usefixtures("true_code")
    def test_is_shown_beside_what_is_compiled_now(self, written: Path) -> None:
        output = invoke("simt.naive", "--against", written, code=1).stdout

        row = next(line for line in output.splitlines() if ON_SM_80 in line)
        assert [cell.strip() for cell in row.split("│")[2:4]] == ["registers", "7"]

    def test_is_replaced_when_asked(self, written: Path, true_code: Snapshot) -> None:
        output = invoke("--against", written, "--update", code=0).stdout

        assert "registers" in output
        assert snapshot.load(written) == true_code


def test_nothing_is_compared_with_what_other_compilers_made(tmp_path: Path) -> None:
    file = tmp_path / "snapshot.json"
    others = snapshot.compilers() | {"triton": "0.1"}
    snapshot.save(file, Snapshot(others, {"a": Entry(PLAIN, SMALL)}))

    output = invoke("simt.naive", "--against", file, code=3).stdout

    assert "Nothing was compared" in output
    assert "the snapshot was made with 0.1" in output


def test_a_snapshot_of_other_compilers_takes_no_variants(tmp_path: Path) -> None:
    file = tmp_path / "snapshot.json"
    snapshot.save(file, Snapshot({"triton": "0.1"}, {}))

    message = f"run outblas inspect --against {file} --update first"
    commands.refuses(message, "inspect", "simt.naive", "--snapshot", file)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--update",), "--update needs --against FILE"),
        (("--against", FILE, "--arch", "80", "--json"), "expected no --arch, --json"),
        (("nothing", "--against", FILE), "kernel is 'nothing'"),
        (("--against", "/nowhere.json"), "cannot be read"),
        (("portable", "--against", FILE, "--update"), "expected no names of kernels"),
        (("--snapshot", "/nowhere/file.json"), "--snapshot is"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(
    arguments: tuple[object, ...], message: str
) -> None:
    commands.refuses(message, "inspect", *arguments)
