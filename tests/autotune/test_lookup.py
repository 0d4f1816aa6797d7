"""What matmul takes from what is known: places in order, refusals, damage; and its arguments. No
GPU needed.
"""

import json
import os
import warnings
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from support.known import A100, CONFIGS, H100, H200, OLDER, PCIE, SQUARE, Know, knowing, winner
from support.stored import sql

from outblas.autotune import lookup
from outblas.autotune.lookup import COUSIN, HERE, MODEL, SHIPPED, Choice, TuningIndex
from outblas.autotune.search import cost_model, prune
from outblas.autotune.store.records import Workload
from outblas.autotune.store.store import Store
from outblas.autotune.store.tables import TABLES, read_table, ship
from outblas.core.configs import to_text
from outblas.hopper import gemm, hilbert
from outblas.kernels.portable_config import PortableConfig

NEAR, FAR = replace(SQUARE, M=2048), replace(SQUARE, M=1024)
HILBERT = {"kernel": "hopper.hilbert", "config": to_text(hilbert.Config())}


@pytest.fixture
def know(tmp_path: Path) -> Know:
    return knowing(tmp_path)


def configs(known: TuningIndex, asked: Workload = SQUARE) -> list[int]:
    """The numbers of the choices' configs."""
    return [CONFIGS.index(choice.config) for choice in known.choices(asked)]


def kernels(known: TuningIndex) -> list[str]:
    return [choice.kernel for choice in known.choices(SQUARE)]


# Places and their order.


def test_nothing_known():
    known = TuningIndex(H100, Path("/nonexistent/tuning.sqlite"), Path("/nonexistent/tables"))
    assert known.choices(SQUARE) == ()
    assert [place for place, _ in known.steps(SQUARE)] == [HERE, MODEL, SHIPPED, COUSIN, "model"]
    nothing = "nothing for bfloat16 bfloat16 nt"
    assert [said for _, said in known.steps(SQUARE)] == [nothing] * 4 + [
        "no config that won somewhere runs here"
    ]


def test_places_in_order(know: Know) -> None:
    here = winner(0), winner(1, workload=NEAR)
    shipped = winner(2), winner(3, workload=NEAR), winner(4, gpu=H200)
    known = know(*here, shipped=shipped)
    assert {k.origin for k in known.entries} == {HERE, SHIPPED, COUSIN}
    assert configs(known) == [0, 2, 4]
    assert known.choices(SQUARE)[0].why == f"{HERE}, 4096 bfloat16 nt, 1.000 of cuBLAS there"
    # without what comes first, the next
    assert configs(know(here[1], shipped=shipped)) == [2, 1, 4]
    assert configs(know(here[1], shipped=shipped[1:])) == [1, 3, 4]
    assert configs(know(shipped=shipped[1:])) == [3, 4]
    assert configs(know(shipped=shipped[2:])) == [4]
    near = know(here[1]).choices(SQUARE)
    assert near[0].why.startswith(
        f"{HERE}, neighbour 2048x4096x4096 bfloat16 nt, 1.000 of cuBLAS there, "
    )
    assert 195 < float(near[0].why.split()[-4]) < 205  # twice the 100 µs there


def test_other_software_of_the_same_model_counts_less(know: Know) -> None:
    known = know(winner(5, gpu=OLDER, ratio=1.5), winner(0))
    assert {k.origin for k in known.entries} == {HERE, MODEL}
    assert configs(known) == [0]
    assert know(winner(5, gpu=OLDER)).choices(SQUARE)[0].why.startswith(MODEL)


def test_the_newest_of_two_sources_counts(know: Know) -> None:
    assert configs(
        know(winner(1, source="new", ratio=0.9), winner(0, source="old", ratio=1.1))
    ) == [1]


def test_kernels_compete_at_one_workload(know: Know) -> None:
    """The faster by cuBLAS's time, though one was tuned here and the other shipped."""
    slow, fast = winner(0, ratio=0.95), winner(**HILBERT, ratio=1.05)
    for here, shipped in (
        ((slow, fast), ()),
        ((slow,), (fast,)),
        ((fast,), (slow,)),
        ((), (slow, fast)),
    ):
        assert kernels(know(*here, shipped=shipped)) == ["hopper.hilbert", "portable"]


