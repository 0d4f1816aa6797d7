"""Rungs on a GPU beyond the oracles that every kernel passes: sampled configs, presets, code for
other architectures, races, phases.
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from support import rungs, turing_rungs
from support.rungs import own

import outblas
from outblas.base import registry
from outblas.base.configs import from_text
from outblas.base.shapes import LAYOUTS
from outblas.hopper.parts.config import HopperConfig
from outblas.kernels.simt_config import SimtConfig, invalid_reason
from outblas.turing.config import TuringConfig
from outblas.verify import cases
from outblas.verify.cases import Case
from outblas.verify.kernels import Refused, caller, check, oracles
from outblas.verify.oracle import determinism

pytestmark = pytest.mark.gpu

BF16, F16, FP32 = torch.bfloat16, torch.float16, torch.float32
HOPPER = [kernel.name for kernel in registry.ladder("hopper")]
PERSISTENT = HOPPER[HOPPER.index("hopper.persistent") :]


def sizes_around(draw: random.Random, config: Any, depths: tuple[int, ...]) -> tuple[int, int, int]:
    """Extents at the edges of a tile or beside them."""
    M, N = config.block_m + draw.randrange(3) - 1, 2 * config.block_n + draw.randrange(3)
    return M, N, draw.choice(depths)


# ---- CUDA cores
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(300, 200, 777), (129, 127, 1)])
def test_every_simt_rung_gives_the_same_bits(shape: tuple[int, int, int], layout: str) -> None:
    """All of them add the products of an output in order of K, in one chain of FMAs."""
    M, N, K = shape
    a, b = torch.randn(M, K, device="cuda"), torch.randn(K, N, device="cuda")
    a = a if layout[0] == "n" else a.t().contiguous().t()
    b = b if layout[1] == "n" else b.t().contiguous().t()
    first, *others = (outblas.matmul(a, b, kernel=name) for name in rungs.NAMES)

    for name, result in zip(rungs.NAMES[1:], others, strict=True):
        assert torch.equal(result, first), name


# The parameters that the documents use: the kernel, and what differs from the rung's config, whose
# values suit an H100.
PRESETS: dict[str, tuple[str, str]] = {
    "002 float4, 000 kernel 6": ("simt.vectorized", "pad=0,piece_n=8"),
    "000 kernel 6, padded": ("simt.vectorized", "piece_n=8"),
    "003 v05": ("simt.vectorized", "block_k=16"),
    "002 warp tile, 000 kernel 7": ("simt.warptile", "pad=0,prefetch=False"),
    "000 kernel 7, padded": ("simt.warptile", "prefetch=False"),
    "003 v06": (
        "simt.warptile",
        "block_m=64,block_n=64,block_k=8,warp_m=32,warp_n=16,thread_m=4,thread_n=4,"
        "piece_m=4,prefetch=False",
    ),
}


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_right(preset: str) -> None:
    kernel, text = PRESETS[preset]
    config = from_text(registry.load(kernel).Config, text)
    for dtype in (FP32, BF16):
        for case in (Case(257, 130, 67, dtype, layout="nt"), Case(256, 256, 64, dtype)):
            result = check(kernel, case, config=config)
            assert result.ok, result.message


@pytest.mark.parametrize("config", rungs.valid_configs(40, seed=7), ids=str)
def test_a_simt_config_that_is_valid_is_right(config: SimtConfig) -> None:
    draw = random.Random(str(config))
    for name in rungs.bodies(config):
        fitted = rungs.fitted(name, config)
        assert invalid_reason(fitted, 48 * 1024, 2) is None
        layout = draw.choice(LAYOUTS)
        for shape in (
            sizes_around(draw, config, (1, 40, 67)),
            (config.block_m, config.block_n, 64),
        ):
            result = check(name, Case(*shape, FP32, layout=layout), config=fitted)
            assert result.ok, result.message


# ---- mma.sync
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", turing_rungs.NAMES)
def test_code_for_older_architectures_is_right(name: str, layout: str) -> None:
    """m16n8k8 and all that sm_75 has, from its PTX."""
    config = own(name, arch=max(75, registry.find(name).min_arch))
    dtype = F16 if config.arch == 75 else BF16
    for case in cases.full(dtype, config.block_m, config.block_n, config.block_k):
        for oracle in oracles(name) if case.layout == layout else ():
            result = check(name, case, oracle, config=config)
            assert result.ok, f"{case} {oracle}: {result.message}"


def test_bfloat16_is_refused_where_turing_has_none() -> None:
    with pytest.raises(Refused, match="needs sm_80 for bfloat16 operands"):
        check("turing.shared", Case(64, 64, 64, BF16), config=own("turing.shared", arch=75))


@pytest.mark.parametrize("oldest", [False, True])
@pytest.mark.parametrize(("name", "config"), turing_rungs.valid_configs(40, seed=3), ids=str)
def test_a_turing_config_that_is_valid_is_right(
    name: str, config: TuringConfig, oldest: bool
) -> None:
    arch = max(75, registry.find(name).min_arch) if oldest else 0
    draw = random.Random(str(config))
    even = 2 * config.block_m, config.block_n, config.block_k * config.stages * 3
    for shape in (sizes_around(draw, config, (1, 40, 67, 500)), even):
        case = Case(*shape, F16, layout=draw.choice(LAYOUTS))
        result = check(name, case, config=replace(config, arch=arch))
        assert result.ok, result.message


@pytest.mark.parametrize("name", ["turing.ldmatrix", "turing.double_buffer", "turing.cp_async"])
def test_one_warp_with_vectors_of_a_and_single_elements_of_b(name: str) -> None:
    """What Triton 3.6's LLVM once gave wrong addresses."""
    one_warp = {"block_m": 32, "block_n": 32, "block_k": 32, "warps_m": 1, "warps_n": 1}
    config = own(name, **one_warp, vector=8, ctas=1, stage_out=False)
    for edge in (64, 72):
        a = torch.randint(-8, 9, (edge, edge), device="cuda").half()
        b = torch.randint(-8, 9, (edge, edge + 1), device="cuda").half()[:, :edge].t()

        result = outblas.matmul(a, b, kernel=name, config=config)

        assert torch.equal(result, (a.double() @ b.double()).half())


