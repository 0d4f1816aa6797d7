"""What a call takes of what is known: a winner at its workload, the winners near it and the rule of
the kernel, the model; and what is said of that. No GPU needed.
"""

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from support.known import A100, CONFIGS, H100, H200, OLDER, PCIE, SQUARE, Know, knowing, winner
from support.stored import INTERPRETED, sql

from outblas.autotune import named_configs
from outblas.autotune.lookup import NEIGHBOURS, TuningIndex, is_faster
from outblas.autotune.named_configs import ChosenConfig
from outblas.autotune.search import cost_model, prune
from outblas.autotune.store.records import BestConfig, Gpu, Workload
from outblas.autotune.store.store import Store
from outblas.autotune.tuned_entries import COUSIN, HERE, MODEL, SHIPPED
from outblas.base.configs import to_text
from outblas.call.problem import Problem
from outblas.hopper import gemm, hilbert
from outblas.kernels.portable_config import PortableConfig
from tools.ship import ship

# One binary order of magnitude from SQUARE, which is within reach, and two, which is beyond.
NEAR, FAR = replace(SQUARE, M=2048), replace(SQUARE, M=1024)
COLD, FUSED = replace(SQUARE, weights="cold"), replace(SQUARE, epilogue="bias+gelu")
HILBERT: dict[str, Any] = {"kernel": "hopper.hilbert", "config": to_text(hilbert.Config())}
NOTHING = "nothing for bfloat16 nt"
NOWHERE = Path("/nonexistent/tuning.sqlite")


@pytest.fixture
def know(tmp_path: Path) -> Know:
    """Makes the knowledge of a GPU from winners in its store, and from those that were shipped."""
    return knowing(tmp_path)


def configs(index: TuningIndex, workload: Workload = SQUARE) -> list[int]:
    """The numbers of the choices' configs."""
    return [CONFIGS.index(choice.config) for choice in index.choices(workload)]


# A winner at the workload.

HERE_AT, HERE_NEAR = winner(0), winner(1, workload=NEAR)
TABLE_AT, TABLE_NEAR = winner(2), winner(3, workload=NEAR)
COUSIN_AT, COUSIN_NEAR = winner(4, gpu=H200), winner(4, gpu=H200, workload=NEAR)


@pytest.mark.parametrize(
    ("here", "shipped", "chosen"),
    [
        pytest.param((), (), [], id="nothing"),
        pytest.param((HERE_AT, HERE_NEAR), (TABLE_AT, TABLE_NEAR), [0], id="this GPU"),
        pytest.param((HERE_NEAR,), (TABLE_AT, TABLE_NEAR, COUSIN_AT), [2], id="the table"),
        pytest.param((HERE_NEAR,), (TABLE_NEAR, COUSIN_AT), [1, 3], id="near, here and shipped"),
        pytest.param((), (TABLE_NEAR, COUSIN_AT), [3], id="near in the table"),
        pytest.param((), (COUSIN_AT,), [4], id="another model of GPU"),
        pytest.param((), (COUSIN_NEAR,), [4], id="near on another model of GPU"),
        pytest.param(
            (winner(5, gpu=OLDER, ratio=1.5), winner(0)), (), [0], id="this driver comes first"
        ),
        pytest.param((winner(5, gpu=OLDER),), (), [5], id="another driver"),
        pytest.param(
            (winner(1, source="new", ratio=0.9), winner(0, source="old")), (), [1], id="the newest"
        ),
        pytest.param((winner(0), winner(1, workload=COLD)), (), [0], id="warm weights"),
        pytest.param((winner(1, workload=COLD), HERE_NEAR), (), [1], id="cold weights stand in"),
        pytest.param((winner(0, workload=FUSED),), (), [], id="an epilogue is no plain call"),
    ],
)
def test_a_winner_at_the_workload_is_taken_and_else_those_near_it(
    know: Know, here: tuple[BestConfig, ...], shipped: tuple[BestConfig, ...], chosen: list[int]
) -> None:
    assert configs(know(*here, shipped=shipped)) == chosen


