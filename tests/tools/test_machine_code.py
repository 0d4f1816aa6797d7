"""Machine code beside its snapshot, tests/data/machine_code.json, for every kernel.

A difference is either a mistake or meant; `make snapshot` writes what is meant, and the commit says
why.
"""

import copy
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from support.recorded_code import ENTRIES, IN_CI, RECORDED, is_hopper, variant

from outblas.base.configs import from_text
from outblas.call.artifact import example
from outblas.hopper import gemm
from tools import machine_code
from tools.machine_code import KernelVariant, compare, differences, problem, uncovered

# Fields of `KernelVariant`, and of the config of `hopper.gemm`, that a variant of it in CI sets.
FEATURES = {
    *("activation", "addend", "alignment", "aux", "batch", "bias", "dtype", "formats", "layout"),
    *("out", "out_dtype", "residual", "scale_a", "scale_b"),
    *("cluster_k", "cluster_m", "cluster_n", "consumers", "pingpong", "split_k"),
    *("epilogue_stages", "stream_k", "swap_ab", "variable_tile_n", "weights_ready"),
}
NAIVE = {
    name: entry for name, entry in ENTRIES.items() if entry["compile"]["kernel"] == "simt.naive"
}


@pytest.fixture(scope="session")
def same_compilers() -> None:
    """Skips what only the compilers of the snapshot can pass."""
    if changed := machine_code.other_compilers(RECORDED):
        pytest.skip(f"other compilers made the snapshot: {'; '.join(changed)}")


@pytest.mark.compile
@pytest.mark.usefixtures("same_compilers")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in IN_CI else pytest.mark.slow) for name in ENTRIES],
)
def test_machine_code_is_that_of_the_snapshot(name: str) -> None:
    changes = compare(ENTRIES[name])

    assert not changes, "\n".join(changes)


# ---- what the snapshot has, and what of it CI compiles
def test_the_snapshot_has_every_kernel_for_every_architecture() -> None:
    assert uncovered(ENTRIES.values()) == []


def test_ci_compiles_every_kernel_and_every_architecture() -> None:
    variants = [ENTRIES[name]["compile"] for name in IN_CI]

    assert {variant["kernel"] for variant in variants} == {
        entry["compile"]["kernel"] for entry in ENTRIES.values()
    }
    assert {variant["arch"] for variant in variants} == {75, 80, 90}


# Bytes that a thread spills, of so many registers that no tile without spills was as fast.
SPILLED = {
    "hopper.gemm all epilogue steps, pingpong": 688,
    "hopper.gemm batch, all epilogue steps": 4,
    "hopper.gemm residual by columns": 28,
    "hopper.gemm split-K, all epilogue steps": 112,
    "hopper.grouped gathered and scattered rows, 128x256, SwiGLU, bias, residual and aux": 4,
}


def test_no_other_hopper_kernel_spills() -> None:
    spills = {
        name: entry["code"]["spill_stores"]
        for name, entry in ENTRIES.items()
        if is_hopper(name) and entry["code"]["spill_stores"]
    }

    assert spills == SPILLED


def changed_fields(record: Any, plain: Any) -> set[str]:
    """The names of the fields in which a record differs from another."""
    return {f.name for f in fields(record) if getattr(record, f.name) != getattr(plain, f.name)}


def test_ci_compiles_every_feature_of_the_production_kernel() -> None:
    plain = variant("hopper.gemm")
    changed: set[str] = set()
    for one in map(variant, IN_CI):
        if one.kernel == "hopper.gemm":
            config = from_text(gemm.Config, one.config)
            changed |= changed_fields(one, plain) | changed_fields(config, gemm.Config())

    assert changed >= FEATURES


