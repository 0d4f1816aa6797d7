"""The portable kernel compiled without a GPU: spills, instructions, copies, and what the compiler
is told.
"""

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from support.portable_builds import BF16, DEVICES, check, copies, form

from outblas.core.problem import problem
from outblas.kernels import portable
from outblas.kernels.portable import Config, compile_for, plan
from outblas.kernels.portable_config import TENSOR_CORE, candidates

pytestmark = pytest.mark.compile

LAYOUTS = ("nn", "nt", "tn", "tt")
LARGE, SQUARE = Config(128, 256, 64, 8, 8, 3), Config(64, 64, 64, 8, 4, 2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sm90_presets(layout: str) -> None:
    """Each layout takes every fourth tile; presets that differ in stages alone count once."""
    given = form(layout=layout)
    assert candidates(given, *DEVICES[90][1:]) == TENSOR_CORE, "a preset fits no H100"
    tiles = {dataclasses.replace(config, num_stages=1): config for config in TENSOR_CORE}
    for config in list(tiles.values())[LAYOUTS.index(layout) :: 4]:
        compiled = check(given, config)
        assert set(copies(compiled)) == {16}, config
        assert (
            "st.global.v4" in compiled.asm["ptx"]
            or config.block_m * config.block_n < 8 * config.threads
        ), config


@pytest.mark.parametrize("layout", LAYOUTS)
def test_edges_keep_wide_copies(layout: str) -> None:
    """1000 is a multiple of 8 elements (16 bytes), not of any tile."""
    assert set(copies(check(form(1000, 1000, 1000, layout=layout, addend=True), LARGE))) == {16}


def test_the_loop_is_pipelined() -> None:
    compiled = compile_for(form(), LARGE, 90)
    tile = (LARGE.block_m + LARGE.block_n) * LARGE.block_k * 2
    assert copies(compiled)[16] == LARGE.num_stages * tile // (16 * LARGE.threads)
    assert re.search(r"cp\.async\.wait_group\s+2;", compiled.asm["ptx"]), (
        "copies of the next step stay in flight"
    )
    assert re.search(r"wgmma\.wait_group\.sync\.aligned\s+1;", compiled.asm["ptx"]), (
        "products overlap the barrier"
    )


@pytest.mark.parametrize(
    ("arch", "shape"),
    [
        (80, (4096, 4096, 4096)),
        (80, (1000, 1000, 1000)),
        (86, (1000, 1000, 1000)),
        (86, (16, 4096, 4096)),
    ],
    ids=str,
)
def test_sm80(arch: int, shape: tuple[int, int, int]) -> None:
    compiled = check(form(*shape, torch.float16, layout="nn", addend=True), arch=arch)
    assert set(copies(compiled)) == {16}
    assert "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32" in compiled.asm["ptx"]


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "shape", [(4096, 4096, 4096), (1000, 1000, 1000), (16, 4096, 4096)], ids=str
)
def test_sm75(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    assert not copies(check(form(*shape, dtype), arch=75)), "cp.async begins with sm_80"


@pytest.mark.parametrize(("arch", "layout"), [(80, "nn"), (80, "tt"), (90, "nn"), (90, "nt")])
def test_fp32_is_ieee_unless_tf32_is_asked_for(arch: int, layout: str) -> None:
    for tf32 in (False, True):
        ptx = check(form(dtype=torch.float32, layout=layout, tf32=tf32), arch=arch).asm["ptx"]
        assert ("tf32" in ptx) == tf32
        assert ("cvt.rna.tf32.f32" in ptx) == tf32, "tensor cores truncate, they do not round"


@pytest.mark.parametrize(
    ("K", "pad", "widest"), [(1000, 1, 0), (1000, 2, 4), (1000, 4, 8), (1001, 7, 0)]
)
def test_unaligned_rows_get_narrower_copies_and_no_spills(K: int, pad: int, widest: int) -> None:
    assert max(copies(check(form(1001, 1001, K, pad=pad, addend=True))), default=0) == widest


def test_an_unaligned_address_is_never_copied_wide() -> None:
    buffer = torch.empty(64 * 64 + 8, dtype=BF16)
    shifted, aligned = buffer[4:-4].view(64, 64), torch.empty(64, 64, dtype=BF16)
    for a, widths in ((aligned, {16}), (shifted, {8, 16})):
        given = problem(a, aligned, torch.empty_like(aligned))
        assert set(copies(compile_for(given, SQUARE, 90))) == widths


def test_launches_that_start_inside_a_tensor_are_unaligned() -> None:
    """The third batch dimension is walked on the host, in steps of 4 elements (8 bytes)."""
    a = torch.empty(2 * 3 * 4 * 64 * 64, dtype=BF16).as_strided(
        (2, 3, 4, 64, 64), (4, 8192, 4096, 64, 1)
    )
    b = torch.empty(4, 64, 64, dtype=BF16)
    given = problem(a, b, torch.empty(2, 3, 4, 64, 64, dtype=BF16))
    assert len(given.batch) == 3
    assert set(copies(compile_for(given, SQUARE, 90))) == {8, 16}


@pytest.mark.parametrize(
    ("shape", "wide"),
    [
        ((), False),
        ((40000, 256, 60000), True),
        ((256, 256, 2**31 - 1), True),
        ((2**31 + 7, 16, 64), True),
    ],
    ids=str,
)
def test_offsets_are_64_bit_only_where_they_must_be(shape: tuple[int, ...], wide: bool) -> None:
    compiled = check(form(*shape), SQUARE)
    assert bool(re.search(r"tensor<\d+x\d+xi64>", compiled.asm["ttir"])) == wide


def test_a_stride_beyond_32_bits() -> None:
    a = torch.empty(1, device="meta", dtype=BF16).as_strided((64, 64), (2**33, 1))
    b = torch.empty(64, 64, device="meta", dtype=BF16)
    check(problem(a, b, b), SQUARE)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 64, 64), (64, 1, 64), (64, 64, 1)], ids=str)
def test_sizes_of_one(shape: tuple[int, int, int]) -> None:
    check(form(*shape), Config(16, 16, 16, 8, 4, 2))


def test_kernel_name_tells_tile_and_dtype() -> None:
    assert compile_for(form(), LARGE, 90).metadata.name == "outblas_portable_128x256x64_bf16"


def test_interpreting_does_not_change_what_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(32, 32, 32, 8, 4, 2)
    texts, ones, out = [], torch.ones(32, 32), torch.empty(32, 32)
    for folder in ("before", "after"):
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / folder))
        portable._compile.cache_clear()
        texts.append(compile_for(form(64, 64, 64), config, 90).asm["ttir"])
        out.fill_(0)
        plan(problem(ones, ones, out), config)(ones, ones, None, out, 1, 0)
        assert torch.equal(out, 32 * ones)
    assert any((tmp_path / "after").rglob("*.cubin"))
    assert texts[0] == texts[1]
