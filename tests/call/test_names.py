"""Names of compiled kernels: one for each compile, and an identifier of C."""

import dataclasses
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from outblas.base import machines
from outblas.call.artifact import example
from outblas.hopper import gemm, hilbert
from outblas.hopper.gemm import traits
from outblas.hopper.gemm.variant import Variant as GemmVariant
from outblas.hopper.parts import compile, host
from outblas.hopper.parts.config import HopperConfig, compile_key

BF16 = torch.bfloat16
PLAIN = traits.KernelTraits(8, False, True, False, False, False, False, False)
GEMM = GemmVariant(compile_key(gemm.Config()), PLAIN, BF16, BF16, "nt")
RUNG = host.RungVariant("hopper.hilbert", compile_key(hilbert.Config()), BF16, BF16, "nt", True, 8)


def other(value: Any) -> Any:
    """Another value of the same type, that no field has by default."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 7
    return f"{value}other" if isinstance(value, str) else torch.float16


def changed(variant: Any) -> Iterator[tuple[str, Any]]:
    """A variant for each field, of it, its config and its traits, in which that one is another."""
    for field in fields(variant):
        value = getattr(variant, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            for part in fields(value):
                one = replace(value, **{part.name: other(getattr(value, part.name))})
                yield f"{field.name}.{part.name}", replace(variant, **{field.name: one})
        else:
            yield field.name, replace(variant, **{field.name: other(value)})


@pytest.mark.parametrize("variant", [GEMM, RUNG], ids=["gemm", "rung"])
def test_every_field_takes_part(variant: Any) -> None:
    """One that is added to a config or to traits does too."""
    names = {name: made.name for name, made in changed(variant)}

    assert len({variant.name, *names.values()}) == 1 + len(names)
    assert {name.split(".")[0] for name in names} == {field.name for field in fields(variant)}
    assert {f"config.{field.name}" for field in fields(HopperConfig)} <= set(names)


def test_names_and_compiles_of_the_search_space_are_one_to_one() -> None:
    space = gemm.space(example(BF16, None, "nt", (4096, 4096, 4096)), machines.reference(90))
    sound = [config for config in space.configs() if space.invalid_reason(config) is None]
    compiles = {compile_key(config) for config in sound}
    columns: dict[str, Any] = dict.fromkeys(
        ("addend", "bias", "residual", "aux", "scale_a", "scale_b"), "columns"
    )
    long = replace(
        PLAIN,
        function="gelu_tanh",
        formats="e4m3 e5m2 promoted",
        **columns,
    )

    names = [replace(GEMM, config=c, traits=t).name for c in compiles for t in (PLAIN, long)]

    assert len(set(names)) == len(names) > 700
    assert all(name.isidentifier() and name.isascii() for name in names)
    assert max(map(len, names)) == compile.LONGEST_NAME
