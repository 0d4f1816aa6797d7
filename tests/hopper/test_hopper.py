"""Hopper rungs without a GPU: configs, what they refuse, their machine code, and the compile cache
on disk.
"""

import itertools
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from outblas.core import cache, configs, registry
from outblas.core import problem as operands
from outblas.core.problem import Problem
from outblas.hopper import cluster_multicast, lean_barriers
from outblas.hopper.core import compile, host, pipeline
from outblas.hopper.core.config import SHARED_MEMORY, HopperConfig, invalid_reason
from outblas.inspect import GateError, inspect

RUNGS = [kernel.name.removeprefix("hopper.") for kernel in registry.ladder("hopper")]
BF16 = torch.bfloat16
FLAT = torch.empty(1 << 22, dtype=BF16)


def load(rung: str) -> ModuleType:
    return registry.load(f"hopper.{rung}")


def rows(
    count: int = 64, columns: int = 64, stride: int | None = None, start: int = 0
) -> torch.Tensor:
    return FLAT.as_strided((count, columns), (columns if stride is None else stride, 1), start)


def problem(
    M: int = 64, N: int = 64, K: int = 64, *, a: Any = None, b: Any = None, out: Any = None
) -> Problem:
    a = rows(M, K) if a is None else a
    b = rows(N, K).t() if b is None else b
    return operands.problem(a, b, rows(M, N) if out is None else out)


def refusal(rung: str, text: str) -> str:
    module = load(rung)
    return str(module.unsupported(problem(), configs.from_text(module.Config, text)))


def check_refused(rung: str, text: str, expected: str) -> None:
    """It is the text's first field that is refused."""
    field, value = text.split(",")[0].split("=")
    assert refusal(rung, text).startswith(f"config: {field} is {value}, expected {expected}")


def test_every_config_is_valid_or_says_why() -> None:
    tiles = itertools.product(
        (64, 96, 128, 256), (8, 16, 64, 128, 192, 256, 264), (8, 16, 64, 128, 256)
    )
    verdicts = {config: invalid_reason(config) for config in itertools.starmap(HopperConfig, tiles)}
    assert invalid_reason(HopperConfig()) is None
    assert all(reason is None or "expected" in reason for reason in verdicts.values())
    valid = [config for config, reason in verdicts.items() if reason is None]
    assert all(config.shared_memory_bytes <= SHARED_MEMORY for config in valid)
    assert len(valid) > 20
    assert "accumulator registers" in str(invalid_reason(HopperConfig(tile_m=256, tile_n=256)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tile_m=80", "64, 128, 192, 256 or 320"),
        ("tile_n=24", "a multiple of 16 from 16 to 512"),
        ("tile_k=48", "16, 32, 64 or 128"),
        ("mma_n=96", "0 or a multiple of 16 that divides tile_n (256)"),
        ("consumers=3", "1, 2 or 3 that share tile_m (128)"),
        ("stages=0", "1 to 64"),
        ("in_flight=1,stages=1", "0 or 1 and fewer than stages (1)"),
        ("in_flight=2", "0 or 1"),
        ("producer_registers=0", "a multiple of 8 from 24 to 168"),
        ("consumer_registers=250", "a multiple of 8 from 168"),
        ("mma_n=96,tile_n=192,epilogue_stages=0", "a divisor or a multiple of 64"),
        ("consumer_registers=240,consumers=1,tile_n=128", "0 with one consumer"),
        ("group_m=0", "at least 1"),
        ("sms=1", "0 (all) or at least the 2 CTAs"),
        ("cluster_m=3", "1, 2 or 4 CTAs that load tile_n"),
        ("epilogue_stages=5", "0 to 4, the epilogue subtiles of a consumer"),
    ],
)
def test_what_the_last_rung_refuses(text: str, expected: str) -> None:
    check_refused("hilbert", text, expected)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "producer_registers=40",
            "setmaxnreg 40/240 adds up to 520 over the warpgroups, expected at most 504",
        ),
        (
            "producer_registers=32",
            "setmaxnreg 32/240 adds up to 512 over the warpgroups, expected at most 504",
        ),
        (
            "tile_m=256,epilogue_stages=1",
            "tile 256x256 needs 256 accumulator registers, expected at most 208",
        ),
        ("order=spiral", "order is 'spiral', expected one of row, column"),
        ("cluster_m=4,cluster_n=4", "a cluster of 4x4 has 16 CTAs, expected at most 8"),
        (
            "tile_n=240,cluster_m=1,epilogue_stages=1",
            "tile_n is 240 and mma_n 240, expected multiples of 64",
        ),
        ("stages=4", "the tiles need 263168 bytes of shared memory, expected at most 232448"),
    ],
)
def test_which_fields_the_last_rung_refuses_together(text: str, reason: str) -> None:
    assert refusal("hilbert", text).startswith(f"config: {reason}")


