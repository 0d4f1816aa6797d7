"""The tables of a pack choose the kernels of the products that it was built for."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import stored
from support.imagined_gpu import ImaginedGpu, empty, imagine, on_gpu
from support.known import H100, H200, OLDER
from support.served_by_pack import forget_packs

import outblas
from outblas.autotune import lookup, packed_tables
from outblas.autotune.search import prune
from outblas.autotune.search.gpu import imagined
from outblas.autotune.store.records import BestConfig, Workload
from outblas.autotune.store.store import Store
from outblas.autotune.store.tables import TABLES, best_of, to_bytes
from outblas.base import pack
from outblas.base.configs import to_text
from outblas.call.grouped import GroupedProblem
from outblas.device import triton_variant
from outblas.hopper.gemm import group_rule
from outblas.hopper.gemm.config import Config
from outblas.hopper.parts.compile import toolchain_fields
from outblas.kernels.portable_config import PortableConfig
from tools.ship import ship

LINES = ["100-200x512x512 bfloat16 nt", "128x512x512 bfloat16 nt bias"]
LISTED = Workload(128, 512, 512)
FIRST, SECOND, THIRD = (to_text(Config(group_m=i)) for i in (3, 5, 7))
FASTER = to_text(PortableConfig())
NAME = "shipped/NVIDIA_H100_80GB_HBM3.json"
Build = Callable[..., Path]


def winner(config: str = FIRST, **changes: Any) -> BestConfig:
    """A winner at `LISTED` on an H100 of an older driver."""
    kernel = "portable" if config == FASTER else "hopper.gemm"
    fields: dict[str, Any] = {"workload": LISTED, "kernel": kernel, "config": config}
    return stored.winner(**{"gpu": OLDER, **fields, **changes})


@pytest.fixture(autouse=True)
def _no_packs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OUTBLAS_PACK", raising=False)
    forget_packs()
    yield
    forget_packs()


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ImaginedGpu:
    """An H100, for which a newer table came with outblas: it has `SECOND` at `LISTED`."""
    found = imagine(H100, tmp_path, monkeypatch)
    ship([winner(SECOND)], tmp_path)
    return found


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Writes a pack of `LINES` whose shipped table has some winners; it has one object."""

    def made(
        *winners: BestConfig, about: dict[str, Any] | None = None, source: str = "", **tables: bytes
    ) -> Path:
        toolchain = toolchain_fields() | ({"source": source} if source else {})
        path = tmp_path / "made.outblas"
        texts = (
            {NAME: to_bytes(best_of(winners, lambda won: won.when))} | tables if winners else tables
        )
        said = {"gpu": H100.name, "products": LINES} | (about or {})
        pack.write(path, said, [({"kernel": "one", **toolchain}, b"code")], texts)
        return path

    return made


def call(M: int = 128, N: int = 512) -> Any:
    return on_gpu(empty(M, 512), empty(N, 512).t())


# ---- which table chooses


@pytest.mark.parametrize(
    ("other", "listed"),
    [
        (replace(LISTED, M=136), True),
        (replace(LISTED, epilogue="bias"), True),
        (replace(LISTED, M=99), False),
        (replace(LISTED, M=201), False),
        (replace(LISTED, N=520), False),
        (replace(LISTED, K=520), False),
        (replace(LISTED, layout="nn"), False),
        (replace(LISTED, dtype="float16", out_dtype="float16"), False),
        (replace(LISTED, out_dtype="float32"), False),
        (replace(LISTED, epilogue="gelu"), False),
        (replace(LISTED, M=129, epilogue="bias"), False),
    ],
    ids=str,
)
@pytest.mark.usefixtures("gpu")
def test_a_pack_chooses_for_what_it_lists(other: Workload, listed: bool, build: Build) -> None:
    """Nothing was measured at 136 rows; the shipped tables have other neighbours."""
    outblas.load_pack(build(winner(FIRST)))

    index = lookup.packed_index(0, other)

    assert (index is not None) == listed
    if index is not None:
        assert {entry.config for entry in index.entries} == {FIRST}


def test_products_of_fp8_operands_are_listed_as_those_of_half_as_many_terms(
    gpu: ImaginedGpu, build: Build
) -> None:
    """They take what was tuned for 16-bit operands of as many bytes, which are other products."""
    lines = {"products": ["128x1024x1024 fp8-e4m3 rowwise swiglu fast-accum"]}
    outblas.load_pack(build(winner(FIRST), about=lines))

    assert lookup.packed_index(0, LISTED, fp8=True) is not None
    assert lookup.packed_index(0, LISTED) is None
    assert lookup.packed_index(0, replace(LISTED, M=129), fp8=True) is None
    assert lookup.packed_index(0, replace(LISTED, K=1024), fp8=True) is None