@pytest.mark.parametrize(
    ("tuned", "asked", "chosen"),
    [
        pytest.param(FUSED, FUSED, [1, 0], id="with its epilogue, then the bare GEMM"),
        pytest.param(replace(FUSED, weights="cold"), FUSED, [1, 0], id="cold weights stand in"),
        pytest.param(replace(FUSED, epilogue="bias"), FUSED, [0], id="another epilogue"),
        pytest.param(
            replace(SQUARE, N=8192),
            replace(SQUARE, N=8192, epilogue="swiglu"),
            [0],
            id="a gated one has half the columns",
        ),
    ],
)
def test_a_call_with_an_epilogue(
    know: Know, tuned: Workload, asked: Workload, chosen: list[int]
) -> None:
    assert configs(know(winner(0), winner(1, workload=tuned)), asked) == chosen


# The winners near it.


@pytest.mark.parametrize(
    ("asked", "within"),
    [
        (replace(SQUARE, K=8192), True),
        (replace(SQUARE, M=2048, N=2048), True),
        (replace(SQUARE, M=2048, N=1024), False),
        (FAR, False),
        (replace(SQUARE, dtype="float16", out_dtype="float16"), False),
        (replace(SQUARE, out_dtype="float32"), False),
        (replace(SQUARE, layout="nn"), False),
        (replace(SQUARE, dtype="tf32", out_dtype="float32"), False),
    ],
    ids=str,
)
def test_a_winner_serves_its_own_kind_within_reach(
    know: Know, asked: Workload, within: bool
) -> None:
    reasons = [choice.why for choice in know(winner()).choices(asked)]

    assert any("neighbour 4096 bfloat16 nt" in reason for reason in reasons) == within


def production(config: str, us: float, M: int, N: int, K: int, layout: str = "nt") -> BestConfig:
    workload = Workload(M, N, K, layout=layout)
    return winner(workload=workload, kernel="hopper.gemm", config=config, us=us)


@pytest.mark.parametrize("change", [{"layout": "tn"}, {"dtype": "float16", "out_dtype": "float16"}])
def test_the_production_kernel_serves_all_layouts_and_16_bit_dtypes(
    know: Know, change: dict[str, Any]
) -> None:
    index = know(production(to_text(gemm.Config()), 100.0, 4096, 4096, 4096))

    assert to_text(gemm.Config()) in {c.config for c in index.choices(replace(NEAR, **change))}
    assert index.choices(replace(NEAR, **change, epilogue="bias"))


# Of two winners at neighbours, the nearer one has half-wide tiles.
ASKED = replace(SQUARE, N=4096 - 256)
TALL, FLAT = (to_text(gemm.Config(tile_n=tile_n)) for tile_n in (256, 128))
NEARER = production(FLAT, 200.0, 4096, 4096 - 512, 4096)
FARTHER = production(TALL, 80.0, 2048, 4096 - 256, 4096)


@pytest.mark.parametrize(
    ("us_of_nearer", "chosen"),
    [(200.0, [TALL, FLAT]), (120.0, [FLAT, TALL])],
    ids=["200 µs", "120"],
)
def test_the_time_near_it_and_the_fit_here_decide_not_the_distance(
    know: Know, us_of_nearer: float, chosen: list[str]
) -> None:
    choices = know(replace(NEARER, us=us_of_nearer), FARTHER).choices(ASKED)

    assert [choice.config for choice in choices if choice.config] == chosen
    (rule,) = (choice for choice in choices if not choice.config)
    assert rule.why.startswith("its own heuristic, ")


def expected(choice: ChosenConfig) -> float:
    match = re.search(r"([\d.]+) µs expected", choice.why)
    assert match, choice.why
    return float(match.group(1))


def test_a_config_that_won_at_two_neighbours_keeps_its_better_place(know: Know) -> None:
    """It is faster than the rule by what it took at the one and slower by what it took at the
    other.
    """
    fast = replace(NEARER, us=0.5 * NEARER.us)
    slow = replace(FARTHER, config=NEARER.config, us=2.0 * FARTHER.us)

    for entries in ((fast, slow), (slow, fast)):
        choices = know(*entries).choices(ASKED)

        assert [choice.config for choice in choices].count(NEARER.config) == 1
        assert choices[0].config == NEARER.config


WIDE = to_text(gemm.Config(tile_n=256))
HALF = to_text(gemm.Config(tile_n=128, stages=6))


