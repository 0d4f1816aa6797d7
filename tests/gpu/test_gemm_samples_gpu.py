"""hopper.gemm on a GPU: calls of all kinds, and configs of its space.

Most tests compile their kernels first, on all cores: without `-n` they take a few minutes together.
"""

import functools
import random
from typing import Any

import pytest
import torch
from support.gemm_levers import LEVERS, LateCompiles, config_of, note_late_compiles, runner
from support.precompiled import KERNEL, Ahead, of_case

import outblas
from outblas.base import configs, machines
from outblas.base.shapes import LAYOUTS
from outblas.base.space import Space
from outblas.call.artifact import example
from outblas.hopper import gemm
from outblas.hopper.parts.config import HopperConfig
from outblas.verify.call import GuardedCall, Run
from outblas.verify.cases import ADDENDS, Case
from outblas.verify.kernels import caller
from outblas.verify.oracle import Exact, Result, against, bounded, exact

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.slow, pytest.mark.timeout(1200)]

BF16, F16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateCompiles:
    """The compiles that were not made ahead."""
    return note_late_compiles(monkeypatch)


# ---- sampled calls
EXAMPLES = 300
PARTS = 15  # of them, which processes share
MOST = 1 << 22  # elements of A or B
EDGES = (
    *(1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 96, 127, 128, 129),
    *(191, 193, 255, 256, 257, 320, 511, 513),
)
BATCHES = (
    ((3,), (3,)),
    ((5,), ()),
    ((), (4,)),
    ((2, 1), (3,)),
    ((2, 3), (2, 3)),
    ((1,), (2,)),
    ((2, 1, 2), (3, 1)),
)
TUNED = (
    (1, 4096, 4096),
    (64, 4096, 4096),
    (128, 4096, 4096),
    (256, 4096, 4096),
    (768, 768, 768),
    (2048, 2048, 2048),
    (4096, 4096, 4096),
    (8192, 8192, 1024),
    (4096, 14336, 4096),
)
WAYS = "rule", "rule", "rule", "rule", "default", "lever", "lever"
Sampled = tuple[Case, str]  # a case, and the way in which it is called


def draw_size(rng: random.Random, longest: int, even: bool) -> int:
    """A size at an edge of a tile, or between two; where it is to be even, a multiple of 8."""
    size = rng.choice((rng.choice(EDGES), rng.randint(1, 1000), rng.randint(1000, longest)))
    return size + -size % 8 if even else size


def draw_options(rng: random.Random, kind: str) -> dict[str, Any]:
    """Batches or an addend."""
    options: dict[str, Any] = {}
    if kind == "batch":
        options["batch_a"], options["batch_b"] = rng.choice(BATCHES)
    if kind == "addend":
        addend = rng.choice(ADDENDS[1:])
        betas = (1.0, -0.5, 3.0) if addend == "out" else (1.0, -0.5, 3.0, 0.0)
        options = {"addend": addend, "alpha": rng.choice((1.0, 2.0, -0.5))}
        options["beta"] = rng.choice(betas)
    return options


def draw_near_tuned(rng: random.Random, even: bool) -> list[int]:
    """Extents a little below tuned ones."""
    below = [8 * rng.randint(0, 12) + (0 if even else rng.choice((0, 1, 3))) for _ in range(3)]
    return [n - min(n - 1, less) for n, less in zip(rng.choice(TUNED), below, strict=True)]


