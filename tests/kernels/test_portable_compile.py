"""The portable kernel compiled without a GPU: spills, instructions, copies, and what the compiler
is told.

`support.portable_builds.check` holds whatever is compiled here to having no spills, the
instructions of its architecture and the shared memory that its config says.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.covering import covering
from support.portable_builds import BF16, check, copies, form

from outblas.call.problem import problem
from outblas.device import cubin
from outblas.kernels.portable import Config, compile_for, plan

pytestmark = pytest.mark.compile

FP32 = torch.float32
SQUARE = Config(64, 64, 64, 8, 4, 2)


# ---- architectures and dtypes
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
MEMORY = torch.empty(2 * 3 * 4 * 64 * 64, dtype=BF16)
# The host walks the first batch dimension, in steps of 8 bytes.
BATCH = MEMORY.as_strided((2, 3, 4, 64, 64), (4, 8192, 4096, 64, 1))


@pytest.mark.parametrize(
    ("a", "widths"),
    [
        pytest.param(MEMORY[:4096].view(64, 64), {16}, id="aligned"),
        pytest.param(MEMORY[4:4100].view(64, 64), {8, 16}, id="8 bytes behind"),
        pytest.param(BATCH, {8, 16}, id="launches that begin inside of a tensor"),
    ],
)
def test_an_unaligned_address_is_never_copied_wide(a: torch.Tensor, widths: set[int]) -> None:
    b = torch.empty(*a.shape[2:-2], 64, 64, dtype=BF16)

    compiled = compile_for(problem(a, b, torch.empty(a.shape, dtype=BF16)), SQUARE, 90)

    assert set(copies(compiled)) == widths


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


# ---- what is compiled
def test_interpreting_does_not_change_what_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(32, 32, 32, 8, 4, 2)
    ones, out = torch.ones(32, 32), torch.empty(32, 32)

    def compiled_anew(folder: str) -> str:
        """The IR of a compile that no cache answers."""
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / folder))
        cubin.kernel_of.cache_clear()
        return str(compile_for(form(64, 64, 64), config, 90).asm["ttir"])

    before = compiled_anew("before")
    plan(problem(ones, ones, out), config)(ones, ones, None, out, 1, 0)
    after = compiled_anew("after")

    assert torch.equal(out, 32 * ones), "it was interpreted"
    assert any((tmp_path / "after").rglob("*.cubin")), "it was compiled"
    assert after == before