def test_another_layout_of_the_same_shape_counts_more_than_another_shape(know: Know) -> None:
    """Measured on an H100: half the rows promised 6% less than they took, and the same shape took
    in this layout what it had taken in another.
    """
    index = know(
        production(WIDE, 87.5, 1024, 4096, 8192),
        production(HALF, 42.5, 512, 4096, 8192, layout="nn"),
    )

    choices = index.choices(Workload(1024, 4096, 8192, layout="nn"))

    first, second = (choice for choice in choices if choice.config)
    assert first.config == WIDE
    assert expected(second) < expected(first) < 1.06 * expected(second)


def test_a_config_that_does_not_run_here_is_no_choice(know: Know) -> None:
    """Copies by 16 bytes do not fit rows of 4095 elements."""
    index = know(winner(workload=replace(SQUARE, N=2048), **HILBERT))

    assert index.choices(SQUARE)[0].kernel == "hopper.hilbert"
    assert index.choices(replace(SQUARE, K=4095)) == ()


LARGE = Workload(16, 57344, 8192)  # whose weights are many times the L2 cache
COLD_LARGE = Workload(16, 51200, 8192, weights="cold")
COLD_SMALL = Workload(16, 2048, 512, weights="cold")


@pytest.mark.parametrize(
    ("asked", "tuned", "serves"),
    [
        (LARGE, COLD_LARGE, True),
        (replace(COLD_SMALL, N=4096, weights="warm"), COLD_SMALL, False),
        (NEAR, COLD, False),
    ],
    ids=["L2 holds neither", "L2 holds both", "L2 holds both, many rows"],
)
def test_cold_weights_serve_other_shapes_where_l2_can_hold_neither(
    know: Know, asked: Workload, tuned: Workload, serves: bool
) -> None:
    choices = know(winner(workload=tuned)).choices(asked)

    assert [choice.config for choice in choices] == [CONFIGS[0]] * serves


def test_without_a_model_the_nearest_comes_first(know: Know) -> None:
    gpu = Gpu("NVIDIA Unheard-of", 89, 77)
    assert named_configs.GpuModel(INTERPRETED).machine is None
    index = know(
        winner(0, workload=replace(SQUARE, M=2048), gpu=INTERPRETED),
        winner(1, workload=replace(SQUARE, M=3072), gpu=INTERPRETED),
        winner(2, gpu=gpu),
        of=INTERPRETED,
    )

    assert configs(index) == [1, 0]


def test_the_table_of_the_nearest_model_of_the_architecture_is_read(know: Know) -> None:
    shipped = winner(0, gpu=PCIE), winner(1, gpu=H200), winner(2, gpu=A100)

    assert [(e.origin, e.gpu) for e in know(shipped=shipped).entries] == [(COUSIN, H200.name)]
    own = know(shipped=shipped, of=PCIE)
    assert {(e.origin, e.gpu) for e in own.entries} == {(SHIPPED, PCIE.name), (COUSIN, H200.name)}
    assert configs(own) == [0]


# The model.

SMALL, BIG = PortableConfig(16, 16, 32, 8, 4, 2), PortableConfig(128, 256, 64, 8, 8, 4)
FAR_AWAY = Workload(16384, 16384, 16384)


def test_the_model_orders_what_won_elsewhere_and_runs_here(know: Know) -> None:
    index = know(
        winner(0, workload=FAR_AWAY, config=to_text(SMALL)),
        winner(1, workload=replace(FAR_AWAY, N=8192), config=to_text(BIG)),
        winner(2, workload=replace(FAR_AWAY, K=8192), config="no_such_field=1"),
        winner(3, workload=replace(FAR_AWAY, M=8192), kernel="no.kernel", config=""),
    )

    with pytest.warns(RuntimeWarning, match="a tuned config of portable is not used: config has"):
        choices = index.choices(SQUARE)

    assert [choice.config for choice in choices] == [to_text(BIG), to_text(SMALL)]
    assert all(choice.why.startswith("analytic model, ") for choice in choices)
    assert dict(index.steps(SQUARE))["model"].startswith("of 2 configs that won at some shape, ")


# What is said of a choice.


