"""CUDA-core rungs on a GPU beyond the oracles that every kernel passes: summation, presets,
configs, memcheck.
"""

import random
from collections.abc import Iterator

import pytest
import torch
from support import sanitizer
from support.rungs import NAMES, bodies, fitted, valid_configs

import outblas
from outblas.base import registry
from outblas.base.configs import from_text
from outblas.kernels.simt_config import PRESETS, SimtConfig, invalid_reason
from outblas.verify.cases import Case
from outblas.verify.kernels import check

pytestmark = pytest.mark.gpu

FP32 = torch.float32


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("shape", [(300, 200, 777), (129, 127, 1)])
def test_every_rung_gives_the_same_bits(shape: tuple[int, int, int], layout: str) -> None:
    """All of them add the products of an output in order of K, in one chain of FMAs."""
    M, N, K = shape
    a = (
        torch.randn(M, K, device="cuda")
        if layout[0] == "n"
        else torch.randn(K, M, device="cuda").t()
    )
    b = (
        torch.randn(K, N, device="cuda")
        if layout[1] == "n"
        else torch.randn(N, K, device="cuda").t()
    )
    want = outblas.matmul(a, b, kernel=NAMES[0])

    for name in NAMES[1:]:
        assert torch.equal(outblas.matmul(a, b, kernel=name), want), name


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(
    "case",
    [
        case
        for dtype in (FP32, torch.bfloat16)
        for case in (Case(257, 130, 67, dtype, layout="nt"), Case(256, 256, 64, dtype))
    ],
    ids=str,
)
def test_presets_are_right(preset: str, case: Case) -> None:
    kernel, text = PRESETS[preset]
    config = from_text(registry.load(kernel).Config, text)

    result = check(kernel, case, config=config)

    assert result.ok, result.message


@pytest.mark.parametrize("config", valid_configs(40, seed=7), ids=str)
def test_a_config_that_is_valid_is_right(config: SimtConfig) -> None:
    draw = random.Random(str(config))
    for name in bodies(config):
        own = fitted(name, config)
        assert invalid_reason(own, 48 * 1024, 2) is None
        sizes = (
            config.block_m + draw.randrange(3) - 1,
            2 * config.block_n + draw.randrange(3),
            draw.choice((1, 40, 67)),
        )
        layout = draw.choice(("nn", "nt", "tn", "tt"))
        for case in (
            Case(*sizes, FP32, layout=layout),
            Case(config.block_m, config.block_n, 64, FP32, layout=layout),
        ):
            result = check(name, case, config=own)
            assert result.ok, result.message


@pytest.fixture
def tf32_allowed() -> Iterator[None]:
    """Torch allows fp32 products to round their operands to tf32."""
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("tf32_allowed")
def test_ieee_products_are_refused_as_tf32() -> None:
    a = torch.randn(64, 64, device="cuda")

    with pytest.raises(
        ValueError, match=r"kernel 'simt.pipelined': multiplies in IEEE fp32, but was given fp32"
    ):
        outblas.matmul(a, a, kernel="simt.pipelined")


TAILS = """
import itertools, torch, outblas
from outblas.base import registry

SHAPES = (129, 127, 33), (1, 1, 1), (64, 260, 17), (256, 128, 64), (130, 131, 7)
DTYPES = torch.float32, torch.bfloat16, torch.float16
CASES = list(zip(itertools.product(SHAPES, DTYPES), itertools.cycle(("nn", "nt", "tn", "tt"))))

def draw(rows, columns, dtype, letter="n"):
    if letter == "t":
        return draw(columns, rows, dtype).t()
    return torch.randint(-8, 9, (rows, columns), device="cuda").to(dtype)

for kernel in registry.ladder("simt"):
    for ((M, N, K), dtype), layout in CASES:
        a, b, c = draw(M, K, dtype, layout[0]), draw(K, N, dtype, layout[1]), draw(M, N, dtype)
        products = a.double() @ b.double()
        found = outblas.matmul(a, b, kernel=kernel.name)
        assert torch.equal(found, products.to(dtype)), kernel.name
        added = outblas.addmm(c, a, b, alpha=2.0, beta=-0.5, kernel=kernel.name)
        assert torch.equal(added, (2 * products - 0.5 * c.double()).to(dtype)), kernel.name
    print("right:", kernel.name)
"""


@pytest.mark.slow
def test_memcheck_finds_nothing_at_the_edges() -> None:
    sanitizer.finds_nothing("memcheck", TAILS, len(NAMES))
