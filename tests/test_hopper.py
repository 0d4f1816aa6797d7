"""Hopper rungs without a GPU: configs, what they refuse, their machine code, and the compile cache on disk."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from outblas import cache, configs, operands, registry
from outblas.hopper import cluster_multicast, host, lean_barriers, sync
from outblas.hopper.config import SHARED_MEMORY, HopperConfig, invalid_reason
from outblas.inspect import GateError, inspect

NAMES = [kernel.name for kernel in registry.ladder("hopper")]
BF16 = torch.bfloat16
FLAT = torch.empty(1 << 16, dtype=BF16)

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


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("tile_m=80", "tile_m is 80, expected 64, 128, 192, 256 or 320"),
        ("tile_n=24", "tile_n is 24, expected a multiple of 16 from 16 to 512"),
        ("tile_k=48", "tile_k is 48, expected 16, 32, 64 or 128"),
        ("mma_n=96", r"mma_n is 96, expected 0 or a multiple of 16 that divides tile_n \(256\)"),
        ("consumers=3", r"consumers is 3, expected 1, 2 or 3 that share tile_m \(128\)"),
        ("slots=0", "slots is 0, expected 1 to 64"),
        ("in_flight=1,slots=1", r"in_flight is 1, expected 0 or 1 and fewer than slots \(1\)"),
        ("in_flight=2", "in_flight is 2"),
        ("producer_registers=0", "producer_registers is 0, expected a multiple of 8 from 24 to 168"),
        ("consumer_registers=250", "consumer_registers is 250, expected a multiple of 8 from 168"),
        ("producer_registers=40", "setmaxnreg 40/240 adds up to 520 over the warpgroups, expected at most 504"),
        ("producer_registers=32", "setmaxnreg 32/240 adds up to 512 over the warpgroups, expected at most 504"),
        ("tile_n=192,mma_n=96,store_buffers=0", "mma_n is 96, expected a divisor or a multiple of 64"),
        ("tile_m=256,store_buffers=1", "tile 256x256 needs 256 accumulator registers, expected at most 208"),
        ("consumers=1,tile_n=128", "consumer_registers is 240, expected 0 with one consumer"),
        ("order=spiral", "order is 'spiral', expected one of row, column"),
        ("group_m=0", "group_m is 0, expected at least 1"),
        ("sms=1", "sms is 1, expected 0 .all. or at least the 2 CTAs"),
        ("cluster_m=3", "cluster_m is 3, expected 1, 2 or 4 CTAs that load tile_n"),
        ("cluster_m=4,cluster_n=4", "a cluster of 4x4 has 16 CTAs, expected at most 8"),
        ("store_buffers=5", "store_buffers is 5, expected 0 to 4, the slabs of a consumer"),
        ("tile_n=240,cluster_m=1,store_buffers=1", "tile_n is 240 and mma_n 240, expected multiples of 64"),
        ("slots=4", "the tiles need 263168 bytes of shared memory, expected at most 232448"),
    ],
)
def test_what_the_last_rung_refuses(text: str, reason: str) -> None:
    module = registry.load("hopper.hilbert")
    with pytest.raises(AssertionError, match=f"config: {reason}"):
        assert module.unsupported(problem(64, 64, 64), configs.from_text(module.Config, text)) is None


@pytest.mark.parametrize(
    ("name", "text", "value", "neutral"),
    [
        ("hopper.tma_wgmma", "slots=2", "2", "1"),
        ("hopper.large_tile", "consumers=2", "2", "1"),
        ("hopper.warp_specialized", "consumer_registers=240", "240", "0"),
        ("hopper.two_consumers", "order=hilbert", "hilbert", "column"),
        ("hopper.lean_barriers", "cluster_m=2", "2", "1"),
        ("hopper.cluster_multicast", "accumulate_flag=True", "True", "False"),
        ("hopper.store_tuning", "store_buffers=2", "2", "0"),
    ],
)
def test_a_rung_refuses_what_a_later_one_brings(name: str, text: str, value: str, neutral: str) -> None:
    module = registry.load(name)
    field = text.partition("=")[0]
    with pytest.raises(AssertionError, match=f"config: {field} is {value}, expected {neutral}: a later rung"):
        assert module.unsupported(problem(64, 64, 64), configs.from_text(module.Config, text)) is None


def test_configs_grow_with_the_ladder() -> None:
    """Each rung's config is its parent's with the fields that the rung changes."""
    for kernel in registry.ladder("hopper"):
        own = registry.load(kernel.name).Config
        assert invalid_reason(own()) is None
        if kernel.parent:
            assert issubclass(own, registry.load(kernel.parent).Config)


def problem(
    M: int, N: int, K: int, dtype: torch.dtype = BF16, *, a: Any = None, b: Any = None, out: Any = None
) -> operands.Problem:
    a = torch.empty(M, K, dtype=dtype) if a is None else a
    b = torch.empty(N, K, dtype=dtype).t() if b is None else b
    return operands.problem(a, b, torch.empty(M, N, dtype=dtype) if out is None else out)


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
    "extent": (dataclasses.replace(problem(64, 64, 64), M=1 << 31), "extents up to 2147481600"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("name", NAMES)
def test_refusals_say_what_is_needed_and_given(name: str, case: str) -> None:
    """The last kernel copies what TMA cannot stride over, and takes batches and addends."""
    given, message = REFUSED[case]
    if name == "hopper.gemm" and case != "extent":
        assert registry.load(name).unsupported(given) is None
        return
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
    assert registry.load("hopper.hilbert").unsupported(given) is None


# What each rung claims, in its own config: instructions of the machine code by prefix, and those that must be absent.
MULTICAST, TMA_STORE, REGISTERS = "UTMALDG.2D.MULTICAST", "UTMASTG", "USETMAXREG"
PER_THREAD = "SYNCS.ARRIVE.TRANS64.ART0"
CLAIMS: dict[str, tuple[dict[str, int], tuple[str, ...], dict[str, int]]] = {
    "hopper.tma_wgmma": (
        {"HGMMA.64x64x16.F32.BF16": 4, "UTMALDG.2D": 2, "STG.E": 16},
        (MULTICAST, TMA_STORE, REGISTERS, PER_THREAD),
        {"max_registers": 64, "min_ctas": 8},
    ),
    "hopper.large_tile": (
        {"HGMMA.64x128x16.F32.BF16": 8, "UTMALDG.2D": 2, "STG.E": 64},
        (MULTICAST, TMA_STORE, REGISTERS, PER_THREAD),
        {"min_ctas": 3},
    ),
    "hopper.warp_specialized": (
        {"HGMMA.64x128x16.F32.BF16": 8, "UTMALDG.2D": 2, PER_THREAD: 3},
        (MULTICAST, TMA_STORE, REGISTERS),
        {},
    ),
    "hopper.two_consumers": (
        {"HGMMA.64x256x16.F32.BF16": 4, REGISTERS: 2, PER_THREAD: 3},
        (MULTICAST, TMA_STORE),
        {"max_registers": 168},
    ),
    "hopper.persistent": (
        {"HGMMA.64x256x16.F32.BF16": 4, REGISTERS: 2, PER_THREAD: 3},
        (MULTICAST, TMA_STORE),
        {"max_registers": 168},
    ),
    "hopper.lean_barriers": (
        {"HGMMA.64x256x16.F32.BF16": 4, REGISTERS: 2, PER_THREAD: 1},
        (MULTICAST, TMA_STORE, "UCGABAR"),
        {"max_registers": 168},
    ),
    "hopper.cluster_multicast": (
        {"HGMMA.64x256x16.F32.BF16": 4, REGISTERS: 2, "UTMALDG.2D": 2, MULTICAST: 1, "UCGABAR_WAIT": 2, "STG.E": 64},
        (TMA_STORE, "STG.E.128"),
        {"max_registers": 168},
    ),
    "hopper.store_tuning": (
        {"HGMMA.64x256x16.F32.BF16": 8, REGISTERS: 2, MULTICAST: 1, "STG.E.128.STRONG.SYS": 16, "SHFL.BFLY": 64},
        (TMA_STORE,),
        {"max_registers": 168},
    ),
    "hopper.tma_store": (
        {"HGMMA.64x256x16.F32.BF16": 8, REGISTERS: 2, MULTICAST: 1, "UTMASTG.2D": 4, "STSM.16.M88.4": 16},
        ("STG",),
        {"max_registers": 168},
    ),
    "hopper.hilbert": (
        {"HGMMA.64x256x16.F32.BF16": 8, REGISTERS: 2, MULTICAST: 1, "UTMASTG.2D": 4, "STSM.16.M88.4": 16},
        ("STG",),
        {"max_registers": 168},
    ),
    "hopper.gemm": (
        {"HGMMA.64x256x16.F32.BF16": 8, REGISTERS: 2, MULTICAST: 1, "UTMASTG.2D": 4, "STSM.16.M88.4": 16},
        ("STG",),
        {"max_registers": 168},
    ),
}
ENDS = ("hopper.tma_wgmma", "hopper.hilbert")  # what all rungs share shows in these two


@pytest.fixture(params=ENDS)
def rung(request: pytest.FixtureRequest) -> ModuleType:
    return registry.load(request.param)


@pytest.mark.compile
@pytest.mark.parametrize("name", NAMES)
def test_the_idea_of_a_rung_is_in_its_machine_code(name: str) -> None:
    """No spills and no warnings of the assembler either."""
    has, lacks, limits = CLAIMS[name]
    code = inspect(name)
    code.require(stack=0, has=has, lacks=lacks, **limits)
    tile = "x".join(str(getattr(registry.load(name).Config, f"tile_{axis}")) for axis in "mnk")
    assert code.name.startswith(f"outblas_{name.replace('.', '_')}_{tile}")


@pytest.mark.compile
@pytest.mark.parametrize("layout", ["nn", "tn", "tt"])
@pytest.mark.parametrize("name", ENDS)
def test_every_layout_has_the_same_instructions(name: str, layout: str) -> None:
    """Major modes of wgmma and of TMA's boxes: nothing is copied or transposed."""
    has = {op: count for op, count in CLAIMS[name][0].items() if not op.startswith(("UTMALDG", "STG"))}
    code = inspect(name, layout=layout).require(stack=0, has=has)
    assert f"_{layout}_bf16_bf16" in code.name


