"""The portable kernel compiled without a GPU: spills, instructions, copies, and what the compiler is told."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from outblas.inspect.machine_code import tool
from outblas.kernels import portable
from outblas.kernels.portable import Config, choose, compile_for, plan
from outblas.kernels.portable_config import TENSOR_CORE, candidates, uses_fma
from outblas.operands import Problem, problem

pytestmark = pytest.mark.compile

KIB = 1024
SHARED = {75: 64 * KIB, 80: 163 * KIB, 86: 99 * KIB, 90: 227 * KIB}
LARGE = Config(128, 256, 64, 8, 8, 3)


def operand(rows: int, columns: int, letter: str, dtype: torch.dtype, pad: int = 0) -> torch.Tensor:
    if letter == "t":
        return operand(columns, rows, "n", dtype, pad).mT
    return torch.empty(rows, columns + pad, dtype=dtype, device="meta")[:, :columns]


def form(
    M: int = 4096,
    N: int = 4096,
    K: int = 4096,
    *,
    dtype: torch.dtype = torch.bfloat16,
    layout: str = "nt",
    pad: int = 0,
    addend: bool = False,
    tf32: bool = False,
) -> Problem:
    a, b = operand(M, K, layout[0], dtype, pad), operand(K, N, layout[1], dtype, pad)
    out = operand(M, N, "n", dtype, pad)
    return problem(a, b, out, out if addend else None, tf32=tf32, scaled=addend)


def copies(compiled: Any) -> Counter[int]:
    """cp.async instructions by their bytes."""
    return Counter(
        int(n, 16) for n in re.findall(r"cp\.async\.c[ag]\.shared\.global [^;]*\], (0x\w+)", compiled.asm["ptx"])
    )


def local_memory(cubin: bytes) -> tuple[int, int]:
    """Bytes of stack and of local memory a thread, where spills go."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool("cuobjdump")), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"STACK:(\d+) .*LOCAL:(\d+)", usage)
    assert found, usage
    return int(found[1]), int(found[2])


def check(given: Problem, config: Config, arch: int) -> Any:
    """Compiles; no spills, no local memory, the dot the architecture should use, shared memory within the budget."""
    compiled = compile_for(given, config, arch)
    assert local_memory(compiled.asm["cubin"]) == (0, 0), config
    assert compiled.metadata.shared <= config.shared_memory(given.dtype), config
    used = set(re.findall(r"wgmma\.mma_async|mma\.sync|fma\.rn\.f32", compiled.asm["ptx"]))
    if uses_fma(given, arch):
        assert used == {"fma.rn.f32"}, config
    else:
        wanted = "wgmma.mma_async" if arch == 90 and config.block_m >= 64 else "mma.sync"
        assert used - {"fma.rn.f32"} == {wanted}, config
    return compiled


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_sm90_presets(layout: str) -> None:
    """Each layout takes every fourth tile; presets that differ in stages alone count once."""
    given = form(layout=layout)
    assert candidates(given, 90, SHARED[90]) == TENSOR_CORE, "a preset fits no H100"
    tiles = {dataclasses.replace(config, num_stages=1): config for config in TENSOR_CORE}
    for config in list(tiles.values())[("nn", "nt", "tn", "tt").index(layout) :: 4]:
        compiled = check(given, config, 90)
        assert set(copies(compiled)) == {16}, config
        assert "st.global.v4" in compiled.asm["ptx"] or config.block_m * config.block_n < 8 * config.threads, config


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_edges_keep_wide_copies(layout: str) -> None:
    """1000 is a multiple of 8 elements (16 bytes), not of any tile."""
    given = form(1000, 1000, 1000, layout=layout, addend=True)
    assert set(copies(check(given, LARGE, 90))) == {16}


def test_the_loop_is_pipelined() -> None:
    compiled = compile_for(form(), LARGE, 90)
    tile = (LARGE.block_m + LARGE.block_n) * LARGE.block_k * 2
    assert copies(compiled)[16] == LARGE.num_stages * tile // (16 * LARGE.threads)
    assert re.search(r"cp\.async\.wait_group\s+2;", compiled.asm["ptx"]), "copies of the next step stay in flight"
    assert re.search(r"wgmma\.wait_group\.sync\.aligned\s+1;", compiled.asm["ptx"]), "products overlap the barrier"


@pytest.mark.parametrize(
    ("arch", "shape"),
    [(80, (4096, 4096, 4096)), (80, (1000, 1000, 1000)), (86, (1000, 1000, 1000)), (86, (16, 4096, 4096))],
    ids=str,
)
def test_sm80(arch: int, shape: tuple[int, int, int]) -> None:
    given = form(*shape, dtype=torch.float16, layout="nn", addend=True)
    compiled = check(given, choose(given, 108, arch, SHARED[arch]), arch)
    assert set(copies(compiled)) == {16}
    assert "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32" in compiled.asm["ptx"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(4096, 4096, 4096), (1000, 1000, 1000), (16, 4096, 4096)], ids=str)
