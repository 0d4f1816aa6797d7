"""hopper.gemm without a GPU: machine code of its levers, who computes what, what the host hands over, its rule."""

from __future__ import annotations

import ast
import itertools
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outblas import configs
from outblas.artifact import example
from outblas.device import raster
from outblas.hopper import gemm, gemm_host, host, rules, schedule, work
from outblas.hopper.config import HopperConfig
from outblas.inspect import inspect
from outblas.operands import Problem, problem

BF16, FP32 = torch.bfloat16, torch.float32
OWN = gemm.Config()
FLAT = torch.empty(1 << 20, dtype=BF16, device="meta")
SMALL = "tile_m=64,consumers=1,producer_registers=0,consumer_registers=0,store_buffers=1,slots=16,cluster_m=1"
MULTICAST, TMA_STORE = "UTMALDG.2D.MULTICAST", "UTMASTG"
SUMS = "ATOMG.E.ADD.STRONG.GPU"  # counts the pieces of a tile


# ---- machine code ----------------------------------------------------------------------------------------------------
@pytest.mark.compile
@pytest.mark.parametrize(
    ("text", "layout", "out_dtype", "has", "lacks"),
    [
        ("tile_n=192,elastic=True", "nt", "", {"HGMMA.64x192x16": 8, "HGMMA.64x184x16": 8, "STSM.16.M88.4": 24}, ()),
        ("tile_n=192,elastic=True", "nn", "", {"HGMMA.64x192x16": 8, "HGMMA.64x184x16": 8, TMA_STORE: 6}, ()),
        ("tile_m=64,pingpong=True", "nt", "", {"HGMMA.64x256x16": 8, TMA_STORE: 4, MULTICAST: 1}, (SUMS,)),
        ("tile_m=64,pingpong=True", "nn", "", {"HGMMA.64x256x16": 8, TMA_STORE: 4}, (SUMS,)),
        ("split_k=4,k_serpentine=False", "nt", "", {"HGMMA.64x256x16": 8, SUMS: 1, "STG.E.128": 32}, ()),
        ("stream_k=True,k_serpentine=False", "nn", "", {"HGMMA.64x256x16": 8, SUMS: 1, "STG.E.128": 32}, ()),
        (f"{SMALL},tile_n=32,swap=True", "nt", "", {"HGMMA.64x32x16": 8, "STSM.16.MT88.4": 2}, (MULTICAST, "STG")),
        (f"{SMALL},tile_n=32,swap=True", "nn", "", {"HGMMA.64x32x16": 8, "STSM.16.MT88.4": 2}, (MULTICAST, "STG")),
        ("", "nn", "float32", {"HGMMA.64x256x16": 8, "STS.64": 64, TMA_STORE: 8}, ("STSM", "STG")),
        (
            f"{SMALL},tile_n=32,cluster_k=4",
            "nt",
            "",
            {"HGMMA.64x32x16": 8, "STAS.128": 4, "LDS.128": 3, TMA_STORE: 1},
            (MULTICAST, "STG", SUMS),
        ),
        (f"{SMALL},tile_n=16", "nt", "", {"HGMMA.64x16x16": 8, "STSM.16.M88.4": 1, TMA_STORE: 1}, (MULTICAST, "STG")),
        (f"{SMALL},tile_n=16", "nn", "", {"HGMMA.64x16x16": 8, "STSM.16.M88.4": 1, TMA_STORE: 1}, (MULTICAST, "STG")),
    ],
)
def test_levers_show_in_the_machine_code(
    text: str, layout: str, out_dtype: str, has: dict[str, int], lacks: tuple[str, ...]
) -> None:
    """No spills and no warnings of the assembler either."""
    inspect("hopper.gemm", config=text, layout=layout, out_dtype=out_dtype or None).require(
        stack=0, has=has, lacks=lacks
    )


