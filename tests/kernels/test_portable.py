"""The portable kernel on the CPU, through Triton's interpreter, against float64 products of small
integers.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from support.portable_builds import DEVICES, KIB, form

import outblas
from outblas.core.problem import problem
from outblas.device import grid
from outblas.device.grid import chunks_of
from outblas.kernels import portable_config
from outblas.kernels.portable import CANDIDATES, Config, choose, invalid_reason, plan, unsupported
from outblas.kernels.portable_config import cycles, uses_fma, vector

pytestmark = pytest.mark.interpreter

SMALL = Config(16, 16, 16, 2, 1, 1)
BF16, FP16, FP32 = DTYPES = torch.bfloat16, torch.float16, torch.float32


def integers(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).to(dtype)


def pair(M: int, N: int, K: int, dtype: torch.dtype = BF16) -> tuple[torch.Tensor, torch.Tensor]:
    return integers(M, K, dtype=dtype), integers(K, N, dtype=dtype, seed=1)


def stored(t: torch.Tensor, letter: str) -> torch.Tensor:
    """The same matrix, stored as rows ("n"), columns ("t"), or with gaps both ways ("s")."""
    if letter == "n":
        return t.contiguous()
    if letter == "t":
        return t.mT.contiguous().mT
    gaps = torch.full(
        (*t.shape[:-2], 3 * t.shape[-2], 2 * t.shape[-1]), float("nan"), dtype=t.dtype
    )
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (16, 16, 16), (17, 15, 33), (1, 40, 7), (40, 1, 16), (48, 32, 80)], ids=str
)
def test_shapes_with_outputs_of_either_dtype(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    a, b = pair(*shape, dtype)
    check(a, b)
    check(a, b, out=torch.empty(*shape[:2]))


@pytest.mark.parametrize(
    "block", [Config(32, 16, 32, 1, 4, 2), Config(16, 64, 16, 8, 2, 3), None], ids=str
)
def test_configs(block: Config | None) -> None:
    check(*pair(70, 90, 40), config=block)


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt", "ss"])
@pytest.mark.parametrize("out_letter", ["n", "t", "s"])
def test_layouts(layout: str, out_letter: str) -> None:
    a, b = map(stored, pair(20, 18, 35, FP16), layout)
    out = stored(torch.empty(20, 18, dtype=FP16), out_letter)
    check(a, b, out=out)
    if out_letter == "s":
        gaps = out._base
        assert int(gaps.isnan().sum()) == gaps.numel() - out.numel(), "the gaps of out were written"


@pytest.mark.parametrize(
    ("terms", "rounded"), [(129, 1160), (133, 1200), (-129, -1160), (-133, -1200)]
)
def test_sums_beyond_the_output_precision_round_to_nearest(terms: int, rounded: int) -> None:
    """bf16 holds every eighth number between 1024 and 2048."""
    b = torch.full((abs(terms), 20), 3.0, dtype=BF16)
    a = b.t() if terms > 0 else -b.t()
    assert check(a, b)[0, 0] == rounded
    assert check(a, b, out=torch.empty(20, 20))[0, 0] == 9 * terms


def test_stride_zero_operands() -> None:
    for a, b in (pair(1, 1, 24, FP32), pair(19, 21, 1, FP32)):
        check(a.expand(19, 24), b.expand(24, 21))


def test_vectors() -> None:
    a, b = pair(19, 21, 24)
    check(a[0], b)
    check(a, b[:, 0])
    check(a[1], b[:, 2])
    check(integers(3, 19, 24), b[:, 1])
    check(a[2], integers(3, 24, 21))


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
def test_batches(
    batch_a: tuple[int, ...], batch_b: tuple[int, ...], dims: int, launches: int
) -> None:
    a, b = integers(*batch_a, 17, 20), integers(*batch_b, 20, 9, seed=1)
    given = problem(a, b, check(a, b))
    assert len(given.batch) == dims
    assert len(chunks_of(given, SMALL)) == launches


@pytest.mark.parametrize(("limit", "launches"), [(30, 1), (20, 2), (14, 2), (4, 8), (3, 12)])
def test_batches_split_to_keep_the_grid_small(
    monkeypatch: pytest.MonkeyPatch, limit: int, launches: int
) -> None:
    monkeypatch.setattr(grid, "MAX_PROGRAMS", limit)
    a, b = integers(4, 1, 17, 20), integers(4, 3, 20, 9, seed=1)
    chunks = chunks_of(problem(a, b, check(a, b)), SMALL)
    assert max(chunk.programs for chunk in chunks) <= limit
    assert sum(chunk.programs for chunk in chunks) == 4 * 3 * 2
    assert len(chunks) == launches


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("alpha", "beta"), [(1, 1), (0.5, -2), (2, 0)])
def test_alpha_and_beta(alpha: float, beta: float, dtype: torch.dtype) -> None:
    matrix, row = integers(18, 33, dtype=dtype, seed=2), integers(33, dtype=dtype, seed=3)
    for c in (matrix, row, stored(matrix, "t")):
        check(*pair(18, 33, 20, dtype), c=c, alpha=alpha, beta=beta)


def test_beta_zero_does_not_read_c() -> None:
    c = torch.full((18, 33), float("nan"))
    check(*pair(18, 33, 20, FP32), c=c, alpha=3, beta=0)


def test_in_place_addend() -> None:
    a, b = pair(18, 33, 20, FP32)
    c = integers(18, 33, dtype=FP32, seed=2)
    want = (a.double() @ b.double() + 2 * c.double()).float()
    plan(problem(a, b, c, c, scaled=True), SMALL)(a, b, c, c, 1, 2)
    assert torch.equal(c, want)


def test_nan_and_inf_stay_in_their_rows() -> None:
    a, b = (t.abs() + 1 for t in pair(18, 17, 20, FP32))
    a[3, 4], a[5, 6] = float("nan"), float("inf")
    out = torch.empty(18, 17)
    plan(problem(a, b, out), SMALL)(a, b, None, out, 1, 0)
    assert torch.equal(out.isnan().any(1).nonzero()[:, 0], torch.tensor([3]))
    assert torch.equal(out.isinf().all(1).nonzero()[:, 0], torch.tensor([5]))


def test_slices_at_any_offset_leave_their_surroundings_alone() -> None:
    whole = torch.full((40, 50), float("nan"), dtype=BF16)
    check(integers(21, 40)[:, 3:22], integers(30, 40, seed=1)[5:24, 1:28], out=whole[7:28, 11:38])
    assert int(whole.isnan().sum()) == whole.numel() - 21 * 27


def test_a_k_block_wider_than_its_strides(tmp_path: Path) -> None:
    """64 columns of A lie 2³² elements apart, each 2²⁶ + 1: in 32 bits the second k-block would
    start at element 64.
    """
    stride, K = 2**26 + 1, 65
    storage = torch.from_file(
        str(tmp_path / "a"), shared=True, size=stride * (K - 1) + 8, dtype=FP16
    )
    a = storage.as_strided((4, K), (1, stride))  # a sparse file
    a.fill_(1)
    storage[64:68] = 5
    b = torch.ones(K, 4, dtype=FP16)
    assert outblas.matmul(a, b, kernel="portable").eq(K).all()


def test_unsupported_says_what_it_needs_and_what_it_was_given() -> None:
    a = torch.empty(16, 16, dtype=torch.float64)
    assert unsupported(problem(a, a, a)) == (
        "needs bfloat16, float16 or float32, and was given float64 operands for float64 outputs"
    )
    meta = torch.empty(16, 16, device="meta")
    assert (
        unsupported(problem(meta, meta, meta))
        == "needs CUDA or CPU tensors, and was given tensors on meta"
    )
    half = torch.empty(16, 16, dtype=FP16)
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
    assert invalid_reason(Config(), FP16, 227 * KIB) is None
    assert complaint in str(
        invalid_reason(dataclasses.replace(Config(), **change), FP16, 227 * KIB)
    )


@pytest.mark.parametrize("dtype", [FP16, FP32], ids=str)
@pytest.mark.parametrize("limit", [limit for _, _, limit in DEVICES.values()])
def test_every_preset_fits_or_says_why(limit: int, dtype: torch.dtype) -> None:
    for config in CANDIDATES:
        reason = invalid_reason(config, dtype, limit)
        if config.shared_memory(dtype) <= limit:
            assert reason is None
        else:
            assert f"the device has {limit}" in str(reason)
    assert len(set(CANDIDATES)) == len(CANDIDATES)


row_major = functools.partial(form, layout="nn")
H100 = DEVICES[90]


@pytest.mark.parametrize("device", DEVICES.values(), ids=map(str, DEVICES))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("pad", [0, 1, 2, 4])
def test_choose_finds_a_cheap_preset_that_fits(
    device: tuple[int, int, int], dtype: torch.dtype, tf32: bool, pad: int
) -> None:
    for shape in [
        (1, 1, 1),
        (16, 4096, 4096),
        (4096, 16, 4096),
        (512, 512, 512),
        (4096, 4096, 4096),
        (1001, 77, 1),
    ]:
        given = row_major(*shape, dtype=dtype, pad=pad, tf32=tf32 and dtype == FP32)
        config = choose(given, *device)
        assert invalid_reason(config, dtype, device[2]) is None
        assert config in (
            portable_config.FMA if uses_fma(given, device[1]) else portable_config.TENSOR_CORE
        )
        rest = portable_config.candidates(given, *device[1:])
        assert all(
            cycles(config, given, *device[:2]) <= cycles(other, given, *device[:2])
            for other in rest
        )


def test_choose_by_shape() -> None:
    def tile(*shape: int) -> tuple[int, int]:
        config = choose(row_major(*shape), *H100)
        return config.block_m, config.block_n

    assert tile(4096, 4096, 4096) == (128, 256)
    assert tile(8192, 8192, 8192) == (128, 256)
    assert tile(16, 4096, 4096)[0] == 16
    assert tile(4096, 16, 4096)[1] == 16
    assert max(tile(512, 512, 512)) <= 64, "a few large tiles would leave most SMs idle"
    with pytest.raises(ValueError, match="no preset"):
        choose(row_major(64, 64, 64), 1, 90, KIB)


def test_vector_widths() -> None:
    def width(
        name: str, dtype: torch.dtype = BF16, N: int = 64, arch: int = 90, **storage: Any
    ) -> int:
        return vector(row_major(64, N, 64, dtype, **storage), name, arch)

    assert width("a") == 8
    assert width("a", FP32) == 4
    assert width("a", pad=4) == 4
    assert width("b", pad=1) == 1
    assert width("b", N=66, pad=6) == 2
    assert width("a", FP32, tf32=True) == 4
    assert width("b", FP32, tf32=True) == 1
    assert width("b", FP32, arch=80, tf32=True) == 4
    a = torch.empty(64, 72, dtype=FP16)
    shifted = problem(a[:, 4:68], a[:, 8:72].mT, torch.empty(64, 64, dtype=FP16))
    assert (vector(shifted, "a", 90), vector(shifted, "b", 90)) == (4, 8)
    gaps = torch.empty(64, 128, dtype=FP16)[:, ::2]
    assert vector(problem(gaps, gaps, gaps), "a", 90) == 1


def test_fields_of_a_config_are_integers() -> None:
    assert all(type(field.default) is int for field in dataclasses.fields(Config))
