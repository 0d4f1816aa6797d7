"""compute-sanitizer over kernels of all ladders, and over the kinds of calls of hopper.gemm that
have device code of their own. A program runs in a process of the sanitizer; what it computes is
exact.
"""

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import epilogue_schedules, grouped_calls, sanitizer, scaled_groups
from support.epilogue_schedules import EPILOGUES, SCHEDULES
from support.gemm_levers import LEVERS
from support.grouped_calls import check_equal, empty_aux
from support.paths import TESTS
from support.scaled_tiles import ScaledProduct

import outblas
from outblas.base import configs, registry
from outblas.call import quantization
from outblas.device import gluon
from outblas.hopper import gemm
from outblas.turing import shared

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.xdist_group("most of the GPU's memory"),  # one at a time
]

Tensor = torch.Tensor
FP32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
EDGES = (129, 127, 33), (1, 1, 1), (64, 264, 40), (128, 256, 128), (130, 131, 7)
LAYOUTS = "nt", "nn", "tn", "tt"
SEVERAL_TILES = (520, 776, 520)


def draw(rows: int, columns: int, dtype: torch.dtype, letter: str = "n") -> Tensor:
    if letter == "t":
        return draw(columns, rows, dtype).t()
    return torch.randint(-4, 5, (rows, columns), device="cuda").to(dtype)


def multiply(
    kernel: str, shape: tuple[int, int, int], dtype: torch.dtype, layout: str, config: Any = None
) -> None:
    """A product, and by the older ladders the same with an addend."""
    M, N, K = shape
    a, b, c = draw(M, K, dtype, layout[0]), draw(K, N, dtype, layout[1]), draw(M, N, dtype)
    product = a.double() @ b.double()
    by_name: dict[str, Any] = {"kernel": kernel, "config": config}
    assert torch.equal(outblas.matmul(a, b, **by_name), product.to(dtype)), (kernel, shape)
    if not kernel.startswith("hopper"):
        added = outblas.addmm(c, a, b, alpha=2.0, beta=-0.5, **by_name)
        assert torch.equal(added, (2 * product - 0.5 * c.double()).to(dtype)), (kernel, shape)


# ---- programs: each yields the name of what was right
def simt() -> Iterator[str]:
    calls = list(
        zip(itertools.product(EDGES, (FP32, BF16, F16)), itertools.cycle(LAYOUTS), strict=False)
    )
    for kernel in registry.ladder("simt"):
        for (shape, dtype), layout in calls:
            multiply(kernel.name, shape, dtype, layout)
        yield kernel.name


def turing() -> Iterator[str]:
    """Code for this GPU, and for the oldest that a rung is for."""
    for kernel, arch in itertools.product(registry.ladder("turing"), (False, True)):
        config = registry.load(kernel.name).Config()
        config = replace(config, arch=max(75, kernel.min_arch) if arch else 0)
        for shape, layout in zip(EDGES, itertools.cycle(LAYOUTS), strict=False):
            multiply(kernel.name, shape, F16, layout, config)
        yield kernel.name


def hopper() -> Iterator[str]:
    for kernel in registry.ladder("hopper"):
        config = registry.load(kernel.name).Config()
        config = replace(config, sms=4) if config.sms else config  # several tiles a CTA
        multiply(kernel.name, SEVERAL_TILES, BF16, "nt", config)
        yield kernel.name


def levers() -> Iterator[str]:
    for lever, text in LEVERS.items():
        config = configs.from_text(gemm.Config, text)
        multiply("hopper.gemm", SEVERAL_TILES, BF16, "nt", config)
        yield lever


def epilogues() -> Iterator[str]:
    for schedule, epilogue in itertools.product(SCHEDULES, EPILOGUES):
        epilogue_schedules.check(schedule, epilogue, "", 1)
        yield f"{epilogue} {schedule}"


def scaled() -> Iterator[str]:
    """Scales of blocks: tiles of one and of two consumers, gated pairs, results in fp8."""
    for way, (activation, config) in SCALED.items():
        product = ScaledProduct(520, 384, 1168, activation=activation)  # more k tiles than stages
        product.check(config, FP32)
        yield way
        if way in QUANTIZING:
            product.check_quantized(config)
            yield f"{way} to fp8"


SCALED = {
    "two consumers": ("", "tile_n=128,cluster_m=1,cluster_n=2,stages=5,epilogue_stages=1"),
    "256 rows": ("", "tile_m=256,tile_n=128,cluster_m=2,stages=4,epilogue_stages=1"),
    "112 columns": ("", "tile_n=112,cluster_m=1,stages=5,epilogue_stages=1"),
    "pairs": ("reglu", "tile_n=256,mma_n=128,cluster_m=2,stages=4,epilogue_stages=1"),
    "halves": ("reglu", "tile_n=128,cluster_m=1,stages=5,epilogue_stages=1"),
}
QUANTIZING = "two consumers", "pairs"


