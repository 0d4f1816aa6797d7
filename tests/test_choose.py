"""What matmul takes from what is known: places in order, refusals, damage; and its arguments. No GPU needed."""

from __future__ import annotations

import json
import os
import sqlite3
import stat
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from known import A100, CONFIGS, H100, H200, OLDER, PCIE, SQUARE, knowing, winner

from outblas.autotune import choose, prune, transfer
from outblas.autotune.choose import COUSIN, HERE, MODEL, REACH, SHIPPED, Choice, Knowledge
from outblas.autotune.records import Workload
from outblas.autotune.store import Store
from outblas.configs import to_text
from outblas.hopper import gemm, hilbert
from outblas.kernels.portable_config import PortableConfig


@pytest.fixture
def know(tmp_path: Path) -> Callable[..., Knowledge]:
    return knowing(tmp_path)


def configs(choices: tuple[Choice, ...]) -> list[int]:
    return [CONFIGS.index(choice.config) for choice in choices]


# ---- places and their order -----------------------------------------------------------------------------------------
NEAR, FAR = replace(SQUARE, M=2048), replace(SQUARE, M=1024)


def test_nothing_known() -> None:
    known = Knowledge(H100, Path("/nonexistent/tuning.sqlite"), Path("/nonexistent/tables"))
    assert known.choices(SQUARE) == ()
    assert [place for place, _ in known.steps(SQUARE)] == [HERE, MODEL, SHIPPED, COUSIN, "model"]
    assert {said for _, said in known.steps(SQUARE)} == {
        "nothing for bfloat16 bfloat16 nt",
        "no config that won somewhere runs here",
    }


def test_places_in_order(know: Callable[..., Knowledge]) -> None:
    here = winner(0), winner(1, workload=NEAR)
    shipped = winner(2), winner(3, workload=NEAR), winner(4, gpu=H200)
    known = know(*here, shipped=shipped)
    assert {k.origin for k in known.known} == {HERE, SHIPPED, COUSIN}
    assert configs(known.choices(SQUARE)) == [0, 2, 4]
    assert known.choices(SQUARE)[0].why == f"{HERE}, 4096 bfloat16 nt, 1.000 of cuBLAS there"
    # without what comes first, the next
    assert configs(know(here[1], shipped=shipped).choices(SQUARE)) == [2, 1, 4]
    assert configs(know(here[1], shipped=shipped[1:]).choices(SQUARE)) == [1, 3, 4]
    assert configs(know(shipped=shipped[1:]).choices(SQUARE)) == [3, 4]
    assert configs(know(shipped=shipped[2:]).choices(SQUARE)) == [4]
    near = know(here[1]).choices(SQUARE)
    assert near[0].why.startswith(f"{HERE}, neighbour 2048x4096x4096 bfloat16 nt, 1.000 of cuBLAS there, ")
    assert 195 < float(near[0].why.split()[-4]) < 205  # twice the 100 µs there


def test_other_software_of_the_same_model_counts_less(know: Callable[..., Knowledge]) -> None:
    known = know(winner(5, gpu=OLDER, ratio=1.5), winner(0))
    assert {k.origin for k in known.known} == {HERE, MODEL}
    assert configs(known.choices(SQUARE)) == [0]
    only = know(winner(5, gpu=OLDER))
    assert only.choices(SQUARE)[0].why.startswith(MODEL)


def test_the_newest_of_two_sources_counts(know: Callable[..., Knowledge]) -> None:
    known = know(winner(1, source="new", ratio=0.9), winner(0, source="old", ratio=1.1))
    assert configs(known.choices(SQUARE)) == [1]


def test_kernels_compete_at_one_workload(know: Callable[..., Knowledge]) -> None:
    """The faster by cuBLAS's time, though one was tuned here and the other shipped."""
    text = to_text(hilbert.Config())
    slow, fast = winner(0, ratio=0.95), winner(kernel="hopper.hilbert", config=text, ratio=1.05)
    for here, shipped in (((slow, fast), ()), ((slow,), (fast,)), ((fast,), (slow,)), ((), (slow, fast))):
        kernels = [choice.kernel for choice in know(*here, shipped=shipped).choices(SQUARE)]
        assert kernels == ["hopper.hilbert", "portable"]


