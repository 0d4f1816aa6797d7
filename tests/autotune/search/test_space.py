"""Search spaces: what each kernel can vary, which configs are valid, and what a config asks for."""

import functools
import itertools
import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.spaces import (
    H100,
    NAMES,
    SHAPES,
    fields_of,
    machine_for,
    precisions,
    some,
    space,
    valid,
    workload,
)

from outblas.autotune.search import prune
from outblas.autotune.search.target import of
from outblas.autotune.store.records import Workload
from outblas.base import registry
from outblas.base.configs import from_text
from outblas.base.machines import Machine
from outblas.call.problem import Problem
from outblas.hopper import hilbert
from outblas.hopper.gemm.config import invalid_reason
from outblas.hopper.gemm.variant import example_variant
from outblas.kernels import portable_config


def shared_out(configs: list[Any]) -> list[Any]:
    """One of eight configs, at random."""
    return random.Random(0).sample(configs, -(-len(configs) // 8))


def asked_of(name: str) -> list[Workload]:
    """Workloads of all shapes and of all dtypes that a kernel takes, but not of all pairs."""
    pairs = itertools.zip_longest(SHAPES, precisions(name), fillvalue=None)
    return [workload(name, shape or SHAPES[0], dtype or "") for shape, dtype in pairs]


# Which configs are valid.


@pytest.mark.parametrize("name", NAMES)
def test_a_space_begins_with_the_kernels_own_config_and_has_each_once(name: str) -> None:
    found = space(name)

    configs = list(found.configs())

    assert configs[0] == found.own
    assert len(set(configs)) == len(configs) < 6000


def own_reason(name: str) -> Callable[[Any, Problem, Machine], str | None]:
    """What a kernel itself has against a config at a problem on a machine."""
    module = of(name).load()
    if name == "portable":
        return lambda config, given, machine: portable_config.invalid_reason(
            config, given.dtype, machine.shared_memory_per_cta
        )
    if name == "hopper.gemm":
        return lambda config, given, machine: invalid_reason(config)
    if name.startswith("hopper."):
        return lambda config, given, machine: module.unsupported.args[0].invalid_reason(config)
    rung = module.unsupported.__self__
    return lambda config, given, machine: (
        rung._invalid(config, machine.shared_memory_per_cta)
        or rung.unsupported_reason(given, config, machine.arch)
    )


@functools.cache
def judged(name: str) -> list[tuple[Workload, Any, str | None]]:
    """Configs of a kernel at several workloads, and why the space leaves them out, if it does."""
    return [
        (asked, config, found.invalid_reason(config))
        for asked, found in ((asked, space(name, asked)) for asked in asked_of(name))
        for config in shared_out(list(found.configs()))
    ]


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_what_a_space_has_is_what_the_kernel_takes(name: str) -> None:
    """The space may refuse more than the kernel, never less."""
    machine, of_kernel = machine_for(name), own_reason(name)
    given = {asked: prune.problem(asked) for asked in asked_of(name)}
    taken = [(asked, config) for asked, config, left_out in judged(name) if not left_out]

    refused = [
        (asked, config, said)
        for asked, config in taken
        if (said := of_kernel(config, given[asked], machine)) is not None
    ]

    assert taken
    assert refused == []


@pytest.mark.parametrize("name", NAMES)
def test_a_space_explains_what_it_leaves_out(name: str) -> None:
    """In one line with a number, that says what was expected or what there is; no whole config."""
    explained = re.compile(
        r"expected .|, but the device has \d|, but an SM has at most \d|too few for \d|needs .*\d"
    )
    reasons = {reason for _, _, reason in judged(name) if reason is not None}

    for reason in reasons:
        assert explained.search(reason), reason
        assert re.search(r"\d", reason), reason
        assert reason.isprintable(), reason
        assert len(reason) < 160, reason


@pytest.mark.parametrize(
    "text", ["stages=2,tile_n=128,epilogue_stages=2", "sms=132", "cluster_m=2", "epilogue_stages=1"]
)
def test_a_config_that_runs_and_cannot_be_the_fastest_is_left_out(text: str) -> None:
    config = from_text(hilbert.Config, f"cluster_m=1,sms=0,{text}")
    problem = prune.problem(Workload(64, 4096, 4096))

    assert hilbert.unsupported(problem, config) is None
    assert hilbert.space(problem, H100).invalid_reason(config) is not None


@pytest.mark.compile
@pytest.mark.parametrize("name", ["simt.pipelined", "hopper.hilbert"])
def test_a_valid_config_compiles(name: str) -> None:
    found = space(name)
    config = min(some(name, found, 8), key=lambda config: found.footprint(config).registers)

    of(name).load().precompile(prune.problem(workload(name)), config, 90)


# What is varied.


@pytest.mark.parametrize("ladder", registry.LADDERS)
def test_every_value_is_of_use_somewhere(ladder: str) -> None:
    unused: dict[tuple[str, ...], set[Any]] = {}
    for name, shape in itertools.product(reversed(registry.LADDERS[ladder]), SHAPES[:2]):
        found = space(name, workload(name, shape))
        for fields, values in zip(fields_of(found.axes), found.axes.values(), strict=True):
            listed = {value if isinstance(value, tuple) else (value,) for value in values}
            unused.setdefault(fields, listed)
        left = [fields for fields in fields_of(found.axes) if unused[fields]]
        for config in valid(found) if left else ():
            for fields in left:
                unused[fields].discard(tuple(getattr(config, field) for field in fields))

    assert not any(unused.values()), unused


# What a config asks for.


@pytest.mark.parametrize("name", NAMES)
def test_a_footprint_fits_the_machine(name: str) -> None:
    machine, found = machine_for(name), space(name)
    for config in some(name, found, 10):
        f = found.footprint(config)
        assert f.shared_memory <= machine.shared_memory_per_cta, config
        assert f.threads % 32 == 0, config
        assert 32 <= f.threads <= machine.max_threads_per_cta, config
        assert f.registers >= f.tile_m * f.tile_n // f.threads // f.groups // 4, config
        sizes = (f.tile_m, f.tile_n, f.tile_k, f.stages, f.groups, f.cluster_m, f.cluster_n)
        assert min(sizes) >= 1, config


# Which configs share a compile.


@pytest.fixture(scope="module")
def compile_keys() -> dict[Any, Any]:
    """The configs of hopper.hilbert, and which compile each of them takes."""
    found = space("hopper.hilbert")
    return {config: found.compile_key(config) for config in valid(found)}


def test_configs_share_a_compile_that_differ_in_the_table_of_tiles(
    compile_keys: dict[Any, Any],
) -> None:
    """The order of tiles and the number of SMs are a table's: 128 SMs, or all."""
    for config, shared in compile_keys.items():
        scheduled = {name: getattr(config, name) for name in ("order", "group_m", "group_n", "sms")}
        assert replace(shared, **scheduled) == config

    assert len(set(compile_keys.values())) * 2 == len(compile_keys)


@pytest.mark.parametrize(
    "asked",
    [
        Workload(1024, 1024, 1024),
        Workload(1536, 1536, 1536, layout="nn"),
        Workload(16, 4096, 4096, layout="nn"),
    ],
    ids=str,
)
def test_gemm_configs_of_one_compile_key_are_one_variant(asked: Workload) -> None:
    found, given = space("hopper.gemm", asked), prune.problem(asked)
    compiled: dict[Any, Any] = {}
    for config in shared_out(valid(found)):
        variant = example_variant(given, config)
        assert compiled.setdefault(found.compile_key(config), variant) == variant, config