# ---- products of groups
GROUPED = Workload(4096, 1536, 2048, grouping="128")
TILES = [to_text(c) for c in group_rule.candidates(prune.grouped_problem(GROUPED))]


def of_groups(i: int) -> BestConfig:
    """A winner of `hopper.grouped` at `GROUPED`."""
    return winner(TILES[i], workload=GROUPED, kernel="hopper.grouped")


def asked(**changes: Any) -> GroupedProblem:
    """A product of groups on the GPU."""
    return replace(prune.grouped_problem(GROUPED), device=torch.device("cuda", 0), **changes)


@pytest.mark.parametrize(
    ("line", "changes", "from_pack"),
    [
        ("1-4096x1536x2048 groups:128", {}, True),
        ("1-4095x1536x2048 groups:128", {}, False),
        ("4096x1536x2048 groups:64", {}, False),
        ("4096x1536x2048 groups:128:terms", {}, False),
        ("4096x1536x2048 swiglu groups:128", {}, False),
        ("4096x1536x2048 groups:128 zero-tail", {}, False),
        ("4096x1536x2048 groups:128 zero-tail", {"zero_tail": True}, True),
        ("32x1536x2048 groups:128:masked", {"capacity": 32}, True),
        ("4096x1536x2048", {}, False),
        ("4096x1536x2048 fp8-e4m3 1x128:128x128 groups:128", {}, False),
    ],
)
def test_listed_groups_are_chosen_by_the_table_of_the_pack(
    line: str, changes: dict[str, Any], from_pack: bool, gpu: ImaginedGpu, build: Build
) -> None:
    ship([of_groups(3)], gpu.path.parent)
    lookup.clear_cache()
    outblas.load_pack(build(of_groups(5), about={"products": [line]}))

    found = lookup.grouped_config(asked(**changes))

    assert TILES.index(found) == (5 if from_pack else 3)


# ---- results of one's own
@pytest.mark.parametrize("of", [H100, OLDER], ids=["this driver", "another driver"])
def test_results_of_the_user_come_first(of: Any, gpu: ImaginedGpu, build: Build) -> None:
    """Though the pack has results of its builder, which come before its tables."""
    builders = to_bytes(best_of([winner(SECOND)], lambda won: won.when))
    outblas.load_pack(build(winner(FIRST), **{packed_tables.OWN_RESULTS: builders}))
    by_builder = gpu.launched(call())

    gpu.tune(winner(THIRD, gpu=of))

    assert by_builder == ("hopper.gemm", SECOND)
    assert gpu.launched(call()) == ("hopper.gemm", THIRD)


def test_the_results_of_one_model_are_gathered(tmp_path: Path) -> None:
    store, folder = tmp_path / "s.sqlite", tmp_path / "tables"
    with Store(store) as opened:
        for each in (winner(FIRST), winner(SECOND, gpu=H200)):
            opened.record_best(each)
    ship([winner(SECOND, gpu=gpu) for gpu in (H100, H200, imagined("h20"))], folder)

    found = packed_tables.gathered(H100, store, folder)
    entries = packed_tables.entries(found, H100)

    assert sorted(found) == [
        "own/results.json",
        "shipped/NVIDIA_H100_80GB_HBM3.json",
        "shipped/NVIDIA_H200.json",
    ]
    assert [(e.config, e.origin) for e in entries] == [
        (FIRST, "tuned on this GPU model, other versions"),
        (SECOND, "shipped table of this GPU model"),
        (SECOND, "shipped table of the nearest GPU model"),
    ]


def test_a_store_without_results_of_the_model_is_refused(tmp_path: Path) -> None:
    with Store(tmp_path / "s.sqlite") as opened:
        opened.record_best(winner(gpu=H200))

    with pytest.raises(ValueError, match="has no results of NVIDIA H100 80GB HBM3 with 132 SMs"):
        packed_tables.gathered(H100, tmp_path / "s.sqlite", tmp_path)


