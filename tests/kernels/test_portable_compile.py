"""The portable kernel compiled without a GPU: spills, instructions, copies, and what the compiler
is told.

`support.portable_builds.check` holds whatever is compiled here to having no spills, the
instructions of its architecture and the shared memory that its config says.
"""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.covering import covering
from support.portable_builds import BF16, DEVICES, check, copies, form

from outblas.core.configs import to_text
from outblas.core.problem import problem
from outblas.kernels import portable
from outblas.kernels.portable import Config, compile_for, plan
from outblas.kernels.portable_config import TENSOR_CORE, candidates

pytestmark = pytest.mark.compile

FP16, FP32 = torch.float16, torch.float32
LAYOUTS = ("nn", "nt", "tn", "tt")
LARGE, SQUARE = Config(128, 256, 64, 8, 8, 3), Config(64, 64, 64, 8, 4, 2)
SHAPES = {
    "whole tiles": (4096, 4096, 4096),
    "edges": (1000, 1000, 1000),
    "few rows": (16, 4096, 4096),
}


# ---- presets
def tiles_in_turn() -> list[Any]:
    """Every tile of the presets, with a layout each in turn; presets that differ in stages alone
    count once.
    """
    tiles = {dataclasses.replace(config, num_stages=1): config for config in TENSOR_CORE}
    return [
        pytest.param(config, LAYOUTS[i % 4], id=f"{to_text(config)}-{LAYOUTS[i % 4]}")
        for i, config in enumerate(tiles.values())
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_preset_fits_an_h100(layout: str) -> None:
    assert candidates(form(layout=layout), *DEVICES[90][1:]) == TENSOR_CORE


@pytest.mark.parametrize(("config", "layout"), tiles_in_turn())
def test_a_preset_copies_and_stores_16_bytes(config: Config, layout: str) -> None:
    compiled = check(form(layout=layout), config)

    assert set(copies(compiled)) == {16}
    if config.block_m * config.block_n >= 8 * config.threads:  # a thread has 16 bytes to store
        assert "st.global.v4" in compiled.asm["ptx"]


# ---- the loop
def test_copies_fill_as_many_stages_as_the_config_has() -> None:
    tile_bytes = (LARGE.block_m + LARGE.block_n) * LARGE.block_k * 2

    compiled = compile_for(form(), LARGE, 90)

    assert copies(compiled)[16] == LARGE.num_stages * tile_bytes // (16 * LARGE.threads)


@pytest.mark.parametrize(
    "wait",
    [
        pytest.param(r"cp\.async\.wait_group\s+2;", id="copies of the next step stay in flight"),
        pytest.param(r"wgmma\.wait_group\.sync\.aligned\s+1;", id="products overlap the barrier"),
    ],
)
def test_the_loop_does_not_wait_for_what_it_does_not_need(wait: str) -> None:
    compiled = compile_for(form(), LARGE, 90)

    assert re.search(wait, compiled.asm["ptx"])


# ---- architectures and dtypes
@pytest.mark.parametrize(
    ("arch", "shape"),
    covering(
        {"sm_80": 80, "sm_86": 86},
        SHAPES,
        possible=lambda arch, shape: arch == 80 or shape != SHAPES["whole tiles"],
    ),
)
def test_ampere_copies_asynchronously_and_multiplies_by_mma(
    arch: int, shape: tuple[int, int, int]
) -> None:
    compiled = check(form(*shape, FP16, layout="nn", addend=True), arch=arch)

    assert set(copies(compiled)) == {16}
    assert "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32" in compiled.asm["ptx"]


@pytest.mark.parametrize(
    ("dtype", "shape"), covering({"bf16": BF16, "fp16": FP16, "fp32": FP32}, SHAPES)
)
def test_turing_has_no_asynchronous_copies(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    compiled = check(form(*shape, dtype), arch=75)

    assert not copies(compiled), "cp.async begins with sm_80"


@pytest.mark.parametrize(
    ("tf32", "arch", "layout"),
    covering(
        {"ieee": False, "tf32": True},
        {"sm_80": 80, "sm_90": 90},
        {"nn": "nn", "nt": "nt", "tt": "tt"},
        of=2,
        possible=lambda _, arch, layout: layout != ("nt" if arch == 80 else "tt"),
    ),
)
def test_fp32_is_ieee_unless_tf32_is_asked_for(tf32: bool, arch: int, layout: str) -> None:
    ptx = check(form(dtype=FP32, layout=layout, tf32=tf32), arch=arch).asm["ptx"]

    assert ("tf32" in ptx) == tf32
    assert ("cvt.rna.tf32.f32" in ptx) == tf32, "tensor cores truncate, they do not round"


# ---- alignment
@pytest.mark.parametrize(
    "layout", ["nn", "tt", *(pytest.param(each, marks=pytest.mark.slow) for each in ("nt", "tn"))]
)
def test_edges_keep_wide_copies(layout: str) -> None:
    """1000 is a multiple of 8 elements (16 bytes), not of any tile."""
    compiled = check(form(1000, 1000, 1000, layout=layout, addend=True), LARGE)

    assert set(copies(compiled)) == {16}


@pytest.mark.parametrize(
    ("K", "pad", "widest"), [(1000, 1, 0), (1000, 2, 4), (1000, 4, 8), (1001, 7, 0)]
)
def test_unaligned_rows_get_narrower_copies_and_no_spills(K: int, pad: int, widest: int) -> None:
    compiled = check(form(1001, 1001, K, pad=pad, addend=True))

    assert max(copies(compiled), default=0) == widest


@pytest.mark.parametrize(
    ("first", "widths"),
    [pytest.param(0, {16}, id="aligned"), pytest.param(4, {8, 16}, id="8 bytes behind")],
)
def test_an_unaligned_address_is_never_copied_wide(first: int, widths: set[int]) -> None:
    buffer, aligned = torch.empty(64 * 64 + 8, dtype=BF16), torch.empty(64, 64, dtype=BF16)
    a = buffer[first : first + 64 * 64].view(64, 64)

    compiled = compile_for(problem(a, aligned, torch.empty_like(aligned)), SQUARE, 90)

    assert set(copies(compiled)) == widths


def test_launches_that_start_inside_a_tensor_are_unaligned() -> None:
    """The third batch dimension is walked on the host, in steps of 4 elements (8 bytes)."""
    a = torch.empty(2 * 3 * 4 * 64 * 64, dtype=BF16).as_strided(
        (2, 3, 4, 64, 64), (4, 8192, 4096, 64, 1)
    )
    b = torch.empty(4, 64, 64, dtype=BF16)
    given = problem(a, b, torch.empty(2, 3, 4, 64, 64, dtype=BF16))
    assert len(given.batch) == 3

    compiled = compile_for(given, SQUARE, 90)

    assert set(copies(compiled)) == {8, 16}


# ---- offsets and sizes
@pytest.mark.parametrize(
    ("shape", "wide"),
    [
        pytest.param((), False, id="4096"),
        pytest.param((40000, 256, 60000), True, id="A has more than 2³¹ elements"),
        pytest.param((256, 256, 2**31 - 1), True, id="K near 2³¹"),
        pytest.param((2**31 + 7, 16, 64), True, id="M beyond 2³¹"),
    ],
)
def test_offsets_are_64_bit_only_where_they_must_be(shape: tuple[Any, ...], wide: bool) -> None:
    compiled = check(form(*shape), SQUARE)

    assert bool(re.search(r"tensor<\d+x\d+xi64>", compiled.asm["ttir"])) == wide


def test_a_stride_beyond_32_bits_compiles() -> None:
    a = torch.empty(1, device="meta", dtype=BF16).as_strided((64, 64), (2**33, 1))
    b = torch.empty(64, 64, device="meta", dtype=BF16)

    check(problem(a, b, b), SQUARE)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 64, 64), (64, 1, 64), (64, 64, 1)], ids=str)
def test_sizes_of_one_compile(shape: tuple[int, int, int]) -> None:
    check(form(*shape), Config(16, 16, 16, 8, 4, 2))


# ---- what is compiled
def test_the_kernel_s_name_tells_tile_and_dtype() -> None:
    compiled = compile_for(form(), LARGE, 90)

    assert compiled.metadata.name == "outblas_portable_128x256x64_bf16"


def test_interpreting_does_not_change_what_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(32, 32, 32, 8, 4, 2)
    ones, out = torch.ones(32, 32), torch.empty(32, 32)

    def compiled_anew(folder: str) -> str:
        """The IR of a compile that no cache answers."""
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / folder))
        portable._compile.cache_clear()
        return str(compile_for(form(64, 64, 64), config, 90).asm["ttir"])

    before = compiled_anew("before")
    plan(problem(ones, ones, out), config)(ones, ones, None, out, 1, 0)
    after = compiled_anew("after")

    assert torch.equal(out, 32 * ones), "it was interpreted"
    assert any((tmp_path / "after").rglob("*.cubin")), "it was compiled"
    assert after == before
