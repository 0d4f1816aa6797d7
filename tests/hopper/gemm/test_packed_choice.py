"""Where no tuning result suits a call, the best config is taken whose kernel a pack has."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.gemm_problems import BF16, product
from support.served_by_pack import forget_packs

import outblas
from outblas.base import pack
from outblas.base.configs import to_text
from outblas.call.artifact import example
from outblas.call.problem import Problem
from outblas.call.steps import Steps
from outblas.hopper.gemm import heuristic, packed_choice
from outblas.hopper.gemm.rule_cycles import Rates
from outblas.hopper.gemm.variant import example_variant
from outblas.hopper.parts.config import HopperConfig, compile_key

GPU = Rates()
LARGE, SMALL = product(4096, 4096, 4096), product(128, 4096, 4096)
BIASED = example(BF16, None, "nt", (4096, 4096, 4096), steps=Steps(bias=True))


@pytest.fixture(autouse=True)
def _no_packs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.delenv("OUTBLAS_PACK", raising=False)
    monkeypatch.setattr(pack, "SHIPPED", tmp_path / "none")
    forget_packs()
    yield
    forget_packs()


def serve(folder: Path, keys: set[HopperConfig], *problems: Problem, kind: str) -> None:
    """A pack of these configs, with the kernels with which they compute some problems."""
    best = [(each, heuristic.config(each, GPU, frozenset(keys))) for each in problems]
    objects = [(example_variant(*each).cache_key_fields, b"") for each in best]
    pack.write(folder / "x.pack", {"configs": {kind: list(map(to_text, keys))}}, objects)
    outblas.load_pack(folder / "x.pack")


def test_without_packs_it_is_the_best_of_all() -> None:
    assert packed_choice.config(LARGE, GPU) == heuristic.config(LARGE, GPU)
    assert packed_choice.packed_config(LARGE, GPU) is None


def test_it_is_the_best_of_those_in_a_pack(tmp_path: Path) -> None:
    """The best of all for one GEMM, and the next ones for another."""
    best, call = heuristic.config(LARGE, GPU), heuristic.call_of(SMALL, GPU)
    of_small = sorted(heuristic.candidates(call), key=lambda each: each.cycles(call))
    _, second, third, *_ = dict.fromkeys(each.key for each in of_small)
    serve(tmp_path, {compile_key(best), third, second}, LARGE, SMALL, kind="bfloat16")

    assert packed_choice.config(LARGE, GPU) == best
    assert compile_key(packed_choice.config(SMALL, GPU)) == second


@pytest.mark.parametrize(
    ("problem", "kind"),
    [
        (BIASED, "bfloat16"),  # the same config, and another kernel
        (LARGE, "float16"),
        (product(4096, 4096, 4096, batch_invariant=True), "bfloat16"),
    ],
    ids=["no kernel", "another kind", "no config that suits"],
)
def test_what_the_pack_does_not_have_is_the_best_of_all(
    problem: Problem, kind: str, tmp_path: Path
) -> None:
    serve(tmp_path, {compile_key(heuristic.config(LARGE, GPU))}, LARGE, kind=kind)

    assert packed_choice.config(problem, GPU) == heuristic.config(problem, GPU)
    assert packed_choice.packed_config(problem, GPU) is None
