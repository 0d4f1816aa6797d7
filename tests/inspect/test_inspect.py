"""The inspection of compiled kernels: what is read of them, and gates that fail when they
should.
"""

import re
from typing import Any

import pytest
import torch
from support.hopper_problems import ONE_CONSUMER
from support.inspections import RECORD_FIELDS, said_by_the_assembler

from outblas.base import machines, registry
from outblas.inspect import GateError, inspect, read
from outblas.inspect.inspection import compilable

# Of the Hopper ladder the ends: tests/hopper/test_hopper.py compiles and reads every rung.
KERNELS = [kernel for kernel in registry.ladder() if kernel not in registry.ladder("hopper")[1:-1]]


@pytest.mark.compile
@pytest.mark.oldest_triton
@pytest.mark.parametrize(
    ("name", "arch"),
    [
        pytest.param(kernel.name, arch, id=f"{kernel.name}-{arch}")
        for kernel in KERNELS
        for arch in compilable(kernel)
    ],
)
def test_a_kernel_has_no_spills_and_is_read_as_the_assembler_says(name: str, arch: int) -> None:
    """For each architecture, as its ladder's documents call it."""
    dtype = getattr(torch, registry.dtype_of(name))
    layout = registry.layout_of(name)
    artifact = registry.load(name).artifact(arch=arch, dtype=dtype, layout=layout)

    inspection = read(artifact)

    assert said_by_the_assembler(artifact.log) == (inspection.registers, 0, 0, 0)
    inspection.require(no_warnings=not old_ptxas(name), stack=0, lacks=("LDL", "STL"))
    assert inspection.arch == ("sm_90a" if arch == 90 else f"sm_{arch}")
    assert list(inspection.record()) == RECORD_FIELDS
    assert list(inspection.bound) == [machine.name for machine in machines.of_arch(arch)]


def old_ptxas(name: str) -> bool:
    """Triton 3.6's assembler serialises the portable kernel's wgmma (C7515); CuTe DSL brings its
    own.
    """
    import triton

    return registry.find(name).dsl != "cute" and triton.__version__ < "3.9"


@pytest.mark.compile
@pytest.mark.oldest_triton
def test_a_gluon_kernel_is_read() -> None:
    from support import gluon_tile

    artifact = gluon_tile.artifact(gluon_tile.TileConfig(), 90)
    assert (artifact.threads, artifact.smem_bytes) == (128, 2 * 64 * 16 * 4)

    found = read(artifact)

    found.require(has=("FFMA", "LDS", "fma.rn.f32"), lacks=("HMMA", "HGMMA"), max_registers=128)
    assert found.bank_conflicts == {"store A": 0}
    assert found.limiter == "registers"
    assert 0.5 < found.ffma_share < 1
    assert 0 < found.ffma_reuse <= 1
    assert found.intensity["shared"] == pytest.approx(4 / 3)  # 8 x 4 products of 12 words read


@pytest.mark.compile
@pytest.mark.oldest_triton
def test_spills_fail_the_gate() -> None:
    from support import gluon_tile

    artifact = gluon_tile.artifact(gluon_tile.TileConfig(max_registers=32), 90)
    found = read(artifact)

    assert said_by_the_assembler(artifact.log) == (
        32,
        found.stack,
        found.spill_stores,
        found.spill_loads,
    )
    assert found.spill_stores > 1000
    spilled = found.spill_stores + found.spill_loads
    message = f"tile_kernel for sm_90.*\n  spilled bytes: {spilled}, expected at most 0"
    with pytest.raises(GateError, match=message):
        found.require()
    found.require(spills=None)


@pytest.mark.compile
def test_a_gate_that_fails_names_every_failure() -> None:
    """A Hopper tile beyond the register budget: spills, and wgmma that the assembler serialises."""
    beyond_budget = inspect("hopper.two_consumers", config=ONE_CONSUMER)

    with pytest.raises(GateError) as caught:
        beyond_budget.require(
            max_registers=200,
            stack=0,
            min_ctas=3,
            has={"HGMMA.64x256x16": 3},
            lacks=("STL", "wgmma.mma_async"),
        )

    assert [line.split(":")[0] for line in caught.value.failed] == [
        "spilled bytes",
        "registers",
        "stack bytes",
        "CTAs per SM",
        "HGMMA.64x256x16",
        "STL",
        "wgmma.mma_async",
        "the assembler warned",
    ]
    assert "registers: 255, expected at most 200" in caught.value.failed
    warning = "(C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized"
    assert warning in str(caught.value)
    with pytest.raises(GateError, match="HMMA: 0, expected at least 1"):
        beyond_budget.require(spills=None, no_warnings=False, has=("HMMA",))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kernel": "nothing"}, "kernel is 'nothing'"),
        ({"arch": 80}, "arch is 80, expected 90 for hopper.tma_wgmma"),
        ({"kernel": "portable", "arch": 89}, "arch is 89, expected 75 or 80 or 90 for portable"),
        (
            {"dtype": "float32"},
            "dtype is 'float32', expected bfloat16 or float16 for hopper.tma_wgmma",
        ),
        (
            {"out_dtype": "float16"},
            "out_dtype is 'float16', expected bfloat16 or float32 for hopper.tma_wgmma",
        ),
        ({"layout": "xy"}, "layout is 'xy', expected one of nt, nn, tn, tt"),
        ({"shape": (4096, 0, 4096)}, "shape is"),
        ({"shape": (64, 64, 63)}, "TMA needs one stride of 1"),
        ({"config": "tile_m=80"}, "config: tile_m is 80, expected 64, 128, 192, 256 or 320"),
        ({"config": "stage=4"}, "config has 'stage=4'"),
        (
            {"kernel": "portable", "arch": 75, "config": "num_stages=4"},
            "needs 131136 bytes of shared memory",
        ),
        (
            {"kernel": "portable", "config": "block_m=100"},
            "config: block_m is 100, expected a power of two",
        ),
    ],
)
def test_bad_arguments_compile_nothing(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        inspect(**{"kernel": "hopper.tma_wgmma", **arguments})
