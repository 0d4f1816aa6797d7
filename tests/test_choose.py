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
from typing import Any

import pytest
import torch

import outblas
from outblas import dispatch, fallback
from outblas.autotune import automatic, choose, gpu, transfer
from outblas.autotune.choose import COUSIN, HERE, MODEL, REACH, SHIPPED, Choice, Knowledge
from outblas.autotune.records import Gpu, Winner, Workload
from outblas.autotune.store import Store
from outblas.configs import to_text
from outblas.hopper import hilbert
from outblas.kernels.portable_config import PortableConfig
from outblas.operands import Problem, problem

H100 = replace(gpu.imagined("h100"), driver="580", torch="2.11")
OLDER = replace(H100, driver="570")
H200 = gpu.imagined("h200")
PCIE = Gpu("NVIDIA H100 PCIe", 90, 114)
A100 = gpu.imagined("a100")
SQUARE = Workload(4096, 4096, 4096)
CONFIGS = [to_text(PortableConfig(group_m=i)) for i in range(1, 12)]


def winner(i: int = 0, **changes: Any) -> Winner:
    ratio = changes.pop("ratio", 1.0)
    fields: dict[str, Any] = {
        "gpu": H100, "workload": SQUARE, "kernel": "portable", "source": "abc", "config": CONFIGS[i], "us": 100.0,
        "cublas_us": 100.0 * ratio, "ratio": ratio, "ratio_low": ratio, "ratio_high": ratio, "rounds": 12,
        "when": f"2026-01-{i + 1:02}T00:00:00+00:00",
    }  # fmt: skip
    return Winner(**fields | changes)


@pytest.fixture
def know(tmp_path: Path) -> Callable[..., Knowledge]:
    """Knowledge of an H100 from winners in its store, and from those that were shipped."""

    def made(*here: Winner, shipped: tuple[Winner, ...] = (), of: Gpu = H100) -> Knowledge:
        folder = tmp_path / f"tables{len(list(tmp_path.iterdir()))}"
        with Store(folder.with_suffix(".sqlite")) as store:
            for each in here:
                store.crown(each)
        transfer.ship(shipped, folder)
        return Knowledge(of, folder.with_suffix(".sqlite"), folder)

    return made


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
    assert near[0].why == f"{HERE}, nearest to it 2048x4096x4096 bfloat16 nt, 1.000 of cuBLAS there"


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
    content["entries"][0]["ratio"] = 9.0
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


# ---- from calls to workloads ----------------------------------------------------------------------------------------
def asked(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None = None, **more: Any) -> Problem:
    shape = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]) + (a.shape[-2:-1] + b.shape[-1:])
    return problem(a, b, torch.empty(shape, dtype=out_dtype or a.dtype, device="meta"), **more)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


WORKLOADS: dict[str, tuple[Callable[[], Problem], Workload | None]] = {
    "nn": (lambda: asked(empty(6, 8), empty(8, 4)), Workload(6, 4, 8, layout="nn")),
    "nt": (lambda: asked(empty(6, 8), empty(4, 8).t()), Workload(6, 4, 8, layout="nt")),
    "tn": (lambda: asked(empty(8, 6).t(), empty(8, 4)), Workload(6, 4, 8, layout="tn")),
    "tt": (lambda: asked(empty(8, 6).t(), empty(4, 8).t()), Workload(6, 4, 8, layout="tt")),
    "to fp32": (
        lambda: asked(empty(6, 8), empty(8, 4), torch.float32),
        Workload(6, 4, 8, out_dtype="float32", layout="nn"),
    ),
    "fp32": (
        lambda: asked(empty(6, 8, dtype=torch.float32), empty(8, 4, dtype=torch.float32)),
        Workload(6, 4, 8, "float32", layout="nn"),
    ),
    "tf32": (
        lambda: asked(empty(6, 8, dtype=torch.float32), empty(8, 4, dtype=torch.float32), tf32=True),
        Workload(6, 4, 8, "tf32", layout="nn"),
    ),
    "rows apart": (lambda: asked(empty(6, 16)[:, :8], empty(8, 16)[:, :4]), Workload(6, 4, 8, layout="nn")),
    "a batch that shares b": (lambda: asked(empty(3, 6, 8), empty(8, 4)), Workload(18, 4, 8, layout="nn")),
    "one row": (lambda: asked(empty(1, 8), empty(8, 4)), Workload(1, 4, 8, layout="nn")),
    "one column": (lambda: asked(empty(6, 8), empty(8, 1)), Workload(6, 1, 8, layout="nn")),
    "one term": (lambda: asked(empty(6, 1), empty(1, 4)), Workload(6, 4, 1, layout="nn")),
    "a batch": (lambda: asked(empty(3, 6, 8), empty(3, 8, 4)), None),
    "empty": (lambda: asked(empty(0, 8), empty(8, 4)), None),
    "no terms": (lambda: asked(empty(6, 0), empty(0, 4)), None),
    "no unit stride": (lambda: asked(empty(6, 16)[:, ::2], empty(8, 4)), None),
    "repeated": (lambda: asked(empty(1, 1).expand(6, 8), empty(8, 4)), None),
}


