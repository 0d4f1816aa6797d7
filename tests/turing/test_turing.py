"""The tensor-core ladder without a GPU: machine code for every architecture, configs, who loads
what, who is chosen.
"""

import re
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.rungs import problem, rung
from support.shared_compiles import Store
from support.turing_rungs import BF16, FP16, FP32, valid_configs

from outblas.base import gpus, machines, registry
from outblas.base.configs import from_text
from outblas.call import default_kernel
from outblas.call.problem import Problem
from outblas.device import cubin, gluon
from outblas.device import rung as device_rung
from outblas.device.triton_variant import TritonVariant
from outblas.inspect import inspect
from outblas.turing.config import TuringConfig, invalid_reason

SQUARE = (4096, 4096, 4096)


@pytest.fixture(autouse=True)
def _shared(shared_store: Store) -> None:
    """Tests without the mark `compile` share what was assembled and disassembled, too."""
    shared_store.share()


def compiled(name: str, config: TuringConfig, given: Problem, arch: int) -> Any:
    return rung(name)._compiled(
        config, given, rung(name).constants(config, given, arch), arch, None
    )


@pytest.mark.parametrize(
    "name",
    [
        "turing.shared",
        "turing.ldmatrix",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("turing.wmma", "turing.double_buffer", "turing.vectorized")
        ),
    ],
)
def test_code_for_turing_assembles_for_hopper(name: str) -> None:
    found = inspect(name, config="arch=75", arch=90)
    assert found.arch == "sm_90"
    assert ".target sm_75" in found.ptx_text
    assert ".version 8.0" in found.ptx_text  # which drivers of CUDA 12 read
    found.require(has=("HMMA.1688.F32", "mma.sync.aligned.m16n8k8."), lacks=("FFMA", "HMMA.16816"))


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("wmma", "block_m=96", "block_m is 96, expected a power of two from 1 to 256"),
        ("wmma", "block_m=16", "block_m is 16, expected at least 32: 2 warps with 16 each"),
        ("wmma", "block_n=16", "block_n is 16, expected at least 32: 4 warps with 8 each"),
        ("wmma", "block_k=8", "block_k is 8, expected 16 to 128"),
        ("wmma", "vector=16", "vector is 16, expected 1, 2, 4 or 8"),
        ("wmma", "pad=8", "pad is 8, expected 0: turing.wmma has no other"),
        ("wmma", "arch=90", "arch is 90, expected one of 0, 75, 80"),
        ("wmma", "group_m=0", "group_m is 0, expected 1 to 1024"),
        ("shared", "pad=3", "pad is 3, expected 0, 2, 4, 8 or 16 elements"),
        ("shared", "vector=8,pad=4", "vector is 8, expected a divisor of pad"),
        ("shared", "swizzle=True", "pad is 8, expected 0 where k-blocks are swizzled"),
        ("shared", "ahead=True", "ahead is True, expected False: turing.shared has no other"),
        (
            "double_buffer",
            "warps_m=32,block_m=512",
            "block_m is 512, expected a power of two from 1 to 256",
        ),
        ("double_buffer", "stages=3", "stages is 3, expected 2: turing.double_buffer has no other"),
        (
            "ldmatrix",
            "block_m=256,block_n=256",
            "block_m x block_n is 256 sums per thread, expected at most 128",
        ),
        ("ldmatrix", "ctas=4", "ctas is 4: 64 registers per thread, too few for 64 sums"),
        (
            "ldmatrix",
            "block_k=128,warps_m=1,ctas=1",
            "block_m x block_k is 128 elements per thread, expected",
        ),
        ("cp_async", "stages=1", "stages is 1, expected at least 2: turing.cp_async copies ahead"),
        ("cp_async", "arch=75", "arch is 75, expected 0 or at least 80: turing.cp_async needs it"),
        (
            "cp_async",
            "swizzle=False",
            "swizzle is False, expected True: turing.cp_async has no other",
        ),
        (
            "cp_async",
            "stages=8,block_k=64",
            "needs 393216 bytes of shared memory, but the device has 232448",
        ),
    ],
)
def test_what_a_config_is_refused_for(name: str, text: str, reason: str) -> None:
    module = registry.load(f"turing.{name}")
    with pytest.raises(ValueError, match=re.escape(f"config: {reason}")):
        module.artifact(from_text(module.Config, text))


NO_BF16 = "needs sm_80 for bfloat16 operands: tensor cores of sm_75 take float16"


@pytest.mark.parametrize(
    ("name", "asked", "reason"),
    [
        ("turing.ldmatrix", {"dtype": "bfloat16", "arch": 75}, NO_BF16),
        ("turing.ldmatrix", {"dtype": "bfloat16", "arch": 90, "config": "arch=75"}, NO_BF16),
        (
            "turing.ldmatrix",
            {"arch": 75, "config": "arch=80"},
            "arch is 80, expected at most 75, the GPU's",
        ),
        ("turing.cp_async", {"arch": 75}, "arch is 75, expected 80 or 90 for turing.cp_async"),
    ],
)
def test_what_an_architecture_is_refused(name: str, asked: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        inspect(name, **asked)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "config"),
    [
        pytest.param(*build, marks=pytest.mark.slow if i >= 4 else ())
        for i, build in enumerate(valid_configs(8, seed=1))  # a rung after the other
    ],
    ids=str,
)
def test_any_valid_config_compiles(name: str, config: TuringConfig) -> None:
    artifact = registry.load(name).artifact(config, arch=80, layout="tn")
    assert artifact.cubin
    stages = (
        config.stages if name == "turing.cp_async" else 2 if name == "turing.double_buffer" else 1
    )
    needed = max(stages * config.k_block_bytes, config.staged_bytes if config.stage_out else 0)
    assert artifact.smem_bytes <= (needed if name != "turing.wmma" else config.staged_bytes) + 512