def groups_with_scales() -> Iterator[str]:
    forms: dict[Any, tuple[tuple[int, ...], int]] = {
        "ragged_m": ((1, 131, 131, 517, 903), 904),  # rows begin anywhere
        "masked": ((7, 0, 100), 100),
        "ragged_k": ((128, 128, 1536), 1664),
    }
    for form, (ends, extent) in forms.items():
        sizes: dict[str, Any] = {"ends": ends, "extent": extent, "M": 200, "N": 264, "K": 1168}
        call = scaled_groups.draw(form, out_dtype=FP32, **sizes).on("cuda")
        scale = call.tensors["scale_a"]
        *rows, blocks = scale.shape
        by_columns = quantization.empty_scales((*rows, 128 * blocks), "1x128", scale.device)
        for of_a in (scale, by_columns.copy_(scale)):
            lying = call.replaced(scale_a=of_a)
            check_equal(lying.run(kernel="hopper.grouped"), call.expected())
            yield form


def groups_on_few_sms() -> Iterator[str]:
    """Gathers, scatters and epilogues, several tiles one after the other on each SM."""
    rows = "bias", "residual", "a_index", "scatter_index", "scatter_weights"
    kinds: list[tuple[Any, tuple[str, ...], str]] = [
        ("ragged_m", rows, "reglu"),
        ("ragged_m", rows[:2], "relu"),
        ("ragged_k", rows[:2], "relu"),
    ]
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    for form, names, activation in kinds:
        # More tiles than SMs, and more k tiles than stages.
        call = grouped_calls.draw(form, *names, activation=activation, M=200, N=784, K=1168)
        x, expected, on_gpu = call.x(), call.expected(), call.on("cuda")
        aux = empty_aux(on_gpu)
        if form == "ragged_k":  # TMA loads rows that are contiguous where no group divides them
            on_gpu = on_gpu.replaced(mat_a=on_gpu.tensors["mat_a"].t().contiguous().t())
        with outblas.sm_carveout(sms - 4):
            check_equal(on_gpu.run(kernel="hopper.grouped").cpu(), expected)
            check_equal(on_gpu.run(kernel="hopper.grouped", aux=aux).cpu(), expected)
        check_equal(aux.cpu(), x)
        yield form


def without_barriers() -> Iterator[str]:
    """turing.shared, from whose PTX all barriers are gone."""

    as_ptx: Any = gluon.as_ptx

    def broken(*variant: Any) -> Any:
        compiled = as_ptx(*variant)
        text, removed = re.subn("bar.sync[^;]*;", "", compiled.asm["ptx"])
        assert removed
        compiled.kernel = text.encode() + bytes(1)
        return compiled

    gluon.as_ptx = broken  # type: ignore[assignment]
    a = torch.ones(256, 256, device="cuda").half()
    outblas.matmul(a, a, kernel="turing.shared", config=shared.Config(arch=75))
    torch.cuda.synchronize()
    yield "launched"


# How many results each program has, and the tools that run it.
TOOLS = "memcheck", "synccheck", "racecheck"
PROGRAMS: dict[Callable[[], Iterator[str]], tuple[int, tuple[str, ...]]] = {
    simt: (len(registry.ladder("simt")), TOOLS[:1]),
    turing: (2 * len(registry.ladder("turing")), TOOLS),
    hopper: (len(registry.ladder("hopper")), TOOLS[1:]),
    levers: (len(LEVERS), TOOLS),
    epilogues: (len(SCHEDULES) * len(EPILOGUES), TOOLS),
    scaled: (len(SCALED) + len(QUANTIZING), TOOLS),
    groups_with_scales: (6, TOOLS),
    groups_on_few_sms: (3, TOOLS),
}
ONLY_OURS = "--kernel-regex", "kns=outblas"


def code(program: Callable[[], Iterator[str]], before: str = "") -> str:
    return f"""
import sys
sys.path[:0] = [{str(TESTS)!r}, {str(TESTS / "gpu")!r}]
{before}
import test_sanitizers_gpu
for name in test_sanitizers_gpu.{program.__name__}():
    print("right:", name, flush=True)
"""


@pytest.mark.parametrize(
    ("program", "tool"),
    [
        pytest.param(
            program,
            tool,
            id=f"{program.__name__}-{tool}",
            marks=[] if program in (simt, turing) else [pytest.mark.sm90],
        )
        for program, (_, tools) in PROGRAMS.items()
        for tool in tools
    ],
)
def test_the_sanitizer_finds_nothing(
    program: Callable[[], Iterator[str]], tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = ""
    if tool == "racecheck" and program in (scaled, groups_with_scales):
        before = "from support import all_lanes_arrive; all_lanes_arrive.install()"
        monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path))  # for kernels of other sources
    only = ONLY_OURS if program is turing and tool != "memcheck" else ()

    sanitizer.finds_nothing(tool, code(program, before), PROGRAMS[program][0], *only)


def test_racecheck_sees_that_barriers_are_missing() -> None:
    """What `ONLY_OURS` lets it look at are our kernels."""
    done = sanitizer.run("racecheck", code(without_barriers), *ONLY_OURS)

    assert done.returncode == sanitizer.FOUND, done.stdout[-3000:] + done.stderr[-2000:]
    assert "right: launched" in done.stdout
    assert "outblas_turing_shared" in done.stdout