@pytest.mark.compile
@pytest.mark.parametrize(
    ("name", "dtype", "out_dtype", "has"),
    [
        ("hopper.tma_wgmma", "bfloat16", "float32", {"HGMMA.64x64x16.F32.BF16": 4, "STG.E.64": 16}),
        ("hopper.tma_wgmma", "float16", "float16", {"HGMMA.64x64x16.F32": 4, "STG.E": 16}),
        ("hopper.store_tuning", "float16", "float32", {"HGMMA.64x256x16.F32": 8, "STG.E.64.STRONG.SYS": 64}),
        ("hopper.hilbert", "float16", "float16", {"HGMMA.64x256x16.F32": 8, "UTMASTG.2D": 4}),
        ("hopper.hilbert", "bfloat16", "float32", {"UTMASTG.2D": 8, "STS.64": 64}),
    ],
)
def test_machine_code_of_every_dtype(name: str, dtype: str, out_dtype: str, has: dict[str, int]) -> None:
    inspect(name, dtype=dtype, out_dtype=out_dtype).require(has=has)


@pytest.mark.compile
@pytest.mark.parametrize(
    ("name", "text", "has", "lacks"),
    [
        ("hopper.tma_wgmma", "tile_n=16,tile_k=16", {"HGMMA.64x16x16": 1}, ()),
        ("hopper.tma_wgmma", "tile_k=128,jitter=True", {"HGMMA.64x64x16": 8, "NANOSLEEP": 4}, ()),
        ("hopper.large_tile", "mma_n=64", {"HGMMA.64x64x16": 16}, ()),
        ("hopper.large_tile", "mma_n=32", {"HGMMA.64x32x16": 32}, ()),
        ("hopper.two_consumers", "producer_registers=0,consumer_registers=0", (), (REGISTERS,)),
        ("hopper.cluster_multicast", "cluster_n=2", {MULTICAST: 2}, ()),
        ("hopper.cluster_multicast", "cluster_m=1", {"UTMALDG.2D": 2}, (MULTICAST,)),
        ("hopper.store_tuning", "reorder_stores=False", {"STG.E.STRONG.SYS": 64}, ("SHFL",)),
        ("hopper.store_tuning", "write_through=False", {"STG.E.128": 16}, ("STG.E.128.STRONG.SYS",)),
        ("hopper.store_tuning", "accumulate_flag=False", {"HGMMA.64x256x16": 4}, ()),
        ("hopper.hilbert", "in_flight=1,slots=4,store_buffers=2,sms=0", {"UTMASTG.2D": 4, MULTICAST: 1}, ()),
        (
            "hopper.hilbert",
            "tile_m=192,tile_n=128,consumers=3,producer_registers=32,consumer_registers=160,store_buffers=2",
            (),
            (),
        ),
        ("hopper.hilbert", "phases=True,jitter=True", ("CS2R", "NANOSLEEP"), ()),
    ],
)
def test_configs_show_in_the_machine_code(name: str, text: str, has: Any, lacks: tuple[str, ...]) -> None:
    inspect(name, config=text).require(has=has, lacks=lacks)


