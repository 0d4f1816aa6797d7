"""The kernels that a pack has for a recorded call are those that the call launches."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.fp8 import RECIPES, with_recipes

import outblas
from outblas.base import configs, machines, registry
from outblas.call import dispatch
from outblas.call.grouped import GroupedProblem
from outblas.call.problem import Problem
from outblas.call.product_storage import Storage
from outblas.call.products import parse_line
from outblas.call.shape_recorder import RecordedShapes, storage_of
from outblas.call.tensor_memory import LINE
from outblas.hopper import grouped
from outblas.packing import build, examples, triton_kernels

pytestmark = pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
K, N = 384, 512
ONE = torch.ones(())


def fp8(*shape: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
    return torch.ones(shape).to(dtype)


def half(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bfloat16)


def scaled(M: int, scale_a: torch.Tensor, scale_b: torch.Tensor, **how: Any) -> Any:
    return outblas.scaled_mm(*with_recipes(fp8(M, K), fp8(N, K).t(), scale_a, scale_b), **how)


def in_blocks(M: int, of_a: str, of_b: str, **how: Any) -> Any:
    a, scale_a = outblas.quantize(torch.ones(M, K), of_a)
    b, scale_b = outblas.quantize(torch.ones(N, K), of_b)
    return outblas.scaled_mm(*with_recipes(a, b.t(), scale_a, scale_b.t()), **how)


WIDE: dict[str, Any] = {"out_dtype": torch.float32}
TO_FP8: dict[str, Any] = {"output_dtype": E4M3, "out_recipe": "1x128"}
CALLS: dict[str, tuple[Callable[[int], Any], str]] = {
    "tensorwise": (lambda M: scaled(M, ONE, ONE), "fp8-e4m3 nt tensorwise"),
    "rowwise": (
        lambda M: scaled(M, torch.ones(M, 1), torch.ones(1, N), use_fast_accum=True),
        "fp8-e4m3 nt rowwise fast-accum",
    ),
    "a layer of a checkpoint": (
        lambda M: outblas.FP8Linear(K, N, dtype=torch.half)(torch.ones(M, K).half()),
        "fp8-e4m3 nt bias 1x128:128x128 to-float16",
    ),
    "columns with scales of their own": (
        lambda M: in_blocks(M, "1x128", "1x128"),
        "fp8-e4m3 nt 1x128",
    ),
    "scales by rows": (
        lambda M: scaled(M, torch.ones(M, K // 128), torch.ones(K // 128, N)),
        "fp8-e4m3 nt 1x128-rows:1x128",
    ),
    "gated pairs into fp8": (
        lambda M: in_blocks(M, "1x128", "128x128", activation="swiglu", **TO_FP8),
        "fp8-e4m3 nt swiglu 1x128:128x128 to-e4m3",
    ),
    "powers of two": (
        lambda M: in_blocks(M, "1x128", "128x128", out_power_of_two=True, **TO_FP8),
        "fp8-e4m3 nt 1x128:128x128 to-e4m3-pow2",
    ),
    "a residual": (
        lambda M: scaled(M, ONE, ONE, bias=half(N), residual=half(M, N), activation="gelu"),
        "fp8-e4m3 nt bias+gelu+residual tensorwise",
    ),
    "slices": (
        lambda M: outblas.matmul(half(M, 2 * K)[:, 8 : 8 + K], half(K, N)),
        "bfloat16 nn lda:768",
    ),
    "slices between granules": (
        lambda M: outblas.matmul(half(M, K + 8)[:, 4 : 4 + K], half(N, K + 3)[:, :K].t()),
        "bfloat16 nt lda:392 ldb:387 align-a:8",
    ),
    "odd rows": (lambda M: outblas.matmul(half(M, 33), half(33, N)), "bfloat16 nn"),
    "an odd result": (
        lambda M: outblas.matmul(half(M, K), half(K, N), out=half(M, N + 1)[:, 1:]),
        "bfloat16 nn ldc:513 align-out:2",
    ),
    "float32, ieee": (lambda M: outblas.matmul(torch.ones(M, K), torch.ones(K, N)), "float32 nn"),
    "float32, slices": (
        lambda M: outblas.matmul(torch.ones(M, K + 6)[:, 2 : K + 2], torch.ones(K, N)),
        "float32 nn lda:390 align-a:8",
    ),
    "wider, an epilogue": (
        lambda M: outblas.matmul(
            half(M, K),
            half(N, K).t(),
            bias=torch.ones(N),
            residual=torch.ones(M, N // 2),
            activation="swiglu",
            **WIDE,
        ),
        "bfloat16 nt bias+swiglu+residual to-float32",
    ),
    "batch, a batch": (
        lambda M: outblas.matmul(half(5, M, K), half(5, K, N)),
        "bfloat16 nn batch:5",
    ),
    "batch, two dimensions": (
        lambda M: outblas.matmul(half(2, 3, M, K), half(2, 3, N, K).mT, **WIDE),
        "bfloat16 nt to-float32 batch:6",
    ),
    "batch, an epilogue": (
        lambda M: outblas.matmul(
            half(5, M, K),
            half(5, N, K).mT,
            bias=half(N),
            activation="swiglu",
            residual=half(5, M, N // 2),
        ),
        "bfloat16 nt bias+swiglu+residual batch:5",
    ),
}


def rows(M: int, count: int = 3) -> torch.Tensor:
    """Ends of groups of M rows."""
    return torch.tensor([M // 3, M // 2, M][:count], dtype=torch.int32)


def weights(*shape: int) -> torch.Tensor:
    """Matrices of groups, stored by columns."""
    return half(3, *shape[::-1]).mT


def experts(M: int, F: int) -> Any:
    """A layer of 3 experts, of which every token has two."""
    chosen = torch.rand(M, 3).topk(2)
    return outblas.moe_mlp(half(M, K), weights(K, 2 * F), weights(F, K), chosen[1], chosen[0])


def scaled_groups(M: int, shape: tuple[int, ...], **how: Any) -> Any:
    a, scale_a = outblas.quantize(torch.ones(*shape), "1x128")
    b, scale_b = outblas.quantize(torch.ones(3, N, K), "128x128")
    recipes = RECIPES["1x128"], RECIPES["128x128"]
    return outblas.scaled_grouped_mm(a, b.mT, scale_a, recipes[0], scale_b.mT, recipes[1], **how)


def scaled_terms(terms: int) -> Any:
    """Sums of the terms of three groups, of which columns of B have scales of their own."""
    a, scale_a = outblas.quantize(torch.ones(K, terms), "1x128")
    b, scale_b = outblas.quantize(torch.ones(N, terms), "1x128")
    ends = rows(terms // 128) * 128
    recipe = RECIPES["1x128"]
    return outblas.scaled_grouped_mm(a, b.mT, scale_a, recipe, scale_b, recipe, offs=ends)


GROUPS: dict[str, tuple[Callable[[int], Any], list[str]]] = {
    "rows": (
        lambda M: outblas.grouped_mm(half(M, K), weights(K, N), offs=rows(M)),
        ["256x512x384 bfloat16 nt groups:3"],
    ),
    "experts whose rows are gathered": (
        lambda M: experts(M // 2, 128),
        [
            "256x256x384 bfloat16 nt swiglu groups:3 gathered top:2",
            "256x384x128 bfloat16 nt groups:3",
        ],
    ),
    "an epilogue": (
        lambda M: outblas.grouped_mm(
            half(M, K),
            half(3, K, N),
            offs=rows(M),
            bias=half(3, N),
            residual=half(M, N),
            activation="relu",
            scatter_index=torch.arange(M),
            scatter_weights=torch.ones(M),
        ),
        ["256x512x384 bfloat16 nn bias+relu+residual groups:3 scattered weighted"],
    ),
    "terms": (
        lambda M: outblas.grouped_mm(half(M, K).t(), half(M, N), offs=rows(M)),
        ["256x512x384 bfloat16 tn groups:3:terms"],
    ),
    "places": (
        lambda M: outblas.grouped_mm(half(3, M, K), weights(K, N), counts=rows(M)),
        ["256x512x384 bfloat16 nt groups:3:masked"],
    ),
    "rows in fp8": (
        lambda M: scaled_groups(M, (M, K), offs=rows(M), activation="swiglu"),
        ["256x512x384 fp8-e4m3 nt swiglu 1x128:128x128 groups:3"],
    ),
    "places in fp8": (
        lambda M: scaled_groups(M, (3, M, K), counts=rows(M), output_dtype=torch.float32),
        ["256x512x384 fp8-e4m3 nt 1x128:128x128 to-float32 groups:3:masked"],
    ),
    "terms in fp8": (scaled_terms, ["256x512x384 fp8-e4m3 nt 1x128 groups:3:terms"]),
}


@pytest.mark.parametrize("name", GROUPS)
def test_a_recorded_call_of_groups_launches_what_its_line_packs(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (call, expected), machine = GROUPS[name], machines.find("H100")
    noted: list[GroupedProblem] = []
    note = RecordedShapes._note_groups

    def keep(self: RecordedShapes, problem: GroupedProblem, top: int) -> None:
        noted.append(problem)
        note(self, problem, top)

    monkeypatch.setattr(RecordedShapes, "_note_groups", keep)
    with outblas.record_shapes() as recorded:
        call(256)

    assert recorded.others == []
    assert recorded.lines == expected
    for line, called in zip(recorded.lines, noted, strict=True):
        products = parse_line(line)
        assert products.groups is not None
        (packed,) = examples.grouped_problems(products, products.groups)
        assert grouped.unsupported(packed) == grouped.unsupported(called) is None
        assert grouped.pack_variant(
            grouped.pack_problem(packed), None, machine
        ) == grouped.pack_variant(grouped.pack_problem(called), None, machine)


def test_a_call_that_names_portable_is_not_recorded() -> None:
    with outblas.record_shapes() as recorded:
        outblas.grouped_mm(half(4, 8), half(3, 8, 8), offs=rows(4), kernel="portable")

    assert recorded.lines == recorded.others == []


OTHER_GROUPS: dict[str, tuple[Callable[[], Any], str]] = {
    "columns": (
        lambda: outblas.grouped_mm(half(3, 8, 8), half(8, 8), offs=rows(8)),
        "8x8x8 bfloat16 groups:3, groups of columns",
    ),
    "float32": (
        lambda: outblas.grouped_mm(torch.ones(4, 8), torch.ones(3, 8, 8), offs=rows(4)),
        "4x8x8 float32 groups:3, a dtype of Triton's kernels",
    ),
    "aux": (
        lambda: outblas.grouped_mm(
            half(4, 8), half(3, 8, 8), offs=rows(4), activation="relu", aux=half(4, 8)
        ),
        "4x8x8 bfloat16 groups:3, aux",
    ),
    "an odd address": (
        lambda: outblas.grouped_mm(half(33)[1:].view(4, 8), half(3, 8, 8), offs=rows(4)),
        "4x8x8 bfloat16 groups:3, operands at addresses that are no multiples of 16",
    ),
    "odd strides": (
        lambda: outblas.grouped_mm(half(4, 7), half(3, 7, 8), offs=rows(4)),
        "4x8x7 bfloat16 groups:3, operands that TMA cannot load",
    ),
    "a bias by columns": (
        lambda: outblas.grouped_mm(half(4, 8), half(3, 8, 8), offs=rows(4), bias=half(8, 3).t()),
        "4x8x8 bfloat16 groups:3, a bias whose rows are not contiguous",
    ),
}


@pytest.mark.parametrize("name", OTHER_GROUPS)
def test_groups_that_a_pack_does_not_hold_are_named(name: str) -> None:
    call, other = OTHER_GROUPS[name]

    with outblas.record_shapes() as recorded:
        call()

    assert recorded.lines == []
    assert recorded.others == [other]


# ---- single GEMMs
@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    """The problems that are recorded."""
    problems: list[Problem] = []
    note = RecordedShapes._note

    def keep(self: RecordedShapes, problem: Problem) -> None:
        problems.append(problem)
        note(self, problem)

    monkeypatch.setattr(RecordedShapes, "_note", keep)
    return problems


def launched(problem: Problem, machine: machines.Machine) -> dict[str, list[Any]]:
    """What a GEMM launches with what was tuned, and by the rule."""
    index, module = build._index(machine), registry.load("hopper.gemm")
    variants = {}
    for kernel, text in (build.chosen(index, machine, problem), build.ruled(machine, problem)):
        if kernel == "hopper.gemm":
            config = configs.from_text(module.Config, text) if text else None
            variants[f"{kernel} {text}"] = list(module.pack_variants(problem, config, machine))
        else:
            of_triton = triton_kernels.of_problem(problem, machine, kernel, text)
            variants[f"{kernel} {text}"] = list(of_triton)
    return variants


FLOAT32 = [name for name in CALLS if name.startswith("float32")]
OF_ONE_ROW = [name for name, (_, words) in CALLS.items() if "fp8" in words and "lda" not in words]


@pytest.mark.parametrize(
    ("name", "M", "tf32"),
    [
        *((name, 1, False) for name in OF_ONE_ROW),
        *((name, M, False) for name in CALLS for M in (2, 300)),
        *((name, 300, True) for name in FLOAT32),
    ],
)
def test_a_recorded_call_launches_what_its_line_packs(
    name: str, M: int, tf32: bool, noted: list[Problem], monkeypatch: pytest.MonkeyPatch
) -> None:
    call, words = CALLS[name]
    machine, module = machines.find("H100"), registry.load("hopper.gemm")
    monkeypatch.setattr(dispatch, "tf32_requested", lambda: tf32)

    with outblas.record_shapes() as recorded:
        call(M)

    ((line,), (problem,)) = recorded.lines, noted
    (packed,) = build._problems(parse_line(line), machine)
    # The CPU's memory need not begin at whole cache lines, as that of a GPU does.
    in_lines = tuple(LINE if bytes_ == 16 else bytes_ for bytes_ in problem.alignment[:2])
    called = replace(problem, alignment=(*in_lines, *problem.alignment[2:]))
    assert recorded.others == []
    if M > 2:  # the scale of one row may count as one for all
        assert line.split(" ", 1)[1] == (words.replace("float32", "tf32") if tf32 else words)
    assert launched(packed, machine) == launched(module.pack_problem(called, machine), machine)


@pytest.mark.parametrize(("device", "told"), [("cpu", Storage()), ("cuda:0", Storage(align_a=16))])
def test_a_place_within_a_cache_line_is_told_of_a_gpu(device: str, told: Storage) -> None:
    (problem,) = examples.problems(parse_line("8x64x96 align-a:16"))

    assert storage_of(replace(problem, device=torch.device(device))) == told


@pytest.mark.parametrize(("columns", "dtype"), [(512, E4M3), (200, torch.float32)])
def test_a_result_in_fp8_is_packed_as_the_gpu_computes_it(columns: int, dtype: torch.dtype) -> None:
    """Where another kernel quantizes, the GEMM has a result in fp32."""
    products = parse_line(f"4096x{columns}x4096 fp8-e4m3 1x128:128x128 to-e4m3")

    (wanted,) = examples.problems(products)
    (packed,) = build._problems(products, machines.find("H100"))

    assert wanted.out_dtype == E4M3
    assert packed.out_dtype == dtype
    assert (packed.epilogue.scale_out is None) == (dtype == torch.float32)
