"""Tensor-core rungs on a GPU beyond the oracles that every kernel passes: code for sm_75 on newer
GPUs, configs, sanitizers.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import sanitizer
from support.turing_rungs import FP16, NAMES, own, valid_configs

import outblas
from outblas.base import registry
from outblas.turing.config import TuringConfig
from outblas.verify import cases
from outblas.verify.cases import Case
from outblas.verify.kernels import Refused, check, oracles

pytestmark = pytest.mark.gpu

TURING = [name for name in NAMES if name != "turing.cp_async"]


def matrix() -> Iterator[Any]:
    for name in TURING:
        config = own(name, arch=75)
        for case in cases.full(FP16, config.block_m, config.block_n, config.block_k):
            yield pytest.param(name, case, id=f"{name}-{case}")


@pytest.mark.parametrize(("name", "case"), list(matrix()))
def test_code_for_sm_75_is_right(name: str, case: Case) -> None:
    """m16n8k8 and all that sm_75 has, from its PTX."""
    for oracle in oracles(name):
        result = check(name, case, oracle, config=own(name, arch=75))
        assert result.ok, f"{oracle}: {result.message}"


@pytest.mark.parametrize("case", list(cases.quick(torch.bfloat16, 128, 256, 32)), ids=str)
def test_code_for_sm_80_is_right_too(case: Case) -> None:
    result = check("turing.cp_async", case, config=own("turing.cp_async", arch=80))

    assert result.ok, result.message


def test_bfloat16_is_refused_where_turing_has_none() -> None:
    case, config = Case(64, 64, 64, torch.bfloat16), own("turing.shared", arch=75)

    with pytest.raises(Refused, match="needs sm_80 for bfloat16 operands"):
        check("turing.shared", case, config=config)


@pytest.mark.parametrize("arch", [0, 75])
@pytest.mark.parametrize(("name", "config"), valid_configs(40, seed=3), ids=str)
def test_a_config_that_is_valid_is_right(name: str, config: TuringConfig, arch: int) -> None:
    if name == "turing.cp_async" and arch:
        arch = 80
    draw = random.Random(str(config))
    sizes = (
        config.block_m + draw.randrange(3) - 1,
        2 * config.block_n + draw.randrange(3),
        draw.choice((1, 40, 67, 500)),
    )
    even = 2 * config.block_m, config.block_n, config.block_k * config.stages * 3

    for shape in (sizes, even):
        case = Case(*shape, FP16, layout=draw.choice(("nn", "nt", "tn", "tt")))
        result = check(name, case, config=replace(config, arch=arch))
        assert result.ok, result.message


@pytest.mark.parametrize("edge", [64, 72])
@pytest.mark.parametrize("name", ["turing.ldmatrix", "turing.double_buffer", "turing.cp_async"])
def test_one_warp_with_vectors_of_a_and_single_elements_of_b(name: str, edge: int) -> None:
    """What Triton 3.6's LLVM once gave wrong addresses."""
    config = own(
        name,
        block_m=32,
        block_n=32,
        block_k=32,
        warps_m=1,
        warps_n=1,
        vector=8,
        ctas=1,
        stage_out=False,
    )
    a = torch.randint(-8, 9, (edge, edge), device="cuda").half()
    b = torch.randint(-8, 9, (edge, edge + 1), device="cuda").half()[:, :edge].t()

    got = outblas.matmul(a, b, kernel=name, config=config)

    assert torch.equal(got, (a.double() @ b.double()).half())


@pytest.mark.parametrize("name", NAMES)
def test_calls_repeat_to_the_bit(name: str) -> None:
    """A race of copies and products would show as a sum that wavers."""
    a = torch.randn(1111, 1000, device="cuda").half()
    b = torch.randn(777, 1000, device="cuda").half().t()
    want = outblas.matmul(a, b, kernel=name)

    for call in range(100):
        assert torch.equal(outblas.matmul(a, b, kernel=name), want), f"call {call}"


CALLS = """
import itertools, sys, torch, outblas
from dataclasses import replace
from outblas.base import registry

SHAPES = (129, 127, 33), (1, 1, 1), (64, 264, 40), (128, 256, 128), (130, 131, 7)
CASES = list(zip(SHAPES, itertools.cycle(("nt", "nn", "tn", "tt"))))

def draw(rows, columns, letter="n"):
    if letter == "t":
        return draw(columns, rows).t()
    return torch.randint(-8, 9, (rows, columns), device="cuda").half()

for kernel in registry.ladder("turing"):
    for arch in (0, 80 if kernel.min_arch > 75 else 75):
        config = replace(registry.load(kernel.name).Config(), arch=arch)
        for (M, N, K), layout in CASES:
            a, b, c = draw(M, K, layout[0]), draw(K, N, layout[1]), draw(M, N)
            products = a.double() @ b.double()
            found = outblas.matmul(a, b, kernel=kernel.name, config=config)
            assert torch.equal(found, products.half()), kernel.name
            added = outblas.addmm(c, a, b, alpha=2.0, beta=-0.5, kernel=kernel.name, config=config)
            assert torch.equal(added, (2 * products - 0.5 * c.double()).half()), kernel.name
        print("right:", kernel.name, arch, flush=True)
"""


ONLY_OURS = "--kernel-regex", "kns=outblas"
WITHOUT_BARRIERS = """
import re, torch, outblas
from outblas.device import gluon
from outblas.turing.shared import Config

def load_broken(compiled):
    broken, removed = re.subn("bar.sync[^;]*;", "", compiled.asm["ptx"])
    assert removed
    compiled.kernel = broken.encode() + bytes(1)

gluon.load_as_ptx = load_broken
a = torch.ones(256, 256, device="cuda").half()
outblas.matmul(a, a, kernel="turing.shared", config=Config(arch=75))
torch.cuda.synchronize()
print("launched")
"""


@pytest.mark.slow
def test_racecheck_sees_that_barriers_are_missing() -> None:
    """What `ONLY_OURS` lets it look at are our kernels."""
    done = sanitizer.run("racecheck", WITHOUT_BARRIERS, *ONLY_OURS)

    assert done.returncode == sanitizer.FOUND, done.stdout[-3000:] + done.stderr[-2000:]
    assert "launched" in done.stdout
    assert "outblas_turing_shared" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_sanitizer_finds_nothing(tool: str) -> None:
    sanitizer.finds_nothing(
        tool, CALLS, 2 * len(registry.ladder("turing")), *(() if tool == "memcheck" else ONLY_OURS)
    )
