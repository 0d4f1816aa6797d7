"""The packs of whole models have exactly the kernels that their calls load, at every number of rows
from 1 to 512, on an H100 that this machine has not.
"""

import contextlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.known import H100
from support.probed_gpu import unprobed_context
from support.served_by_pack import forget_packs

import outblas
from outblas.autotune import lookup
from outblas.autotune.search import gpu as gpus
from outblas.base import cache, machines, pack
from outblas.base.facts import digest
from outblas.base.shapes import LAYERS
from outblas.call import launcher
from outblas.call.products import Products, parse_line
from outblas.device import cubin, driver
from outblas.device.triton_variant import TritonVariant
from outblas.hopper import grouped
from outblas.hopper.gemm import group_host as grouped_host
from outblas.hopper.gemm import host, smid_probe
from outblas.hopper.parts import compile, tile_order
from outblas.packing import build, examples
from outblas.packing.products import of_model

ROWS = "1-512"
FP8 = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "hidden_act": "silu",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # as Qwen3-8B-FP8
# Those around which a choice changes, and some between.
SOME_ROWS = "1-17,24,32,33,48,64-66,96,100,128,129,200,256,257,320,384,500,511-512"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[set[str]]:
    """The kernels, by the digest of their facts, that plans have loaded on an imagined H100, in a
    process that has no cache and no results of its own. A kernel that the pack lacks fails.
    """
    found: set[str] = set()
    context = unprobed_context()
    properties = SimpleNamespace(multi_processor_count=H100.sms, name=H100.name)

    def load(variant: Any, build: Callable[[], Any]) -> Callable[..., None]:
        found.add(digest(variant.cache_key_fields))
        assert pack.packed_code(variant.cache_key_fields) is not None, variant.name
        return lambda *given: None

    def probe(device: Any, cluster: int, ctas: int, *, jitter: bool) -> list[int]:
        load(smid_probe.ProbeVariant(cluster), lambda: None)
        return list(range(ctas))

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(gpus, "current", lambda _=None: H100)
    monkeypatch.setattr(driver, "context", lambda: context)
    monkeypatch.setattr(driver, "relaxed_capture", contextlib.nullcontext)
    monkeypatch.setattr(tile_order, "kept", lambda *_: torch.zeros(1, dtype=torch.int32))
    monkeypatch.setattr(smid_probe, "sm_of_each_cta", probe)
    monkeypatch.setattr(compile, "load", load)
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path / "none"))
    monkeypatch.delenv("OUTBLAS_TUNE", raising=False)
    monkeypatch.delenv("OUTBLAS_PACK", raising=False)
    forget_packs()
    lookup.clear_cache()
    host.device_rates.cache_clear()
    yield found
    forget_packs()
    lookup.clear_cache()
    host.device_rates.cache_clear()


def built_without_compiling(
    products: Sequence[Products], path: Path, monkeypatch: pytest.MonkeyPatch
) -> pack.Pack:
    """A pack whose kernels have no code."""

    def compiled(variants: Any, *_: Any) -> list[dict[str, object]]:
        return [variant.cache_key_fields for variant in variants]

    with monkeypatch.context() as patch:
        patch.setattr(build, "compiled", compiled)
        patch.setattr(cache, "packed_object", lambda facts: b"")
        done = build.build(products, path)
    assert done.left_out == {}
    return pack.read(path)


def of_the_dsl(opened: pack.Pack) -> set[str]:
    """The names of the kernels that Triton did not compile."""
    return {name for name, each in opened.objects.items() if "outblas_hopper" in each.kernel}