def test_kernels_compete_at_the_nearest_workload(know: Callable[..., Knowledge]) -> None:
    text = to_text(hilbert.Config())
    near = winner(0, workload=NEAR, ratio=0.9), winner(workload=NEAR, kernel="hopper.hilbert", config=text, ratio=1.0)
    known = know(*near, winner(1, workload=FAR, ratio=2.0))
    assert [choice.kernel for choice in known.choices(SQUARE)] == ["hopper.hilbert", "portable"]


def test_what_won_at_neighbours_is_weighed_by_the_model(know: Callable[..., Knowledge]) -> None:
    """Of two winners at neighbours, what it took there and how well it fits here decide, not which is nearer."""
    tall, flat = (to_text(gemm.Config(tile_n=n)) for n in (256, 128))
    asked = replace(SQUARE, N=4096 - 256)
    near, farther = replace(asked, N=4096 - 512), replace(asked, M=2048)
    slow = winner(workload=near, kernel="hopper.gemm", config=flat, ratio=1.0, us=200.0)
    fast = winner(workload=farther, kernel="hopper.gemm", config=tall, ratio=1.0, us=80.0)
    found = know(slow, fast).choices(asked)
    assert [c.config for c in found if c.config] == [tall, flat]
    (ruled,) = (choice for choice in found if not choice.config)
    assert ruled.why.startswith("its own rule, ")
    assert [c.config for c in know(replace(slow, us=120.0), fast).choices(asked) if c.config] == [flat, tall]


def test_what_was_tuned_speaks_for_operands_that_lie_alike_in_lines() -> None:
    asked = Workload(2048, 2048, 2048)
    packed = prune.problem(asked)
    own, other = (Choice(kernel, "text", "") for kernel in ("hopper.gemm", "portable"))
    for changed in ({"alignment": (16, 128, 16)}, {"a": (2056, 1)}):
        astray = replace(packed, **changed)
        assert choose.suited(own, asked, astray) == ""
        assert choose.suited(other, asked, astray) == "text"
    assert choose.suited(own, asked, packed) == "text"
    assert choose.suited(own, asked, replace(packed, a=(4096, 1))) == "text"
    assert choose.suited(own, Workload(2048, 2048, 2056), prune.problem(Workload(2048, 2048, 2056))) == "text"


def test_packed_operands_speak_for_others_that_are_copied_as_they_are(know: Callable[..., Knowledge]) -> None:
    even, odd = Workload(16, 4096, 4096), Workload(16, 4096, 4095)
    text = to_text(gemm.Config())
    known = know(*(winner(workload=each, kernel="hopper.gemm", config=text) for each in (even, odd)))
    packed = prune.problem(even)
    offset = replace(packed, alignment=(16, 2, 16))  # B is copied: 16 rows do not pay for it
    assert known.objection("hopper.gemm", even, packed) is None
    assert "copies operands first" in str(known.objection("hopper.gemm", even, offset))
    assert known.objection("portable", even, offset) is None
    assert known.objection("hopper.gemm", odd, prune.problem(odd)) is None
    assert "copies" in str(know().objection("hopper.gemm", odd, prune.problem(odd)))


def test_reach(know: Callable[..., Knowledge]) -> None:
    known = know(winner(0, workload=Workload(4096, 4096, 64)))
    assert choose.distance(Workload(4096, 4096, 64), Workload(4096, 4096, 128)) == 1
    assert configs(known.choices(Workload(4096, 4096, 128))) == [0]
    assert known.choices(Workload(4096, 4096, 64 * 3))[0].why.startswith("analytic model")
    steps = dict(known.steps(Workload(4096, 4096, 64 * 3)))
    assert steps[HERE] == f"nearest is 4096x4096x64 bfloat16 nt, 1.58 away, expected at most {REACH}"


def test_distance() -> None:
    one, other = Workload(128, 256, 512), Workload(256, 256, 1024)
    assert choose.distance(one, other) == choose.distance(other, one) == pytest.approx(2**0.5)
    assert choose.distance(one, one) == 0


