"""What tells compiled Hopper kernels apart, in a process and on disk."""

import platform
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from outblas.device import exported
from outblas.hopper import gemm
from outblas.hopper.parts import compile, host
from outblas.hopper.parts.config import compile_key

CONFIG = gemm.Config()
# The host makes the order of tiles, swaps operands and says in traits whether consumers are
# staggered; the number of partitions is an argument.
OF_THE_HOST = {"order", "group_m", "group_n", "sms", "gpc_local", "swap_ab", "stagger"}
OTHERS: dict[str, Any] = {
    "order": "hilbert",
    "mma_n": 64,
    "cluster_k": 2,
    "split_k": 4,
    "stagger": "always",
}
VARIANT = host.RungVariant(
    "hopper.tma_wgmma", CONFIG, torch.bfloat16, torch.bfloat16, "nt", row_major=True, width=8
)


def changed(name: str):
    """The config with another value of a field."""
    value = getattr(CONFIG, name)
    if name in OTHERS:
        return replace(CONFIG, **{name: OTHERS[name]})
    other: Any = not value if isinstance(value, bool) else value + 8
    return replace(CONFIG, **{name: other})


@pytest.mark.parametrize("name", [field.name for field in fields(CONFIG)])
def test_a_compile_is_shared_by_configs_that_differ_on_the_host_alone(name: str) -> None:
    shared = compile_key(changed(name)) == compile_key(CONFIG)

    assert shared == (name in OF_THE_HOST)


def test_a_compile_is_shared_by_any_number_of_partitions_beyond_one() -> None:
    three, nine = (compile_key(replace(CONFIG, split_k=count)) for count in (3, 9))

    assert three == nine


TOOLCHAIN = {
    "options": lambda patch: patch.setattr(compile, "OPTIONS", "--opt-level 0"),
    "architecture": lambda patch: patch.setattr(compile, "ARCH", "sm_100a"),
    "machine": lambda patch: patch.setattr(platform, "machine", lambda: "riscv64"),
    "DSL": lambda patch: install_another(patch, "nvidia-cutlass-dsl"),
    "CUDA of the DSL": lambda patch: patch.setattr(exported, "cuda_of_dsl", lambda: 11),
    "TVM FFI": lambda patch: install_another(patch, "apache-tvm-ffi"),
    "source": lambda patch: patch.setattr(compile, "source_fingerprint", lambda: "edited"),
}


def install_another(patch: pytest.MonkeyPatch, package: str) -> None:
    """Another version of a package is installed."""
    version = compile.version_of
    patch.setattr(compile, "version_of", lambda name: "0.0" if name == package else version(name))


@pytest.mark.parametrize("what", TOOLCHAIN)
def test_a_kernel_on_disk_is_for_one_toolchain(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = VARIANT.cache_key_fields

    TOOLCHAIN[what](monkeypatch)

    assert VARIANT.cache_key_fields != before
