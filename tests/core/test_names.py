"""Names of compiled kernels: one for each compile, readable, and an identifier of C."""

import dataclasses
import itertools
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from outblas.core import machines
from outblas.core.artifact import example
from outblas.core.epilogue import ACTIVATIONS
from outblas.hopper import gemm, hilbert, tma_wgmma, two_consumers
from outblas.hopper.core import compile, host
from outblas.hopper.core.config import HopperConfig, compile_key
from outblas.hopper.gemm import traits
from outblas.hopper.gemm.variant import Variant as GemmVariant

BF16, F16, FP32 = torch.bfloat16, torch.float16, torch.float32
PLAIN = traits.KernelTraits(8, False, True, False, False, False, False, False)
OWN = GemmVariant(compile_key(gemm.Config()), PLAIN, BF16, BF16, "nt")
RUNG = host.Variant("hopper.hilbert", compile_key(hilbert.Config()), BF16, BF16, "nt", True, 8)
KINDS = ("", "columns", "pairs", "rows", "matrix", "batch", "staged")


def other(value):
    """Another value of the same type, that no field has by default."""
    if isinstance(value, bool):
        return not value
    return (
        value + 7 if isinstance(value, int) else f"{value}other" if isinstance(value, str) else F16
    )


def changed(variant):
    """A variant for each field, of it, its config and its traits, in which that one is another."""
    for field in fields(variant):
        value = getattr(variant, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            for part in fields(value):
                one = replace(value, **{part.name: other(getattr(value, part.name))})
                yield f"{field.name}.{part.name}", replace(variant, **{field.name: one})
        else:
            yield field.name, replace(variant, **{field.name: other(value)})


@pytest.mark.parametrize("variant", [OWN, RUNG], ids=["gemm", "rung"])
def test_every_field_takes_part(variant):
    """One that is added to a config or to traits does too."""
    names = {name: made.name for name, made in changed(variant)}
    assert len({variant.name, *names.values()}) == 1 + len(names)
    assert {name.split(".")[0] for name in names} == {field.name for field in fields(variant)}
    assert {f"config.{field.name}" for field in fields(HopperConfig)} <= set(names)


def test_a_field_that_is_added_takes_part() -> None:
    @dataclasses.dataclass(frozen=True)
    class More(traits.KernelTraits):
        added: int = 0

    values = {field.name: getattr(PLAIN, field.name) for field in fields(PLAIN)}
    first, second = (replace(OWN, traits=More(**values, added=added)).name for added in (0, 1))
    assert len({OWN.name, first, second}) == 3


def forms():
    """Forms of calls, and ones that no call has: for names all of them count."""
    yield from (
        replace(
            PLAIN,
            width=width,
            by_columns=by_columns,
            staged=staged,
            transposed=crossed,
            batched=batched,
        )
        for width in (1, 2, 8)
        for by_columns, staged, crossed, batched in itertools.product((False, True), repeat=4)
    )
    for name in ("addend", "bias", "residual", "aux"):
        for kind in KINDS[1:]:
            changed: dict[str, Any] = {"scaled": True, name: kind}
            yield replace(PLAIN, **changed)
    for function, gated in itertools.product(filter(None, ACTIVATIONS), (False, True)):
        yield replace(PLAIN, function=function, gated=gated)
    for formats in ("e4m3 e4m3", "e4m3 e5m2 promoted"):
        yield from (
            replace(PLAIN, formats=formats, scale_a=kind, scale_b="one") for kind in ("one", "rows")
        )
    yield from (
        replace(PLAIN, ordered=True),
        replace(PLAIN, single_wave=True),
        replace(PLAIN, staggered_tail=True),
    )


def distinct(variants):
    """Names of different variants, all checked. Those that differ in the type of their configs
    alone are one."""
    keys: dict[str, str] = {}
    for variant in variants:
        name, key = variant.name, repr(variant)
        assert len(name) <= compile.LONGEST_NAME
        assert name.isidentifier()
        assert name.isascii()
        assert keys.setdefault(name, key) == key, name
    return keys


def test_names_and_compiles_of_the_space_are_one_to_one():
    """Every compile of two search spaces, with a few traits, and all traits with a few configs."""
    machine, found = machines.reference(90), set()
    for shape, layout in (((4096, 4096, 4096), "nt"), ((16, 4096, 4096), "nn")):
        space = gemm.space(example(BF16, None, layout, shape), machine)
        found |= {
            compile_key(config)
            for config in space.configs()
            if space.invalid_reason(config) is None
        }
    compiles = sorted(found, key=str)
    few = list(forms())
    variants = {replace(OWN, config=c, traits=f) for c in compiles for f in few[:: len(few) // 2]}
    variants |= {
        replace(OWN, config=c, traits=f) for c in compiles[:: len(compiles) // 20] for f in few
    }
    variants |= {replace(v, out_dtype=FP32, layout="tn") for v in list(variants)[::50]}
    assert len(distinct(variants)) == len(variants) > 1000


def test_names_and_compiles_of_the_rungs_are_one_to_one() -> None:
    variants = set()
    for rung, kind in (
        (tma_wgmma, "hopper.tma_wgmma"),
        (two_consumers, "hopper.two_consumers"),
        (hilbert, RUNG.kernel),
    ):
        space = rung.space(example(BF16, None, "nt", (4096, 4096, 4096)), machines.reference(90))
        for config in space.configs():
            for row_major, width in ((True, 8), (True, 2), (False, 1)):
                made = replace(
                    RUNG, kernel=kind, config=compile_key(config), row_major=row_major, width=width
                )
                variants.add(made)
    assert len(distinct(variants)) == len(variants) > 100


def test_what_is_read_comes_first() -> None:
    assert OWN.name.startswith("outblas_hopper_gemm_128x256x64x4_2x1x1_nt_bf16_bf16_serpentine_")
    assert RUNG.name.startswith("outblas_hopper_hilbert_128x256x64_2x1_nt_bf16_bf16_")
    stored = replace(
        PLAIN, function="gelu_tanh", bias="pairs", formats="e4m3 e5m2 promoted", scale_a="one"
    )
    assert "_bias_pairs_gelu_tanh_e4m3_e5m2_promoted_" in replace(OWN, traits=stored).name


def test_a_long_name_is_cut_off_and_still_its_own() -> None:
    everything: dict[str, Any] = dict.fromkeys(
        ("addend", "bias", "residual", "aux", "scale_a", "scale_b"), "columns"
    )
    long = replace(
        PLAIN,
        function="gelu_tanh",
        formats="e4m3 e5m2 promoted",
        staggered_tail=True,
        gated=True,
        **everything,
    )
    long = replace(
        long,
        by_columns=True,
        transposed=True,
        batched=True,
        ordered=True,
        single_wave=True,
        scaled=True,
    )
    config = replace(
        OWN.config,
        jitter=True,
        stream_k=True,
        pdl=True,
        variable_tile_n=True,
        pingpong=True,
        cluster_k=2,
    )
    names = {
        replace(OWN, config=c, traits=long).name for c in (config, replace(config, in_flight=0))
    }
    assert {len(name) for name in names} == {compile.LONGEST_NAME}
    assert len(names) == 2
