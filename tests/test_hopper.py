"""Hopper rungs without a GPU: configs, what they refuse, their machine code, and the compile cache on disk."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from outblas import cache, operands, registry
from outblas.hopper import host
from outblas.hopper.config import SHARED_MEMORY, HopperConfig, invalid_reason
from outblas.inspect import inspect

NAMES = [kernel.name for kernel in registry.ladder("hopper")]
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

GRID = [
    HopperConfig(tile_m=m, tile_n=n, tile_k=k)
    for m, n, k in itertools.product((64, 96, 128, 256), (8, 16, 64, 128, 192, 256, 264), (8, 16, 64, 128, 256))
]


def test_every_config_is_valid_or_says_why() -> None:
    verdicts = {config: invalid_reason(config) for config in GRID}
    assert invalid_reason(HopperConfig()) is None
    assert all(reason is None or "expected" in reason for reason in verdicts.values())
    valid = [config for config, reason in verdicts.items() if reason is None]
    assert all(config.shared_memory_bytes <= SHARED_MEMORY for config in valid)
    assert len(valid) > 20
    assert "accumulator registers" in str(invalid_reason(HopperConfig(tile_m=256, tile_n=256)))


def problem(
    M: int, N: int, K: int, dtype: torch.dtype = BF16, *, a: Any = None, b: Any = None, out: Any = None
) -> operands.Problem:
    a = torch.empty(M, K, dtype=dtype) if a is None else a
    b = torch.empty(N, K, dtype=dtype).t() if b is None else b
    return operands.problem(a, b, torch.empty(M, N, dtype=dtype) if out is None else out)


FLAT = torch.empty(1 << 16, dtype=BF16)

REFUSED = {
    "K no multiple of 8": (problem(64, 64, 63), r"a has strides \(63, 1\) for 64x63"),
    "no unit stride": (problem(64, 64, 64, a=FLAT.as_strided((64, 64), (512, 2))), "TMA needs one stride of 1"),
    "odd address": (problem(64, 64, 64, a=FLAT[1 : 1 + 4096].view(64, 64)), "a's is a multiple of 2"),
    "b's stride": (problem(64, 60, 64, b=torch.empty(64, 60, dtype=BF16)), r"b has strides \(60, 1\)"),
    "batches": (
        operands.problem(FLAT[:512].view(2, 16, 16), FLAT[:512].view(2, 16, 16), FLAT[:512].view(2, 16, 16)),
        r"was given batches of shape \(2,\)",
    ),
    "addend": (
        dataclasses.replace(problem(64, 64, 64), c=(64, 1), scaled=True),
        "was given an addend or a scale",
    ),
    "extent": (dataclasses.replace(problem(64, 64, 64), M=1 << 31), "extents below"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("name", NAMES)
def test_refusals_say_what_is_needed_and_given(name: str, case: str) -> None:
    given, message = REFUSED[case]
    with pytest.raises(AssertionError, match=message):
        assert registry.load(name).unsupported(given) is None
    assert "config: tile_n is 7" in registry.load(name).unsupported(problem(64, 64, 64), HopperConfig(tile_n=7))


@pytest.mark.parametrize(
    "given",
    [
        problem(64, 64, 64),
        problem(63, 65, 8),
        problem(1, 1, 1),
        problem(1, 63, 63, b=torch.empty(64, 63, dtype=BF16).t().as_strided((63, 63), (1, 64))),
        problem(64, 1, 64),
        problem(64, 1, 64, b=torch.empty(64, dtype=BF16)),
        problem(64, 64, 64, a=FLAT.as_strided((64, 64), (8, 1))),
        problem(64, 64, 64, a=FLAT[:64].expand(64, 64)),
        problem(64, 64, 64, out=FLAT[1 : 1 + 4096].view(64, 64)),
        problem(64, 64, 64, out=torch.empty(64, 200, dtype=BF16)[:, ::3][:, :64]),
    ],
)
def test_whatever_tma_can_stride_over_is_taken(given: operands.Problem) -> None:
    assert host.unsupported(given) is None


@pytest.fixture(params=NAMES)
def rung(request: pytest.FixtureRequest) -> ModuleType:
    return registry.load(request.param)


@pytest.mark.compile
@pytest.mark.parametrize("layout", ["nt", "nn", "tn", "tt"])
def test_machine_code_of_every_layout(rung: ModuleType, layout: str) -> None:
    # STG: pairs, half as many stores as accumulators.
    has = {"HGMMA.64x64x16.F32.BF16": 4, "UTMALDG.2D": 2, "STG": 16, "STG.E": 16}
    code = inspect(rung.KERNEL.name, layout=layout).require(stack=0, max_registers=64, min_ctas=8, has=has)
    assert code.name.startswith(f"outblas_{rung.KERNEL.name.replace('.', '_')}_64x64x64_{layout}_bf16_bf16")


@pytest.mark.compile
@pytest.mark.parametrize(
    ("dtype", "out_dtype", "wgmma", "store"),
    [
        ("bfloat16", "float32", "HGMMA.64x64x16.F32.BF16", "STG.E.64"),
        ("float16", "float16", "HGMMA.64x64x16.F32", "STG.E"),
        ("float16", "float32", "HGMMA", "STG.E.64"),
    ],
)
def test_machine_code_of_every_dtype(rung: ModuleType, dtype: str, out_dtype: str, wgmma: str, store: str) -> None:
    inspect(rung.KERNEL.name, dtype=dtype, out_dtype=out_dtype).require(has={wgmma: 4, store: 16})


@pytest.mark.compile
@pytest.mark.parametrize(
    ("config", "wgmma"),
    [
        (HopperConfig(tile_m=128, tile_n=128), {"HGMMA.64x128x16": 8}),
        (HopperConfig(tile_n=256), {"HGMMA.64x256x16": 4}),
        (HopperConfig(tile_n=16, tile_k=16), {"HGMMA.64x16x16": 1}),
        (HopperConfig(tile_k=128, jitter=True), {"HGMMA.64x64x16": 8, "NANOSLEEP": 4}),
    ],
)
@pytest.mark.parametrize("layout", ["nt", "tn"])
def test_configs_show_in_the_machine_code(
    rung: ModuleType, config: HopperConfig, wgmma: dict[str, int], layout: str
) -> None:
    inspect(rung.KERNEL.name, config=config, layout=layout).require(has=wgmma)


@pytest.mark.compile
def test_invalid_config_compiles_nothing(rung: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.cute, "compile", lambda *_, **__: pytest.fail("compiled"))
    with pytest.raises(ValueError, match="tile_m is 80, expected 64, 128, 192 or 256"):
        rung.artifact(HopperConfig(tile_m=80))


@pytest.mark.compile
def test_bytes_that_do_not_match_the_config_fail_the_compile(rung: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The producer would announce what never lands, and every CTA would wait for it."""
    monkeypatch.setattr(HopperConfig, "slot_bytes", property(lambda self: 16384 + 128))
    with pytest.raises(Exception, match="16384 bytes land in a slot, the config announces 16512"):
        rung.artifact()


@pytest.mark.compile
def test_shared_memory_is_what_the_formula_says(rung: ModuleType) -> None:
    (gemm,) = rung.plan.args[1:]
    variant = host.Variant(rung.KERNEL.name, HopperConfig(), BF16, BF16, "nt", row_major=True, pairs=True)
    compiled = host.compile_variant(gemm, variant)
    assert f"{HopperConfig().shared_memory_bytes} : i64" in str(compiled.ir_module)


@pytest.mark.compile
def test_compiled_once_then_loaded_from_disk(rung: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path / "cache"))
    compiles = []
    compile_variant = host.compile_variant
    monkeypatch.setattr(host, "compile_variant", lambda *a: compiles.append(a) or compile_variant(*a))
    for M, N, K in ((64, 64, 64), (4096, 512, 72)):
        monkeypatch.setattr(host, "_loaded", {})  # a new process
        rung.plan(problem(M, N, K))
    assert len(compiles) == 1
    assert len(list((cache.directory() / "objects").glob("*.o"))) == 1
    monkeypatch.setattr(host, "_source_fingerprint", lambda: "edited")
    monkeypatch.setattr(host, "_loaded", {})
    rung.plan(problem(64, 64, 64))
    assert len(compiles) == 2