# ---- what counts as different
CODE = {
    "registers": 32,
    "smem_bytes": 1024,
    "instructions": 200,
    "counts": {"BAR.SYNC": 2, "HMMA.16816.F32": 8},
}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"registers": 33}, ["registers: 32 -> 33"]),
        ({"smem_bytes": 2048}, ["smem_bytes: 1024 -> 2048"]),
        ({"counts": {"BAR.SYNC": 3, "HMMA.16816.F32": 8}}, ["BAR.SYNC: 2 -> 3"]),
        ({"counts": {"BAR.SYNC": 2}}, ["HMMA.16816.F32: 8 -> 0"]),
        ({"instructions": 202}, []),
        ({"instructions": 198}, []),
        ({"instructions": 203}, ["instructions: 200 -> 203"]),
    ],
)
def test_what_counts_as_different(changed: dict[str, Any], expected: list[str]) -> None:
    assert differences(CODE, {**CODE, **changed}) == expected


@pytest.mark.compile
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"config": "block_m=7"}, "compile: ValueError: config: block_m is 7"),
        ({"activation": "gelu"}, "compile: ValueError: has no epilogue besides alpha and C"),
        ({"out": "diagonal"}, "compile: ValueError: a matrix is 'diagonal'"),
        ({"tile": 64}, "compile: TypeError: KernelVariant.__init__() got an unexpected keyword"),
    ],
)
def test_a_variant_that_does_not_compile_is_a_difference(
    changed: dict[str, object], message: str
) -> None:
    entry = NAIVE["simt.naive sm_80"]

    (line,) = compare({**entry, "compile": {**entry["compile"], **changed}})

    assert line.startswith(message)


# ---- the variants
@pytest.mark.parametrize("layout", ["nt", "nn", "tn", "tt"])
@pytest.mark.parametrize("out_dtype", ["", "float32"])
def test_a_plain_variant_is_the_call_that_inspect_compiles(layout: str, out_dtype: str) -> None:
    plain = KernelVariant(
        kernel="hopper.gemm", arch=90, layout=layout, out_dtype=out_dtype, shape=(64, 72, 80)
    )

    result = torch.float32 if out_dtype else None
    assert problem(plain) == example(torch.bfloat16, result, layout, (64, 72, 80))


def test_a_variant_may_have_everything() -> None:
    call = problem(
        KernelVariant(
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
    )

    extra = call.epilogue
    assert (call.M, call.N, call.columns, call.K, call.batch) == (64, 48, 96, 32, (3,))
    assert (call.out, call.alignment) == ((64 * 48, 1, 64), (2, 16, 8))
    assert (extra.function, extra.gated) == ("silu", True)
    assert [t.strides for t in (extra.bias, extra.residual, extra.aux) if t] == [
        (0, 0, 1),
        (0, 1, 0),
        (64 * 96, 1, 64),
    ]


# ---- the file and the command
@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A snapshot of one kernel, which may be written."""
    path = tmp_path / "snapshot.json"
    path.write_text(machine_code.to_text({**RECORDED, "variants": copy.deepcopy(NAIVE)}))
    return path


@pytest.mark.compile
@pytest.mark.usefixtures("same_compilers")
def test_the_command_finds_a_change_and_replaces_it_when_asked(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = file.read_text()
    changed = json.loads(before)
    changed["variants"]["simt.naive sm_80"]["code"]["registers"] = 7
    del changed["variants"]["simt.naive sm_75"]["code"]
    file.write_text(machine_code.to_text(changed))

    code = machine_code.main(["simt.naive", "--file", str(file)])
    assert code == machine_code.DIFFERENT
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("simt.naive sm_80: registers: 7 -> ") for line in lines)
    assert "simt.naive sm_75: code: missing, run `make snapshot`" in lines

    assert machine_code.main(["--update", "--file", str(file)]) == 0
    assert file.read_text() == before
    capsys.readouterr()

    assert machine_code.main(["--file", str(file)]) == machine_code.DIFFERENT
    lines = capsys.readouterr().out.splitlines()
    assert "hopper.gemm sm_90: no variant" in lines
    assert not [line for line in lines if line.startswith("simt.naive")]
