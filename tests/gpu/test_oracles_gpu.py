"""Every kernel on a GPU: the oracles over the whole matrix of cases, streams, graphs, configs, cold
starts.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import outblas
from outblas.base import registry
from outblas.kernels.portable import CANDIDATES
from outblas.runtime import dispatch, launcher
from outblas.verify import cases
from outblas.verify.cases import Case
from outblas.verify.kernels import Refused, check, oracles

pytestmark = pytest.mark.gpu

BF16, FP32 = torch.bfloat16, torch.float32
SIMT = [kernel.name for kernel in registry.ladder("simt")]
HOPPER = [kernel.name for kernel in registry.ladder("hopper")]
# Tiles around whose edges the cases lie; of a cluster, where there are clusters.
TILES = {
    "portable": (128, 128, 64),
    "hopper.tma_wgmma": (64, 64, 64),
    "hopper.large_tile": (128, 128, 64),
    "hopper.warp_specialized": (128, 128, 64),
    "hopper.two_consumers": (128, 256, 64),
    "hopper.persistent": (128, 256, 64),
    "hopper.lean_barriers": (128, 256, 64),
}
CLUSTER_TILE = (256, 256, 64)


def cases_of(kernel: registry.Kernel, dtype: str) -> Iterator[Case]:
    """All around a kernel's tile; of a CUDA-core rung's 16-bit operands, which are widened on the
    way, a few.
    """
    kind = getattr(torch, dtype)
    if kernel.ladder == "turing":
        config = registry.load(kernel.name).Config()
        return cases.full(kind, config.block_m, config.block_n, config.block_k)
    if kernel.ladder != "simt":
        return cases.full(kind, *TILES.get(kernel.name, CLUSTER_TILE))
    if kind is not FP32:
        return cases.quick(kind)
    config = registry.load(kernel.name).Config()
    return cases.full(kind, config.block_m, config.block_n, max(8, 2 * config.block_k))


def matrix() -> Iterator[Any]:
    for kernel in registry.ladder():
        marks = [pytest.mark.sm90] if kernel.ladder == "hopper" else []
        for dtype in kernel.dtypes:
            for case in cases_of(kernel, dtype):
                yield pytest.param(kernel.name, case, marks=marks, id=f"{kernel.name}-{case}")


def tma_takes(case: Case) -> bool:
    """Whether TMA can stride over A and B, said independently of the kernel's own rule."""
    if case.addend or (case.batch_a and case.batch_b) or case.batch_b or case.offset % 8:
        return False
    if case.batch_a and (case.layout[0] == "t" or case.pad):
        return False  # rows of consecutive matrices do not follow at one stride
    stored = (
        ((case.M, case.K), case.layout[0], case.expand == "a"),
        ((case.K, case.N), case.layout[1], case.expand == "b"),
    )
    for shape, letter, expanded in stored:
        outer, inner = shape if letter == "n" else shape[::-1]
        if outer > 1 and not expanded and (inner + case.pad) % 8:
            return False
    return True


@pytest.mark.parametrize(("kernel", "case"), list(matrix()))
def test_oracles(kernel: str, case: Case) -> None:
    for oracle in oracles(kernel):
        try:
            result = check(kernel, case, oracle)
        except Refused as refusal:
            assert not tma_takes(case) if kernel in HOPPER else kernel in SIMT and case.tf32, (
                refusal
            )
            return
        assert result.ok, f"{oracle}: {result.message}"