@pytest.mark.parametrize("name", turing_rungs.NAMES)
def test_turing_calls_repeat_to_the_bit(name: str) -> None:
    """A race of copies and products would show as a sum that wavers."""
    case = Case(1111, 777, 1000, F16, layout="nt")

    result = determinism(caller(name), case, "cuda", times=100)

    assert result.ok, result.message


# ---- wgmma
VALUES = {
    "tile_m": (64, 128, 192, 256),
    "tile_n": (16, 32, 48, 64, 96, 128, 192, 256),
    "tile_k": (16, 32, 64, 128),
    "mma_n": (0, 16, 32, 48, 64, 96, 128),
    "stages": (1, 2, 3, 4, 5, 8),
    "consumers": (1, 2, 3),
    "in_flight": (0, 1),
    "order": ("row", "column", "consecutive", "grouped", "serpentine", "hilbert"),
    "group_m": (1, 3, 8, 16),
    "group_n": (1, 2, 5, 8),
    "sms": (0, 8, 23, 128, 1000),
    "cluster_m": (1, 2, 4),
    "cluster_n": (1, 2, 4),
    "reorder_stores": (False, True),
    "write_through": (False, True),
    "accumulate_flag": (False, True),
    "epilogue_stages": (0, 1, 2, 3, 4),
    "jitter": (False, True),
    "swap_ab": (False, True),
    "variable_tile_n": (False, True),
    "pingpong": (False, True),
    "stagger": ("never", "rule", "always"),
    "stagger_k_tiles": (0, 1, 2, 3, 4),
    "k_serpentine": (False, True),
    "split_k": (1, 2, 3, 7),
    "stream_k": (False, True),
    "pdl": (False, True),
}
SETMAXNREG = ((0, 0), (24, 240), (40, 232), (32, 160), (32, 240), (72, 216))


@pytest.mark.sm90
@pytest.mark.parametrize("kernel", HOPPER)
def test_two_hundred_jittered_calls_give_equal_bits(kernel: str) -> None:
    """More tiles than SMs, so that persistent CTAs have several each."""
    case, config = Case(3000, 3400, 456, BF16, layout="nt"), own(kernel, jitter=True)
    assert check(kernel, case, config=config).ok

    result = determinism(caller(kernel, config), case, "cuda", times=200)

    assert result.ok, result.message


