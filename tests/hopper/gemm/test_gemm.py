"""hopper.gemm without a GPU: machine code of its levers, what the host hands over, its rule."""

import contextlib
import functools
import gc
import itertools
import math
import re
import weakref
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outblas.core import configs
from outblas.core.artifact import example
from outblas.core.epilogue import EpilogueArgs
from outblas.core.problem import Problem, problem, transposed
from outblas.core.shapes import LAYOUTS
from outblas.core.tensor_memory import LINE
from outblas.hopper import gemm
from outblas.hopper.core import compile, tile_order
from outblas.hopper.core.config import HopperConfig
from outblas.hopper.gemm import canonical, heuristic, operand_copies, schedule, workspace
from outblas.hopper.gemm.compile import compile_variant, shared_memory
from outblas.hopper.gemm.variant import EPILOGUE_TENSORS, example_variant
from outblas.inspect import inspect
from outblas.runtime import default_kernel

BF16, FP32 = torch.bfloat16, torch.float32
OWN = gemm.Config()
FLAT = torch.empty(1 << 20, dtype=BF16, device="meta")
SMALL = (
    "tile_m=64,consumers=1,producer_registers=0,consumer_registers=0,epilogue_stages=1,stages=16,"
    "cluster_m=1"
)
MULTICAST, TMA_STORE = "UTMALDG.2D.MULTICAST", "UTMASTG"
SUMS = "ATOMG.E.ADD.STRONG.GPU"  # counts the pieces of a tile


# ---- machine code
@pytest.mark.compile
@pytest.mark.parametrize(
    ("text", "layout", "out_dtype", "has", "lacks"),
    [
        (
            "tile_n=192,variable_tile_n=True",
            "nt",
            "",
            ("HGMMA.64x192x16", "HGMMA.64x184x16", "STSM.16.M88.4"),
            (),
        ),
        (
            "tile_n=192,variable_tile_n=True",
            "nn",
            "",
            ("HGMMA.64x192x16", "HGMMA.64x184x16", TMA_STORE),
            (),
        ),
        ("tile_m=64,pingpong=True", "nt", "", ("HGMMA.64x256x16", TMA_STORE, MULTICAST), (SUMS,)),
        ("split_k=4,k_serpentine=False", "nt", "", (SUMS, "STG.E.128"), ()),
        ("stream_k=True,k_serpentine=False", "nn", "", (SUMS, "STG.E.128"), ()),
        (f"{SMALL},tile_n=32,swap_ab=True", "nt", "", ("STSM.16.MT88.4",), (MULTICAST, "STG")),
        (f"{SMALL},tile_n=32,swap_ab=True", "nn", "", ("STSM.16.MT88.4",), (MULTICAST, "STG")),
        ("", "nn", "float32", ("HGMMA.64x256x16", "STS.64", TMA_STORE), ("STSM", "STG")),
        (
            f"{SMALL},tile_n=32,cluster_k=4",
            "nt",
            "",
            ("STAS.128", TMA_STORE),
            (MULTICAST, "STG", SUMS),
        ),
        (
            f"{SMALL},tile_n=16",
            "nn",
            "",
            ("HGMMA.64x16x16", "STSM.16.M88.4", TMA_STORE),
            (MULTICAST, "STG"),
        ),
    ],
)
def test_levers_show_in_the_machine_code(
    text: str, layout: str, out_dtype: str, has: tuple[str, ...], lacks: tuple[str, ...]
) -> None:
    """No spills and no warnings of the assembler either. How many of each there are is in the
    snapshot.
    """
    inspect("hopper.gemm", config=text, layout=layout, out_dtype=out_dtype or None).require(
        stack=0, has=has, lacks=lacks
    )