def test_kernels_compete_at_the_nearest_workload(know: Know) -> None:
    near = winner(0, workload=NEAR, ratio=0.9), winner(**HILBERT, workload=NEAR)
    assert kernels(know(*near, winner(1, workload=FAR, ratio=2.0))) == [
        "hopper.hilbert",
        "portable",
    ]


def test_what_won_at_neighbours_is_weighed_by_the_model(know: Know) -> None:
    """Of two winners at neighbours, what it took there and how well it fits here decide, not which
    is nearer.
    """
    tall, flat = (to_text(gemm.Config(tile_n=n)) for n in (256, 128))
    asked = replace(SQUARE, N=4096 - 256)
    near, farther = replace(asked, N=4096 - 512), replace(asked, M=2048)
    slow = winner(workload=near, kernel="hopper.gemm", config=flat, us=200.0)
    fast = winner(workload=farther, kernel="hopper.gemm", config=tall, us=80.0)
    found = know(slow, fast).choices(asked)
    assert [c.config for c in found if c.config] == [tall, flat]
    (ruled,) = (choice for choice in found if not choice.config)
    assert ruled.why.startswith("its own rule, ")
    assert [c.config for c in know(replace(slow, us=120.0), fast).choices(asked) if c.config] == [
        flat,
        tall,
    ]


def test_what_was_tuned_speaks_for_operands_that_lie_alike_in_lines() -> None:
    asked, odd = Workload(2048, 2048, 2048), Workload(2048, 2048, 2056)
    packed = prune.problem(asked)
    own, other = (Choice(kernel, "text", "") for kernel in ("hopper.gemm", "portable"))
    for changed in ({"alignment": (16, 128, 16)}, {"a": (2056, 1)}):
        astray = replace(packed, **changed)
        assert lookup.suited(own, asked, astray) == ""
        assert lookup.suited(other, asked, astray) == "text"
    assert lookup.suited(own, asked, packed) == "text"
    assert lookup.suited(own, asked, replace(packed, a=(4096, 1))) == "text"
    assert lookup.suited(own, odd, prune.problem(odd)) == "text"


def test_packed_operands_speak_for_others_that_are_copied_as_they_are(know: Know) -> None:
    even, odd = Workload(16, 4096, 4096), Workload(16, 4096, 4095)
    text = to_text(gemm.Config())
    known = know(
        *(winner(workload=each, kernel="hopper.gemm", config=text) for each in (even, odd))
    )
    packed = prune.problem(even)
    offset = replace(packed, alignment=(16, 2, 16))  # B is copied: 16 rows do not pay for it
    assert known.pruned_reason("hopper.gemm", even, packed) is None
    assert "copies operands first" in str(known.pruned_reason("hopper.gemm", even, offset))
    assert known.pruned_reason("portable", even, offset) is None
    assert known.pruned_reason("hopper.gemm", odd, prune.problem(odd)) is None
    assert "copies" in str(know().pruned_reason("hopper.gemm", odd, prune.problem(odd)))


def test_reach(know: Know) -> None:
    near, far = Workload(4096, 4096, 128), Workload(4096, 4096, 192)
    known = know(winner(0, workload=Workload(4096, 4096, 64)))
    assert lookup.distance(Workload(4096, 4096, 64), near) == 1
    assert configs(known, near) == [0]
    assert known.choices(far)[0].why.startswith("analytic model")
    said = "nearest is 4096x4096x64 bfloat16 nt, 1.58 away, expected at most 1.5"
    assert dict(known.steps(far))[HERE] == said


def test_distance() -> None:
    one, other = Workload(128, 256, 512), Workload(256, 256, 1024)
    assert lookup.distance(one, other) == lookup.distance(other, one) == pytest.approx(2**0.5)
    assert lookup.distance(one, one) == 0