# ---- calls that name no kernel
def integers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Small integers, whose products are exact."""
    return torch.randint(-8, 9, shape, device="cuda").to(dtype)


dtypes = pytest.mark.parametrize("dtype", [BF16, torch.float16, FP32])


@dtypes
@pytest.mark.parametrize(
    ("shape_a", "shape_b"),
    [
        pytest.param((65, 70), (70, 33), id="matrices"),
        pytest.param((3, 1, 5, 70), (2, 70, 9), id="batches"),
        pytest.param((70,), (70,), id="vectors"),
        pytest.param((4, 0), (0, 3), id="K=0"),
    ],
)
@pytest.mark.usefixtures("float32_by_kernels")
@pytest.mark.filterwarnings("error::outblas.FallbackWarning")
def test_the_default_is_right_without_a_fallback(
    shape_a: tuple[int, ...], shape_b: tuple[int, ...], dtype: torch.dtype
) -> None:
    a, b = integers(*shape_a, dtype=dtype), integers(*shape_b, dtype=dtype)
    torch.full((1 << 20,), torch.nan, device="cuda")  # what freed memory holds

    got = outblas.matmul(a, b)

    assert torch.equal(got, torch.matmul(a.double(), b.double()).to(dtype))


@dtypes
@pytest.mark.usefixtures("float32_by_kernels")
@pytest.mark.filterwarnings("error::outblas.FallbackWarning")
def test_the_default_of_addmm_is_right_without_a_fallback(dtype: torch.dtype) -> None:
    c = integers(33, dtype=dtype)
    a, b = integers(65, 70, dtype=dtype), integers(70, 33, dtype=dtype)

    got = outblas.addmm(c, a, b, alpha=-2, beta=0.5)

    want = 0.5 * c.double() - 2 * (a.double() @ b.double())
    assert torch.equal(got, want.to(dtype))


def error_of_fp32() -> float:
    """The relative error of a product of fp32 operands."""
    a, b = torch.randn(512, 512, device="cuda"), torch.randn(512, 512, device="cuda")
    want = a.double() @ b.double()
    return float((outblas.matmul(a, b) - want).norm() / want.norm())


@pytest.fixture
def tf32_allowed() -> Iterator[None]:
    """Torch allows fp32 products to round their operands to tf32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("float32_by_kernels")
def test_fp32_is_not_rounded_to_tf32_by_itself() -> None:
    assert error_of_fp32() < 1e-6


@pytest.mark.usefixtures("float32_by_kernels", "tf32_allowed")
def test_fp32_is_rounded_to_tf32_when_torch_allows_it() -> None:
    assert 1e-5 < error_of_fp32() < 2e-3


@pytest.mark.usefixtures("float32_by_kernels")
def test_fp32_is_not_rounded_to_tf32_once_torch_forbids_it_again() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        error_of_fp32()
    finally:
        torch.set_float32_matmul_precision(before)

    assert error_of_fp32() < 1e-6


@pytest.mark.filterwarnings("error::outblas.FallbackWarning")
def test_fp32_that_was_not_measured_to_be_faster_is_torchs() -> None:
    """Bit for bit, with its epilogue and gradients, and in a capture without a warmup."""
    dispatch.clear_cache()
    x, w, bias = (torch.randn(*shape, device="cuda") for shape in ((300, 200), (100, 200), (100,)))
    leaves, copies = ([t.clone().requires_grad_() for t in (x, w, bias)] for _ in range(2))

    for _ in range(2):
        y = outblas.linear(*leaves, activation="relu")
        want = torch.nn.functional.linear(*copies).relu()
        assert torch.equal(y, want)
        ours, theirs = (
            torch.autograd.grad(result.sum(), given)
            for result, given in ((y, leaves), (want, copies))
        )
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = outblas.matmul(x[:77], w.t())
    graph.replay()

    assert torch.equal(captured, x[:77] @ w.t())


# ---- streams, graphs, other devices
TURING = [kernel.name for kernel in registry.ladder("turing")]
KERNELS = [
    *map(pytest.param, ("portable", *SIMT, *TURING)),
    *(pytest.param(name, marks=pytest.mark.sm90) for name in HOPPER),
]


@pytest.mark.parametrize("kernel", KERNELS)
def test_runs_on_the_current_stream(kernel: str) -> None:
    a, b = (
        torch.randn(512, 512, device="cuda").bfloat16(),
        torch.randn(512, 512, device="cuda").bfloat16(),
    )
    want = outblas.matmul(a, b, kernel=kernel)
    stream = torch.cuda.Stream()
    late = torch.zeros_like(a)
    torch.cuda.synchronize()

    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late.copy_(a)
        got = outblas.matmul(late, b, kernel=kernel)
    stream.synchronize()

    assert torch.equal(got, want)