def test_a_pack_chooses_as_the_shipped_tables_that_it_has() -> None:
    nowhere = Path("/nonexistent/tuning.sqlite")
    packed = packed_tables.entries(packed_tables.gathered(H100), H100)

    shipped = lookup.TuningIndex(H100, nowhere, TABLES).entries
    assert packed
    assert lookup.TuningIndex(H100, nowhere, packed=packed).entries == tuple(
        entry
        for entry in shipped
        if entry.kernel == "hopper.gemm" or entry.workload.dtype == "float32"
    )


@pytest.mark.parametrize("changes", [{}, {"source": "older"}], ids=["of these sources", "of older"])
def test_a_pack_of_kernels_of_triton_alone_has_tables_that_choose(
    changes: dict[str, str], gpu: ImaginedGpu, tmp_path: Path
) -> None:
    """For products of float32, of which packs hold every kernel that is tuned."""
    wide = Workload(128, 512, 512, "float32", "float32", "nt")
    tuned = winner(FASTER, workload=wide, kernel="portable")
    path, toolchain = tmp_path / "made.outblas", triton_variant.toolchain_fields() | changes
    about = {"gpu": H100.name, "products": ["128x512x512 float32 nt"]}
    texts = {NAME: to_bytes(best_of([tuned], lambda won: won.when))}
    pack.write(path, about, [({"kernel": "one", **toolchain}, b"code")], texts)
    outblas.load_pack(path)
    a, b = (torch.empty(n, 512, device="meta") for n in (128, 512))

    index = lookup.packed_index(0, wide)

    assert (index is None) == bool(changes)
    if index is not None:
        assert [(entry.kernel, entry.config) for entry in index.entries] == [("portable", FASTER)]
        assert gpu.launched(on_gpu(a, b.t())) == ("portable", FASTER)
    assert lookup.packed_index(0, replace(wide, dtype="tf32")) is None


def test_a_faster_kernel_that_packs_do_not_hold_is_not_taken(
    gpu: ImaginedGpu, build: Build
) -> None:
    """Triton would compile it."""
    ship([winner(FASTER, ratio=1.5, us=50.0)], gpu.path.parent)
    lookup.clear_cache()
    before = gpu.launched(call())

    outblas.load_pack(build(winner(FIRST), winner(FASTER, ratio=1.5, us=50.0)))

    assert before == ("portable", FASTER)
    assert gpu.launched(call()) == ("hopper.gemm", FIRST)


# ---- packs whose tables are not used
@pytest.mark.parametrize(
    ("winners", "changes"),
    [
        ([winner()], {"about": {"gpu": H200.name}}),
        ([winner()], {"source": "of other sources"}),
        ([], {}),
    ],
    ids=["another GPU", "other sources", "no tables"],
)
def test_a_pack_whose_kernels_or_tables_are_not_used_chooses_nothing(
    winners: list[BestConfig], changes: dict[str, Any], gpu: ImaginedGpu, build: Build
) -> None:
    outblas.load_pack(build(*winners, **changes))

    assert gpu.launched(call()) == ("hopper.gemm", SECOND)


def test_an_altered_table_chooses_nothing_and_is_named_once(gpu: ImaginedGpu, build: Build) -> None:
    path = build(winner(FIRST))
    content = path.read_bytes()
    place = content.index(b'"ratio"')
    path.write_bytes(content[:place] + b"'" + content[place + 1 :])
    outblas.load_pack(path)

    with pytest.warns(RuntimeWarning, match="the table shipped/.* is not what was packed") as said:
        chosen = [gpu.launched(call()) for _ in range(2)]

    assert chosen == [("hopper.gemm", SECOND)] * 2
    assert len(said) == 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [(b"{", "the file is not JSON"), (b"\xff", "can't decode"), (b"{}", "expected the format")],
)
def test_what_is_no_table_is_a_problem_of_the_pack(text: bytes, reason: str, build: Build) -> None:
    found = pack.read(build(winner(FIRST), odd=text))

    assert found.problems() == []
    (problem,) = packed_tables.problems(found)
    assert reason in problem


@pytest.mark.parametrize("products", [["8x8"], [3], 3], ids=["sizes", "a number", "no list"])
def test_a_list_of_products_that_nobody_can_read_lists_none(
    products: Any, gpu: ImaginedGpu, build: Build
) -> None:
    outblas.load_pack(build(winner(FIRST), about={"products": products}))

    with pytest.warns(RuntimeWarning, match="the tables are not used"):
        assert gpu.launched(call()) == ("hopper.gemm", SECOND)
