"""The packs of the wheel: which configs they have, and that their kernels serve every call."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from outblas.base import machines
from outblas.call.products import parse_line
from outblas.hopper import grouped
from outblas.hopper.gemm import heuristic, packed
from outblas.hopper.gemm.rule_cycles import rates
from outblas.packing import examples
from tools import wheel_packs

H100 = machines.find("H100")


def test_few_configs_are_those_with_the_least_mean_time() -> None:
    """The best alone is not among the best two."""
    times = np.array([[1.0, 3.0, 1.5], [3.0, 1.0, 1.5], [1.0, 4.0, 1.5], [4.0, 1.0, 1.5]])

    assert wheel_packs.least_regret(times, 1) == [2]
    assert sorted(wheel_packs.least_regret(times, 2)) == [0, 1]


def test_no_exchange_of_a_config_would_be_better() -> None:
    times = np.random.default_rng(0).uniform(1, 3, (40, 12))

    chosen = wheel_packs.least_regret(times, 4)

    def mean(columns: list[int]) -> float:
        return float(times[:, columns].min(axis=1).mean())

    for i, other in itertools.product(range(4), range(12)):
        assert mean(chosen) <= mean([*chosen[:i], other, *chosen[i + 1 :]]) + 1e-9


@pytest.mark.long
@pytest.mark.parametrize("name", ["bfloat16", "bfloat16-gated", "fp8-blocks"])
def test_every_number_of_rows_has_its_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [(6144, 4096), (28672, 4096), (4096, 14336)]
    monkeypatch.setattr(wheel_packs, "sizes", lambda kind: layers)
    kind = wheel_packs.KINDS[name]
    first, last = kind.epilogues[0], kind.epilogues[-1]
    kind = wheel_packs.Kind(kind.words, (first, last))
    posed = list(wheel_packs.problems(kind, first, wheel_packs.rows_of_choices()))
    times, keys = wheel_packs.relative_times(posed, H100)
    chosen = frozenset(keys[i] for i in wheel_packs.least_regret(times, 12))

    kernels = set(wheel_packs.variants(kind, chosen, posed, H100))

    some = random.Random(name).sample(range(1, wheel_packs.MOST_ROWS + 1), 150)
    for epilogue in (first, last):
        for problem in wheel_packs.problems(kind, epilogue, sorted(some)):
            config = heuristic.config(problem, rates(H100), chosen)
            assert kernels.issuperset(packed.variants(problem, config, H100)), problem.M


@pytest.mark.parametrize("name", wheel_packs.KINDS_OF_EXPERTS)
def test_every_number_of_rows_of_experts_has_its_kernel(name: str) -> None:
    words = wheel_packs.KINDS_OF_EXPERTS[name]
    kernels = set(wheel_packs.expert_variants(words, H100))
    dtype, _, scaling = words.partition(" ")
    some = random.Random(name).sample(range(1, wheel_packs.MOST_ROWS + 1), 100)

    for count, top, hidden, inner, steps in wheel_packs.EXPERTS.values():
        line = f"1x{2 * inner}x{hidden} {dtype} nt {steps} {scaling} groups:{count}"
        rows = tuple((top * each, top * each) for each in some)
        products = replace(parse_line(line), rows=rows)
        assert products.groups is not None
        for problem in examples.grouped_problems(products, products.groups):
            assert grouped.pack_variant(grouped.pack_problem(problem), None, H100) in kernels
