"""The portable kernel on the CPU, through Triton's interpreter, against float64 products of small integers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import outblas
from outblas.device import grid
from outblas.device.grid import pieces_of
from outblas.kernels import portable, portable_config
from outblas.kernels.portable import CANDIDATES, Config, choose, invalid_reason, plan, unsupported
from outblas.kernels.portable_config import cycles, uses_fma, vector
from outblas.operands import Problem, problem

SMALL = Config(16, 16, 16, 2, 1, 1)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
KIB = 1024


def integers(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, tuple(shape), generator=generator).to(dtype)


def stored(t: torch.Tensor, letter: str) -> torch.Tensor:
    """The same matrix, stored as rows ("n"), columns ("t"), or with gaps both ways ("s")."""
    if letter == "n":
        return t.contiguous()
    if letter == "t":
        return t.mT.contiguous().mT
    gaps = torch.full((*t.shape[:-2], 3 * t.shape[-2], 2 * t.shape[-1]), float("nan"), dtype=t.dtype)
    gaps[..., 1::3, 1::2] = t
    return gaps[..., 1::3, 1::2]


def check(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
    alpha: float = 1,
    beta: float = 0,
    config: Config | None = SMALL,
) -> torch.Tensor:
    """Plans, runs twice into NaN, compares each time with the float64 result rounded once."""
    exact = alpha * (a.double() @ b.double())
    if c is not None and beta != 0:
        exact = exact + beta * c.double()
    out = torch.empty(exact.shape, dtype=a.dtype) if out is None else out
    addend = c if beta != 0 else None
    launch = plan(problem(a, b, out, addend, scaled=addend is not None or alpha != 1), config)
    for _ in range(2):
        out.fill_(float("nan"))
        launch(a, b, c, out, alpha, beta)
        assert torch.equal(out, exact.to(out.dtype))
    return out


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (16, 16, 16), (17, 15, 33), (1, 40, 7), (40, 1, 16), (48, 32, 80)], ids=str
)
def test_shapes(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    M, N, K = shape
    check(integers((M, K), dtype), integers((K, N), dtype, 1))


@pytest.mark.interpreter
@pytest.mark.parametrize("block", [Config(32, 16, 32, 1, 4, 2), Config(16, 64, 16, 8, 2, 3), None], ids=str)
def test_configs(block: Config | None) -> None:
    check(integers((70, 40), torch.bfloat16), integers((40, 90), torch.bfloat16, 1), config=block)


@pytest.mark.interpreter
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt", "ss"])
@pytest.mark.parametrize("out_letter", ["n", "t", "s"])
def test_layouts(layout: str, out_letter: str) -> None:
    a = stored(integers((20, 35), torch.float16), layout[0])
    b = stored(integers((35, 18), torch.float16, 1), layout[1])
    out = stored(torch.empty(20, 18, dtype=torch.float16), out_letter)
    gaps = out._base if out_letter == "s" else None
    check(a, b, out=out)
    if gaps is not None:
        assert int(gaps.isnan().sum()) == gaps.numel() - out.numel(), "the gaps of out were written"


@pytest.mark.interpreter
@pytest.mark.parametrize(("terms", "rounded"), [(129, 1160), (133, 1200), (-129, -1160), (-133, -1200)])
def test_sums_beyond_the_output_precision_round_to_nearest(terms: int, rounded: int) -> None:
    """bf16 holds every eighth number between 1024 and 2048."""
    K = abs(terms)
    a, b = torch.full((20, K), 3.0, dtype=torch.bfloat16), torch.full((K, 20), 3.0, dtype=torch.bfloat16)
    a = a if terms > 0 else -a
    assert check(a, b)[0, 0] == rounded
    assert check(a, b, out=torch.empty(20, 20))[0, 0] == 9 * terms


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fp32_outputs(dtype: torch.dtype) -> None:
    check(integers((18, 20), dtype), integers((20, 33), dtype, 1), out=torch.empty(18, 33))


@pytest.mark.interpreter
def test_stride_zero_operands() -> None:
    row, column = integers((1, 24), torch.float32), integers((24, 1), torch.float32, 1)
    check(row.expand(19, 24), column.expand(24, 21))
    check(integers((19, 1), torch.float32).expand(19, 24), integers((1, 21), torch.float32).expand(24, 21))


@pytest.mark.interpreter
def test_vectors() -> None:
    a, b = integers((19, 24), torch.bfloat16), integers((24, 21), torch.bfloat16, 1)
    check(a[0], b)
    check(a, b[:, 0])
    check(a[1], b[:, 2])
    check(integers((3, 19, 24), torch.bfloat16), b[:, 1])
    check(a[2], integers((3, 24, 21), torch.bfloat16))


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("batch_a", "batch_b", "dims", "launches"),
    [
        ((5,), (5,), 1, 1),
        ((5,), (), 0, 1),
        ((), (5,), 1, 1),
        ((2, 1), (2, 3), 2, 1),
        ((2, 3), (1, 3), 2, 1),
        ((2, 3, 1), (1, 3, 4), 3, 2),
        ((4, 1, 2, 1), (1, 3, 1, 2), 4, 4),
    ],
    ids=str,
)
def test_batches(batch_a: tuple[int, ...], batch_b: tuple[int, ...], dims: int, launches: int) -> None:
    a, b = integers((*batch_a, 17, 20), torch.float16), integers((*batch_b, 20, 9), torch.float16, 1)
    shape = torch.broadcast_shapes(batch_a, batch_b)
    form = problem(a, b, torch.empty(*shape, 17, 9, dtype=torch.float16))
    assert len(form.batch) == dims
    assert len(pieces_of(form, SMALL)) == launches
    check(a, b)


@pytest.mark.interpreter
@pytest.mark.parametrize(("limit", "launches"), [(30, 1), (20, 2), (14, 2), (4, 8), (3, 12)])
def test_batches_split_to_keep_the_grid_small(monkeypatch: pytest.MonkeyPatch, limit: int, launches: int) -> None:
    monkeypatch.setattr(grid, "MAX_PROGRAMS", limit)
    a, b = integers((4, 1, 17, 20), torch.float16), integers((4, 3, 20, 9), torch.float16, 1)
    form = problem(a, b, torch.empty(4, 3, 17, 9, dtype=torch.float16))
    pieces = pieces_of(form, SMALL)
    assert max(piece.programs for piece in pieces) <= limit
    assert sum(piece.programs for piece in pieces) == 4 * 3 * 2
    assert len(pieces) == launches
    check(a, b)


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("alpha", "beta"), [(1, 1), (0.5, -2), (2, 0)])
def test_alpha_and_beta(alpha: float, beta: float, dtype: torch.dtype) -> None:
    a, b = integers((18, 20), dtype), integers((20, 33), dtype, 1)
    for c in (integers((18, 33), dtype, 2), integers((33,), dtype, 3), stored(integers((18, 33), dtype, 4), "t")):
        check(a, b, c=c, alpha=alpha, beta=beta)


@pytest.mark.interpreter
def test_beta_zero_does_not_read_c() -> None:
    c = torch.full((18, 33), float("nan"))
    check(integers((18, 20), torch.float32), integers((20, 33), torch.float32, 1), c=c, alpha=3, beta=0)


@pytest.mark.interpreter
def test_in_place_addend() -> None:
    a, b = integers((18, 20), torch.float32), integers((20, 33), torch.float32, 1)
    c = integers((18, 33), torch.float32, 2)
    want = (a.double() @ b.double() + 2 * c.double()).float()
    plan(problem(a, b, c, c, scaled=True), SMALL)(a, b, c, c, 1, 2)
    assert torch.equal(c, want)


@pytest.mark.interpreter
def test_nan_and_inf_stay_in_their_rows() -> None:
    a, b = integers((18, 20), torch.float32).abs() + 1, integers((20, 17), torch.float32, 1).abs() + 1
    a[3, 4], a[5, 6] = float("nan"), float("inf")
    out = torch.empty(18, 17)
    plan(problem(a, b, out), SMALL)(a, b, None, out, 1, 0)
    assert torch.equal(out.isnan().any(1).nonzero()[:, 0], torch.tensor([3]))
    assert torch.equal(out.isinf().all(1).nonzero()[:, 0], torch.tensor([5]))


@pytest.mark.interpreter
def test_slices_at_any_offset_leave_their_surroundings_alone() -> None:
    whole = torch.full((40, 50), float("nan"), dtype=torch.bfloat16)
    a = integers((21, 40), torch.bfloat16)[:, 3:22]
    b = integers((30, 40), torch.bfloat16, 1)[5:24, 1:28]
    check(a, b, out=whole[7:28, 11:38])
    assert int(whole.isnan().sum()) == whole.numel() - 21 * 27


def test_a_slab_wider_than_its_strides(tmp_path: Path) -> None:
    """64 columns of A lie 2³² elements apart, each 2²⁶ + 1: in 32 bits the second slab would start at element 64."""
    stride, K = 2**26 + 1, 65
    storage = torch.from_file(str(tmp_path / "a"), shared=True, size=stride * (K - 1) + 8, dtype=torch.float16)
    a = storage.as_strided((4, K), (1, stride))  # a sparse file
    a.fill_(1)
    storage[64:68] = 5
    b = torch.ones(K, 4, dtype=torch.float16)
    assert outblas.matmul(a, b, kernel="portable").eq(K).all()


def test_unsupported_says_what_it_needs_and_what_it_was_given() -> None:
    a = torch.empty(16, 16, dtype=torch.float64)
    assert unsupported(problem(a, a, a)) == (
        "needs bfloat16, float16 or float32, and was given float64 operands for float64 outputs"
    )
    meta = torch.empty(16, 16, device="meta")
    assert unsupported(problem(meta, meta, meta)) == "needs CUDA or CPU tensors, and was given tensors on meta"
    half = torch.empty(16, 16, dtype=torch.float16)
    assert unsupported(problem(half, half, half)) is None
    with pytest.raises(ValueError, match="block_m is 24, expected a power of two"):
        plan(problem(half, half, half), Config(block_m=24))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"block_m": 8}, "block_m is 8"),
        ({"block_n": 48}, "block_n is 48"),
        ({"block_k": 0}, "block_k is 0"),
        ({"num_warps": 3}, "num_warps is 3"),
        ({"num_warps": 64}, "num_warps is 64"),
        ({"group_m": 0}, "group_m is 0"),
        ({"num_stages": 0}, "num_stages is 0"),
        ({"block_n": 256}, "256 accumulators a thread, expected at most 128"),
        ({"num_stages": 8}, "needs 262208 bytes of shared memory, the device has 232448"),
    ],
    ids=str,
)
def test_invalid_configs_say_why(change: dict[str, int], complaint: str) -> None:
    assert invalid_reason(Config(), torch.float16, 227 * KIB) is None
    assert complaint in str(invalid_reason(dataclasses.replace(Config(), **change), torch.float16, 227 * KIB))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("limit", [64 * KIB, 99 * KIB, 163 * KIB, 227 * KIB])
def test_every_preset_fits_or_says_why(limit: int, dtype: torch.dtype) -> None:
    for config in CANDIDATES:
        reason = invalid_reason(config, dtype, limit)
        if config.shared_memory(dtype) <= limit:
            assert reason is None
        else:
            assert f"the device has {limit}" in str(reason)
    assert len(set(CANDIDATES)) == len(CANDIDATES)


def form(M: int, N: int, K: int, dtype: torch.dtype = torch.bfloat16, *, pad: int = 0, tf32: bool = False) -> Problem:
    """Row-major A and B; `pad` widens their rows."""
    a = torch.empty(M, K + pad, dtype=dtype, device="meta")[:, :K]
    b = torch.empty(K, N + pad, dtype=dtype, device="meta")[:, :N]
    return problem(a, b, torch.empty(M, N, dtype=dtype, device="meta"), tf32=tf32)


H100, A100, RTX3090, T4 = (132, 90, 227 * KIB), (108, 80, 163 * KIB), (82, 86, 99 * KIB), (40, 75, 64 * KIB)


@pytest.mark.parametrize("device", [H100, A100, RTX3090, T4], ids=["H100", "A100", "RTX3090", "T4"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("pad", [0, 1, 2, 4])
def test_choose_finds_a_cheap_preset_that_fits(
    device: tuple[int, int, int], dtype: torch.dtype, tf32: bool, pad: int
) -> None:
    for shape in [(1, 1, 1), (16, 4096, 4096), (4096, 16, 4096), (512, 512, 512), (4096, 4096, 4096), (1001, 77, 1)]:
        given = form(*shape, dtype, pad=pad, tf32=tf32 and dtype == torch.float32)
        config = choose(given, *device)
        assert invalid_reason(config, dtype, device[2]) is None
        assert config in (portable_config.FMA if uses_fma(given, device[1]) else portable_config.TENSOR_CORE)
        rest = portable_config.candidates(given, *device[1:])
        assert all(cycles(config, given, *device[:2]) <= cycles(other, given, *device[:2]) for other in rest)


def test_choose_by_shape() -> None:
    def tile(*shape: int) -> tuple[int, int]:
        config = choose(form(*shape), *H100)
        return config.block_m, config.block_n

    assert tile(4096, 4096, 4096) == (128, 256)
    assert tile(8192, 8192, 8192) == (128, 256)
    assert tile(16, 4096, 4096)[0] == 16
    assert tile(4096, 16, 4096)[1] == 16
    assert max(tile(512, 512, 512)) <= 64, "a few large tiles would leave most SMs idle"
    with pytest.raises(ValueError, match="no preset"):
        choose(form(64, 64, 64), 1, 90, KIB)


def test_vector_widths() -> None:
    assert vector(form(64, 64, 64), "a", 90) == 8
    assert vector(form(64, 64, 64, torch.float32), "a", 90) == 4
    assert vector(form(64, 64, 64, pad=4), "a", 90) == 4
    assert vector(form(64, 64, 64, pad=1), "b", 90) == 1
    assert vector(form(64, 66, 64, pad=6), "b", 90) == 2
    assert vector(form(64, 64, 64, torch.float32, tf32=True), "a", 90) == 4
    assert vector(form(64, 64, 64, torch.float32, tf32=True), "b", 90) == 1
    assert vector(form(64, 64, 64, torch.float32, tf32=True), "b", 80) == 4
    a = torch.empty(64, 72, dtype=torch.float16)
    shifted = problem(a[:, 4:68], a[:, 8:72].mT, torch.empty(64, 64, dtype=torch.float16))
    assert (vector(shifted, "a", 90), vector(shifted, "b", 90)) == (4, 8)
    gaps = torch.empty(64, 128, dtype=torch.float16)[:, ::2]
    assert vector(problem(gaps, gaps, gaps), "a", 90) == 1


def test_kernel_record_and_config_agree_with_the_contract() -> None:
    assert portable.KERNEL.name == "portable"
    assert all(type(field.default) is int for field in dataclasses.fields(Config))