def test_other_dtypes_and_layouts_are_no_neighbours(know: Callable[..., Knowledge]) -> None:
    kinds = [
        {"dtype": "float16", "out_dtype": "float16"},
        {"out_dtype": "float32"},
        {"layout": "nn"},
        {"dtype": "tf32", "out_dtype": "float32"},
    ]
    known = know(*(winner(i, workload=replace(SQUARE, **kind)) for i, kind in enumerate(kinds)))
    assert all(choice.why.startswith("analytic model") for choice in known.choices(SQUARE))
    assert all(said == "nothing for bfloat16 bfloat16 nt" for _, said in known.steps(SQUARE)[:4])


def test_the_nearest_cousin_of_the_same_architecture(know: Callable[..., Knowledge]) -> None:
    known = know(shipped=(winner(0, gpu=PCIE), winner(1, gpu=H200), winner(2, gpu=A100)))
    assert {(k.origin, k.gpu) for k in known.known} == {(COUSIN, H200.name)}
    assert configs(known.choices(SQUARE)) == [1]
    on_pcie = know(shipped=(winner(0, gpu=PCIE), winner(1, gpu=H200)), of=PCIE)
    assert configs(on_pcie.choices(SQUARE)) == [0, 1]
    assert {k.gpu for k in know(shipped=(winner(2, gpu=A100),)).known} == set()


def test_the_model_knows_what_won_elsewhere_and_runs_here(know: Callable[..., Knowledge]) -> None:
    far = Workload(16384, 16384, 16384)
    small, large = PortableConfig(16, 16, 32, 8, 4, 2), PortableConfig(128, 256, 64, 8, 8, 4)
    known = know(
        winner(0, workload=far, config=to_text(small)),
        winner(1, workload=replace(far, N=8192), config=to_text(large)),
        winner(2, workload=replace(far, K=8192), config="block_m=17"),
        winner(3, workload=replace(far, M=8192), kernel="no.kernel", config=""),
        winner(4, workload=replace(far, M=4096), kernel="simt.pipelined", config="block_k=nonsense"),
    )
    found = known.choices(SQUARE)
    assert [choice.config for choice in found] == [to_text(large), to_text(small)]
    assert all(choice.why.startswith("analytic model, ") for choice in found)
    assert "is the fastest of 2 configs that won somewhere" in dict(known.steps(SQUARE))["model"]


def test_steps_say_what_each_place_has(know: Callable[..., Knowledge]) -> None:
    known = know(winner(0, ratio=1.234), shipped=(winner(1, workload=NEAR), winner(2, gpu=H200, workload=FAR)))
    steps = dict(known.steps(SQUARE))
    assert steps[HERE] == "portable[group_m=1] 1.234 of cuBLAS"
    assert steps[MODEL] == "nothing for bfloat16 bfloat16 nt"
    assert steps[SHIPPED] == "1.00 from 2048x4096x4096: portable[group_m=2] 1.000 of cuBLAS"
    assert steps[COUSIN] == "nearest is 1024x4096x4096 bfloat16 nt, 2.00 away, expected at most 1.5"


def test_refusals(know: Callable[..., Knowledge]) -> None:
    assert choose.refusal("portable", "", SQUARE, H100) is None
    assert "block_m is 17" in str(choose.refusal("portable", "block_m=17", SQUARE, H100))
    assert "needs sm_90" in str(choose.refusal("hopper.hilbert", "", SQUARE, A100))
    assert "expected one of" in str(choose.refusal("no.kernel", "", SQUARE, H100))
    assert "name=value" in str(choose.refusal("portable", "tile_m=128", SQUARE, H100))


def test_lookups_are_cheap(know: Callable[..., Knowledge]) -> None:
    known = know(winner(0))
    assert known.choices(SQUARE)

    def seconds(times: int = 2000) -> float:
        began = time.perf_counter()
        for _ in range(times):
            known.choices(SQUARE)
        return (time.perf_counter() - began) / times

    assert min(seconds() for _ in range(20)) < 2e-6