@pytest.mark.compile
@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ((512, 512, 512), f"{SMALL},tile_n=32,slots=8"),
        ((1024, 1024, 1024), "tile_m=64,tile_n=128,consumers=1,producer_registers=0,consumer_registers=0,slots=8"),
        ((2048, 2048, 2048), ""),
        ((16, 4096, 4096), f"{SMALL},tile_n=16,swap=True,cluster_k=2"),
    ],
)
def test_short_calls_neither_divide_nor_fence(shape: tuple[int, int, int], text: str) -> None:
    """Nor wait for the cluster a second time: who has one tile ends when nobody will reach into its memory."""
    code = inspect("hopper.gemm", config=text, shape=shape)
    code.require(stack=0, lacks=("MUFU", "MEMBAR.ALL.GPU", "MEMBAR.SC.GPU", "LDL", "STL"))
    assert code.count("UCGABAR_WAIT") <= 1
    assert code.count("UTMACCTL.PF") == 3  # descriptors of A, B and C


@pytest.mark.compile
@pytest.mark.parametrize(
    "text",
    [
        "split_k=11,k_serpentine=False",
        "tile_m=192,tile_n=128,consumers=3,producer_registers=32,consumer_registers=160,split_k=11,k_serpentine=False,"
        "store_buffers=1",
    ],
)
def test_consumers_meet_before_pieces_of_k_are_counted(text: str) -> None:
    """After the count one of them may be done with the tile, and the other wait for it for ever."""
    text_of = inspect("hopper.gemm", config=text, shape=(256, 512, 65536)).ptx_text
    (meeting,) = re.finditer(r"(bar|barrier)\.sync\S* \s*8, (256|384);", text_of)
    assert meeting.start() < text_of.index("atom.")


@pytest.mark.compile
@pytest.mark.parametrize(
    ("text", "size", "slabs"),
    [("", 8192, 0), ("", 2048, 32768), ("tile_n=128,slots=5,cluster_m=1,store_buffers=1,cluster_k=2", 1024, 0)],
)
def test_shared_memory_is_what_the_formula_says(text: str, size: int, slabs: int) -> None:
    """Less what C's slabs would take, where they lie over the ring."""
    config = configs.from_text(gemm.Config, text)
    made = gemm_host.compile_variant(gemm.Gemm, variant(example(BF16, None, "nt", (size,) * 3), config))
    assert f"{config.shared_memory_bytes - slabs} : i64" in str(made.ir_module)


def test_words_beside_the_barriers_have_room() -> None:
    refused = configs.from_text(gemm.Config, f"{SMALL},tile_n=16,tile_k=16".replace("slots=16", "slots=61"))
    assert "slots is 61, expected at most 60" in str(gemm.unsupported(product(64, 64, 64), refused))


# ---- who computes what -----------------------------------------------------------------------------------------------
class Word(int):
    """A 32-bit integer that is never more."""


def _checked(name: str) -> Any:
    compute = getattr(int, name)

    def operation(self: int, other: int) -> Word:
        found = compute(int(self), int(other))
        assert -(1 << 31) <= found < 1 << 31, f"{self} {name} {other} is {found}"
        return Word(found)

    return operation


def _checked_divmod(self: int, other: int) -> tuple[Word, Word]:
    quotient, remainder = divmod(int(self), int(other))
    return Word(quotient), Word(remainder)


Word.__divmod__ = _checked_divmod  # type: ignore[assignment,method-assign]
for _name in ("add", "sub", "mul", "floordiv", "mod"):
    setattr(Word, f"__{_name}__", _checked(f"__{_name}__"))
    setattr(Word, f"__r{_name}__", _checked(f"__r{_name}__"))


@pytest.fixture(scope="module")
def arithmetic() -> SimpleNamespace:
    """`work`'s own source on Python's integers: what the DSL would trace is computed instead."""
    tree = ast.parse(Path(work.__file__).read_text(encoding="utf-8"))
    dsl = SimpleNamespace(const_expr=bool, min=min, max=max, Constexpr=object)
    made: dict[str, Any] = {"cutlass": dsl, "cute": SimpleNamespace(jit=lambda function: function), "Int32": Word}
    made |= {"NamedTuple": NamedTuple, "__name__": "work"}
    tree.body = [node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom)]
    exec(compile(tree, work.__file__, "exec"), made)
    return SimpleNamespace(**made)