@pytest.mark.parametrize("kernel", KERNELS)
def test_captured_in_a_cuda_graph(kernel: str) -> None:
    a, b = (
        torch.randn(256, 256, device="cuda").bfloat16(),
        torch.randn(256, 256, device="cuda").bfloat16(),
    )
    out = outblas.matmul(a, b, kernel=kernel)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outblas.matmul(a, b, out=out, kernel=kernel)
    a.copy_(torch.randn_like(a))
    want = outblas.matmul(a, b, kernel=kernel)
    out.fill_(torch.nan)

    graph.replay()

    assert torch.equal(out, want)


@pytest.mark.parametrize("kernel", KERNELS)
def test_captured_where_operands_lie_elsewhere_in_lines(kernel: str) -> None:
    flat, out = (
        torch.randint(-3, 4, (2, 2**22 + 64), device="cuda").to(BF16),
        torch.empty(2048, 2048, device="cuda"),
    )
    (a, b), (x, y) = (
        [each[start : start + 2**22].view(2048, 2048) for each in flat] for start in (0, 8)
    )
    outblas.matmul(a, b.t(), out=out, out_dtype=FP32, kernel=kernel)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outblas.matmul(x, y.t(), out=out, out_dtype=FP32, kernel=kernel)

    graph.replay()

    assert torch.equal(out, x.float() @ y.float().t())


@pytest.mark.parametrize("kernel", KERNELS)
def test_deterministic_alone_and_beside_other_streams(kernel: str) -> None:
    result = check(kernel, Case(1000, 520, 2048, BF16, layout="nt"), "determinism")

    assert result.ok, result.message


# ---- what runs and what is refused
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("config", CANDIDATES, ids=str)
def test_every_portable_preset_runs_or_says_why_not(config: Any, dtype: torch.dtype) -> None:
    case = Case(
        config.block_m + 9, 2 * config.block_n - 3, 3 * config.block_k + 8, dtype, layout="nt"
    )

    try:
        result = check("portable", case, config=config)
    except Refused as refusal:
        assert "shared memory" in str(refusal)
        return

    assert result.ok, result.message


@pytest.mark.parametrize(
    ("call", "message"),
    [
        pytest.param(
            lambda a: outblas.matmul(a, a.cpu()),
            "other is on cpu but input is on cuda:0",
            id="B on the CPU",
        ),
        pytest.param(
            lambda a: outblas.matmul(a.cpu(), a),
            "input is on cpu|other is on cuda:0 but input is on cpu",
            id="A on the CPU",
        ),
        pytest.param(
            lambda a: outblas.matmul(a, a, out=a.cpu()),
            "out is on cpu but input is on cuda:0",
            id="out on the CPU",
        ),
        pytest.param(
            lambda a: outblas.matmul(a, a, out=a), "out overlaps input", id="out overlaps A"
        ),
    ],
)
def test_bad_input_is_refused_and_nothing_is_written(
    call: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    a = torch.ones(64, 64, device="cuda", dtype=BF16)

    with pytest.raises(ValueError, match=message):
        call(a)

    torch.cuda.synchronize()
    assert torch.equal(a, torch.ones_like(a))


rungs_by_tma = pytest.mark.parametrize("kernel", HOPPER[:-1])  # hopper.gemm copies what TMA refuses


NARROW = torch.ones(64, 63)  # whose rows TMA cannot load
REFUSED_BY_TMA: dict[str, Callable[..., torch.Tensor]] = {
    r": TMA needs .* a has strides \(63, 1\)": lambda a, **named: outblas.matmul(
        a.to(BF16), a.to(BF16).t().contiguous(), **named
    ),
    ": .* given an addend": lambda a, **named: outblas.addmm(
        a[:, :1].to(BF16), a.to(BF16), a.to(BF16).t(), **named
    ),
    " needs operands of dtype .* given float32": lambda a, **named: outblas.matmul(
        a, a.t(), **named
    ),
}


@pytest.mark.sm90
@rungs_by_tma
@pytest.mark.parametrize("message", REFUSED_BY_TMA)
def test_what_a_rung_does_not_take_is_refused_by_name(message: str, kernel: str) -> None:
    with pytest.raises(ValueError, match=f"kernel '{kernel}'{message}"):
        REFUSED_BY_TMA[message](NARROW.cuda(), kernel=kernel)


@pytest.mark.parametrize("kernel", registry.ladder(), ids=lambda kernel: kernel.name)
def test_a_kernel_for_another_architecture_is_refused(kernel: registry.Kernel) -> None:
    major, minor = torch.cuda.get_device_capability()
    arch = 10 * major + minor
    runs = kernel.min_arch <= arch and (kernel.max_arch is None or arch <= kernel.max_arch)

    reason = launcher.unsupported_device_reason(kernel, torch.device("cuda"))

    assert (reason is None) == runs, reason


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kernel", KERNELS)
def test_runs_on_the_operands_device(kernel: str) -> None:
    a = torch.randn(256, 256, device="cuda:1").bfloat16()
    on_the_first = a.to("cuda:0")

    with torch.cuda.device(0):
        got = outblas.matmul(a, a, kernel=kernel)
        want = outblas.matmul(on_the_first, on_the_first, kernel=kernel)

        assert torch.equal(got, want.to(a.device))


HUGE = (
    "portable",
    "simt.shared",
    "simt.pipelined",
    "turing.wmma",
    "turing.shared",
    "turing.double_buffer",
    "turing.cp_async",
    *HOPPER,
)


@pytest.mark.slow
@pytest.mark.xdist_group("most of the GPU's memory")  # one at a time
@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if kernel.values[0] in HUGE])
@pytest.mark.parametrize("case", list(cases.huge(BF16)), ids=str)
def test_more_than_two_to_the_31_elements(case: Case, kernel: str) -> None:
    try:
        result = check(kernel, case)
    except Refused as refusal:
        assert kernel in HOPPER[:-1], refusal
        assert not tma_takes(case), refusal
        return
    assert result.ok, result.message