@pytest.mark.parametrize(
    ("best", "why"),
    [
        (winner(gpu=INTERPRETED, us=123.4), f"{HERE}, 4096 bfloat16 nt, 123.4 µs there"),
        (winner(), f"{HERE}, 4096 bfloat16 nt, 1.000 × cuBLAS there"),
        (winner(gpu=OLDER), f"{MODEL}, 4096 bfloat16 nt, 1.000 × cuBLAS there"),
        (winner(workload=COLD), f"{HERE}, 4096 bfloat16 nt cold, 1.000 × cuBLAS there"),
        (
            winner(workload=NEAR),
            f"{HERE}, neighbour 2048x4096x4096 bfloat16 nt, 1.000 × cuBLAS there, 198",
        ),
    ],
    ids=["a CPU", "here", "another driver", "cold weights", "nearly twice its 100 µs near it"],
)
def test_a_choice_says_why_it_was_made(know: Know, best: BestConfig, why: str) -> None:
    of = INTERPRETED if best.gpu == INTERPRETED else H100
    assert know(best, of=of).choices(SQUARE)[0].why.startswith(why)


def test_every_place_is_a_step(know: Know) -> None:
    steps = know(
        winner(0, ratio=1.234),
        winner(1, workload=COLD),
        shipped=(winner(1, workload=NEAR), winner(2, gpu=H200, workload=FAR)),
    ).steps(FUSED)

    assert steps[:-1] == [
        (HERE, "portable[group_m=1], 1.234 × cuBLAS"),
        (MODEL, NOTHING),
        (
            SHIPPED,
            "the nearest tuned shape is 2048x4096x4096, 1.00 doublings away: "
            "portable[group_m=2], 1.000 × cuBLAS",
        ),
        (
            COUSIN,
            "the nearest tuned shape is 1024x4096x4096, 2.00 doublings away, and only shapes "
            "within 1.5 count",
        ),
        (f"{HERE}, cold", "portable[group_m=2], 1.000 × cuBLAS"),
    ]
    assert know().steps(SQUARE)[-1] == ("model", "no config that won at some shape runs here")


# What was measured.


def test_the_gains_of_a_weight_are_those_of_each_number_of_rows(know: Know) -> None:
    rows_1, rows_16 = (replace(SQUARE, M=rows) for rows in (1, 16))
    index = know(
        winner(workload=rows_16, ratio=1.1),
        winner(workload=replace(rows_1, weights="cold"), ratio=1.2),
        winner(workload=replace(rows_1, N=2048), ratio=1.3),
        winner(workload=replace(rows_1, epilogue="bias"), ratio=1.4),
        winner(workload=replace(rows_1, layout="nn"), ratio=1.5),
        shipped=(winner(gpu=H200, ratio=1.6),),
    )

    assert index.measured_gains(SQUARE) == {1: 1.2, 16: 1.1}


@pytest.mark.parametrize(
    ("best", "gain", "faster"),
    [
        (winner(ratio=1.1), 1.1, True),
        (winner(workload=COLD, ratio=1.2), 1.2, True),
        (winner(ratio=0.9), 0.9, False),
        (winner(workload=NEAR, ratio=1.1), None, False),
    ],
    ids=["faster", "with cold weights", "slower", "near"],
)
def test_the_gain_is_what_was_measured_at_the_workload(
    know: Know, best: BestConfig, gain: float | None, faster: bool
) -> None:
    index = know(best)

    assert index.measured_gain(SQUARE) == gain
    assert is_faster(index.choices(SQUARE)[0].reason, SQUARE) == faster


# Operands that are not packed.

EVEN, ODD = Workload(2048, 2048, 2048), Workload(2048, 2048, 2056)
PACKED = prune.problem(EVEN)


@pytest.mark.parametrize(
    ("workload", "problem", "suits"),
    [
        pytest.param(EVEN, PACKED, True, id="packed"),
        pytest.param(EVEN, replace(PACKED, a=(4096, 1)), True, id="rows apart, at whole lines"),
        pytest.param(ODD, prune.problem(ODD), True, id="packed ones are between lines too"),
        pytest.param(EVEN, replace(PACKED, alignment=(16, 128, 16)), False, id="A inside a line"),
        pytest.param(EVEN, replace(PACKED, a=(2056, 1)), False, id="rows inside of lines"),
    ],
)
def test_a_config_suits_operands_that_lie_in_cache_lines_as_the_tuned_ones(
    workload: Workload, problem: Problem, suits: bool
) -> None:
    assert named_configs.suits("hopper.gemm", workload, problem) == suits
    assert named_configs.suits("portable", workload, problem)