@pytest.mark.parametrize(
    ("rung", "text", "neutral"),
    [
        ("tma_wgmma", "stages=2", "1"),
        ("large_tile", "consumers=2", "1"),
        ("warp_specialized", "consumer_registers=240", "0"),
        ("two_consumers", "order=hilbert", "column"),
        ("lean_barriers", "cluster_m=2", "1"),
        ("cluster_multicast", "accumulate_flag=True", "False"),
        ("store_tuning", "epilogue_stages=2", "0"),
    ],
)
def test_a_rung_refuses_what_a_later_one_brings(rung: str, text: str, neutral: str) -> None:
    check_refused(rung, text, f"{neutral}: a later rung")


def test_configs_grow_with_the_ladder() -> None:
    """Each rung's config is its parent's with the fields that the rung changes."""
    for kernel in registry.ladder("hopper"):
        own = registry.load(kernel.name).Config
        assert invalid_reason(own()) is None
        if kernel.parent:
            assert issubclass(own, registry.load(kernel.parent).Config)


REFUSED = {
    "K no multiple of 8": (problem(K=63), "a has strides (63, 1) for 64x63"),
    "no unit stride": (problem(a=FLAT.as_strided((64, 64), (512, 2))), "TMA needs one stride of 1"),
    "odd address": (problem(a=rows(start=1)), "a's is a multiple of 2"),
    "b's stride": (problem(N=60, b=rows(64, 60)), "b has strides (60, 1)"),
    "batches": (
        operands.problem(*3 * [FLAT[:512].view(2, 16, 16)]),
        "was given batches of shape (2,)",
    ),
    "addend": (replace(problem(), c=(64, 1), scaled=True), "was given an addend or a scale"),
    "extent": (replace(problem(), M=1 << 31), "extents up to 2147481600"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("rung", RUNGS)
def test_refusals_say_what_is_needed_and_given(rung: str, case: str) -> None:
    """The last kernel copies what TMA cannot stride over, and takes batches and addends."""
    given, message = REFUSED[case]
    if rung == "gemm" and case != "extent":
        assert load(rung).unsupported(given) is None
        return
    assert message in str(load(rung).unsupported(given))
    assert "config: tile_n is 7" in load(rung).unsupported(problem(), HopperConfig(tile_n=7))


@pytest.mark.parametrize(
    "given",
    [
        problem(),
        problem(63, 65, 8),
        problem(1, 1, 1),
        problem(1, 63, 63, b=rows(63, 63, 64).t()),
        problem(N=1),
        problem(N=1, b=FLAT[:64]),
        problem(a=rows(stride=8)),
        problem(a=rows(stride=0)),
        problem(out=rows(start=1)),
        problem(out=FLAT.as_strided((64, 64), (200, 3))),
    ],
)
def test_whatever_tma_can_stride_over_is_taken(given: Problem) -> None:
    assert load("hilbert").unsupported(given) is None


# What the machine code of each rung has in its own config, and what it lacks, by prefix. How many
# of each there are is in tests/data/machine_code.json.
MULTICAST, TMA_STORE, REGISTERS = "UTMALDG.2D.MULTICAST", "UTMASTG", "USETMAXREG"
PER_THREAD = "SYNCS.ARRIVE.TRANS64.ART0"
TO_REGISTERS = {MULTICAST: False, TMA_STORE: False}
SIMPLE = TO_REGISTERS | {REGISTERS: False, PER_THREAD: False}
TWO_CONSUMERS = {"HGMMA.64x256x16.F32.BF16": True, REGISTERS: True}
UNROLLED = TWO_CONSUMERS | {MULTICAST: True}
STORED_BY_TMA = UNROLLED | {"UTMASTG.2D": True, "STSM.16.M88.4": True, "STG": False}
CLAIMS = {
    "tma_wgmma": {"HGMMA.64x64x16.F32.BF16": True, "UTMALDG.2D": True, "STG.E": True, **SIMPLE},
    "large_tile": {"HGMMA.64x128x16.F32.BF16": True, "UTMALDG.2D": True, "STG.E": True, **SIMPLE},
    "warp_specialized": {
        "HGMMA.64x128x16.F32.BF16": True,
        "UTMALDG.2D": True,
        **SIMPLE,
        PER_THREAD: True,
    },
    "two_consumers": TWO_CONSUMERS | TO_REGISTERS | {PER_THREAD: True},
    "persistent": TWO_CONSUMERS | TO_REGISTERS | {PER_THREAD: True},
    "lean_barriers": TWO_CONSUMERS | TO_REGISTERS | {PER_THREAD: True, "UCGABAR": False},
    "cluster_multicast": TWO_CONSUMERS
    | {
        "UTMALDG.2D": True,
        MULTICAST: True,
        "UCGABAR_WAIT": True,
        "STG.E": True,
        TMA_STORE: False,
        "STG.E.128": False,
    },
    "store_tuning": UNROLLED | {"STG.E.128.STRONG.SYS": True, "SHFL.BFLY": True, TMA_STORE: False},
    "tma_store": STORED_BY_TMA,
    "hilbert": STORED_BY_TMA,
    "gemm": STORED_BY_TMA,
}
THREE_CONSUMERS = (
    "tile_m=192,tile_n=128,consumers=3,producer_registers=32,consumer_registers=160,"
    "epilogue_stages=2"
)
LIMITS = {
    "tma_wgmma": {"max_registers": 64, "min_ctas": 8},
    "large_tile": {"min_ctas": 3},
    "warp_specialized": {},
}
ENDS = ("tma_wgmma", "hilbert")  # what all rungs share shows in these two


@pytest.fixture(params=ENDS)
def end(request: pytest.FixtureRequest) -> ModuleType:
    return load(request.param)


def claimed(claims):
    """`has` and `lacks` of `Inspection.require`."""
    return {
        "has": [op for op, on in claims.items() if on],
        "lacks": [op for op, on in claims.items() if not on],
    }


@pytest.mark.compile
@pytest.mark.parametrize("rung", RUNGS)
def test_the_idea_of_a_rung_is_in_its_machine_code(rung: str) -> None:
    """No spills and no warnings of the assembler either."""
    code = inspect(f"hopper.{rung}")
    code.require(stack=0, **claimed(CLAIMS[rung]), **LIMITS.get(rung, {"max_registers": 168}))
    tile = "x".join(str(getattr(load(rung).Config, f"tile_{axis}")) for axis in "mnk")
    assert code.name.startswith(f"outblas_hopper_{rung}_{tile}")


@pytest.mark.compile
@pytest.mark.parametrize("layout", ["nn", "tn", "tt"])
@pytest.mark.parametrize("rung", ENDS)
def test_every_layout_has_the_same_instructions(rung: str, layout: str) -> None:
    """Major modes of wgmma and of TMA's boxes: nothing is copied or transposed."""
    claims = {op: on for op, on in CLAIMS[rung].items() if not op.startswith(("UTMALDG", "STG"))}
    code = inspect(f"hopper.{rung}", layout=layout).require(stack=0, **claimed(claims))
    assert f"_{layout}_bf16_bf16" in code.name


@pytest.mark.compile
@pytest.mark.parametrize(
    ("rung", "dtype", "out_dtype", "has"),
    [
        ("tma_wgmma", "bfloat16", "float32", ("HGMMA.64x64x16.F32.BF16", "STG.E.64")),
        ("tma_wgmma", "float16", "float16", ("HGMMA.64x64x16.F32", "STG.E")),
        ("store_tuning", "float16", "float32", ("HGMMA.64x256x16.F32", "STG.E.64.STRONG.SYS")),
        ("hilbert", "float16", "float16", ("HGMMA.64x256x16.F32", "UTMASTG.2D")),
        ("hilbert", "bfloat16", "float32", ("UTMASTG.2D", "STS.64")),
    ],
)
def test_machine_code_of_every_dtype(
    rung: str, dtype: str, out_dtype: str, has: tuple[str, ...]
) -> None:
    inspect(f"hopper.{rung}", dtype=dtype, out_dtype=out_dtype).require(has=has)


@pytest.mark.compile
@pytest.mark.parametrize(
    ("rung", "text", "has", "lacks"),
    [
        ("tma_wgmma", "tile_n=16,tile_k=16", ("HGMMA.64x16x16",), ()),
        ("tma_wgmma", "tile_k=128,jitter=True", ("HGMMA.64x64x16", "NANOSLEEP"), ()),
        ("large_tile", "mma_n=64", ("HGMMA.64x64x16",), ()),
        ("large_tile", "mma_n=32", ("HGMMA.64x32x16",), ()),
        ("two_consumers", "producer_registers=0,consumer_registers=0", (), (REGISTERS,)),
        ("cluster_multicast", "cluster_n=2", (MULTICAST,), ()),
        ("cluster_multicast", "cluster_m=1", ("UTMALDG.2D",), (MULTICAST,)),
        ("store_tuning", "reorder_stores=False", ("STG.E.STRONG.SYS",), ("SHFL",)),
        ("store_tuning", "write_through=False", ("STG.E.128",), ("STG.E.128.STRONG.SYS",)),
        ("hilbert", "in_flight=1,stages=4,epilogue_stages=2,sms=0", ("UTMASTG.2D", MULTICAST), ()),
        ("hilbert", THREE_CONSUMERS, (), ()),
        ("hilbert", "phases=True,jitter=True", ("CS2R", "NANOSLEEP"), ()),
    ],
)
def test_configs_show_in_the_machine_code(rung, text, has, lacks):
    inspect(f"hopper.{rung}", config=text).require(has=has, lacks=lacks)


@pytest.mark.compile
def test_one_consumer_of_a_128x256_tile_spills_and_serialises_wgmma() -> None:
    code = inspect(
        "hopper.two_consumers", config="consumers=1,producer_registers=0,consumer_registers=0"
    )
    with pytest.raises(GateError, match="C7511") as caught:
        code.require(max_registers=255)
    assert "spilled bytes" in str(caught.value)


@pytest.mark.compile
def test_only_compiles_with_phases_read_the_clock(end: ModuleType) -> None:
    inspect(end.KERNEL.name).require(lacks=("CS2R.32", "S2UR.64"))
    assert "clock64" not in end.artifact().ptx
    assert "clock64" in end.artifact(end.Config(phases=True)).ptx


@pytest.mark.compile
@pytest.mark.parametrize(
    ("method", "broken", "barrier", "traced", "expected"),
    [
        ("consumer_release", lambda self, index: None, "empty", "no", 2),
        ("arrival_counts", lambda self: {"full": 1, "empty": 3}, "empty", "{'consumers': 2}", 3),
        ("arrive_and_expect_tx", lambda self, state: None, "full", "no", 1),
    ],
)
def test_a_pipeline_that_breaks_its_contract_fails_the_compile(
    method, broken, barrier, traced, expected, monkeypatch
):
    """It would hang on the GPU."""
    monkeypatch.setattr(lean_barriers.LeanPipeline, method, broken)
    message = f"{barrier}[s] gets {traced} arrivals a phase, its contract expects {expected}"
    with pytest.raises(Exception, match=re.escape(message)):
        load("lean_barriers").artifact()


@pytest.mark.parametrize(
    ("kind", "consumers", "cluster", "full", "empty"),
    [
        (pipeline.Pipeline, 1, 1, 1, 0),
        (pipeline.TokenPipeline, 1, 1, 129, 129),
        (pipeline.TokenPipeline, 2, 1, 257, 257),
        (lean_barriers.LeanPipeline, 2, 1, 1, 2),
        (cluster_multicast.ClusterPipeline, 2, 2, 1, 4),
        (cluster_multicast.ClusterPipeline, 3, 4, 1, 12),
    ],
)
def test_arrival_counts_follow_from_the_roles(kind, consumers, cluster, full, empty):
    made = kind(None, None, 3, 49152, consumers, cluster, False)
    assert made.arrival_counts() == {"full": full, "empty": empty}


@pytest.mark.parametrize(
    ("out", "width"),
    [
        (rows(), 8),
        (torch.empty(64, 64), 4),
        (rows(stride=72), 8),
        (rows(64, 66, 72), 2),  # TMA would write up to column 72
        (torch.empty(64, 68)[:, :66], 2),
        (rows(64, 66), 2),
        (rows(64, 65), 1),
        (rows(start=1), 1),
        (rows(start=2), 2),
        (rows(1), 8),
        (rows(1, 63), 1),
        (FLAT.as_strided((64, 64), (512, 2)), 1),
    ],
)
def test_how_c_can_be_written(out: torch.Tensor, width: int) -> None:
    M, N = out.shape
    made = host._variant("hopper.hilbert", problem(M, N, out=out), load("hilbert").Config())
    assert (made.width, made.row_major) == (width, out.stride(1) == 1)


def test_a_column_major_c_swaps_the_operands() -> None:
    given = problem(N=128, K=256, out=rows(128).t())
    swapped = operands.transposed(given)
    assert (swapped.M, swapped.N, swapped.K) == (128, 64, 256)
    assert (swapped.a, swapped.b, swapped.out) == ((256, 1), (1, 256), (64, 1))
    assert operands.transposed(swapped) == given


@pytest.mark.compile
def test_invalid_config_compiles_nothing(end: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.cute, "compile", lambda *_, **__: pytest.fail("compiled"))
    with pytest.raises(ValueError, match="tile_m is 80, expected 64, 128, 192, 256 or 320"):
        end.artifact(end.Config(tile_m=80))


@pytest.mark.compile
def test_bytes_that_do_not_match_the_config_fail_the_compile(
    end: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The producer would announce what never lands, and every CTA would wait for it."""
    lands = end.Config().stage_bytes
    monkeypatch.setattr(HopperConfig, "stage_bytes", property(lambda self: lands + 128))
    with pytest.raises(
        Exception, match=f"{lands} bytes land in a stage, the config announces {lands + 128}"
    ):
        end.artifact()


@pytest.mark.compile
@pytest.mark.parametrize(
    ("rung", "text"),
    [
        ("tma_wgmma", ""),
        ("tma_wgmma", "tile_n=16,tile_k=16"),
        ("warp_specialized", "stages=64,tile_m=64,tile_n=16,tile_k=16"),
        ("hilbert", ""),
        ("hilbert", "stages=2,epilogue_stages=3,tile_k=32"),
    ],
)
def test_shared_memory_is_what_the_formula_says(rung: str, text: str) -> None:
    (made,) = load(rung).plan.args
    config = configs.from_text(type(made.config), text)
    variant = host.Variant(made.name, config, BF16, BF16, "nt", row_major=True, width=8)
    compiled = host.compile_variant(made.gemm, variant)
    assert f"{config.shared_memory_bytes} : i64" in str(compiled.ir_module)


@pytest.mark.compile
def test_compiled_once_then_loaded_from_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path / "cache"))
    compiles = Mock(wraps=host.compile_variant)
    monkeypatch.setattr(host, "compile_variant", compiles)

    def plan(*shape: int) -> None:
        monkeypatch.setattr(compile, "_loaded", {})  # a new process
        load("tma_wgmma").plan(problem(*shape))

    plan()
    plan(4096, 512, 72)
    assert compiles.call_count == 1
    assert len(list((cache.directory() / "objects").glob("*.o"))) == 1
    monkeypatch.setattr(compile, "source_fingerprint", lambda: "edited")
    plan()
    assert compiles.call_count == 2
