"""Machine code beside its snapshot, tests/data/machine_code.json, for every kernel.

A difference is either a mistake or meant; `make snapshot` writes what is meant, and the commit says
why.
"""

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import cutlass.cute as cute
import pytest
from support.recorded_code import (
    HOPPER_IN_CI,
    IN_CI,
    RECORDED,
    TRITON_LEFT_OUT,
    is_hopper,
)

from outblas.core.configs import from_text
from outblas.hopper import gemm
from outblas.inspect import snapshot
from outblas.inspect.snapshot import Snapshot
from outblas.inspect.variant import KernelVariant

# Fields of `KernelVariant`, and of the config of `hopper.gemm`, that a variant of it in CI sets.
FEATURES = {
    *("activation", "addend", "alignment", "aux", "batch", "bias", "dtype", "formats", "layout"),
    *("out", "out_dtype", "residual", "scale_a", "scale_b"),
    *("cluster_k", "cluster_m", "cluster_n", "consumers", "pingpong", "split_k"),
    *("epilogue_stages", "stream_k", "swap_ab", "variable_tile_n"),
}


@pytest.fixture(scope="session")
def same_compilers() -> None:
    """Skips what only the compilers of the snapshot can pass."""
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
def test_machine_code_is_that_of_the_snapshot(name: str) -> None:
    found = snapshot.compare(name, RECORDED.entries[name])

    assert not found, "\n".join(f"{each.what}: {each.before} -> {each.now}" for each in found)


@pytest.mark.compile
@pytest.mark.own_compile
@pytest.mark.usefixtures("same_compilers")
def test_one_more_barrier_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    once = cute.arch.sync_threads

    def twice(**where: Any) -> None:
        once(**where)
        once(**where)

    monkeypatch.setattr(cute.arch, "sync_threads", twice)

    found = snapshot.compare("mutant", RECORDED.entries["hopper.tma_wgmma"])

    assert [each.what for each in found if each.what.startswith("BAR.SYNC")]


# ---- what the snapshot has, and what of it CI compiles
def test_the_snapshot_has_every_kernel_for_every_architecture() -> None:
    assert snapshot.uncovered(RECORDED) == []


def test_the_snapshot_has_the_production_kernel_in_many_variants() -> None:
    kernels = [entry.variant.kernel for entry in RECORDED.entries.values()]

    assert kernels.count("hopper.gemm") >= 40


def test_a_kernel_that_a_snapshot_lacks_is_found() -> None:
    others = {
        name: entry
        for name, entry in RECORDED.entries.items()
        if entry.variant.kernel != "turing.wmma"
    }

    found = snapshot.uncovered(Snapshot({}, others))

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