COPYING, COPIED = Workload(16, 4096, 4096), Workload(16, 4096, 4095)
# B is copied first, which 16 rows do not pay for.
OFFSET = replace(prune.problem(COPYING), alignment=(16, 2, 16))


@pytest.mark.parametrize(
    ("kernel", "workload", "problem", "pruned"),
    [
        pytest.param("hopper.gemm", COPYING, OFFSET, True, id="it won with packed operands"),
        pytest.param("hopper.gemm", COPYING, prune.problem(COPYING), False, id="it copies nothing"),
        pytest.param("portable", COPYING, OFFSET, False, id="a kernel that copies nothing"),
        pytest.param("hopper.gemm", COPIED, prune.problem(COPIED), False, id="it won with copies"),
        pytest.param(
            "hopper.gemm",
            replace(COPIED, M=17),
            prune.problem(replace(COPIED, M=17)),
            True,
            id="nothing was tuned",
        ),
    ],
)
def test_a_kernel_may_copy_operands_where_it_won_with_copies(
    know: Know, kernel: str, workload: Workload, problem: Problem, pruned: bool
) -> None:
    own = to_text(gemm.Config())
    tuned = [winner(workload=w, kernel="hopper.gemm", config=own) for w in (COPYING, COPIED)]

    reason = know(*tuned).pruned_reason(kernel, workload, problem)

    assert (reason is not None and "copies operands first" in reason) == pruned


@pytest.mark.parametrize(
    ("kernel", "config", "gpu", "reason"),
    [
        pytest.param("portable", "", H100, "None", id="it runs"),
        pytest.param("portable", "block_m=17", H100, "block_m is 17", id="a wrong value"),
        pytest.param("hopper.hilbert", "", A100, "needs sm_90", id="another architecture"),
        pytest.param("no.kernel", "", H100, "expected one of", id="no kernel"),
        pytest.param("portable", "tile_m=128", H100, "name=value", id="no field of the kernel"),
    ],
)
def test_the_reason_against_a_config_is_named(
    kernel: str, config: str, gpu: Gpu, reason: str
) -> None:
    assert reason in str(named_configs.unsupported_reason(kernel, config, SQUARE, gpu))


# Stores and tables that cannot be read.


@pytest.mark.parametrize("kind", ["text", "half a store", "another program's", "a folder", "newer"])
def test_a_store_that_cannot_be_read_is_left_out_with_a_warning(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "store" / "tuning.sqlite"
    with Store(path) as store:
        store.merge([], [winner(3, source=str(i)) for i in range(50)])
    if kind == "half a store":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif kind == "newer":
        sql(path, "PRAGMA user_version = 99")
    else:
        path.unlink()
        if kind == "a folder":
            path.mkdir()
        elif kind == "text":
            path.write_text("no database at all " * 1000)
        else:
            sql(path, "CREATE TABLE shopping (item)")
    before = path.read_bytes() if path.is_file() else b""

    with pytest.warns(UserWarning, match="outblas cannot read its tuning store: "):
        index = TuningIndex(H100, path, path.parent)

    assert index.entries == index.choices(SQUARE) == ()
    assert (path.read_bytes() if path.is_file() else b"") == before
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b'{"format": "outblas-table"}'])
def test_tables_that_cannot_be_read_are_left_out(content: bytes, tmp_path: Path) -> None:
    ship([winner(1)], tmp_path)
    (tmp_path / "0.json").write_bytes(content)

    with pytest.warns(UserWarning, match=r"outblas ignores the tuning table 0\.json"):
        index = TuningIndex(H100, NOWHERE, tmp_path)

    assert configs(index) == [1]


# What a lookup remembers, and what it costs.


def test_a_first_lookup_predicts_for_few_of_many_winners(
    know: Know, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each neighbour costs two predictions, and the kernel's rule one."""
    many = [
        winner(i % 11, workload=Workload(64 * (i % 40 + 1), 64 * (i // 40 + 1), 4096))
        for i in range(1000)
    ]
    index = know(shipped=tuple(many))
    predict = Mock(side_effect=cost_model.ConfigModel.us)
    monkeypatch.setattr(cost_model.ConfigModel, "us", lambda *args: predict(*args))

    assert index.choices(Workload(1000, 1000, 5000))
    assert 0 < predict.call_count <= 2 * NEIGHBOURS + 1