def test_other_dtypes_and_layouts_are_no_neighbours(know: Know) -> None:
    kinds = (
        {"dtype": "float16", "out_dtype": "float16"},
        {"out_dtype": "float32"},
        {"layout": "nn"},
        {"dtype": "tf32", "out_dtype": "float32"},
    )
    known = know(*(winner(i, workload=replace(SQUARE, **kind)) for i, kind in enumerate(kinds)))
    assert all(choice.why.startswith("analytic model") for choice in known.choices(SQUARE))
    assert all(said == "nothing for bfloat16 bfloat16 nt" for _, said in known.steps(SQUARE)[:4])


def test_the_nearest_cousin_of_the_same_architecture(know: Know) -> None:
    known = know(shipped=(winner(0, gpu=PCIE), winner(1, gpu=H200), winner(2, gpu=A100)))
    assert {(k.origin, k.gpu) for k in known.entries} == {(COUSIN, H200.name)}
    assert configs(known) == [1]
    assert configs(know(shipped=(winner(0, gpu=PCIE), winner(1, gpu=H200)), of=PCIE)) == [0, 1]
    assert know(shipped=(winner(2, gpu=A100),)).entries == ()


def test_the_model_knows_what_won_elsewhere_and_runs_here(know: Know) -> None:
    far = Workload(16384, 16384, 16384)
    small, large = PortableConfig(16, 16, 32, 8, 4, 2), PortableConfig(128, 256, 64, 8, 8, 4)
    known = know(
        winner(0, workload=far, config=to_text(small)),
        winner(1, workload=replace(far, N=8192), config=to_text(large)),
        winner(2, workload=replace(far, K=8192), config="block_m=17"),
        winner(3, workload=replace(far, M=8192), kernel="no.kernel", config=""),
        winner(
            4, workload=replace(far, M=4096), kernel="simt.pipelined", config="block_k=nonsense"
        ),
    )
    found = known.choices(SQUARE)
    assert [choice.config for choice in found] == [to_text(large), to_text(small)]
    assert all(choice.why.startswith("analytic model, ") for choice in found)
    assert "is the fastest of 2 configs that won somewhere" in dict(known.steps(SQUARE))["model"]


def test_steps_say_what_each_place_has(know: Know) -> None:
    known = know(
        winner(0, ratio=1.234),
        shipped=(winner(1, workload=NEAR), winner(2, gpu=H200, workload=FAR)),
    )
    steps = dict(known.steps(SQUARE))
    assert steps[HERE] == "portable[group_m=1] 1.234 of cuBLAS"
    assert steps[MODEL] == "nothing for bfloat16 bfloat16 nt"
    assert steps[SHIPPED] == "1.00 from 2048x4096x4096: portable[group_m=2] 1.000 of cuBLAS"
    assert steps[COUSIN] == "nearest is 1024x4096x4096 bfloat16 nt, 2.00 away, expected at most 1.5"


def test_refusals():
    assert lookup.unsupported_reason("portable", "", SQUARE, H100) is None
    assert "block_m is 17" in str(lookup.unsupported_reason("portable", "block_m=17", SQUARE, H100))
    assert "needs sm_90" in str(lookup.unsupported_reason("hopper.hilbert", "", SQUARE, A100))
    assert "expected one of" in str(lookup.unsupported_reason("no.kernel", "", SQUARE, H100))
    assert "name=value" in str(lookup.unsupported_reason("portable", "tile_m=128", SQUARE, H100))


def test_a_shape_is_looked_up_once(know: Know, monkeypatch: pytest.MonkeyPatch) -> None:
    """From then on its choices are remembered: nothing is compared or predicted."""
    known = know(winner(0))
    first = known.choices(SQUARE)
    monkeypatch.setattr(known, "entries", None)

    again = known.choices(replace(SQUARE))

    assert again is first