@pytest.mark.long
@pytest.mark.filterwarnings("error::RuntimeWarning")  # of a kernel of Triton that cannot be planned
@pytest.mark.parametrize(
    ("model", "rows"),
    [
        ("llama-3-8b", SOME_ROWS),
        *(pytest.param(model, ROWS, marks=pytest.mark.slow) for model in LAYERS),
    ],
)
def test_a_pack_has_exactly_what_all_calls_of_a_model_load(
    model: str, rows: str, asked: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Choices are those of a call, from the tables in the pack, and of OUTBLAS_TUNE=off."""
    path = tmp_path / "model.outblas"
    opened = built_without_compiling(of_model(model, rows), path, monkeypatch)
    outblas.load_pack(path)

    calls, machine = 0, machines.find("H100")
    for products in of_model(model, rows):
        for problem in build._problems(products, machine):
            on_gpu = replace(problem, device=torch.device("cuda", 0))
            for tune in ("lookup", "off"):
                launcher.best_launcher(on_gpu, tune, no_product=False)
                calls += 1

    assert calls == 2 * 5 * (512 if rows == ROWS else 36)
    assert asked == set(opened.objects)


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_pack_has_exactly_what_calls_of_fp8_operands_load(
    asked: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a checkpoint take the kernel's rule. Those with fast sums take the tuned choice of
    16-bit operands, here from the tables of the pack.
    """
    (tmp_path / "config.json").write_text(json.dumps(FP8), encoding="utf-8")
    fast = [
        parse_line(f"16,128,512x{N}x8192 fp8-e4m3 rowwise fast-accum") for N in (4096, 6144, 28672)
    ]
    wanted = [*of_model(str(tmp_path), "1,2,16,64,100,512"), *fast]
    path, machine = tmp_path / "model.outblas", machines.find("H100")
    opened = built_without_compiling(wanted, path, monkeypatch)
    outblas.load_pack(path)

    for products in wanted:
        for problem in build._problems(products, machine):
            on_gpu = replace(problem, device=torch.device("cuda", 0))
            for tune in ("lookup", "off"):
                launcher.best_launcher(on_gpu, tune, no_product=False)

    assert asked == of_the_dsl(opened)


def test_a_pack_has_exactly_what_calls_of_groups_load(
    asked: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The products of experts without an epilogue take tuned choices, here from the tables of the
    pack.
    """
    lines = (
        "64,4096,65536x28672x4096 groups:8",
        "1024x1536x2048 swiglu groups:128 gathered",
        "1024x4096x2048 swiglu groups:128 gathered",
        "4096x2048x768 residual groups:128 scattered weighted",
        "4096x1536x2048 groups:128:terms",
        "128x4096x7168 swiglu fp8-e4m3 1x128:128x128 groups:8:masked",
        "4096x4096x7168 fp8-e4m3 1x128:128x128 groups:8 gathered",
    )
    wanted, path = [parse_line(line) for line in lines], tmp_path / "experts.outblas"
    opened = built_without_compiling(wanted, path, monkeypatch)
    outblas.load_pack(path)
    grouped_host.launch.cache_clear()

    for products in wanted:
        assert products.groups is not None
        for problem in examples.grouped_problems(products, products.groups):
            on_gpu = replace(grouped.pack_problem(problem), device=torch.device("cuda", 0))
            grouped_host.launch(on_gpu)
            monkeypatch.setenv("OUTBLAS_TUNE", "off")
            grouped_host.launch(on_gpu, carveout=0)
            monkeypatch.delenv("OUTBLAS_TUNE")

    grouped_host.launch.cache_clear()
    assert asked == of_the_dsl(opened)


@pytest.fixture
def asked_of_triton(asked: set[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """As `asked`, with the kernels of Triton and Gluon, where nothing may be compiled."""
    limit = machines.find("H100").shared_memory_per_cta
    properties = torch.cuda.get_device_properties(0)

    def packed(variant: TritonVariant, device: int) -> Any:
        found = digest(variant.cache_key_fields)
        if pack.packed_code(variant.cache_key_fields) is None:
            return None
        asked.add(found)
        return defaultdict(lambda: None, loaded=None)

    monkeypatch.setenv("OUTBLAS_COMPILE", "never")
    monkeypatch.setattr(properties, "shared_memory_per_block_optin", limit, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cubin, "packed", packed)
    cubin.kernel_of.cache_clear()
    yield asked
    cubin.kernel_of.cache_clear()


OF_TRITON = (
    "1-2,64,300,4096x4096x4096 float32 nn",
    "2,64,300x4096x4096 float32 bias",
    "64x64x33 float32 nn",
    "64,4096x512x512 tf32 nn relu",
    "64x512x512 float32 batch-invariant",
)


WIDER = (
    "16x6144x4096 bias+gelu",
    "1-2x4096x4096 nn batch-invariant",
    "1-2,64,4096x4096x4096 to-float32",
    "64,300x8192x4096 bias+swiglu to-float32",
    "64x4096x4096 float16 nn batch-invariant to-float32",
    "2x64x33 nn relu to-float32",
)
BATCHES = (
    "1-3,64,512x128x512 batch:16",
    "64x512x128 nn bias+gelu batch:8",
    "512x512x512 tn to-float32 batch:4",
    "3x64x33 nn batch:2",
    "64x512x512 float32 batch:4",
)


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize(
    ("lines", "of_triton"),
    [
        (OF_TRITON, {"portable.matmul_kernel", "pipelined.pipelined"}),
        (WIDER, {"portable.matmul_kernel"}),
        (BATCHES, {"portable.matmul_kernel"}),
    ],
    ids=["float32", "wider results", "batches"],
)
def test_a_pack_has_exactly_what_calls_of_float32_and_of_batches_load(
    lines: tuple[str, ...],
    of_triton: set[str],
    asked_of_triton: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of tuned configs, for float32 of `simt.pipelined` and of `portable` too, and those of
    the rule.
    """
    wanted, path = [parse_line(line) for line in lines], tmp_path / "model.outblas"
    opened = built_without_compiling(wanted, path, monkeypatch)
    outblas.load_pack(path)

    for products in wanted:
        for problem in examples.problems(products):
            on_gpu = replace(problem, device=torch.device("cuda", 0))
            for tune in ("lookup", "off"):
                launcher.best_launcher(on_gpu, tune, no_product=False)

    kernels = {each.kernel for each in opened.objects.values()}
    assert {kernel for kernel in kernels if "outblas_hopper" not in kernel} == of_triton
    assert asked_of_triton == set(opened.objects)