def test_sm75(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    given = form(*shape, dtype=dtype)
    compiled = check(given, choose(given, 40, 75, SHARED[75]), 75)
    assert not copies(compiled), "cp.async begins with sm_80"


@pytest.mark.parametrize(("arch", "layout"), [(80, "nn"), (80, "tt"), (90, "nn"), (90, "nt")])
def test_fp32_is_ieee_unless_tf32_is_asked_for(arch: int, layout: str) -> None:
    ieee, tf32 = form(dtype=torch.float32, layout=layout), form(dtype=torch.float32, layout=layout, tf32=True)
    for given in (ieee, tf32):
        compiled = check(given, choose(given, 132, arch, SHARED[arch]), arch)
        assert ("tf32" in compiled.asm["ptx"]) == given.tf32
        assert ("cvt.rna.tf32.f32" in compiled.asm["ptx"]) == given.tf32, "tensor cores truncate, they do not round"


@pytest.mark.parametrize(("K", "pad", "widest"), [(1000, 1, 0), (1000, 2, 4), (1000, 4, 8), (1001, 7, 0)])
def test_unaligned_rows_get_narrower_copies_and_no_spills(K: int, pad: int, widest: int) -> None:
    given = form(1001, 1001, K, layout="nt", pad=pad, addend=True)
    compiled = check(given, choose(given, 132, 90, SHARED[90]), 90)
    assert max(copies(compiled), default=0) == widest


def test_an_unaligned_address_is_never_copied_wide() -> None:
    buffer = torch.empty(64 * 64 + 8, dtype=torch.bfloat16)
    a, b = buffer[4:-4].view(64, 64), torch.empty(64, 64, dtype=torch.bfloat16)
    config = Config(64, 64, 64, 8, 4, 2)
    both = compile_for(problem(b, b, b), config, 90)
    shifted = compile_for(problem(a, b, torch.empty_like(b)), config, 90)
    assert set(copies(both)) == {16}
    assert set(copies(shifted)) == {8, 16}


def test_launches_that_start_inside_a_tensor_are_unaligned() -> None:
    """The third batch dimension is walked on the host, in steps of 4 elements (8 bytes)."""
    a = torch.empty(2 * 3 * 4 * 64 * 64, dtype=torch.bfloat16).as_strided((2, 3, 4, 64, 64), (4, 8192, 4096, 64, 1))
    b = torch.empty(4, 64, 64, dtype=torch.bfloat16)
    given = problem(a, b, torch.empty(2, 3, 4, 64, 64, dtype=torch.bfloat16))
    assert len(given.batch) == 3
    assert set(copies(compile_for(given, Config(64, 64, 64, 8, 4, 2), 90))) == {8, 16}


@pytest.mark.parametrize(
    ("shape", "wide"),
    [
        ((4096, 4096, 4096), False),
        ((40000, 256, 60000), True),
        ((256, 256, 2**31 - 1), True),
        ((2**31 + 7, 16, 64), True),
    ],
    ids=str,
)
def test_offsets_are_64_bit_only_where_they_must_be(shape: tuple[int, int, int], wide: bool) -> None:
    compiled = check(form(*shape), Config(64, 64, 64, 8, 4, 3), 90)
    assert bool(re.search(r"tensor<\d+x\d+xi64>", compiled.asm["ttir"])) == wide


def test_a_stride_beyond_32_bits() -> None:
    a = torch.empty(1, device="meta", dtype=torch.bfloat16).as_strided((64, 64), (2**33, 1))
    b = torch.empty(64, 64, device="meta", dtype=torch.bfloat16)
    check(problem(a, b, b), Config(64, 64, 64, 8, 4, 3), 90)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 64, 64), (64, 1, 64), (64, 64, 1)], ids=str)
def test_sizes_of_one(shape: tuple[int, int, int]) -> None:
    check(form(*shape), Config(16, 16, 16, 8, 4, 2), 90)


def test_kernel_name_tells_tile_and_dtype() -> None:
    assert compile_for(form(), LARGE, 90).metadata.name == "outblas_portable_128x256x64_bf16"


def test_interpreting_does_not_change_what_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(32, 32, 32, 8, 4, 2)
    texts = []
    for folder in ("before", "after"):
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / folder))
        portable._compile.cache_clear()
        texts.append(compile_for(form(64, 64, 64), config, 90).asm["ttir"])
        ones = torch.ones(32, 32)
        out = torch.empty(32, 32)
        plan(problem(ones, ones, out), config)(ones, ones, None, out, 1, 0)
        assert torch.equal(out, 32 * ones)
    assert any((tmp_path / "after").rglob("*.cubin"))
    assert texts[0] == texts[1]
