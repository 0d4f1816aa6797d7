"""The CUDA-core ladder's configs and refusals, and what rungs of both Gluon ladders share: the
types of their arguments, and configs that travel.
"""

import ast
import re
import textwrap
from typing import Any

import pytest
from support.rungs import NAMES, own, problem, rung

from outblas.base import registry
from outblas.base.configs import from_text
from outblas.call.problem import Problem
from outblas.device import grid, simt
from outblas.kernels.simt_config import invalid_reason

GLUON = [*NAMES, *(kernel.name for kernel in registry.ladder("turing"))]


# ---- what is refused
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("block_m=96", "block_m is 96, expected a power of two from 1 to 1024"),
        (
            "warp_m=256",
            "piece_m, thread_m, warp_m, block_m are 8, 8, 256, 128, expected each to divide the "
            "next",
        ),
        ("thread_n=8", "a warp tile of 64x64 outputs has 64 threads of 8x8, expected 32"),
        ("pad=3", "pad is 3, expected 0, 1, 2, 4, 8 or 16 words"),
        ("pad=1", "pad is 1, expected a multiple of 4 where A is transposed"),
        ("vector=8", "vector is 8, expected 1, 2 or 4"),
        ("store_at=16", "store_at is 16, expected a term of the k-block, 0 to 15"),
        ("group_m=0", "group_m is 0, expected 1 to 1024"),
        ("ctas=0", "ctas is 0, expected 1 to 32"),
        ("ctas=4", "ctas is 4: 128 registers per thread, too few for 128 sums"),
        ("ctas=32", "ctas is 32: 4096 threads, but an SM has at most 2048"),
        ("block_m=512,block_n=512", "the tile takes 2048 threads, expected at most 1024"),
        (
            "thread_m=16,thread_n=16,warp_m=128",
            "thread_m x thread_n is 256 sums per thread, expected at most 128",
        ),
        ("block_k=128", "block_m x block_k is 128 elements per thread, expected at most 64"),
    ],
)
def test_an_invalid_config_says_why(text: str, reason: str) -> None:
    config = from_text(registry.load("simt.warptile").Config, text)

    assert str(invalid_reason(config)).startswith(reason)


def test_tensors_on_the_cpu_are_refused() -> None:
    assert "needs CUDA tensors" in str(registry.load("simt.pipelined").unsupported(problem()))


def test_a_config_of_another_kernel_is_refused() -> None:
    config = registry.load("portable").Config()

    with pytest.raises(
        ValueError, match=r"config is a PortableConfig, expected the Config of simt.pipelined"
    ):
        registry.load("simt.pipelined").artifact(config)


@pytest.mark.parametrize(
    ("kernel", "changes", "reason"),
    [
        ("simt.pipelined", {"warp_m": 128, "thread_m": 16}, "thread_m x thread_n is 256"),
        (
            "simt.pipelined",
            {"prefetch": False},
            "prefetch is False, expected True: simt.pipelined has no other",
        ),
        ("simt.warptile", {"store_at": 3}, "store_at is 3, expected 0: simt.warptile has no other"),
        ("simt.naive", {"block_k": 16}, "block_k is 16, expected 1: simt.naive has no other"),
        ("simt.naive", {"block_m": 32.0}, "block_m is 32.0 (float), expected int"),
        ("simt.shared", {"prefetch": 1}, "prefetch is 1 (int), expected bool"),
    ],
    ids=str,
)
def test_a_config_that_a_rung_cannot_take_is_refused(
    kernel: str, changes: dict[str, Any], reason: str
) -> None:
    config = own(kernel, **changes)

    with pytest.raises(ValueError, match=re.escape(f"config: {reason}")):
        registry.load(kernel).artifact(config)


# ---- types of arguments
def specialized(name: str, given: Problem) -> tuple[dict[str, Any], dict[str, Any]]:
    """Constants of a rung's kernel and the types of its arguments."""
    constants = rung(name).constants(own(name), given, 90)
    return constants, dict(rung(name).specialization(own(name), given, constants, 90).signature)


@pytest.mark.parametrize(
    ("layout", "shape", "operand", "dimension"),
    [
        pytest.param("tn", (2**28, 8, 65), "a", "col", id="K-blocks of A"),
        pytest.param("nn", (8, 2**28, 65), "b", "row", id="K-blocks of B"),
    ],
)
@pytest.mark.parametrize("name", GLUON)
def test_wide_products_step_in_64_bits(
    name: str, layout: str, shape: tuple[int, int, int], operand: str, dimension: str
) -> None:
    """K-blocks lie more than 2³¹ elements apart, strides do not."""
    constants, types = specialized(name, problem(layout, shape, rung(name).dtype))

    assert constants["TILE"].wide
    assert types["size"].K == "i64"
    assert getattr(getattr(types["strides"], operand), dimension) == "i64"


@pytest.mark.parametrize("name", GLUON)
def test_loops_end_beyond_32_bits_where_k_is_near_them(name: str) -> None:
    K = 2**31 - 8 * own(name).block_k

    assert grid.needs_int64(problem("nt", (1, 1, K), rung(name).dtype), own(name))


# ---- bodies
@pytest.mark.parametrize("name", GLUON)
def test_a_body_reads_every_parameter_it_takes(name: str) -> None:
    body = rung(name).body
    (function,) = ast.parse(textwrap.dedent(body.src)).body

    read = {
        node.id
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }

    assert set(body.arg_names) <= read
    assert len(body.arg_names) <= 15


@pytest.mark.parametrize(
    ("shape", "group_m"),
    [((16, 2**26, 16), 1), ((64, 2**26, 16), 2), ((16, 2**20, 16), 1024)],
    ids=str,
)
def test_groups_of_tiles_are_counted_in_32_bits(shape: tuple[int, int, int], group_m: int) -> None:
    config = own("simt.shared", group_m=1024)

    assert grid.group_m(config, problem(shape=shape)) == group_m


# ---- the order of FFMAs
def order_of_ffmas() -> list[list[int]]:
    """The operands of each FFMA of a thread's 4 x 8 sums: sum, row, column, sum."""
    text, _, _ = simt.snake(4, 8)
    return [
        [int(part.strip(" $;")) for part in line.removeprefix("fma.rn.f32").split(",")]
        for line in text.split("\n")
    ]


def test_every_sum_has_one_ffma_of_its_own_operands() -> None:
    order = order_of_ffmas()

    assert sorted(line[0] for line in order) == list(range(8))
    assert all(line == [line[0] + 8 * i for i in range(4)] for line in order)