@pytest.mark.parametrize("case", WORKLOADS)
def test_workload_of_a_call(case: str) -> None:
    make, want = WORKLOADS[case]
    assert automatic.of_problem(make()) == want


# ---- what a call asks -----------------------------------------------------------------------------------------------
@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Problem:
    """A call on a GPU, as far as dispatch can tell."""
    monkeypatch.setattr(dispatch.choice, "kernel_for", lambda problem: "portable")
    monkeypatch.setattr(dispatch, "_capturing", lambda device: False)
    monkeypatch.setattr(dispatch, "lacks", lambda record, problem: None)
    monkeypatch.delenv("OUTBLAS_TUNE", raising=False)
    return replace(asked(empty(64, 64), empty(64, 64).t()), device=torch.device("cuda", 0))


AT = Workload(64, 64, 64)


def taken(call: Problem, monkeypatch: pytest.MonkeyPatch, known: Knowledge, tune: str = "", **plans: Any) -> Any:
    """What `matmul` would launch; `plans` maps a config's number to the error of its plan."""

    def launcher(kernel: str, config: str, problem: Problem, *, nothing: bool) -> Any:
        error = plans.get(f"c{CONFIGS.index(config)}") if config else None
        if error is not None:
            raise error
        return kernel, config

    monkeypatch.setattr(choose, "knowledge", lambda index: known)
    monkeypatch.setattr(dispatch, "_launcher", launcher)
    return dispatch._best_launcher(call, tune, nothing=False)


def test_matmul_takes_the_best_that_takes_the_call(
    on_gpu: Problem, monkeypatch: pytest.MonkeyPatch, know: Callable[..., Knowledge]
) -> None:
    other = to_text(hilbert.Config())
    known = know(
        winner(0, workload=AT, ratio=1.0),
        winner(workload=AT, kernel="hopper.hilbert", config=other, ratio=0.9),
        winner(1, workload=replace(AT, K=128)),
    )
    CONFIGS.append(other)
    try:
        assert taken(on_gpu, monkeypatch, known) == ("portable", CONFIGS[0])
        assert taken(on_gpu, monkeypatch, known, c0=ValueError("a field is gone")) == ("hopper.hilbert", other)
        with pytest.warns(RuntimeWarning, match=r"portable\[block_m=.*\], which was tuned for this call, fails: bad"):
            assert taken(on_gpu, monkeypatch, known, c0=RuntimeError("bad")) == ("hopper.hilbert", other)
        missing = ImportError("no DSL")
        assert taken(on_gpu, monkeypatch, known, c0=missing, c11=missing) == ("portable", "")
        assert taken(on_gpu, monkeypatch, known, "off") == ("portable", "")
        monkeypatch.setenv("OUTBLAS_TUNE", "off")
        assert taken(on_gpu, monkeypatch, known) == ("portable", "")
        assert taken(on_gpu, monkeypatch, known, "lookup") == ("portable", CONFIGS[0])
        monkeypatch.setenv("OUTBLAS_TUNE", "always")
        with pytest.raises(ValueError, match="OUTBLAS_TUNE is 'always', expected one of off, lookup, on"):
            taken(on_gpu, monkeypatch, known)
    finally:
        CONFIGS.pop()


def test_what_cannot_be_looked_up_is_not_the_callers_concern(
    on_gpu: Problem, monkeypatch: pytest.MonkeyPatch, know: Callable[..., Knowledge]
) -> None:
    class Broken:
        def choices(self, workload: Workload) -> tuple[Choice, ...]:
            raise KeyError("a bug")

    with pytest.warns(RuntimeWarning, match="a bug"):
        assert taken(on_gpu, monkeypatch, Broken()) == ("portable", "")  # type: ignore[arg-type]