def draw_example(rng: random.Random) -> Sampled:
    """Any options of a call, sizes at the edges of tiles and between them; where `matmul` is to
    choose ("default"), a little below tuned ones. Half of the calls are such as TMA takes: all is
    in multiples of 8 elements.
    """
    way, even = rng.choice(WAYS), rng.random() < 0.5
    kind = rng.choice(("plain", "plain", "addend", *(() if way == "default" else ("batch",))))
    options = draw_options(rng, kind)
    if way == "default":
        M, N, K = draw_near_tuned(rng, even)
        dtype, out_dtype, layout = BF16, None, rng.choice(("nt", "nn"))
    else:
        longest = 704 if kind == "batch" else 3000
        M, N = (min(draw_size(rng, 3000, even), longest) for _ in range(2))
        K = min(draw_size(rng, 9000, even), MOST // max(M, N) // 8 * 8)
        dtype, layout = rng.choice((BF16, F16)), rng.choice(LAYOUTS)
        out_dtype = None if kind == "addend" else rng.choice((None, FP32))
    case = Case(
        M,
        N,
        K,
        dtype,
        out_dtype,
        layout,
        **options,
        out_layout=rng.choice("nnt"),
        seed=rng.randint(0, 99),
        expand=rng.choice(("", "", "", "", "a", "b")),
        offset=rng.choice((0, 8) if even else (0, 0, 1, 2, 8)),
        pad=rng.choice((0, 8) if even else (0, 0, 1, 3, 8)),
    )
    return case, rng.choice([*LEVERS]) if way == "lever" else way


@functools.cache
def sampled() -> list[Sampled]:
    """The same ones every time. What would take another kernel by default, or cannot have a lever,
    takes the rule.
    """
    rng = random.Random(0)
    examples = [draw_example(rng) for _ in range(EXAMPLES)]
    return [(case, way if is_taken(case, way) else "rule") for case, way in examples]


def is_taken(case: Case, way: str) -> bool:
    """Whether the kernel takes the call, and with that config: K may have fewer slices than a
    cluster has parts.
    """
    config = config_of(way, case)
    return way == "rule" or (config is not None and gemm.unsupported(of_case(case), config) is None)


def one_chain(call: GuardedCall) -> torch.Tensor:
    """The product in fp32 by the ladder's first rung, which adds all of K in one chain of
    wgmmas.
    """
    case = call.case

    def matrices(t: torch.Tensor) -> torch.Tensor:
        """Those of a batch, one after the other, padded to multiples of 8."""
        padded = torch.nn.functional.pad(t, (0, -t.shape[-1] % 8, 0, -t.shape[-2] % 8))
        return padded.expand(*case.batch, *padded.shape[-2:]).reshape(-1, *padded.shape[-2:])

    products = [
        outblas.matmul(a, b, kernel="hopper.tma_wgmma", out_dtype=FP32)[: case.M, : case.N]
        for a, b in zip(matrices(call.a.armed), matrices(call.b.armed), strict=True)
    ]
    return torch.stack(products).reshape(*case.batch, case.M, case.N)


def near(run: Run, case: Case) -> Result:
    """Rounded to 16 bits, an error is held to torch's. In fp32 it shows how the tensor cores add:
    to the error of the same instructions; torch's may be a seventh of it (WORKLOG.md).
    """
    if case.result_dtype is FP32:
        return against(
            "one chain", run, case, "cuda", one_chain, "that of one chain of wgmmas", 1.25
        )
    return bounded(run, case, "cuda")


def equal(run: Run, case: Case) -> Result:
    """On integers: no rounding, no difference."""
    return exact(run, case, "cuda")


@pytest.mark.parametrize("part", range(PARTS))
def test_sampled_calls_are_right(part: int, ahead: Ahead, late: LateCompiles) -> None:
    calls = sampled()[part::PARTS]
    compiles = ahead((of_case(case), config_of(way, case)) for case, way in calls)
    faults = []
    for case, way in calls:
        run = runner(way, case)
        for oracle in (equal, near):
            try:
                result = oracle(run, case)
            except Exception as error:
                error.add_note(f"{way}: {case!r}")
                raise
            if not result.ok:
                faults.append(f"{way}, {result.oracle}: {case!r}: {result.message}")
    assert not faults, f"{len(faults)} of {2 * len(calls)} checks failed:\n" + "\n".join(
        faults[:10]
    )
    late.check(compiles)


# ---- the space
AWKWARD = (
    Case(57, 4120, 4104, BF16, layout="nt"),  # few rows, K cut
    Case(1931, 2744, 523, F16, layout="tn"),  # many tiles, A copied first
)
SAMPLE = 48  # configs of a shape, beside the extremes of every field


def sample(space: Space[HopperConfig]) -> list[HopperConfig]:
    """Configs at even distances, and for every field the first ones that have its least and its
    greatest value.
    """
    valid = [config for config in space.configs() if space.invalid_reason(config) is None]
    chosen = valid[:: -(-len(valid) // SAMPLE)]
    for name in vars(valid[0]):
        values = {getattr(config, name) for config in valid}
        ends = (min(values), max(values)) if len(values) > 1 else ()
        chosen += [next(config for config in valid if getattr(config, name) == end) for end in ends]
    return list(dict.fromkeys(chosen))


def space_of(case: Case) -> Space[HopperConfig]:
    return gemm.space(
        example(case.dtype, case.out_dtype, case.layout, (case.M, case.N, case.K)),
        machines.reference(90),
    )


@pytest.mark.parametrize("case", AWKWARD, ids=str)
def test_configs_of_the_space_are_right(case: Case, ahead: Ahead, late: LateCompiles) -> None:
    chosen = sample(space_of(case))
    compiles = ahead((of_case(case), config) for config in chosen)
    exact, faults = Exact(case, "cuda"), []
    for config in chosen:
        result = exact(caller(KERNEL, config))
        if not result.ok:
            faults.append(f"{configs.brief(config)}: {result.message}")
            exact = Exact(case, "cuda")  # the operands may be spoilt
    assert not faults, f"{len(faults)} of {len(chosen)} configs failed:\n" + "\n".join(faults[:10])
    late.check(compiles)
