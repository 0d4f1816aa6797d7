"""Hopper rungs on a GPU beyond the oracles that every kernel passes: races, configs, orders,
phases, sanitizers.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from support import sanitizer

import outblas
from outblas.base import registry
from outblas.hopper.parts.config import HopperConfig
from outblas.verify.cases import Case
from outblas.verify.kernels import caller, check
from outblas.verify.oracle import determinism

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

BF16, F16 = torch.bfloat16, torch.float16
NAMES = [kernel.name for kernel in registry.ladder("hopper")]
PERSISTENT = NAMES[NAMES.index("hopper.persistent") :]

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


def own(kernel: str, **changes: Any) -> HopperConfig:
    return replace(registry.load(kernel).Config(), **changes)


@pytest.mark.parametrize("kernel", NAMES)
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


@pytest.mark.parametrize("kernel", NAMES)
def test_configs_run_or_say_why_not(kernel: str) -> None:
    """The first 24 valid configs of a sample are exact on ragged sizes."""
    module = registry.load(kernel)
    gemm = module.Gemm if kernel == "hopper.gemm" else module.plan.args[0].gemm
    draw = random.Random(kernel)
    valid = 0

    for config in drawn_configs(kernel, draw):
        if reason := gemm.invalid_reason(config):
            assert "expected" in reason
            continue
        case = ragged(draw, config)
        result = check(kernel, case, config=config)
        assert result.ok, f"{config} at {case}: {result.message}"
        valid += 1
        if valid == 24:
            return

    pytest.fail(f"only {valid} valid configs in 2000")


def ragged(draw: random.Random, config: HopperConfig) -> Case:
    """A product of a few cluster tiles in sizes that TMA takes."""
    rows, columns = config.tile_m * config.cluster_m, config.tile_n * config.cluster_n
    M, N, K = (
        draw.randint(1, 4 * rows),
        draw.randint(1, 4 * columns),
        8 * draw.randint(1, config.tile_k),
    )
    layout = draw.choice(("nt", "nn", "tn", "tt"))
    return Case(
        M + -M % 8 if layout[0] == "t" else M,
        N + -N % 8 if layout[1] == "n" else N,
        K,
        draw.choice((BF16, F16)),
        layout=layout,
        out_layout=draw.choice("nnt"),
        out_dtype=draw.choice((None, torch.float32)),
    )


@pytest.mark.parametrize("kernel", PERSISTENT)
@pytest.mark.parametrize("sms", [1, 2, 5, 0])
def test_few_sms_compute_all_tiles(kernel: str, sms: int) -> None:
    config = own(kernel)
    few = replace(config, sms=max(sms, config.cluster) if sms else 0)

    result = check(kernel, Case(900, 1800, 200, BF16, layout="nt"), config=few)

    assert result.ok, result.message


# ---- phases
@dataclass(frozen=True)
class Phases:
    """What the stopwatch of a rung found for a product of 1024 x 1024 x 1024."""

    kernel: str
    config: HopperConfig
    roles: list[Any]
    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor

    @property
    def least_cycles(self) -> float:
        """Cycles that the tensor cores need for a tile."""
        return 2 * self.config.tile_m * self.config.tile_n * 1024 / 4096


@pytest.fixture(scope="module", params=NAMES[:-1])  # hopper.gemm has no stopwatch
def phases(request: pytest.FixtureRequest) -> Phases:
    """The phases of a rung, measured once."""
    module = registry.load(request.param)
    a, b = (torch.randn(1024, 1024, device="cuda").to(BF16) for _ in range(2))
    out = torch.empty_like(a)
    roles = module.phases(a, b.t(), out)
    return Phases(request.param, module.Config(), roles, a, b.t(), out)


def test_a_product_under_the_stopwatch_is_right(phases: Phases) -> None:
    want = outblas.matmul(phases.a, phases.b, kernel=phases.kernel)

    assert torch.equal(phases.out, want)


def test_there_is_a_role_for_each_warpgroup(phases: Phases) -> None:
    names = [role.name for role in phases.roles]

    if len(names) == 1:
        assert names == ["all"]
    else:
        assert names == ["producer", "consumer 1", "consumer 2"][: len(names)]


def test_a_role_takes_as_long_as_its_products(phases: Phases) -> None:
    for role in phases.roles:
        # A producer has loaded its last k-blocks before they are multiplied.
        least = phases.least_cycles / (2 if role.name == "producer" else 1)
        assert least < role.total < 12 * phases.least_cycles, f"{role}, and wgmma needs {least}"


def test_only_consumers_multiply_and_store(phases: Phases) -> None:
    for role in phases.roles:
        multiplies = role.name != "producer"
        assert (role.tensor > 0) == (role.store > 0) == multiplies, role


def test_consumers_multiply_for_half_of_the_least_time(phases: Phases) -> None:
    steps = 1024 // phases.config.tile_k

    for role in phases.roles:
        if role.name != "producer":
            least = phases.least_cycles / phases.config.consumers
            assert steps * role.tensor > 0.5 * least, role


# ---- sanitizers


SANITIZED = """
import torch, outblas
from outblas.base import registry
from dataclasses import replace
a = torch.randint(-4, 5, (520, 200), device="cuda").bfloat16()
b = torch.randint(-4, 5, (776, 200), device="cuda").bfloat16().t()
want = (a.double() @ b.double()).bfloat16()
for kernel in registry.ladder("hopper"):
    config = registry.load(kernel.name).Config()
    if config.sms:
        config = replace(config, sms=4)  # several tiles a CTA
    assert torch.equal(outblas.matmul(a, b, kernel=kernel.name, config=config), want), kernel.name
    print("right:", kernel.name)
"""


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["synccheck", "racecheck"])
def test_sanitizers_find_nothing(tool: str) -> None:
    sanitizer.finds_nothing(tool, SANITIZED, len(NAMES))