@pytest.mark.compile
@pytest.mark.parametrize("edge", [64, 72])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("turing.ldmatrix", ""),
        ("turing.double_buffer", ""),
        ("turing.cp_async", "stages=2,stage_out=False"),
    ],
)
def test_indices_of_two_operands_are_no_vector(name: str, text: str, edge: int) -> None:
    """Triton 3.6's LLVM shifted both as one, A's loaded by vectors and B's singly, and one spilt
    into the other.
    """
    one_warp = f"block_m=32,block_n=32,block_k=32,warps_m=1,warps_n=1,vector=8,ctas=1,{text}"
    given = replace(problem("nt", (edge, edge, edge), FP16), b=(1, edge + 1))
    ptx = compiled(name, from_text(registry.load(name).Config, one_warp), given, 90).asm["ptx"]
    assert not re.search(r"mul\.wide\.u32 .*, 2147483648|mov\.b64\s+\{_,", ptx)


GPUS = [
    (75, FP16, SQUARE, "nt", "turing.ldmatrix"),
    (75, FP16, (33, 5, 7), "nn", "turing.double_buffer"),
    (75, BF16, SQUARE, "nt", "portable"),
    (75, FP32, SQUARE, "nt", "portable"),
    (80, FP16, SQUARE, "nn", "turing.cp_async"),
    (86, BF16, (2048, 2048, 2048), "nt", "turing.cp_async"),
    (89, BF16, (1024, 1024, 1024), "tn", "turing.cp_async"),
    (89, BF16, (512, 512, 512), "nt", "portable"),
    (89, BF16, (16, 4096, 4096), "nt", "portable"),
    (80, FP16, (4096, 4096, 4095), "nt", "portable"),
    (80, FP16, (4096, 4096, 4094), "nt", "turing.cp_async"),
    (80, FP32, SQUARE, "nt", "portable"),
    (90, FP16, SQUARE, "nt", "hopper.gemm"),
    (90, BF16, (33, 8, 16), "nn", "hopper.gemm"),
    (90, BF16, (33, 5, 7), "nn", "portable"),  # which copies nothing
    (90, FP32, SQUARE, "nt", "portable"),
    (100, BF16, SQUARE, "nt", "portable"),
    (120, BF16, SQUARE, "nt", "turing.cp_async"),
]


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a GPU of an architecture that this machine does not have, as far as planning a launch
    goes.
    """

    def make(arch: int) -> None:
        machine = machines.reference(75 if arch < 80 else 80)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: divmod(arch, 10))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(gpus, "sm_count", lambda _: machine.sms)
        monkeypatch.setattr(gpus, "shared_memory_limit", lambda _: machine.shared_memory_per_cta)

    return make


def on_gpu(dtype: torch.dtype, layout: str, shape: tuple[int, int, int]) -> Problem:
    return replace(problem(layout, shape, dtype), device=torch.device("cuda", 0))


@pytest.mark.parametrize(("arch", "dtype", "shape", "layout", "kernel"), GPUS)
def test_the_kernel_of_a_call_that_names_none(
    fake_gpu: Any,
    arch: int,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    layout: str,
    kernel: str,
) -> None:
    fake_gpu(arch)
    given = on_gpu(dtype, layout, shape)
    assert default_kernel.kernel_for(given) == kernel
    assert registry.load(kernel).unsupported(given) is None


@pytest.mark.parametrize(
    ("arch", "text", "as_ptx"), [(75, "", False), (75, "arch=75", False), (80, "arch=75", True)]
)
def test_turing_gets_its_own_code_and_newer_gpus_its_ptx(
    fake_gpu: Any, monkeypatch: pytest.MonkeyPatch, arch: int, text: str, as_ptx: bool
) -> None:
    """On sm_75 the ordinary path: a cubin; on newer GPUs, PTX for the driver."""
    fake_gpu(arch)
    loaded = []

    class Compiled:
        def __init__(self, variant: TritonVariant) -> None:
            self.target, self.asm, self.kernel = variant.arch, {"ptx": "ptx of sm_75"}, b"cubin"

        def __getitem__(self, programs: tuple[int, int, int]) -> Any:
            loaded.append((self.target, programs, self.kernel))
            return lambda *_: None

    monkeypatch.setattr(TritonVariant, "compile", lambda variant: Compiled(variant))
    monkeypatch.setattr(device_rung, "kernel_of", cubin.kernel_of.__wrapped__)  # no cache
    monkeypatch.setattr(gluon, "as_ptx", gluon.as_ptx.__wrapped__)
    module = registry.load("turing.ldmatrix")
    module.plan(
        on_gpu(FP16, "nt", (256, 384, 512)), from_text(module.Config, text) if text else None
    )
    assert loaded == [(75, (6, 1, 1), b"ptx of sm_75\0" if as_ptx else b"cubin")]


def test_tiles_follow_the_size_of_the_product() -> None:
    """128×256 where there are enough of them for 132 SMs, smaller ones where not, and where those
    do not fit in shared memory.
    """

    def tile(edge: int, limit: int = 163 * 1024) -> tuple[int, int]:
        config = rung("turing.cp_async").default(
            problem("nt", (edge, edge, edge), FP16), 132, limit
        )
        assert invalid_reason(config, limit) is None
        return config.block_m, config.block_n

    assert tile(8192) == (128, 256)
    assert tile(1024) == (64, 128)
    assert tile(512) == (64, 64)
    assert tile(8192, 99 * 1024) == (128, 128)
