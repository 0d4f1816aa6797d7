"""Machine code beside its snapshot, tests/data/machine_code.json, for every kernel.

A difference is either a mistake or meant; `make snapshot` writes what is meant, and the commit says
why.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import cutlass.cute as cute
import pytest
import torch
from support import commands
from support.recorded_code import (
    FILE,
    HOPPER_IN_CI,
    IN_CI,
    RECORDED,
    TRITON_LEFT_OUT,
    is_hopper,
)

from outblas.core.artifact import example
from outblas.core.configs import from_text
from outblas.hopper import gemm
from outblas.inspect import snapshot
from outblas.inspect.snapshot import CodeSummary, Difference, Entry, Snapshot
from outblas.inspect.variant import KernelVariant, from_record, problem

# Fields of `KernelVariant`, and of the config of `hopper.gemm`, that a variant of it in CI sets.
FEATURES = {
    *("activation", "addend", "alignment", "aux", "batch", "bias", "dtype", "formats", "layout"),
    *("out", "out_dtype", "residual", "scale_a", "scale_b"),
    *("cluster_k", "cluster_m", "cluster_n", "consumers", "pingpong", "split_k"),
    *("epilogue_stages", "stream_k", "swap_ab", "variable_tile_n"),
}
PLAIN = KernelVariant(kernel="simt.naive", arch=80, dtype="float32", layout="nn")
SMALL = CodeSummary(
    registers=32,
    stack=0,
    spill_stores=0,
    spill_loads=0,
    smem_bytes=1024,
    threads=128,
    instructions=200,
    counts={"BAR.SYNC": 2, "HMMA.16816.F32": 8},
)


@pytest.fixture(scope="session")
def same_compilers() -> None:
    if changed := snapshot.other_compilers(RECORDED):
        pytest.skip(f"other compilers made the snapshot: {'; '.join(changed)}")


@pytest.mark.compile
@pytest.mark.usefixtures("same_compilers")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in IN_CI else pytest.mark.slow)
        for name in RECORDED.entries
    ],
)
def test_machine_code_is_that_of_the_snapshot(name) -> None:
    found = snapshot.compare(name, RECORDED.entries[name])
    assert not found, "\n".join(f"{each.what}: {each.before} -> {each.now}" for each in found)


def test_the_snapshot_has_every_kernel() -> None:
    assert not snapshot.uncovered(RECORDED)
    assert list(RECORDED.entries) == sorted(RECORDED.entries)
    assert sum(entry.variant.kernel == "hopper.gemm" for entry in RECORDED.entries.values()) >= 40
    without = {
        name: entry
        for name, entry in RECORDED.entries.items()
        if entry.variant.kernel != "turing.wmma"
    }
    found = snapshot.uncovered(Snapshot({}, without))
    assert [(each.name, each.what) for each in found] == [
        ("turing.wmma", f"sm_{arch}") for arch in (75, 80, 90)
    ]


def test_what_ci_compiles_is_in_the_snapshot() -> None:
    assert RECORDED.entries.keys() >= HOPPER_IN_CI | TRITON_LEFT_OUT


def test_ci_compiles_every_kernel_for_every_architecture() -> None:
    in_ci = {name: RECORDED.entries[name] for name in IN_CI}

    assert not snapshot.uncovered(Snapshot({}, in_ci))


def changed_fields(record: Any, plain: Any) -> set[str]:
    """The names of the fields in which a record differs from another."""
    return {f.name for f in fields(record) if getattr(record, f.name) != getattr(plain, f.name)}


def test_ci_compiles_every_feature_of_the_production_kernel() -> None:
    variants = [RECORDED.entries[name].variant for name in IN_CI]
    plain = RECORDED.entries["hopper.gemm"].variant
    found: set[str] = set()

    for variant in variants:
        if variant.kernel == "hopper.gemm":
            config = from_text(gemm.Config, variant.config)
            found |= changed_fields(variant, plain) | changed_fields(config, gemm.Config())

    assert found >= FEATURES


def test_ci_compiles_every_feature_of_triton_kernels() -> None:
    """All fields of calls, in one kernel or another."""

    def features(names: Iterable[str]) -> set[tuple[str, object]]:
        variants = [RECORDED.entries[name].variant for name in names if not is_hopper(name)]
        return {
            (f.name, getattr(variant, f.name))
            for f in fields(KernelVariant)
            for variant in variants
        }

    assert features(IN_CI) == features(RECORDED.entries)


# ---- the comparison
@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"registers": 33}, [("registers", "32", "33")]),
        ({"spill_loads": 4, "stack": 8}, [("stack", "0", "8"), ("spill_loads", "0", "4")]),
        ({"smem_bytes": 2048}, [("smem_bytes", "1024", "2048")]),
        ({"counts": {"BAR.SYNC": 3, "HMMA.16816.F32": 8}}, [("BAR.SYNC", "2", "3")]),
        ({"counts": {"BAR.SYNC": 2}}, [("HMMA.16816.F32", "8", "0")]),
        ({"instructions": 202}, []),
        ({"instructions": 198}, []),
        ({"instructions": 203}, [("instructions", "200", "203 (+1.5%)")]),
    ],
)
def test_what_counts_as_different(changed: Any, expected) -> None:
    now = replace(SMALL, **changed)
    assert snapshot.differences("a", SMALL, now) == [Difference("a", *each) for each in expected]


@pytest.mark.compile
@pytest.mark.own_compile
def test_one_more_barrier_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    variant = RECORDED.entries["hopper.tma_wgmma"].variant
    entry, once = Entry(variant, snapshot.summarize(variant)), cute.arch.sync_threads

    def twice(**where):
        once(**where)
        once(**where)

    monkeypatch.setattr(cute.arch, "sync_threads", twice)
    found = snapshot.compare("mutant", entry)
    assert [each.what for each in found if each.what.startswith("BAR.SYNC")]


@pytest.mark.compile
def test_a_variant_that_does_not_compile_is_a_difference() -> None:
    (found,) = snapshot.compare("tile", Entry(replace(PLAIN, config="block_m=7"), SMALL))
    assert found.what == "compile"
    assert found.now.startswith("ValueError: config: block_m is 7")
    (found,) = snapshot.compare("epilogue", Entry(replace(PLAIN, activation="gelu"), SMALL))
    assert "has no epilogue beside alpha and C, and was given gelu" in found.now
    (found,) = snapshot.compare("new", Entry(PLAIN))
    assert (found.what, found.before) == ("code", "missing")


# ---- what is compiled
@pytest.mark.parametrize("layout", ["nt", "nn", "tn", "tt"])
@pytest.mark.parametrize("out_dtype", ["", "float32"])
def test_a_plain_variant_is_the_product_that_inspect_compiles(layout: str, out_dtype: str) -> None:
    variant = KernelVariant(
        kernel="hopper.gemm", arch=90, layout=layout, out_dtype=out_dtype, shape=(64, 72, 80)
    )
    wanted = example(torch.bfloat16, torch.float32 if out_dtype else None, layout, (64, 72, 80))
    assert problem(variant) == wanted


def test_the_problem_of_a_variant_with_everything() -> None:
    variant = KernelVariant(
        kernel="hopper.gemm",
        arch=90,
        shape=(64, 48, 32),
        batch=(3,),
        out="columns",
        alignment=(2, 16, 8),
        activation="swiglu",
        bias="row",
        residual="column",
        aux="columns",
    )
    found = problem(variant)
    assert (found.M, found.N, found.columns, found.K, found.batch) == (64, 48, 96, 32, (3,))
    assert found.out == (64 * 48, 1, 64)
    assert found.alignment == (2, 16, 8)
    added = found.epilogue
    assert (added.function, added.gated) == ("silu", True)
    assert added.bias.strides == (0, 0, 1)
    assert added.residual.strides == (0, 1, 0)
    assert added.aux.strides == (64 * 96, 1, 64)


def test_the_problem_of_an_fp8_variant_and_of_an_addend() -> None:
    fields = {"kernel": "hopper.gemm", "arch": 90, "shape": (64, 48, 32)}
    fp8 = problem(KernelVariant(**fields, formats="e4m3 e5m2", scale_a="column", scale_b="row"))
    assert (fp8.K, fp8.formats) == (16, "e4m3 e5m2")
    assert fp8.epilogue.scale_a.strides == (1, 0)
    assert fp8.epilogue.scale_b.strides == (0, 1)
    added = problem(KernelVariant(**fields, addend="columns"))
    assert (added.c, added.scaled) == ((1, 64), True)
    assert problem(KernelVariant(**fields, scaled=True)).scaled


def test_a_record_is_what_differs_from_a_plain_call() -> None:
    record = {
        "kernel": "simt.naive",
        "arch": 80,
        "dtype": "float32",
        "layout": "nn",
        "batch": [3, 5],
    }
    assert from_record(record) == replace(PLAIN, batch=(3, 5))
    assert from_record(record).record() == record


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"kernel": "simt.new"},
            "kernel is 'simt.new' (did you mean 'simt.naive'?), expected one of",
        ),
        ({"arch": 86}, "arch is 86, expected for"),
        ({"tile": 64}, "has the field 'tile', expected one of: kernel, arch"),
        ({"tf32": 1}, "has tf32 1, expected bool"),
        ({"shape": [64, 64]}, "shape is (64, 64) and alignment (), expected three numbers"),
        ({"shape": [64, 64, 0]}, "expected a list of numbers, each at least 1"),
        ({"layout": "xy"}, "layout is 'xy'"),
        ({"bias": "diagonal"}, "bias is 'diagonal', expected one of: row, column, rows, columns"),
        ({"activation": "selu"}, "activation is 'selu'"),
        ({"aux": "row"}, "aux is 'row', expected one of: rows, columns"),
    ],
)
def test_unknown_variants_are_refused_by_the_file(
    changed: Any, message: str, tmp_path: Path
) -> None:
    compiled = {"kernel": "simt.naive", "arch": 80} | changed
    file = tmp_path / "snapshot.json"
    file.write_text(
        json.dumps({"format": 1, "compilers": {}, "variants": {"mine": {"compile": compiled}}})
    )
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        snapshot.load(file)
    assert str(caught.value).startswith(f"{file}: variant 'mine' ")


# ---- the file
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "no JSON"),
        ("[]", "no snapshot of format 1"),
        ('{"format": 2}', "no snapshot of format 1"),
        ('{"format": 1, "compilers": {}}', "expected the objects compilers and variants"),
        ('{"format": 1, "compilers": {}, "variants": {"a": {}}}', "variant 'a' is malformed"),
        (
            '{"format": 1, "compilers": {}, "variants": {"a": {"compile": {"arch": 80}}}}',
            "variant 'a' lacks kernel",
        ),
    ],
)
def test_malformed_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "snapshot.json"
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
def test_malformed_code_is_refused(changed: Any, message: str, tmp_path: Path) -> None:
    file = tmp_path / "snapshot.json"
    snapshot.save(file, Snapshot({}, {"a": Entry(PLAIN, SMALL)}))
    written = json.loads(file.read_text())
    written["variants"]["a"]["code"] |= changed
    file.write_text(json.dumps(written))
    with pytest.raises(ValueError, match=message):
        snapshot.load(file)


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "snapshot.json"
    entries = {"b": Entry(PLAIN, SMALL), "a": Entry(replace(PLAIN, shape=(1, 2, 3)))}
    snapshot.save(file, Snapshot({"triton": "1"}, entries))
    assert snapshot.load(file) == Snapshot({"triton": "1"}, entries)
    text = file.read_text()
    assert text.index('"a"') < text.index('"b"')
    assert text == json.dumps(json.loads(text), indent=2) + "\n"
    assert [each.name for each in tmp_path.iterdir()] == ["snapshot.json"]


def test_the_file_in_the_repository_is_laid_out_as_it_is_written(tmp_path: Path) -> None:
    snapshot.save(tmp_path / "again.json", RECORDED)
    assert (tmp_path / "again.json").read_text() == FILE.read_text()


# ---- the command
@pytest.fixture
def written(tmp_path: Path):
    """A snapshot of one kernel, by the command."""
    file = tmp_path / "snapshot.json"
    commands.invoke("inspect", "simt.naive", "--arch", "75,80", "--snapshot", file, code=0)
    return file


@pytest.mark.compile
def test_the_command_writes_a_snapshot_and_finds_no_difference(written) -> None:
    found = snapshot.load(written)
    assert list(found.entries) == [
        "simt.naive sm_75 float32 nn 4096",
        "simt.naive sm_80 float32 nn 4096",
    ]
    assert found.compilers == snapshot.compilers()
    done = commands.invoke("inspect", "simt.naive", "--against", written, code=0)
    assert "2 variants have the machine code of the snapshot" in done.stdout
    commands.invoke(
        "inspect",
        "simt.naive",
        "--config",
        "group_m=4",
        "--arch",
        "80",
        "--snapshot",
        written,
        code=0,
    )
    assert list(snapshot.load(written).entries)[-1] == "simt.naive sm_80 float32 nn 4096 group_m=4"
    assert len(snapshot.load(written).entries) == 3


@pytest.mark.compile
def test_the_command_shows_differences_and_writes_them_when_asked(written) -> None:
    before = snapshot.load(written)
    name = "simt.naive sm_80 float32 nn 4096"
    code = replace(before.entries[name].code, registers=7)
    changed = {**before.entries, name: replace(before.entries[name], code=code)}
    snapshot.save(written, replace(before, entries=changed))
    done = commands.invoke("inspect", "simt.naive", "--against", written, code=1)
    row = next(line for line in done.stdout.splitlines() if name in line)
    assert [cell.strip() for cell in row.split("│")[2:4]] == ["registers", "7"]
    done = commands.invoke("inspect", "--against", written, "--update", code=0)
    assert "registers" in done.stdout
    assert snapshot.load(written) == before


@pytest.mark.compile
def test_kernels_without_a_variant_fail_the_comparison_of_a_whole_snapshot(written) -> None:
    done = commands.invoke("inspect", "--against", written, code=1)
    assert "no variant" in done.stdout
    assert "hopper.gemm" in done.stdout
    assert "simt.naive" in done.stdout  # for sm_90


def test_other_compilers_compare_nothing(tmp_path: Path) -> None:
    file = tmp_path / "snapshot.json"
    snapshot.save(
        file, Snapshot(snapshot.compilers() | {"triton": "0.1"}, {"a": Entry(PLAIN, SMALL)})
    )
    done = commands.invoke("inspect", "simt.naive", "--against", file, code=3)
    assert "Nothing was compared" in done.stdout
    assert "the snapshot has 0.1" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--update",), "--update needs --against FILE"),
        (("--against", FILE, "--arch", "80", "--json"), "and was given --arch, --json"),
        (("nothing", "--against", FILE), "kernel is 'nothing'"),
        (("--against", "/nowhere.json"), "cannot be read"),
        (("portable", "--against", FILE, "--update"), "and was given kernels"),
        (("--snapshot", "/nowhere/file.json"), "--snapshot is"),
    ],
)
def test_usage_errors(arguments, message: str) -> None:
    commands.refuses(message, "inspect", *arguments)


def test_a_snapshot_of_other_compilers_takes_no_variants(tmp_path: Path) -> None:
    file = tmp_path / "snapshot.json"
    snapshot.save(file, Snapshot({"triton": "0.1"}, {}))
    message = f"run outblas inspect --against {file} --update first"
    commands.refuses(message, "inspect", "simt.naive", "--snapshot", file)
