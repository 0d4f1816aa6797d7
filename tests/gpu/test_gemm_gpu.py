"""hopper.gemm on a GPU: rows of any batch, more than 2³¹ elements, sanitizers."""

import pytest
import torch
from support import sanitizer
from support.gemm_levers import LEVERS, LateCompiles, note_late_compiles
from support.precompiled import KERNEL, Ahead, Asked, by_rule

import outblas
from outblas.core.problem import problem
from outblas.verify.cases import Case
from outblas.verify.kernels import check

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.slow, pytest.mark.timeout(1200)]

BF16 = torch.bfloat16


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateCompiles:
    """The compiles that were not made ahead."""
    return note_late_compiles(monkeypatch)


# ---- rows of any batch
LARGEST = 4096
EXTENTS = sorted(
    {*range(1, 65), *range(65, LARGEST, 61)}
    | {127, 128, 129, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025, 2047, 2048, 2049, 4095, 4096}
)


def invariant(a: torch.Tensor, b: torch.Tensor) -> Asked:
    out = torch.empty(len(a), b.shape[1], dtype=a.dtype, device=a.device)
    given = problem(a, b, out, batch_invariant=True)
    return given, by_rule(given)


# The last has weights that come from DRAM, where the rule takes other tiles for few rows.
@pytest.mark.parametrize(("N", "K"), [(1024, 4096), (4104, 520), (8192, 4096)])
@pytest.mark.parametrize("layout", ["nt", "nn"])
def test_rows_have_the_same_bits_in_all_batches(
    layout: str, N: int, K: int, ahead: Ahead, late: LateCompiles
) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    a = torch.randn(LARGEST, K, device="cuda", generator=generator).to(BF16)
    b = torch.randn(K, N, device="cuda", generator=generator).to(BF16)
    b = b.t().contiguous().t() if layout == "nt" else b
    slices = [rows for M in EXTENTS for rows in (slice(M), slice(LARGEST - M, None))]
    compiles = ahead(invariant(a[rows], b) for rows in slices)
    with outblas.batch_invariant():
        whole = outblas.matmul(a, b)
        differ = [
            rows for rows in slices if not torch.equal(outblas.matmul(a[rows], b), whole[rows])
        ]
    assert not differ, f"{len(differ)} of {len(slices)} slices have other bits: {differ[:10]}"
    late.check(compiles)


# ---- more than 2³¹ elements
# The odd rows of test_oracles_gpu.py are copied and written one by one; here TMA reads and writes
# all.
HUGE = (
    Case(2**16 + 8, 2**15 + 8, 16, BF16, layout="nt"),
    Case(2**16 + 8, 2**15 + 8, 16, BF16, layout="nt", out_layout="t"),
    Case(2**16 + 8, 2**15 + 8, 16, BF16, layout="nt", addend="matrix", alpha=2.0, beta=-0.5),
    Case(2**15 + 8, 2**14 + 8, 16, BF16, layout="nt", batch_a=(5,), batch_b=(5,)),
    Case(2**25 + 8, 8, 72, BF16, layout="nt"),
    Case(8, 2**25 + 8, 72, BF16, layout="nt"),
    Case(2**26 + 8, 8, 40, BF16, layout="tn"),
    Case(8, 2**26 + 8, 40, BF16, layout="nn"),
    Case(2**14 + 8, 8, 2**15 + 8, BF16, layout="nt", batch_a=(5,), batch_b=(5,)),
)


@pytest.mark.xdist_group("most of the GPU's memory")  # one at a time
@pytest.mark.parametrize("case", HUGE, ids=str)
def test_more_than_two_to_the_31_aligned_elements(case: Case) -> None:
    result = check(KERNEL, case)
    assert result.ok, result.message


# ---- sanitizers
SANITIZED = f"""
import torch, outblas
from outblas.base import configs
from outblas.hopper import gemm
a = torch.randint(-4, 5, (520, 520), device="cuda").bfloat16()
b = torch.randint(-4, 5, (776, 520), device="cuda").bfloat16().t()
want = (a.double() @ b.double()).bfloat16()
for way, text in {LEVERS}.items():
    config = configs.from_text(gemm.Config, text)
    assert torch.equal(outblas.matmul(a, b, kernel="{KERNEL}", config=config), want), way
    print("right:", way)
"""


@pytest.mark.slow
@pytest.mark.xdist_group("most of the GPU's memory")
@pytest.mark.parametrize("tool", ["memcheck", "synccheck", "racecheck"])
def test_sanitizers_find_nothing(tool: str) -> None:
    sanitizer.finds_nothing(tool, SANITIZED, len(LEVERS))