@pytest.mark.compile
def test_one_consumer_of_a_128x256_tile_spills_and_serialises_wgmma() -> None:
    code = inspect("hopper.two_consumers", config="consumers=1,producer_registers=0,consumer_registers=0")
    with pytest.raises(GateError, match="C7511") as caught:
        code.require(max_registers=255)
    assert "spilled bytes" in str(caught.value)


@pytest.mark.compile
def test_only_compiles_with_phases_read_the_clock(rung: ModuleType) -> None:
    inspect(rung.KERNEL.name).require(lacks=("CS2R.32", "S2UR.64"))
    assert "clock64" not in rung.artifact().ptx
    assert "clock64" in rung.artifact(configs.from_text(rung.Config, "phases=True")).ptx


@pytest.mark.compile
@pytest.mark.parametrize(
    ("method", "broken", "message"),
    [
        ("release", lambda self, index: None, r"empty\[s\] gets no arrivals a turn, its contract expects 2"),
        (
            "contract",
            lambda self: {"full": 1, "empty": 3},
            r"empty\[s\] gets \{'consumers': 2\} arrivals a turn, its contract expects 3",
        ),
        ("announce", lambda self, slot: None, r"full\[s\] gets no arrivals a turn, its contract expects 1"),
    ],
)
def test_a_ring_that_breaks_its_contract_fails_the_compile(
    method: str, broken: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would hang on the GPU."""
    monkeypatch.setattr(lean_barriers.LeanRing, method, broken)
    with pytest.raises(Exception, match=message):
        registry.load("hopper.lean_barriers").artifact()


@pytest.mark.parametrize(
    ("ring", "consumers", "cluster", "full", "empty"),
    [
        (sync.Ring, 1, 1, 1, 0),
        (sync.TokenRing, 1, 1, 129, 129),
        (sync.TokenRing, 2, 1, 257, 257),
        (lean_barriers.LeanRing, 2, 1, 1, 2),
        (cluster_multicast.ClusterRing, 2, 2, 1, 4),
        (cluster_multicast.ClusterRing, 3, 4, 1, 12),
    ],
)
def test_arrival_counts_follow_from_the_roles(ring: Any, consumers: int, cluster: int, full: int, empty: int) -> None:
    made = ring(None, None, 3, 49152, consumers, cluster, False)
    assert made.contract() == {"full": full, "empty": empty}


@pytest.mark.parametrize(
    ("out", "width", "row_major"),
    [
        (torch.empty(64, 64, dtype=BF16), 8, True),
        (torch.empty(64, 64), 4, True),
        (torch.empty(64, 72, dtype=BF16)[:, :64], 8, True),
        (torch.empty(64, 72, dtype=BF16)[:, :66], 2, True),  # TMA would write up to column 72
        (torch.empty(64, 68)[:, :66], 2, True),
        (torch.empty(64, 66, dtype=BF16), 2, True),
        (torch.empty(64, 65, dtype=BF16), 1, True),
        (FLAT[1 : 1 + 4096].view(64, 64), 1, True),
        (FLAT[2 : 2 + 4096].view(64, 64), 2, True),
        (FLAT[:64].view(1, 64), 8, True),
        (FLAT[:63].view(1, 63), 1, True),
        (FLAT.as_strided((64, 64), (512, 2)), 1, False),
    ],
)
def test_how_c_can_be_written(out: torch.Tensor, width: int, row_major: bool) -> None:
    M, N = out.shape
    given = problem(M, N, 64, b=torch.empty(N, 64, dtype=BF16).t(), out=out)
    made = host._variant("hopper.hilbert", given, registry.load("hopper.hilbert").Config())
    assert (made.width, made.row_major) == (width, row_major)


def test_a_column_major_c_swaps_the_operands() -> None:
    given = problem(64, 128, 256, out=torch.empty(128, 64, dtype=BF16).t())
    swapped = operands.transposed(given)
    assert (swapped.M, swapped.N, swapped.K) == (128, 64, 256)
    assert (swapped.a, swapped.b, swapped.out) == ((256, 1), (1, 256), (64, 1))
    assert operands.transposed(swapped) == given


@pytest.mark.compile
def test_invalid_config_compiles_nothing(rung: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.cute, "compile", lambda *_, **__: pytest.fail("compiled"))
    with pytest.raises(ValueError, match="tile_m is 80, expected 64, 128, 192, 256 or 320"):
        rung.artifact(rung.Config(tile_m=80))


@pytest.mark.compile
def test_bytes_that_do_not_match_the_config_fail_the_compile(rung: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The producer would announce what never lands, and every CTA would wait for it."""
    lands = rung.Config().slot_bytes
    monkeypatch.setattr(HopperConfig, "slot_bytes", property(lambda self: lands + 128))
    with pytest.raises(Exception, match=f"{lands} bytes land in a slot, the config announces {lands + 128}"):
        rung.artifact()


@pytest.mark.compile
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hopper.tma_wgmma", ""),
        ("hopper.tma_wgmma", "tile_n=16,tile_k=16"),
        ("hopper.warp_specialized", "slots=64,tile_m=64,tile_n=16,tile_k=16"),
        ("hopper.hilbert", ""),
        ("hopper.hilbert", "slots=2,store_buffers=3,tile_k=32"),
    ],
)
def test_shared_memory_is_what_the_formula_says(name: str, text: str) -> None:
    (made,) = registry.load(name).plan.args
    config = configs.from_text(type(made.config), text)
    variant = host.Variant(made.name, config, BF16, BF16, "nt", row_major=True, width=8)
    compiled = host.compile_variant(made.gemm, variant)
    assert f"{config.shared_memory_bytes} : i64" in str(compiled.ir_module)


@pytest.mark.compile
def test_compiled_once_then_loaded_from_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rung = registry.load("hopper.tma_wgmma")
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path / "cache"))
    compiles = []
    compile_variant = host.compile_variant
    monkeypatch.setattr(host, "compile_variant", lambda *a: compiles.append(a) or compile_variant(*a))
    for M, N, K in ((64, 64, 64), (4096, 512, 72)):
        monkeypatch.setattr(host, "_loaded", {})  # a new process
        rung.plan(problem(M, N, K))
    assert len(compiles) == 1
    assert len(list((cache.directory() / "objects").glob("*.o"))) == 1
    monkeypatch.setattr(host, "source_fingerprint", lambda: "edited")
    monkeypatch.setattr(host, "_loaded", {})
    rung.plan(problem(64, 64, 64))
    assert len(compiles) == 2