def launch(
    config: HopperConfig, M: int, N: int, K: int, batch: int = 0, fit: int = 132, order: str = ""
) -> SimpleNamespace:
    """What the kernel has of a call on a GPU where so many clusters fit, as the host and `Gemm.__call__` make it."""
    tiles_m, tiles_n = schedule.cluster_tiles(config, M, N)
    tiles, k_tiles = tiles_m * tiles_n * max(batch, 1), -(-K // config.tile_k)
    pieces = min(config.split_k, k_tiles)
    columns, narrow = schedule.columns(config, N), config.tile_n - 8
    clusters = min(fit, tiles * (k_tiles if config.stream_k else pieces))
    table = None
    if order:
        steps = raster.schedule(order, tiles_m, tiles_n, fit, 8, 8)
        table = [Word(tile) for step in steps for tile in step]
    by = work.Divisors(
        *(Word(n) for n in (tiles_n if order else tiles_m, tiles_m * tiles_n, clusters, pieces)),
    )
    numbers = {
        "clusters": clusters, "tiles": tiles, "k_tiles": k_tiles, "pieces": pieces,
        "wide": min(max(-(-(N - columns * narrow) // 8), 0), columns) if config.elastic else 0,
        "part_a": 0, "part_b": 0,
    }  # fmt: skip
    once = tiles * pieces <= fit and not config.stream_k
    return SimpleNamespace(
        batched=batch > 0, table=table, by=by, once=once, **{name: Word(value) for name, value in numbers.items()}
    )


def all_work(arithmetic: Any, k: SimpleNamespace, config: HopperConfig) -> list[tuple[int, int, work.Work]]:
    """(cluster, step, work) of a whole launch; CTAs that share a tile along K as pieces of it."""
    found = []
    for cluster, part in itertools.product(range(int(k.clusters)), range(config.cluster_k)):
        k.cluster, k.part_k = Word(cluster), Word(part)
        for step in range(arithmetic.steps(k, config)):
            mine = work.Work(*(int(value) for value in arithmetic.at(k, config, Word(step))))
            if config.cluster_k > 1:
                mine = mine._replace(piece=part, pieces=config.cluster_k)
            found.append((cluster, step, mine))
    return found


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_every_slice_of_every_tile_is_computed_once(arithmetic: Any, data: st.DataObject) -> None:
    draw = data.draw
    kind = draw(st.sampled_from(["whole", "split", "stream", "cluster"]))
    config = replace(
        OWN,
        tile_m=64,
        tile_n=draw(st.sampled_from([32, 64])),
        cluster_m=1,
        k_serpentine=False,
        elastic=kind != "cluster" and draw(st.booleans()),
        cluster_k=draw(st.sampled_from([2, 4])) if kind == "cluster" else 1,
        split_k=draw(st.integers(2, 7)) if kind == "split" else 1,
        stream_k=kind == "stream",
    )
    M, N, K = draw(st.integers(1, 600)), draw(st.integers(1, 400)), draw(st.integers(1, 900))
    batch, fit = draw(st.sampled_from([0, 1, 3])), draw(st.sampled_from([1, 2, 7, 16, 132]))
    rows, columns = schedule.cluster_tiles(config, M, N)
    order = draw(st.sampled_from(["serpentine", "hilbert"])) if rows * columns > fit else ""
    check(arithmetic, launch(config, M, N, K, batch, fit, order), config, rows, columns)


def check(arithmetic: Any, k: SimpleNamespace, config: HopperConfig, rows: int, columns: int) -> None:
    found = all_work(arithmetic, k, config)
    tiles: dict[tuple[int, int, int], list[work.Work]] = {}
    for _, _, mine in found:
        assert mine.count > 0 or mine.pieces == 1 or int(k.k_tiles) < config.cluster_k
        tiles.setdefault((mine.matrix, mine.m, mine.column), []).append(mine)
    assert len(tiles) == int(k.tiles)
    assert {m for _, m, _ in tiles} == set(range(rows))
    assert len({column for _, _, column in tiles}) == columns
    places: set[int] = set()
    shared: set[int] = set()
    for parts in tiles.values():
        parts.sort(key=lambda mine: mine.piece)
        assert [mine.piece for mine in parts] == list(range(parts[0].pieces))
        assert len({(mine.narrow, mine.pieces, mine.shared, mine.place) for mine in parts}) == 1
        ends = 0
        for mine in parts:
            assert mine.begin == ends
            ends += mine.count
        assert ends == int(k.k_tiles)
        if len(parts) > 1 and config.split:
            own = {parts[0].place + mine.piece for mine in parts}
            assert not own & places
            assert parts[0].shared not in shared
            places |= own
            shared.add(parts[0].shared)
    # The host's room for partial sums and counters.
    cut = int(k.tiles % k.clusters if config.stream_k else k.tiles)
    room = int(k.clusters) + cut if config.stream_k else int(k.tiles * k.pieces)
    assert max(places, default=-1) < room
    assert max(shared, default=-1) < max(cut, 1)
    steps = [sum(1 for cluster, _, _ in found if cluster == c) for c in range(int(k.clusters))]
    assert min(steps) >= 1
    if config.stream_k:
        slices = [sum(mine.count for cluster, _, mine in found if cluster == c) for c in range(int(k.clusters))]
        assert max(slices) - min(slices) <= 1 or int(k.tiles % k.clusters * k.k_tiles) < int(k.clusters)


@pytest.mark.parametrize(
    ("M", "N", "K", "tiles", "clusters"),
    [
        (64, 64, 64 * 3, 1, 3),  # fewer slices than clusters fit
        (128, 64, 64 * 5, 2, 10),
        (64 * 7, 64, 64, 7, 7),  # a slice each
        (64 * 133, 64, 64, 133, 132),  # one tile of one slice is left over
        (64 * 264, 64, 128, 264, 132),  # none is
    ],
)
def test_stream_k_with_few_slices(arithmetic: Any, M: int, N: int, K: int, tiles: int, clusters: int) -> None:
    config = configs.from_text(gemm.Config, f"{SMALL},tile_n=64,slots=8,k_serpentine=False,stream_k=True")
    k = launch(config, M, N, K)
    assert (k.tiles, k.clusters) == (tiles, clusters)
    check(arithmetic, k, config, *schedule.cluster_tiles(config, M, N))


def test_the_longest_row_of_slices_is_numbered_in_32_bits(arithmetic: Any) -> None:
    config = configs.from_text(gemm.Config, f"{SMALL},tile_n=64,slots=8,k_serpentine=False,stream_k=True")
    M, K = 64 * 263, gemm_host.MOST_SLICES * 64
    check(arithmetic, launch(config, M, 64, K), config, 263, 1)
    given = example(BF16, None, "nt", (M, 64, K))
    assert gemm.unsupported(given, config) is None
    assert "slices of K" in str(gemm.unsupported(replace(given, K=K + 1), config))


def test_ctas_of_a_cluster_have_neighbouring_tiles(arithmetic: Any) -> None:
    config = replace(OWN, tile_m=64, tile_n=64, cluster_m=2, cluster_n=2)
    k = launch(config, 256, 256, 64)
    k.cluster = Word(3)
    tiles = set()
    for k.part_b in (0, 1):
        for k.part_a in (0, 1):
            mine = arithmetic.at(k, config, Word(0))
            tiles.add((int(mine.m), int(mine.column)))
    assert tiles == {(m, column) for m in (2, 3) for column in (128, 192)}


@settings(max_examples=300, deadline=None)
@given(tile_n=st.integers(3, 32).map(lambda n: 8 * n), N=st.integers(1, 20_000))
def test_elastic_columns_cover_the_matrix(arithmetic: Any, tile_n: int, N: int) -> None:
    """In whole steps of 8, unless narrow ones are too wide, of which one fewer would not do."""
    config = replace(OWN, tile_n=tile_n, elastic=True, cluster_m=1)
    k = launch(config, 1, N, 64)
    k.cluster = Word(0)
    k.clusters = Word(1)
    tiles = [arithmetic.at(k, config, Word(n)) for n in range(int(k.tiles))]
    widths = [config.widths[int(mine.narrow)] for mine in tiles]
    assert len(tiles) == schedule.columns(config, N)
    assert set(widths) <= {tile_n, tile_n - 8}
    assert [int(mine.column) for mine in tiles] == [sum(widths[:n]) for n in range(len(widths))]
    over = sum(widths) - N
    assert over >= 0
    if over >= 8:
        assert set(widths) == {tile_n - 8}
        assert (len(widths) - 1) * tile_n < N


# ---- the host --------------------------------------------------------------------------------------------------------
def asked(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None, **changed: Any) -> Problem:
    shape = (*a.shape[:-1], b.shape[-1])
    return replace(problem(a, b, torch.empty(shape, dtype=BF16, device="meta") if out is None else out), **changed)


def product(M: int, N: int, K: int, out_dtype: torch.dtype = BF16, **changed: Any) -> Problem:
    out = torch.empty(M, N, dtype=out_dtype, device="meta")
    a, b = torch.empty(M, K, dtype=BF16, device="meta"), torch.empty(N, K, dtype=BF16, device="meta").t()
    return replace(problem(a, b, out), **{"alignment": (16, 16, 16), **changed})


def variant(given: Problem, config: HopperConfig = OWN) -> Any:
    return gemm_host.example_variant(gemm.plan.args[0], given, config)


ODD = {
    "K no multiple of 8": (product(64, 64, 63), (True, True)),
    "N no multiple of 8": (asked(FLAT[:4096].view(64, 64), FLAT[: 64 * 60].view(64, 60)), (False, True)),
    "no unit stride": (asked(FLAT.as_strided((64, 64), (512, 2)), FLAT[:4096].view(64, 64)), (True, False)),
    "odd address": (product(64, 64, 64, alignment=(2, 16, 16)), (True, False)),
    "both odd": (product(64, 64, 64, alignment=(8, 4, 2)), (True, True)),
    "a row": (product(1, 63, 64), (False, False)),
    "a batch": (
        asked(FLAT[: 3 * 4096].view(3, 64, 64), FLAT[: 3 * 4096].view(3, 64, 64), alignment=(16, 16, 16)),
        (False, False),
    ),
    "a batch that starts anywhere": (
        asked(FLAT.as_strided((3, 64, 64), (4100, 64, 1)), FLAT.as_strided((3, 64, 64), (4104, 64, 1))),
        (True, False),
    ),
    "one odd B for a batch": (
        asked(FLAT.as_strided((3, 64, 63), (63, 200, 1)), FLAT[: 63 * 60].view(63, 60).expand(3, 63, 60)),
        (True, True),
    ),
    "two batch dimensions": (
        asked(FLAT.as_strided((2, 5, 64, 64), (7, 4096 * 3, 64, 1)), FLAT.as_strided((2, 5, 64, 8), (0, 520, 1, 65))),
        (True, True),
    ),
}


@pytest.mark.parametrize("case", ODD)
def test_copies_are_said(case: str) -> None:
    given, copies = ODD[case]
    said = gemm.remarks(given)
    assert [line[0] for line in said] == [name for name, is_copied in zip("ab", copies, strict=True) if is_copied]
    assert all("is copied first" in line and "has strides" in line for line in said)


@pytest.mark.parametrize("config", [OWN, replace(OWN, swap=True)], ids=["straight", "swapped"])
@pytest.mark.parametrize("case", ODD)
def test_any_strides_are_taken(case: str, config: HopperConfig) -> None:
    given, copies = ODD[case]
    assert gemm.unsupported(given) is None
    assert gemm_host.copied(given) == copies
    made = gemm_host.aligned(given)
    assert gemm_host.copied(made) == (False, False)
    assert replace(made, a=given.a, b=given.b, alignment=given.alignment) == given
    for name, is_copied in zip("ab", copies, strict=True):
        before, after = getattr(given, name), getattr(made, name)
        if is_copied:
            assert 1 in after[-2:]
            assert all(stride % 8 == 0 for i, stride in enumerate(after) if i < len(after) - 2 or stride != 1)
            assert [stride == 0 for stride in before[:-2]] == [stride == 0 for stride in after[:-2]]
        else:
            assert after == before
    turned, crossed = gemm_host._turned(made, config)
    assert crossed == config.swap
    a, b = gemm_host._operand_strides(gemm_host._one_batch(turned)[0] if len(turned.batch) > 1 else turned)
    assert 1 in a[:2]
    assert 1 in b[:2]
    assert variant(given, config).layout[0] in "nt"


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_copy_has_the_elements(data: st.DataObject) -> None:
    draw = data.draw
    size = st.integers(1, 9)
    shape = (*draw(st.lists(size, max_size=2)), draw(size), draw(size))
    source = tuple(draw(st.integers(0 if i < len(shape) - 2 else 1, 40)) for i in range(len(shape)))
    room = 1 + sum((extent - 1) * stride for extent, stride in zip(shape, source, strict=True))
    t = torch.arange(room)
    given = replace(product(*shape[-2:], 8), batch=shape[:-2])
    made = gemm_host._copy_strides(given, source, *shape[-2:])
    copy = gemm_host._copy(t, shape, source, made)
    assert copy.stride() == made
    assert torch.equal(copy, t.as_strided(shape, source))


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("by_columns", [False, True])
def test_a_product_is_turned_for_each_of_two_reasons(swap: bool, by_columns: bool) -> None:
    out = torch.empty(128, 64, dtype=BF16, device="meta").t() if by_columns else None
    given = asked(FLAT[: 64 * 256].view(64, 256), FLAT[: 128 * 256].view(128, 256).t(), out)
    turned, crossed = gemm_host._turned(given, replace(OWN, swap=swap))
    assert crossed == (swap != by_columns)
    assert turned == (host.transposed(given) if crossed else given)
    form = variant(given, replace(OWN, swap=swap)).form
    assert (form.by_columns, form.staged, form.width) == (swap, True, 8)


def test_the_longest_batch_dimension_is_the_kernels() -> None:
    given = replace(product(64, 64, 64), batch=(2, 7, 3), a=(9, 8, 0, 64, 1), b=(0, 24, 7, 1, 64), out=(1, 2, 3, 64, 1))
    made, inner = gemm_host._one_batch(given)
    assert inner == 1
    assert (made.batch, made.a, made.b, made.out) == ((7,), (8, 64, 1), (24, 1, 64), (2, 64, 1))
    assert gemm_host._offset(given.a, (1, 2), inner) == 9
    assert gemm_host._offset(given.b, (1, 2), inner) == 14
    assert gemm_host._offset(given.out, (1, 2), inner) == 7


@pytest.mark.parametrize(
    ("given", "width", "by_columns", "staged"),
    [
        (product(64, 64, 64), 8, False, True),
        (product(64, 64, 64, FP32), 4, False, True),
        (product(64, 68, 64, FP32), 4, False, True),
        (product(64, 66, 64, FP32), 2, False, False),
        (product(64, 66, 64), 2, False, False),
        (product(64, 65, 64), 1, False, False),
        (product(64, 64, 64, alignment=(16, 16, 2)), 1, False, False),
        (product(64, 64, 64, alignment=(16, 16, 8)), 2, False, False),
        (product(64, 60, 64, out=(72, 1)), 2, False, False),  # TMA would write up to column 64
        (product(64, 64, 64, out=(512, 2)), 1, False, False),
        (product(1, 64, 64, out=(1, 1)), 8, False, True),
        (product(64, 64, 64, batch=(3,), a=(0, 64, 1), b=(0, 1, 64), out=(4097, 64, 1)), 1, False, False),
        (product(64, 64, 64, batch=(3,), a=(0, 64, 1), b=(0, 1, 64), out=(4104, 64, 1)), 8, False, True),
    ],
)
def test_how_c_is_written(given: Problem, width: int, by_columns: bool, staged: bool) -> None:
    form = variant(given).form
    assert (form.width, form.by_columns, form.staged) == (width, by_columns, staged)
    unstaged = variant(given, replace(OWN, store_buffers=0)).form
    assert (unstaged.width, unstaged.staged) == (width, False)


@pytest.mark.parametrize(
    ("given", "width", "staged"),
    [
        (product(16, 64, 64), 8, True),
        (product(16, 66, 64), 1, False),
        (product(16, 64, 64, FP32), 1, False),  # which stmatrix cannot turn
    ],
)
def test_how_a_swapped_c_is_written(given: Problem, width: int, staged: bool) -> None:
    made = variant(given, replace(OWN, swap=True))
    assert (made.form.width, made.form.by_columns, made.form.staged) == (width, True, staged)
    assert made.layout == "nt"


ROW, COLUMN = product(1, 4096, 64), product(4096, 1, 64)
ROWS = replace(product(1, 64, 64), batch=(3,), a=(0, 64, 1), b=(0, 1, 64), out=(64, 64, 1))


@pytest.mark.parametrize(
    ("given", "swap", "strides", "width", "by_columns"),
    [
        (ROW, False, (8, 1), 8, False),
        (ROW, True, (1, 8), 8, True),
        (COLUMN, False, (1, 8), 8, True),
        (COLUMN, True, (8, 1), 8, False),
        (ROWS, False, (8, 1, 64), 8, False),
        (ROWS, True, (1, 8, 64), 8, True),
        (replace(ROW, out=(4096, 2)), True, (1, 2), 1, True),  # no two elements of it are neighbours
        (replace(ROWS, out=(60, 60, 1)), True, (1, 8, 60), 1, True),  # not every row starts at 16 bytes
        (product(1, 4095, 64), True, (1, 8), 1, True),
        (replace(COLUMN, out=(4096, 1)), False, (4096, 1), 1, False),  # of a matrix stored by rows
        (replace(ROW, out_dtype=FP32), True, (1, 8), 1, True),  # which stmatrix cannot turn
        (product(1, 1, 64), True, (8, 1), 1, False),
    ],
)
def test_a_single_row_or_column_is_written_along_its_length(
    given: Problem, swap: bool, strides: tuple[int, ...], width: int, by_columns: bool
) -> None:
    config = replace(OWN, swap=swap)
    assert gemm_host._out_strides(gemm_host._turned(given, config)[0]) == strides
    form = variant(given, config).form
    assert (form.width, form.by_columns, form.staged) == (width, by_columns, width == 8)


def test_a_form_says_what_a_call_has() -> None:
    plain = variant(product(64, 64, 64)).form
    assert (plain.batched, plain.ordered, plain.scaled, plain.addend) == (False, False, False, False)
    assert variant(product(8192, 8192, 64)).form.ordered
    assert variant(replace(product(64, 64, 64), scaled=True)).form.scaled
    assert variant(replace(product(64, 64, 64), scaled=True, c=(0, 1))).form.addend
    assert variant(ODD["a batch"][0]).form.batched


def test_one_compile_serves_orders_and_numbers_of_pieces() -> None:
    given = product(8192, 8192, 8192)
    halves = replace(OWN, split_k=2, k_serpentine=False)
    assert variant(given, replace(OWN, order="hilbert", group_m=4, sms=120)) == variant(given)
    assert variant(given, replace(halves, split_k=5)) == variant(given, halves) != variant(given)


# ---- the rule --------------------------------------------------------------------------------------------------------
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_the_rule_gives_a_config_that_can_be_built(data: st.DataObject) -> None:
    draw = data.draw
    size = st.one_of(st.integers(1, 300), st.integers(1, 20_000))
    M, N, K = draw(size), draw(size), draw(size)
    given = product(M, N, K, draw(st.sampled_from([BF16, FP32])), batch_invariant=draw(st.booleans()))
    if draw(st.booleans()):
        given = replace(given, out=(1, M))
    if draw(st.booleans()):
        count = draw(st.integers(1, 40))
        given = replace(given, batch=(count,), a=(0, *given.a), b=(0, *given.b), out=(M * N, *given.out))
    made = rules.config(given, draw(st.sampled_from([1, 78, 114, 132])), OWN)
    assert gemm.Gemm.invalid_reason(made) is None
    assert gemm.unsupported(given, made) is None
    assert made.split_k <= max(1, math.ceil(K / made.tile_k))
    assert configs.from_text(gemm.Config, configs.to_text(made)) == made
    if given.batch_invariant:
        assert not made.split
        assert made.cluster_k == 1
        assert not made.k_serpentine


def test_the_rule_cuts_k_where_few_tiles_are() -> None:
    small = product(64, 64, 65536)
    assert rules.config(small, 132, OWN).split_k > 8
    assert rules.config(replace(small, batch_invariant=True), 132, OWN).split_k == 1
    few = product(16, 4096, 4096)
    made = rules.config(few, 132, OWN)
    assert (made.cluster_k, made.split_k, made.swap) == (2, 1, True)
    assert rules.config(replace(few, batch_invariant=True), 132, OWN).cluster_k == 1
    large = rules.config(product(8192, 8192, 8192), 132, OWN)
    assert (large.split_k, large.cluster_k, large.elastic) == (1, 1, True)


@pytest.mark.parametrize("text", ["split_k=2,k_serpentine=False", "stream_k=True,k_serpentine=False", ""])
def test_another_order_of_k_is_refused_where_rows_must_not_tell(text: str) -> None:
    given = product(64, 64, 4096, batch_invariant=True)
    config = configs.from_text(gemm.Config, text)
    assert "batch_invariant needs one order of K" in str(gemm.unsupported(given, config))
    assert gemm.unsupported(given, replace(config, split_k=1, stream_k=False, k_serpentine=False)) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("split_k=65", "split_k is 65, expected 1 to 64 pieces of K"),
        ("split_k=2,stream_k=True", "split_k is 2 with stream_k, expected 1"),
        ("pingpong=True,consumers=1,producer_registers=0,consumer_registers=0,tile_n=64", "pingpong with 1 consumers"),
        ("pingpong=True,split_k=2,tile_m=64", "pingpong with 2 consumers and pieces of K"),
        ("elastic=True,tile_n=20", "expected a multiple of 8 from 24 to 256 and 0 when elastic"),
        ("elastic=True,tile_n=192,mma_n=96", "mma_n 96, expected"),
        ("tile_m=64", "consumers is 2, expected 1, 2 or 3 that share tile_m"),
        ("phases=True", "phases is True, expected False"),
        ("cluster_m=3", "cluster_m is 3, expected 1, 2 or 4"),
    ],
)
def test_what_cannot_be_built(text: str, reason: str) -> None:
    config = configs.from_text(gemm.Config, text)
    assert reason in str(gemm.unsupported(product(64, 64, 64), config))


def test_every_call_of_an_outer_batch_has_the_alignment_that_is_promised() -> None:
    """The stride that is walked call by call, 20481 elements, leaves C at odd addresses."""
    out = FLAT.as_strided((2, 5, 64, 64), (20481, 4096, 64, 1))
    a, b = torch.empty(2, 1, 64, 64, dtype=BF16), torch.empty(1, 5, 64, 64, dtype=BF16)
    asked = problem(a, b, out)
    assert asked.batch == (2, 5)
    alone, inner = gemm_host._one_batch(asked)
    assert (inner, alone.batch, alone.alignment[2]) == (1, (5,), 2)


def test_partial_sums_beyond_32_bits_are_refused() -> None:
    asked = problem(*(torch.empty(8192, 8192, dtype=BF16, device="meta") for _ in range(3)))
    config = replace(gemm.Config(), split_k=64, k_serpentine=False)
    assert "split_k takes up to 2147483648 partial sums" in str(gemm.unsupported(asked, config))
    assert gemm.unsupported(asked, replace(config, split_k=16)) is None