def test_a_first_lookup_predicts_for_few_of_many_winners(
    know: Know, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each neighbour that is weighed costs two predictions, and the kernels' own rule one."""
    many = [
        winner(i % 11, workload=Workload(64 * (i % 40 + 1), 64 * (i // 40 + 1), 4096))
        for i in range(1000)
    ]
    known = know(shipped=tuple(many))
    predict = Mock(side_effect=cost_model.predict)
    monkeypatch.setattr(cost_model, "predict", predict)

    found = known.choices(Workload(1000, 1000, 5000))

    assert found
    assert 0 < predict.call_count <= 2 * lookup.NEIGHBOURS + 1


# Whatever is wrong with files.


@pytest.fixture
def path(path: Path) -> Path:
    """Of a store with a winner."""
    with Store(path) as store:
        store.record_best(winner(3))
    return path


def read(store: Path) -> TuningIndex:
    """With the tables beside it."""
    return TuningIndex(H100, store, store.parent)


DAMAGES = {
    "garbage": lambda path: path.write_bytes(os.urandom(1 << 16)),
    "text": lambda path: path.write_text("no database at all " * 1000),
    "half a store": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "of another program": lambda path: (path.unlink(), sql(path, "CREATE TABLE shopping (item)")),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a newer version": lambda path: sql(path, "PRAGMA user_version = 99"),
    "not readable": lambda path: path.chmod(0),
    "a dangling link": lambda path: (path.unlink(), path.symlink_to("/nonexistent/store")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_store_that_cannot_be_read_is_left_out(damage: str, path: Path) -> None:
    def content() -> bytes:
        return path.read_bytes() if path.is_file() and os.access(path, os.R_OK) else b""

    DAMAGES[damage](path)
    before = content()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        known = read(path)
    readable = damage == "not readable" and os.getuid() == 0
    assert len(known.entries) == len(known.choices(SQUARE)) == readable
    assert caught or damage == "a dangling link" or readable
    assert content() == before


def test_a_store_in_a_folder_that_cannot_be_written(path: Path) -> None:
    files = sorted(path.parent.iterdir())
    path.chmod(0o400)
    path.parent.chmod(0o500)
    try:
        assert configs(read(path)) == [3]
        assert sorted(path.parent.iterdir()) == files
    finally:
        path.parent.chmod(0o700)


def test_rows_that_are_no_winners_are_left_out(path: Path) -> None:
    with Store(path) as store:
        store.record_best(winner(1, workload=NEAR))
    sql(path, "UPDATE winners SET config = '; rm -rf /' WHERE M = 4096")
    assert [k.workload for k in read(path).entries] == [NEAR]


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[1, 2]", b"\xff\xfe", b'{"format": "outblas-table"}', b"[" * 100_000],
    ids=["empty", "no fields", "a list", "no UTF-8", "a format alone", "deeply nested"],
)
def test_tables_that_cannot_be_read_are_left_out(content: bytes, tmp_path: Path) -> None:
    ship([winner(1)], tmp_path)
    (tmp_path / "0.json").write_bytes(content)
    with pytest.warns(UserWarning, match=r"outblas leaves out the tuning table 0\.json"):
        assert configs(read(tmp_path / "no.sqlite")) == [1]


def test_tables_that_were_changed_are_left_out(tmp_path: Path) -> None:
    (path,) = ship([winner(1)], tmp_path)
    content = json.loads(path.read_text())
    content["entries"][0]["ratio_high"] = 9.0
    path.write_text(json.dumps(content))
    with pytest.warns(UserWarning, match="sha256"):
        assert read(tmp_path / "no.sqlite").entries == ()


def test_shipped_tables_name_configs_that_exist() -> None:
    tables = [read_table(path) for path in TABLES.glob("*.json")]
    assert tables
    for table in tables:
        for entry in table.entries:
            assert (
                lookup.unsupported_reason(entry.kernel, entry.config, entry.workload, table.gpu)
                is None
            ), entry


def test_a_winner_of_a_wrong_clock_does_not_count_as_the_newest(path: Path) -> None:
    """That of another source, which no newer result replaces."""
    with Store(path) as store:
        store.record_best(winner(1, source="old", when="2099-01-01T00:00:00+00:00"))
    assert configs(read(path)) == [3]
