"""Kernels of Triton as packs keep them: what is kept, what is refused, and what a launch passes to
the driver. A stand-in for the driver notes what it is told.
"""

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.served_by_pack import forget_packs

import outblas
from outblas.base import cache, compiling, gpus, machines, pack
from outblas.base.compiling import CompileForbidden
from outblas.call.artifact import example
from outblas.call.problem import Problem
from outblas.call.steps import Steps
from outblas.device import cubin, driver, launch
from outblas.device.cubin import Cubin
from outblas.device.triton_variant import Kept, TritonVariant, toolchain_fields
from outblas.kernels import portable

H100 = machines.find("H100")
PROBLEM = example(torch.bfloat16, None, "nt", (2, 64, 33), steps=Steps(bias=True))
VARIANT = portable.pack_variant(PROBLEM, H100)
TYPES = [kind for _, kind in VARIANT.parameters]
KEPT = Kept("outblas_portable", 1 << 16, 64, TYPES, 2, b"\x7fELF machine code")


@dataclass
class Driver:
    """What the driver was told. `context`: whether a thread has one."""

    context: bool = True
    loaded: list[bytes] = field(default_factory=list)
    attributes: list[tuple[int, int]] = field(default_factory=list)
    launches: list[dict[str, Any]] = field(default_factory=list)
    made_current: int = 0
    failing: str = ""

    def function(self, name: str) -> Any:
        def call(*given: Any) -> int:
            if name == self.failing:
                return 209
            getattr(self, name)(*given)
            return 0

        return call

    def cuCtxGetCurrent(self, context: Any) -> None:
        context._obj.value = 1 if self.context else None

    def cuDeviceGet(self, handle: Any, device: int) -> None:
        handle._obj.value = device

    def cuDevicePrimaryCtxRetain(self, context: Any, handle: Any) -> None:
        context._obj.value = 100 + handle.value

    def cuCtxSetCurrent(self, context: Any) -> None:
        self.made_current = context.value

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> None: ...

    def cuModuleLoadData(self, module: Any, code: bytes) -> None:
        self.loaded.append(code)
        module._obj.value = 7

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> None:
        assert (module.value, name) == (7, KEPT.name.encode())
        function._obj.value = 8

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> None:
        self.attributes.append((attribute, value))

    def cuLaunchKernel(self, function: Any, *given: Any) -> None:
        *sizes, stream, addresses, _ = given
        kinds = [*TYPES, "*", "*"]
        values = [self._value(kind, at) for kind, at in zip(kinds, addresses, strict=True)]
        self.launches.append({"sizes": sizes, "stream": stream.value, "values": values})

    @staticmethod
    def _value(kind: str, address: int) -> Any:
        sizes = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}
        found: Any = sizes.get(kind, ctypes.c_void_p)
        return found.from_address(address).value


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
    monkeypatch.setattr(driver, "_function", found.function)
    stream = SimpleNamespace(cuda_stream=5)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    return found


@pytest.fixture(autouse=True)
def _no_packs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OUTBLAS_PACK", raising=False)
    forget_packs()
    cubin.kernel_of.cache_clear()
    yield
    forget_packs()
    cubin.kernel_of.cache_clear()


def packed_in(folder: Path, code: bytes, **changes: Any) -> Path:
    """A pack whose only kernel is `VARIANT`."""
    path = folder / "one.outblas"
    pack.write(path, {}, [({**VARIANT.cache_key_fields, **changes}, code)])
    return path


# ---- what is kept
@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"[]\0", b"{}\0x", b"[1, 2]\0x"])
def test_what_is_no_kernel_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"not that of a kernel of Triton|Expecting value"):
        Kept.from_bytes(content)


@pytest.mark.compile
def test_a_compiled_kernel_takes_the_parameters_that_a_launch_passes() -> None:
    """Triton's own entry has them, and two pointers to memory that it does not use."""
    compiled = VARIANT.compile()

    kept = Kept.of(compiled, VARIANT)

    kinds = {"*bf16": ".u64", "fp32": ".f32", "i32": ".u32"}
    entry = compiled.asm["ptx"].partition(".entry")[2].partition(")")[0]
    found = [line.split()[1] for line in entry.splitlines() if ".param" in line]
    assert found == [kinds[kind] for kind in TYPES] + [".u64"] * kept.scratch
    assert kept.cubin == compiled.asm["cubin"]
    assert kept.threads == 32 * compiled.metadata.num_warps


@pytest.mark.parametrize(
    ("changes", "parameters", "message"),
    [
        ({}, 0, r"has parameters \['u64', .*\], expected \['u64', 'u64', 'u64', 'f32'"),
        ({"global_scratch_size": 64}, 0, "needs global_scratch_size"),
        ({"launch_pdl": True}, 0, "needs launch_pdl"),
        ({"num_ctas": 2}, 0, "needs clusters"),
        ({}, 3, "has 3 parameters more than arguments"),
        ({}, -1, "has -1 parameters more than arguments"),
    ],
)
def test_a_kernel_that_is_launched_otherwise_is_not_kept(
    changes: dict[str, Any], parameters: int, message: str
) -> None:
    facts = {"name": "k", "shared": 0, "num_warps": 4, "warp_size": 32} | changes
    ptx = ".entry k(" + ".param .u64 p" * (len(TYPES) + parameters) + ") {"
    compiled = SimpleNamespace(
        metadata=SimpleNamespace(_asdict=lambda: facts), asm={"ptx": ptx, "cubin": b""}
    )

    with pytest.raises(ValueError, match=message):
        Kept.of(compiled, VARIANT)