def test_first_lookups_among_many_winners_are_quick(know: Callable[..., Knowledge]) -> None:
    many = [winner(i % 11, workload=Workload(64 * (i % 40 + 1), 64 * (i // 40 + 1), 4096)) for i in range(1000)]
    began = time.process_time()
    known = know(shipped=tuple(many))
    began = time.process_time()
    assert known.choices(Workload(100, 100, 5000))
    assert time.process_time() - began < 0.5


# ---- whatever is wrong with files -----------------------------------------------------------------------------------
def _newer_version(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
        connection.execute("CREATE TABLE trials (id)")


def _of_another_program(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE shopping (item)")


STORES: dict[str, Callable[[Path], object]] = {
    "garbage": lambda path: path.write_bytes(os.urandom(1 << 16)),
    "text": lambda path: path.write_text("no database at all " * 1000),
    "a folder": lambda path: path.mkdir(),
    "a newer version": _newer_version,
    "of another program": _of_another_program,
    "half a store": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "not readable": lambda path: path.chmod(0),
    "a dangling link": lambda path: (path.unlink(), path.symlink_to("/nonexistent/store")),
}


@pytest.mark.parametrize("damage", STORES)
def test_a_store_that_cannot_be_read_is_left_out(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "tuning.sqlite"
    if damage in ("half a store", "not readable", "a dangling link"):
        with Store(path) as store:
            store.crown(winner())
    STORES[damage](path)
    before = path.read_bytes() if path.is_file() and os.access(path, os.R_OK) else b""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        known = Knowledge(H100, path, tmp_path / "tables")
    readable = damage == "not readable" and os.getuid() == 0
    assert len(known.known) == readable
    assert len(known.choices(SQUARE)) == readable
    assert caught or damage == "a dangling link" or readable
    assert before == (path.read_bytes() if path.is_file() and os.access(path, os.R_OK) else b"")
    path.is_dir() or path.is_symlink() or path.chmod(stat.S_IRUSR)


def test_a_store_in_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "store" / "tuning.sqlite"
    path.parent.mkdir(0o700)
    with Store(path) as store:
        store.crown(winner(3))
    files = sorted(path.parent.iterdir())
    path.chmod(0o400)
    path.parent.chmod(0o500)
    try:
        assert configs(Knowledge(H100, path, tmp_path / "tables").choices(SQUARE)) == [3]
        assert sorted(path.parent.iterdir()) == files
    finally:
        path.parent.chmod(0o700)


def test_rows_that_are_no_winners_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "tuning.sqlite"
    with Store(path) as store:
        store.crown(winner(0))
        store.crown(winner(1, workload=NEAR))
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE winners SET config = '; rm -rf /' WHERE M = 4096")
    assert [k.workload for k in Knowledge(H100, path, tmp_path / "tables").known] == [NEAR]


@pytest.mark.parametrize("content", [b"", b"{}", b"[1, 2]", b"\xff\xfe", b'{"format": "outblas-table"}', b"[" * 100000])
def test_tables_that_cannot_be_read_are_left_out(content: bytes, tmp_path: Path) -> None:
    transfer.ship([winner(1)], tmp_path)
    (tmp_path / "0.json").write_bytes(content)
    with pytest.warns(UserWarning, match=r"outblas leaves out the tuning table 0\.json"):
        known = Knowledge(H100, tmp_path / "no.sqlite", tmp_path)
    assert configs(known.choices(SQUARE)) == [1]


def test_tables_that_were_changed_are_left_out(tmp_path: Path) -> None:
    (path,) = transfer.ship([winner(1)], tmp_path)
    content = json.loads(path.read_text())
    content["kernels"][0]["entries"][0][3] = 9.0
    path.write_text(json.dumps(content))
    with pytest.warns(UserWarning, match="sha256"):
        assert Knowledge(H100, tmp_path / "no.sqlite", tmp_path).known == ()


def test_shipped_tables_are_whole_and_name_configs_that_exist() -> None:
    paths = sorted(transfer.TABLES.glob("*.json"))
    assert paths
    for path in paths:
        table = transfer.read_table(path)
        for entry in table.entries:
            assert choose.refusal(entry.kernel, entry.config, entry.workload, table.gpu) is None, entry
