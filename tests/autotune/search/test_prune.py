"""Which configs the pruner takes away: what cannot run, and what wastes the GPU and is not even
predicted to be fast.
"""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from support.spaces import FOOTPRINT
from support.stored import INTERPRETED

from outblas.autotune.search import cost_model, prune, target
from outblas.autotune.search.gpu import imagined
from outblas.autotune.store.records import Workload
from outblas.base.space import Footprint, Space

H100 = imagined("H100")
WORKLOAD = Workload(128, 132 * 128, 4096)  # a tile of 128x128 for each SM


@dataclass(frozen=True)
class Config:
    """A tile of so many columns: of 1024, an eighth of the SMs has one."""

    tile_n: int = 128


def pruned(own: int = 128, slow: tuple[int, ...] = (), invalid: tuple[int, ...] = ()):
    """The space of a kernel whose own config has tiles of `own` columns, pruned: `slow` tiles are
    predicted to be slow, `invalid` ones cannot run.
    """
    space = Space(
        own=Config(own),
        axes={"tile_n": (128, 256, 1024)},
        invalid_reason=lambda c: f"{c.tile_n} columns" if c.tile_n in invalid else None,
        footprint=lambda c: replace(FOOTPRINT, tile_n=c.tile_n),
    )
    kernel: Any = SimpleNamespace(
        name="made_up", load=lambda: SimpleNamespace(space=lambda problem, machine: space)
    )
    predict = cost_model.predict

    def prediction(f: Footprint, *of: Any) -> cost_model.Prediction:
        return replace(predict(f, *of), us=9.0 if f.tile_n in slow else 5.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost_model, "predict", prediction)
        return prune.prune([kernel], WORKLOAD, H100)


def widths(found) -> list[int]:
    """The tiles of the configs that are left."""
    return sorted(each.config.tile_n for each in found.candidates)


@pytest.mark.parametrize(
    ("own", "slow", "left"),
    [
        pytest.param(128, (1024,), [128, 256], id="what is slow goes"),
        pytest.param(128, (128, 256), [128, 256, 1024], id="what is predicted to be the fastest"),
        pytest.param(1024, (1024,), [128, 256, 1024], id="the kernel's own config"),
    ],
)
def test_what_wastes_the_gpu_stays_where_it_may_be_the_fastest(
    own: int, slow: tuple[int, ...], left: list[int]
) -> None:
    found = pruned(own, slow)

    assert widths(found) == left
    reasons = [each.rule for each in found.pruned]
    assert ["of the work that the SMs do is needed" in reason for reason in reasons] == [True] * (
        3 - len(left)
    )


def test_what_cannot_run_goes_with_its_reason() -> None:
    found = pruned(invalid=(128, 256))

    assert widths(found) == [1024]
    assert [(each.rule, each.example, each.count) for each in found.pruned] == [
        ("# columns", "128 columns", 2)
    ]
    assert found.generated == 3


def test_on_a_cpu_the_config_with_fewer_programs_is_predicted_to_be_faster() -> None:
    found = prune.prune([target.of("portable")], Workload(64, 64, 64), INTERPRETED)

    best = min(found.candidates, key=lambda each: each.predicted_us)
    worst = max(found.candidates, key=lambda each: each.predicted_us)

    assert (best.config.block_m, best.config.block_n) == (64, 64)
    assert (worst.config.block_m, worst.config.block_n) == (16, 16)