def test_a_kernel_is_found_by_all_that_it_depends_on() -> None:
    others = [
        example(torch.float16, None, "nt", (2, 64, 33), steps=Steps(bias=True)),
        example(torch.bfloat16, None, "nt", (2, 64, 34), steps=Steps(bias=True)),
        example(torch.bfloat16, None, "nn", (2, 64, 33), steps=Steps(bias=True)),
        example(torch.bfloat16, None, "nt", (2, 64, 33)),
    ]

    found = {cache.digest(portable.pack_variant(each, H100).cache_key_fields) for each in others}

    assert len(found | {cache.digest(VARIANT.cache_key_fields)}) == 5
    assert toolchain_fields().items() <= VARIANT.cache_key_fields.items()


# ---- launches
def test_a_launch_passes_what_is_not_known(gpu: Driver) -> None:
    """In the order of Triton's parameters: pointers, numbers, then memory that nothing uses."""
    run = Cubin(KEPT, VARIANT, 0)[3, 1, 1]
    call = launch.bind(
        PROBLEM,
        portable.chunks_of(PROBLEM, portable.choose(PROBLEM, 132, 90, 232448)),
        lambda programs: run,
        dict.fromkeys(("TILE", "PRECISION", "INTERPRETED_K", "EPILOGUE")),
    )
    a, b, bias = (torch.ones(n, dtype=torch.bfloat16) for n in (66, 33 * 64, 64))
    out = torch.ones(128, dtype=torch.bfloat16)

    call(a, b, None, out, 1.0, 0.5, bias, None, None)

    (seen,) = gpu.launches
    assert gpu.loaded == [KEPT.cubin]
    assert gpu.attributes == [(8, KEPT.shared)]
    assert seen["sizes"] == [3, 1, 1, KEPT.threads, 1, 1, KEPT.shared]
    assert seen["stream"] == 5
    pointers = [t.data_ptr() for t in (a, b, out)]
    sizes = [2, 64, 33, 33, 33, 64]  # M, N, K; rows of A, columns of B, rows of the result
    assert seen["values"] == [*pointers, 1.0, 0.5, *sizes, bias.data_ptr(), None, None]


def test_a_thread_without_a_context_gets_the_one_of_torch(gpu: Driver) -> None:
    gpu.context = False

    Cubin(KEPT, VARIANT, 2)

    assert gpu.made_current == 102


def test_the_code_of_another_kernel_is_refused(gpu: Driver) -> None:
    with pytest.raises(ValueError, match=r"not that of portable\.matmul_kernel"):
        Cubin(KEPT._replace(types=["i32"]), VARIANT, 0)

    assert gpu.loaded == []


# ---- packs
def test_a_kernel_comes_from_a_pack(gpu: Driver, tmp_path: Path) -> None:
    outblas.load_pack(packed_in(tmp_path, KEPT.to_bytes()))

    assert isinstance(cubin.packed(VARIANT, 0), Cubin)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"triton": "3.0"}, "another version of Triton \\(3.0, here"),
        ({"source": "older"}, "another version of the sources of the kernels"),
        ({"arch": "sm_100"}, "another version of arch \\(sm_100, here sm_90\\)"),
    ],
    ids=["Triton", "sources", "GPU"],
)
def test_a_pack_of_other_versions_is_not_used(
    changes: dict[str, str], message: str, gpu: Driver, tmp_path: Path
) -> None:
    outblas.load_pack(packed_in(tmp_path, KEPT.to_bytes(), **changes))

    with pytest.warns(RuntimeWarning, match=message):
        assert cubin.packed(VARIANT, 0) is None

    assert gpu.loaded == []


def test_code_that_cannot_be_loaded_is_named(gpu: Driver, tmp_path: Path) -> None:
    gpu.failing = "cuModuleLoadData"
    outblas.load_pack(packed_in(tmp_path, KEPT.to_bytes()))

    with pytest.warns(RuntimeWarning, match="cannot be loaded here: portable.matmul_kernel: cuMod"):
        assert cubin.packed(VARIANT, 0) is None


# ---- the portable kernel
@pytest.fixture
def on_gpu(gpu: Driver, monkeypatch: pytest.MonkeyPatch) -> Problem:
    """`PROBLEM` on a GPU where nothing may be compiled."""
    monkeypatch.setenv("OUTBLAS_COMPILE", "never")
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(gpus, "arch_of", lambda device: 90)
    monkeypatch.setattr(gpus, "sm_count", lambda device: H100.sms)
    limit = H100.shared_memory_per_cta
    monkeypatch.setattr(gpus, "shared_memory_limit", lambda device: limit)
    return replace(PROBLEM, device=torch.device("cuda", 0))


def test_a_plan_takes_its_kernel_from_a_pack(
    gpu: Driver, on_gpu: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(self: TritonVariant) -> Any:
        raise AssertionError("something was compiled")

    monkeypatch.setattr(TritonVariant, "compile", never)
    outblas.load_pack(packed_in(tmp_path, KEPT.to_bytes()))

    assert callable(portable.plan(on_gpu))
    assert gpu.loaded == [KEPT.cubin]


def test_a_plan_that_no_pack_has_is_forbidden(gpu: Driver, on_gpu: Problem, tmp_path: Path) -> None:
    outblas.load_pack(packed_in(tmp_path, KEPT.to_bytes(), constants="others"))

    with pytest.raises(CompileForbidden, match="neither a pack nor the cache has portable"):
        portable.plan(on_gpu)

    assert compiling.forbidden()