def drawn_configs(kernel: str, draw: random.Random) -> Iterator[HopperConfig]:
    """2000 configs a few fields away from the rung's own, of the fields that it understands."""
    understood = {field.name for field in fields(HopperConfig)}
    if kernel != "hopper.gemm":  # which understands all of them
        parents = registry.load(kernel).plan.args[0].gemm.__mro__
        understood = {name for kind in parents for name in vars(kind).get("introduces", ())}
    names = [name for name in VALUES if name in understood]
    for _ in range(2000):
        changes: dict[str, Any] = {
            name: draw.choice(VALUES[name])
            for name in draw.sample(names, k=draw.randint(1, min(5, len(names))))
        }
        if "consumer_registers" in understood:
            changes["producer_registers"], changes["consumer_registers"] = draw.choice(SETMAXNREG)
        yield own(kernel, **changes)


@pytest.mark.sm90
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kernel", HOPPER)
def test_configs_run_or_say_why_not(kernel: str) -> None:
    """The first 24 valid configs of a sample are exact on ragged sizes."""
    module = registry.load(kernel)
    gemm = module if kernel == "hopper.gemm" else module.plan.args[0].gemm
    draw = random.Random(kernel)
    valid = []
    for config in drawn_configs(kernel, draw):
        if reason := gemm.invalid_reason(config):
            assert "expected" in reason
        else:
            valid.append(config)

    for config in itertools.islice(valid, 24):
        case = ragged(draw, config)
        result = check(kernel, case, config=config)
        assert result.ok, f"{config} at {case}: {result.message}"
    assert len(valid) >= 24


def ragged(draw: random.Random, config: HopperConfig) -> Case:
    """A product of a few cluster tiles in sizes that TMA takes."""
    rows, columns = config.tile_m * config.cluster_m, config.tile_n * config.cluster_n
    M, N = draw.randint(1, 4 * rows), draw.randint(1, 4 * columns)
    K, layout = 8 * draw.randint(1, config.tile_k), draw.choice(LAYOUTS)
    return Case(
        M + -M % 8 if layout[0] == "t" else M,
        N + -N % 8 if layout[1] == "n" else N,
        K,
        draw.choice((BF16, F16)),
        layout=layout,
        out_layout=draw.choice("nnt"),
        out_dtype=draw.choice((None, FP32)),
    )


@pytest.mark.sm90
@pytest.mark.parametrize("kernel", PERSISTENT)
def test_few_sms_compute_all_tiles(kernel: str) -> None:
    config = own(kernel)
    for sms in (1, 2, 5, 0):
        few = replace(config, sms=max(sms, config.cluster) if sms else 0)
        result = check(kernel, Case(900, 1800, 200, BF16, layout="nt"), config=few)
        assert result.ok, f"{sms} SMs: {result.message}"


@pytest.mark.sm90
@pytest.mark.parametrize("kernel", HOPPER[:-1])  # hopper.gemm has no stopwatch
def test_phases_take_as_long_as_their_products(kernel: str) -> None:
    """A product of 1024 x 1024 x 1024 under the stopwatch of a rung is right."""
    module = registry.load(kernel)
    config = module.Config()
    a, b = (torch.randn(1024, 1024, device="cuda").to(BF16) for _ in range(2))
    out = torch.empty_like(a)

    roles = module.phases(a, b.t(), out)

    assert torch.equal(out, outblas.matmul(a, b.t(), kernel=kernel))
    names, all_names = [role.name for role in roles], ["producer", "consumer 1", "consumer 2"]
    assert names == (["all"] if len(names) == 1 else all_names[: len(names)])
    cycles = (
        2 * config.tile_m * config.tile_n * 1024 / 4096
    )  # that the tensor cores need for a tile
    for role in roles:
        multiplies = role.name != "producer"
        assert (role.tensor > 0) == (role.store > 0) == multiplies, role
        # A producer has loaded its last k-blocks before they are multiplied.
        assert cycles / (1 if multiplies else 2) < role.total < 12 * cycles, f"{role}, {cycles}"
        if multiplies:
            assert 1024 // config.tile_k * role.tensor > 0.5 * cycles / config.consumers, role