def test_batches_and_empty_calls_ask_nothing(on_gpu: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automatic, "choices", lambda *_: pytest.fail("asked"))
    monkeypatch.setattr(dispatch, "_launcher", lambda *_, nothing: nothing)
    for changed in ({"batch": (2,)}, {"M": 0}, {"device": torch.device("cpu")}):
        dispatch._best_launcher(replace(on_gpu, **changed), "on", nothing=False)  # type: ignore[arg-type]
    assert dispatch._best_launcher(on_gpu, "on", nothing=True) is True
    monkeypatch.setattr(dispatch, "_capturing", lambda device: True)
    dispatch._best_launcher(on_gpu, "on", nothing=False)


def test_tuning_when_first_met(
    on_gpu: Problem, monkeypatch: pytest.MonkeyPatch, know: Callable[..., Knowledge]
) -> None:
    """Once for a shape, with what the environment grants; a failure is said once, and then forgotten."""
    swept: list[tuple[Workload, float | None]] = []
    before, after = know(), know(winner(3, workload=AT))
    now = [before]

    def sweep(workload: Workload, index: int, kernels: Any, budget: float | None, trials: int, top_k: int) -> None:
        swept.append((workload, budget))
        if budget == 1.5:
            raise RuntimeError("the GPU is on fire")
        now[0] = after

    monkeypatch.setattr(automatic, "_sweep", sweep)
    monkeypatch.setattr(automatic, "_given_up", set())
    monkeypatch.setattr(choose, "knowledge", lambda index: now[0])
    assert list(automatic.choices(on_gpu)) == []
    assert swept == []
    monkeypatch.setenv("OUTBLAS_TUNE_BUDGET", "1.5")
    with pytest.warns(RuntimeWarning, match="64 bfloat16 nt could not be tuned: the GPU is on fire"):
        assert list(automatic.choices(on_gpu, "on")) == []
    assert list(automatic.choices(on_gpu, "on")) == []
    assert swept == [(AT, 1.5)]
    monkeypatch.setattr(automatic, "_given_up", set())
    monkeypatch.setenv("OUTBLAS_TUNE_BUDGET", "soon")
    with pytest.warns(RuntimeWarning, match="could not convert"):
        assert list(automatic.choices(on_gpu, "on")) == []
    monkeypatch.setattr(automatic, "_given_up", set())
    monkeypatch.delenv("OUTBLAS_TUNE_BUDGET")
    assert list(automatic.choices(on_gpu, "on")) == [("portable", CONFIGS[3])]
    assert list(automatic.choices(on_gpu, "on")) == [("portable", CONFIGS[3])]
    assert swept == [(AT, 1.5), (AT, automatic.FIRST_SECONDS)]


def test_modes() -> None:
    assert choose.mode(None, None) == choose.mode("", "") == choose.mode(None, "") == "lookup"
    assert choose.mode("on", "off") == "on"
    assert choose.mode(None, "off") == "off"
    with pytest.raises(ValueError, match="tune is 'yes', expected one of off, lookup, on"):
        choose.mode("yes", "on")
    with pytest.raises(ValueError, match="OUTBLAS_TUNE is '1'"):
        choose.mode("", "1")


A, B = torch.randn(6, 5), torch.randn(5, 4)

BAD: dict[str, tuple[type[Exception], str, Callable[[], Any]]] = {
    "word": (ValueError, "tune is 'yes', expected one of off, lookup, on", lambda: outblas.matmul(A, B, tune="yes")),
    "empty word": (ValueError, "tune is ''", lambda: outblas.matmul(A, B, tune="")),
    "type": (TypeError, "tune is bool, expected a str: off, lookup, on", lambda: outblas.matmul(A, B, tune=True)),  # type: ignore[arg-type]
    "addmm": (ValueError, "tune is 'yes'", lambda: outblas.addmm(torch.zeros(4), A, B, tune="yes")),
    "tune on the CPU": (ValueError, "a is on cpu, expected an NVIDIA GPU", lambda: outblas.tune(A, B)),
    "tune of a list": (TypeError, "a is list, expected a torch.Tensor", lambda: outblas.tune([1.0], B)),  # type: ignore[arg-type]
    "tune of other sizes": (ValueError, r"a.shape\[1\] is 5 but b.shape\[0\] is 4", lambda: outblas.tune(A, B[:4])),
    "tune to fp16": (ValueError, "out_dtype is torch.float16", lambda: outblas.tune(A, B, out_dtype=torch.float16)),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    error, message, call = BAD[case]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("tune", ["off", "lookup", "on"])
def test_calls_without_a_gpu_look_nothing_up(tune: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "knowledge", lambda index: pytest.fail("looked up"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fallback.FallbackWarning)
        assert torch.equal(outblas.matmul(A, B, tune=tune), A @ B)
    assert torch.allclose(outblas.matmul(A, B, tune=tune, kernel="portable"), A @ B, atol=1e-5)