@pytest.mark.compile
@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ((512, 512, 512), f"{SMALL},tile_n=32,stages=8"),
        (
            (1024, 1024, 1024),
            "tile_m=64,tile_n=128,consumers=1,producer_registers=0,consumer_registers=0,stages=8",
        ),
        ((2048, 2048, 2048), ""),
        ((16, 4096, 4096), f"{SMALL},tile_n=16,swap_ab=True,cluster_k=2"),
    ],
)
def test_short_calls_neither_divide_nor_fence(shape: tuple[int, int, int], text: str) -> None:
    """Nor wait for the cluster a second time: who has one tile ends when nobody will reach into its
    memory.
    """
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
        "epilogue_stages=1",
    ],
)
def test_consumers_meet_before_pieces_of_k_are_counted(text: str) -> None:
    """After the count one of them may be done with the tile, and the other wait for it for ever."""
    text_of = inspect("hopper.gemm", config=text, shape=(256, 512, 65536)).ptx_text
    (meeting,) = re.finditer(r"(bar|barrier)\.sync\S* \s*8, (256|384);", text_of)
    assert meeting.start() < text_of.index("atom.")


@pytest.mark.compile
@pytest.mark.parametrize(
    ("text", "N", "slabs"),
    [
        ("", 8192, 0),
        ("", 2048, 32768),
        ("", 8191, 32768),  # TMA cannot write it
        ("tile_n=128,stages=5,cluster_m=1,epilogue_stages=1,cluster_k=2", 1024, 0),
        (f"{SMALL},tile_n=32", 8192, 4096),
        (f"{SMALL},tile_n=16", 8192, 6144),
    ],
)
def test_shared_memory_is_what_the_formula_says(text: str, N: int, slabs: int) -> None:
    """Less what C's slabs do not take, where there are none, they lie over the ring, or they are
    narrow.
    """
    config = configs.from_text(gemm.Config, text)
    asked = variant(example(BF16, None, "nt", (-(-N // 8) * 8, N, 1024)), config)
    assert shared_memory(gemm.Gemm, asked) == config.shared_memory_bytes - slabs
    made = compile_variant(gemm.Gemm, asked)
    assert f"{shared_memory(gemm.Gemm, asked)} : i64" in str(made.ir_module)


def test_words_beside_the_barriers_have_room() -> None:
    refused = configs.from_text(
        gemm.Config, f"{SMALL},tile_n=16,tile_k=16".replace("stages=16", "stages=61")
    )
    assert "stages is 61, expected at most 60" in str(
        gemm.unsupported(product(64, 64, 64), refused)
    )


# ---- the host
def asked(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None, **changed: Any
) -> Problem:
    shape = (*a.shape[:-1], b.shape[-1])
    return replace(
        problem(a, b, torch.empty(shape, dtype=BF16, device="meta") if out is None else out),
        **changed,
    )


def product(M: int, N: int, K: int, out_dtype: torch.dtype = BF16, **changed: Any) -> Problem:
    out = torch.empty(M, N, dtype=out_dtype, device="meta")
    a, b = (
        torch.empty(M, K, dtype=BF16, device="meta"),
        torch.empty(N, K, dtype=BF16, device="meta").t(),
    )
    return replace(problem(a, b, out), **{"alignment": (LINE, LINE, 16), **changed})


def variant(given, config=OWN):
    return example_variant(cast(functools.partial, gemm.plan).args[0], given, config)


ODD = {
    "K no multiple of 8": (product(64, 64, 63), (True, True)),
    "N no multiple of 8": (
        asked(FLAT[:4096].view(64, 64), FLAT[: 64 * 60].view(64, 60)),
        (False, True),
    ),
    "no unit stride": (
        asked(FLAT.as_strided((64, 64), (512, 2)), FLAT[:4096].view(64, 64)),
        (True, False),
    ),
    "odd address": (product(64, 64, 64, alignment=(2, 16, 16)), (True, False)),
    "both odd": (product(64, 64, 64, alignment=(8, 4, 2)), (True, True)),
    "a row": (product(1, 63, 64), (False, False)),
    "a batch": (
        asked(
            FLAT[: 3 * 4096].view(3, 64, 64),
            FLAT[: 3 * 4096].view(3, 64, 64),
            alignment=(16, 16, 16),
        ),
        (False, False),
    ),
    "a batch that starts anywhere": (
        asked(
            FLAT.as_strided((3, 64, 64), (4100, 64, 1)), FLAT.as_strided((3, 64, 64), (4104, 64, 1))
        ),
        (True, False),
    ),
    "one odd B for a batch": (
        asked(
            FLAT.as_strided((3, 64, 63), (63, 200, 1)),
            FLAT[: 63 * 60].view(63, 60).expand(3, 63, 60),
        ),
        (True, True),
    ),
    "two batch dimensions": (
        asked(
            FLAT.as_strided((2, 5, 64, 64), (7, 4096 * 3, 64, 1)),
            FLAT.as_strided((2, 5, 64, 8), (0, 520, 1, 65)),
        ),
        (True, True),
    ),
}


@pytest.mark.parametrize("case", ODD)
def test_copies_are_said(case: str) -> None:
    given, which = ODD[case]
    said = [line for line in gemm.remarks(given) if "twice" not in line]
    assert [line[0] for line in said] == [
        name for name, is_copied in zip("ab", which, strict=True) if is_copied
    ]
    assert all("is copied first" in line and "has strides" in line for line in said)


@pytest.mark.parametrize("config", [OWN, replace(OWN, swap_ab=True)], ids=["straight", "swapped"])
@pytest.mark.parametrize("case", ODD)
def test_any_strides_are_taken(case: str, config: HopperConfig) -> None:
    given, which = ODD[case]
    assert gemm.unsupported(given) is None
    assert operand_copies.needs_copy(given) == which
    made = operand_copies.aligned(given)
    assert operand_copies.needs_copy(made) == (False, False)
    assert replace(made, a=given.a, b=given.b, alignment=given.alignment) == given
    for name, is_copied in zip("ab", which, strict=True):
        before, after = getattr(given, name), getattr(made, name)
        if is_copied:
            assert 1 in after[-2:]
            assert all(
                stride % 8 == 0
                for i, stride in enumerate(after)
                if i < len(after) - 2 or stride != 1
            )
            assert [stride == 0 for stride in before[:-2]] == [stride == 0 for stride in after[:-2]]
        else:
            assert after == before
    turned, crossed = canonical.orient(made, config)
    assert crossed == config.swap_ab
    a, b = canonical.operand_strides(
        canonical.single_batch(turned)[0] if len(turned.batch) > 1 else turned
    )
    assert 1 in a[-2:]
    assert 1 in b[-2:]
    assert variant(given, config).layout[0] in "nt"


@pytest.mark.parametrize(
    ("given", "asked_for"),
    [
        (product(64, 64, 64), (1, 1)),
        (product(64, 64, 1000), (2, 2)),
        (example(BF16, None, "nn", (512, 1000, 512)), (1, 2)),
        (example(BF16, None, "tn", (1000, 512, 512)), (2, 1)),
        (product(64, 64, 64, alignment=(16, LINE, 16)), (2, 1)),
        (product(64, 64, 64, alignment=(LINE, 16, 2)), (1, 2)),
        (product(64, 64, 1001), (1, 1)),  # copies' rows are whole lines
        (product(64, 64, 64, alignment=(2, 16, 16)), (1, 2)),
        (product(1, 64, 1000), (1, 2)),  # of one row there is no next
        (
            replace(
                product(64, 64, 64), batch=(3,), a=(0, 64, 1), b=(4104, 1, 64), out=(4096, 64, 1)
            ),
            (1, 2),
        ),
    ],
)
def test_lines_that_rows_lie_in(given, asked_for):
    assert operand_copies.cache_lines_per_row(given) == asked_for
    assert operand_copies.cache_lines_per_row(transposed(given)) == asked_for[::-1]
    said = [line for line in operand_copies.remarks(given) if "twice the requests" in line]
    assert [line[0] for line in said] == [
        name for name, lines in zip("ab", asked_for, strict=True) if lines == 2
    ]


@pytest.mark.parametrize("size", [1000, 1024, 2048])
def test_rows_inside_of_lines_are_loaded_for_each_other(size: int) -> None:
    """One wave of tiles without clusters takes 1.3 times as long there: requests for parts of lines
    do not merge.
    """
    own = heuristic.config(product(size, size, 1024), 132, OWN)
    beside = heuristic.config(product(size, size, 1032), 132, OWN)
    assert own.multicast_size == 1
    assert beside.multicast_size == 2
    assert beside == heuristic.config(product(size, size, 1024, alignment=(16, 16, 16)), 132, OWN)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_copy_has_the_elements(data: st.DataObject) -> None:
    draw = data.draw
    size = st.integers(1, 9)
    wide = size | st.just(70)
    shape = (*draw(st.lists(size, max_size=2)), draw(wide), draw(wide))
    source = tuple(draw(st.integers(0 if i < len(shape) - 2 else 1, 40)) for i in range(len(shape)))
    room = 1 + sum((extent - 1) * stride for extent, stride in zip(shape, source, strict=True))
    t = torch.arange(room)
    given = replace(product(shape[-2], shape[-1], 8), batch=shape[:-2])
    made = operand_copies.copy_strides(given, source, *shape[-2:])
    copy = operand_copies.copy(t, shape, source, made)
    assert copy.stride() == made
    assert all(
        stride % (64 if 70 in shape[-2:] and max(made[-2:]) > 64 else 8) == 0
        for stride in made
        if stride > 1
    )
    assert torch.equal(copy, t.as_strided(shape, source))


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("by_columns", [False, True])
def test_a_product_is_turned_for_each_of_two_reasons(swap: bool, by_columns: bool) -> None:
    out = torch.empty(128, 64, dtype=BF16, device="meta").t() if by_columns else None
    given = asked(FLAT[: 64 * 256].view(64, 256), FLAT[: 128 * 256].view(128, 256).t(), out)
    turned, crossed = canonical.orient(given, replace(OWN, swap_ab=swap))
    assert crossed == (swap != by_columns)
    assert turned == (transposed(given) if crossed else given)
    traits = variant(given, replace(OWN, swap_ab=swap)).traits
    assert (traits.by_columns, traits.staged, traits.width) == (swap, True, 8)


def test_the_longest_batch_dimension_is_the_kernels() -> None:
    given = replace(
        product(64, 64, 64),
        batch=(2, 7, 3),
        a=(9, 8, 0, 64, 1),
        b=(0, 24, 7, 1, 64),
        out=(1, 2, 3, 64, 1),
    )
    made, inner = canonical.single_batch(given)
    assert inner == 1
    assert (made.batch, made.a, made.b, made.out) == ((7,), (8, 64, 1), (24, 1, 64), (2, 64, 1))
    assert canonical.batch_offset(given.a, (1, 2), inner) == 9
    assert canonical.batch_offset(given.b, (1, 2), inner) == 14
    assert canonical.batch_offset(given.out, (1, 2), inner) == 7


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
        (
            product(64, 64, 64, batch=(3,), a=(0, 64, 1), b=(0, 1, 64), out=(4097, 64, 1)),
            1,
            False,
            False,
        ),
        (
            product(64, 64, 64, batch=(3,), a=(0, 64, 1), b=(0, 1, 64), out=(4104, 64, 1)),
            8,
            False,
            True,
        ),
    ],
)
def test_how_c_is_written(given, width, by_columns, staged):
    traits = variant(given).traits
    assert (traits.width, traits.by_columns, traits.staged) == (width, by_columns, staged)
    unstaged = variant(given, replace(OWN, epilogue_stages=0)).traits
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
    made = variant(given, replace(OWN, swap_ab=True))
    assert (made.traits.width, made.traits.by_columns, made.traits.staged) == (width, True, staged)
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
        (ROWS, False, (64, 8, 1), 8, False),
        (ROWS, True, (64, 1, 8), 8, True),
        (
            replace(ROW, out=(4096, 2)),
            True,
            (1, 2),
            1,
            True,
        ),  # no two elements of it are neighbours
        (
            replace(ROWS, out=(60, 60, 1)),
            True,
            (60, 1, 8),
            1,
            True,
        ),  # not every row starts at 16 bytes
        (product(1, 4095, 64), True, (1, 8), 1, True),
        (replace(COLUMN, out=(4096, 1)), False, (4096, 1), 1, False),  # of a matrix stored by rows
        (replace(ROW, out_dtype=FP32), True, (1, 8), 1, True),  # which stmatrix cannot turn
        (product(1, 1, 64), True, (8, 1), 1, False),
    ],
)
def test_a_single_row_or_column_is_written_along_its_length(
    given: Problem, swap: bool, strides: tuple[int, ...], width: int, by_columns: bool
) -> None:
    config = replace(OWN, swap_ab=swap)
    assert canonical.output_strides(canonical.orient(given, config)[0]) == strides
    traits = variant(given, config).traits
    assert (traits.width, traits.by_columns, traits.staged) == (width, by_columns, width == 8)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_a_call_hands_over_its_own_tensors(
    batch: tuple[int, ...], swap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Views of them in every call cost the host 8 µs."""
    a, b, out = (
        torch.empty(*batch, 64, 72),
        torch.empty(*batch, 40, 72).mT,
        torch.empty(*batch, 64, 40),
    )
    handed = []
    monkeypatch.setattr(tile_order, "clusters", lambda *_: 132)
    monkeypatch.setattr(compile, "load", lambda *_: lambda *given: handed.extend(given))
    config = configs.from_text(gemm.Config, f"{SMALL},tile_n=16,gpc_local=False,swap_ab={swap}")
    gemm.plan(problem(a, b, out), config)(a, b, None, out, 1.0, 0.0)
    assert [id(given) for given in handed[:3]] == [
        id(t) for t in ((b, a, out) if swap else (a, b, out))
    ]


@pytest.fixture
def handed(monkeypatch):
    """What launches hand to a compiled kernel: A, B, C, the table, tensors of the epilogue, ..."""
    launches = []
    monkeypatch.setattr(tile_order, "clusters", lambda *_: 132)
    monkeypatch.setattr(compile, "load", lambda *_: lambda *given: launches.append(given))
    return launches


def numbered(*shape):
    return torch.arange(math.prod(shape), dtype=torch.float32).view(shape)


@pytest.mark.parametrize("swap", [False, True])
def test_each_index_of_other_batches_is_a_launch(swap, handed):
    """The longest batch dimension is the kernel's, and the host loops over the others."""
    a, out = numbered(2, 3, 64, 72), numbered(2, 3, 64, 40)
    b = numbered(3, 2, 40, 72).transpose(0, 1).mT  # so that no stride walks both dimensions
    residual = numbered(2, 3, 64, 40)
    config = configs.from_text(gemm.Config, f"{SMALL},tile_n=16,gpc_local=False,swap_ab={swap}")
    given = problem(a, b, out, extra=EpilogueArgs(residual=residual))
    gemm.plan(given, config)(a, b, None, out, 1.0, 0.0, None, residual, None)
    assert len(handed) == 2
    for i, launch in enumerate(handed):
        first, second, c = launch[:3]
        assert torch.equal(first, (b if swap else a)[i])
        assert torch.equal(second, (a if swap else b)[i])
        assert torch.equal(c, out[i])
        assert torch.equal(launch[4 + EPILOGUE_TENSORS.index("residual")], residual[i])
        assert [launch[4 + EPILOGUE_TENSORS.index(name)] for name in ("addend", "aux")] == [
            None
        ] * 2


def test_copies_are_handed_over_in_place_of_operands(handed):
    a, b, out = numbered(64, 63), numbered(63, 40), numbered(64, 40)
    config = configs.from_text(gemm.Config, f"{SMALL},tile_n=16,gpc_local=False")
    gemm.plan(problem(a, b, out), config)(a, b, None, out, 1.0, 0.0)
    ((first, second, c, *_),) = handed
    assert torch.equal(first, a)
    assert first.stride() == (64, 1)
    assert second is b
    assert c is out


@pytest.mark.parametrize(
    ("text", "clusters", "floats", "counters"),
    [
        ("", 4, None, None),
        # A CTA of 64x16 outputs has a partition of K for each of 4 x 3 tiles.
        ("split_k=4,k_serpentine=False", 48, 48 * 64 * 16, 12),
        # 12 tiles of 64 k tiles each: 132 clusters, all tiles in the last wave.
        ("stream_k=True,k_serpentine=False", 132, (132 + 12) * 64 * 16, 12),
    ],
)
def test_a_schedule_has_room_for_partial_sums(text, clusters, floats, counters):
    """fp32 of each partition, and a counter of each tile that has several."""
    config = configs.from_text(gemm.Config, f"{SMALL},tile_n=16,{text}")
    given = product(4 * 64, 3 * 16, 4096) if text else product(64, 64, 4096)
    grid = schedule.tile_grid(given, config)
    launched = schedule.launched_clusters(given, config, grid, resident=132)
    assert launched == clusters
    expected = None if floats is None else (floats, counters)
    assert schedule.workspace_size(config, grid, launched) == expected


@pytest.mark.parametrize("fails", [False, True])
def test_a_workspace_is_held_until_the_launch_is_enqueued(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And then marked, whatever came of it: another thread may have replaced it meanwhile."""
    steps, alive = [], []

    class Event:
        def record(self, stream):
            steps.append(("marked", stream))

    def get_workspace(index, floats, counters):
        lent = workspace.Workspace(
            torch.empty(floats), torch.empty(counters), Event(), "its stream"
        )
        alive.append(weakref.ref(lent))
        return lent

    def run(*given):
        gc.collect()
        assert alive[-1]() is not None
        assert given[-6:-4] == (alive[-1]().sums, alive[-1]().counters)
        steps.append("enqueued")
        if fails:
            raise RuntimeError("no launch")

    monkeypatch.setattr(tile_order, "clusters", lambda *_: 132)
    monkeypatch.setattr(compile, "load", lambda *_: run)
    monkeypatch.setattr(workspace, "get_workspace", get_workspace)
    config = configs.from_text(
        gemm.Config, f"{SMALL},tile_n=16,gpc_local=False,split_k=4,k_serpentine=False"
    )
    a, b, out = torch.empty(64, 512), torch.empty(40, 512).t(), torch.empty(64, 40)
    launch = gemm.plan(problem(a, b, out), config)
    with pytest.raises(RuntimeError, match="no launch") if fails else contextlib.nullcontext():
        launch(a, b, None, out, 1.0, 0.0)
    assert steps == ["enqueued", ("marked", "its stream")]
    workspace._retired.clear()


def test_traits_say_what_a_call_has():
    plain = variant(product(64, 64, 64)).traits
    assert (plain.batched, plain.ordered, plain.scaled, plain.addend, plain.plain) == (
        False,
        False,
        False,
        "",
        True,
    )
    assert variant(product(8192, 8192, 64)).traits.ordered
    assert variant(replace(product(64, 64, 64), scaled=True)).traits.scaled
    for strides, kind in {
        (0, 1): "pairs",
        (1, 0): "rows",
        (64, 1): "staged",
        (65, 1): "matrix",
    }.items():
        with_c = replace(product(64, 64, 64), scaled=True, c=strides, alignment=(16, 16, 16, 16))
        assert variant(with_c).traits.addend == kind
    assert variant(ODD["a batch"][0]).traits.batched


def test_one_compile_serves_orders_and_numbers_of_pieces() -> None:
    given = product(8192, 8192, 8192)
    halves = replace(OWN, split_k=2, k_serpentine=False)
    assert variant(given, replace(OWN, order="hilbert", group_m=4, sms=120)) == variant(given)
    assert variant(given, replace(halves, split_k=5)) == variant(given, halves) != variant(given)


# ---- the rule
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_the_rule_gives_a_config_that_can_be_built(data: st.DataObject) -> None:
    draw = data.draw
    size = st.one_of(st.integers(1, 300), st.integers(1, 20_000))
    M, N, K = draw(size), draw(size), draw(size)
    given = product(
        M, N, K, draw(st.sampled_from([BF16, FP32])), batch_invariant=draw(st.booleans())
    )
    if draw(st.booleans()):
        given = replace(given, out=(1, M))
    if draw(st.booleans()):
        count = draw(st.integers(1, 40))
        given = replace(
            given, batch=(count,), a=(0, *given.a), b=(0, *given.b), out=(M * N, *given.out)
        )
    made = heuristic.config(given, draw(st.sampled_from([1, 78, 114, 132])), OWN)
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
    assert heuristic.config(small, 132, OWN).split_k > 8
    assert heuristic.config(replace(small, batch_invariant=True), 132, OWN).split_k == 1
    few = product(16, 4096, 4096)
    made = heuristic.config(few, 132, OWN)
    assert (made.cluster_k, made.split_k, made.swap_ab) == (2, 1, True)
    assert heuristic.config(replace(few, batch_invariant=True), 132, OWN).cluster_k == 1
    large = heuristic.config(product(8192, 8192, 8192), 132, OWN)
    assert (large.split_k, large.cluster_k, large.variable_tile_n) == (1, 1, True)


@pytest.mark.parametrize("size", [1280, 1536, 5120])
def test_elastic_tiles_begin_anywhere_only_along_rows_of_k(size: int) -> None:
    """Where neither operand has such rows tiles begin at whole lines of 128 bytes."""
    rule = {
        layout: heuristic.config(example(BF16, None, layout, (size,) * 3), 132, OWN)
        for layout in LAYOUTS
    }
    swapped = {layout: made.swap_ab for layout, made in rule.items() if made.variable_tile_n}
    assert swapped == {"nn": True, "nt": False, "tt": False}
    assert rule["tn"].tile_n % 64 == 0


@pytest.mark.parametrize(
    ("shape", "layout", "ratio"),  # measured on an H100: its time, copies included, over portable's
    [
        ((4096, 4096, 4095), "nt", 0.26),
        ((4096, 4095, 4096), "nn", 0.29),
        ((1024, 1024, 1023), "nt", 0.61),
        ((512, 512, 511), "nt", 1.08),
        ((128, 128, 127), "nt", 2.96),
        ((16, 4096, 4095), "nt", 2.41),
        ((128, 4096, 4095), "nt", 0.56),
        ((1, 4096, 4095), "nt", 2.45),
        ((8192, 8192, 63), "nt", 0.70),
        ((16, 1024, 1023), "nt", 1.47),
        ((64, 64, 4095), "nt", 0.48),
        ((16, 4096, 4096), "nt", 0.70),
    ],
)
def test_it_is_spared_where_copies_cost_more_than_they_save(
    shape: tuple[int, int, int], layout: str, ratio: float
) -> None:
    given = example(BF16, None, layout, shape)
    assert (default_kernel.pruned_reason("hopper.gemm", given) is not None) == (ratio > 1)
    assert default_kernel.by_rule(given, 90, 132) == ("portable" if ratio > 1 else "hopper.gemm")
    assert default_kernel.by_rule(replace(given, batch_invariant=True), 90, 132) == "hopper.gemm"


def test_as_few_clusters_as_waves_allow() -> None:
    """The waves stay as many, and few clusters are left out."""
    assert [tile_order.balance_waves(66, tiles) for tiles in (1, 66, 256, 1024, 67, 260)] == [
        66,
        66,
        64,
        64,
        66,
        65,
    ]
    for clusters, tiles in itertools.product(range(1, 140), range(1, 600)):
        fewest = tile_order.balance_waves(clusters, tiles)
        assert 15 * clusters <= 16 * fewest <= 16 * clusters
        assert -(-tiles // fewest) == -(-tiles // clusters)


@pytest.mark.parametrize(
    "text", ["split_k=2,k_serpentine=False", "stream_k=True,k_serpentine=False", ""]
)
def test_another_order_of_k_is_refused_where_rows_must_not_tell(text: str) -> None:
    given = product(64, 64, 4096, batch_invariant=True)
    config = configs.from_text(gemm.Config, text)
    assert "batch_invariant needs one order of K" in str(gemm.unsupported(given, config))
    assert (
        gemm.unsupported(given, replace(config, split_k=1, stream_k=False, k_serpentine=False))
        is None
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("split_k=65", "split_k is 65, expected 1 to 64 partitions of K"),
        ("split_k=2,stream_k=True", "split_k is 2 with stream_k, expected 1"),
        (
            "pingpong=True,consumers=1,producer_registers=0,consumer_registers=0,tile_n=64",
            "pingpong with 1 consumers",
        ),
        ("pingpong=True,split_k=2,tile_m=64", "pingpong with 2 consumers and partitions of K"),
        (
            "variable_tile_n=True,tile_n=20",
            "expected a multiple of 8 from 24 to 256 and 0 when variable_tile_n",
        ),
        ("variable_tile_n=True,tile_n=192,mma_n=96", "mma_n 96, expected"),
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
    alone, inner = canonical.single_batch(asked)
    assert (inner, alone.batch, alone.alignment[2]) == (1, (5,), 2)


def test_partial_sums_beyond_32_bits_are_refused() -> None:
    asked = problem(*(torch.empty(8192, 8192, dtype=BF16, device="meta") for _ in range(3)))
    config = replace(gemm.Config(), split_k=64, k_serpentine=False)
    assert "split_k takes up to 2147483648 partial sums" in str(gemm.unsupported(asked, config))
    assert gemm.unsupported(asked, replace(config, split_k=16)) is None