# ---- cold starts
def run(code: str, cache: Path) -> str:
    """What a program prints in a process of its own, whose compiled kernels a folder keeps."""
    # Byte code must be kept: without it every start compiles its imports.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment["OUTBLAS_CACHE_DIR"] = str(cache)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.sm90
@pytest.mark.parametrize("kernel", ["hopper.tma_wgmma", "hopper.gemm"])
def test_a_process_with_a_warm_cache_compiles_nothing(kernel: str, tmp_path: Path) -> None:
    code = f"""
import torch, outblas
from outblas.base import cache
fetch, built = cache.fetch, []
def counted(facts, *, build, **functions):
    return fetch(facts, build=lambda: built.append(facts) or build(), **functions)
cache.fetch = counted
a = torch.randn(64, 64, device="cuda").bfloat16()
out = outblas.matmul(a, a, kernel="{kernel}")
torch.cuda.synchronize()
print(len(built))
"""

    compiled = [int(run(code, tmp_path / "cache")) for _ in range(3)]

    assert compiled[0] > 0
    assert compiled[1:] == [0, 0]


@pytest.mark.sm90
def test_eight_cold_processes_compile_each_key_once(tmp_path: Path) -> None:
    code = f"""
import torch, outblas
from outblas.hopper.parts import host
compile_variant = host.compile_variant
def logged(gemm, variant, *options):
    with open({str(tmp_path / "log")!r}, "a") as log:
        log.write(variant.name + "\\n")
    return compile_variant(gemm, variant, *options)
host.compile_variant = logged
a = torch.randint(-8, 9, (128, 128), device="cuda").bfloat16()
for b in (a, a.t()):
    expected = torch.matmul(a.double(), b.double()).bfloat16()
    assert torch.equal(outblas.matmul(a, b, kernel="hopper.tma_wgmma"), expected)
"""
    environment = {**os.environ, "OUTBLAS_CACHE_DIR": str(tmp_path / "cache")}

    processes = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(8)]

    assert [process.wait(timeout=110) for process in processes] == [0] * 8
    names = (tmp_path / "log").read_text().split()
    assert len(names) == len(set(names)) == 2
