"""hopper.grouped on fp8 operands with scales of blocks: what it refuses, which variant it takes,
its machine code, and what the host gathers.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.fp8 import E4M3
from support.scaled_groups import FORMS, draw

from outblas.base import machines
from outblas.call.epilogue import glu_split
from outblas.call.grouped import (
    Form,
    GroupedProblem,
    GroupedTensors,
    describe,
    in_kernel_form,
    in_planned_form,
)
from outblas.hopper.gemm import group_host as host
from outblas.hopper.gemm import group_layouts as layouts
from outblas.hopper.gemm.group_rule import candidates
from outblas.hopper.gemm.group_variant import has_whole_halves, variant_of
from outblas.hopper.gemm.heuristic import rates
from outblas.hopper.parts.config import SHARED_MEMORY, HopperConfig
from outblas.hopper.parts.config_limits import block_scaled_reason, gated_reason, promoted_reason

Tensor = torch.Tensor

BF16, F32 = torch.bfloat16, torch.float32
H100 = rates(machines.find("h100"))
G = 8


def empty(*shape: int, dtype: torch.dtype = E4M3) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def problem(
    form: Form = "ragged_m",
    M: int = 4096,
    N: int = 2048,
    K: int = 7168,
    *,
    out_dtype: torch.dtype = BF16,
    activation: str = "",
    has: str = "",
    b: torch.dtype = E4M3,
    **changes: Tensor,
) -> GroupedProblem:
    """Returns a product of packed tensors. `has`: any of bias and residual. `changes`: other
    operands.
    """
    blocks, across = -(-K // 128), -(-N // 128)
    rows = {"masked": (G, M), "ragged_m": (M,), "ragged_k": (M,)}[form]
    lead = (G, M) if form == "ragged_k" else rows
    whole = () if form == "ragged_k" else (G,)
    out = empty(*lead, N // glu_split(activation), dtype=out_dtype)
    tensors = GroupedTensors(
        bias=empty(G, N, dtype=out_dtype) if "bias" in has else None,
        residual=torch.empty_like(out) if "residual" in has else None,
        counts=empty(G, dtype=torch.int32) if form == "masked" else None,
        scale_a=empty(*rows, blocks, dtype=F32),
        scale_b=empty(*whole, blocks, N if form == "ragged_k" else across, dtype=F32),
    )
    given = {"mat_a": empty(*rows, K), "mat_b": empty(*whole, N, K, dtype=b).mT} | changes
    operands = given["mat_a"], given["mat_b"], out
    return describe(form, *operands, G, tensors, activation=activation)


def variant(given: GroupedProblem, config: HopperConfig | None = None) -> Any:
    words = layouts.in_words(given)
    return variant_of(words, config or host.config_for(words, H100))


@pytest.mark.parametrize("form", FORMS)
def test_words_of_two_values_are_moved(form: Form) -> None:
    given = problem(form, M=256)

    words = layouts.in_words(given)

    assert host.unsupported(given) is None
    assert (words.K, words.dtype, words.scales) == (3584, BF16, given.scales)
    assert words.a == (3584, 1)
    assert words.b == (() if form == "ragged_k" else (2048 * 3584,)) + (1, 3584)
    assert variant(given).layout == "nt"


@pytest.mark.parametrize(
    "given",
    [
        problem(
            K=7170, mat_a=empty(4096, 7184)[:, :7170], mat_b=empty(G, 2048, 7184)[..., :7170].mT
        ),
        problem(M=1, mat_a=empty(1, 7168).as_strided((1, 7168), (2, 1))),
        problem("masked", M=64, activation="swiglu", N=2064),
        problem(N=40),
        problem("ragged_k", K=7200, N=8),
    ],
    ids=str,
)
def test_supported(given: GroupedProblem) -> None:
    assert host.unsupported(given) is None


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (problem(K=7169), "but mat_a has strides (7169, 1) and 7169 terms"),
        (problem(K=7176), "but mat_a has strides (7176, 1) and 7176 terms"),
        (
            problem(K=71, mat_a=empty(4096, 80)[:, :71], mat_b=empty(G, 2048, 80)[..., :71].mT),
            "but mat_a has strides (80, 1) and 71 terms",
        ),
        (problem(mat_a=empty(7168, 4096).t()), "but mat_a has strides (1, 4096)"),
        (problem(mat_a=empty(4096, 14336)[:, ::2]), "but mat_a has strides (14336, 2)"),
        (problem(mat_b=empty(G, 7168, 2048)), "but mat_b has strides (14680064, 2048, 1)"),
        (
            replace(problem(), alignment=(8, 16, 16)),
            "7168 terms at an address that is a multiple of 8",
        ),
        (problem(N=2044), "rows of the result that begin and end at multiples of 16 bytes"),
    ],
)
def test_what_is_refused_is_named(given: GroupedProblem, reason: str) -> None:
    found = host.unsupported(given)

    assert found is not None
    assert reason in found


@pytest.mark.parametrize(
    ("form", "M", "strides", "wide"),
    [
        ("masked", 128, (7168, 1, 128), True),
        ("masked", 126, (7168, 1, 128), False),
        ("masked", 128, (7170, 1, 128), False),
        ("masked", 128, (7168, 56, 1), False),
        ("ragged_k", 128, (0, 1, 128), True),
        ("ragged_k", 126, (0, 1, 128), False),
        ("ragged_k", 128, (0, 1, 130), False),
        ("ragged_k", 128, (0, 56, 1), False),
        ("ragged_m", 128, (0, 1, 128), True),
        ("ragged_m", 126, (0, 1, 128), False),
        ("ragged_m", 128, (0, 1, 130), False),
        ("ragged_m", 128, (0, 56, 1), False),
    ],
)
def test_tma_loads_the_scales_of_rows_where_those_of_each_tile_begin_at_16_bytes(
    form: Form, M: int, strides: tuple[int, int, int], wide: bool
) -> None:
    given = problem(form, M=M)
    assert given.scales is not None

    own = 16 if form == "ragged_k" else 4
    lying = replace(given, scales=replace(given.scales, a=strides, alignment=(16, own)))

    traits = variant(lying).traits
    assert traits.wide_scales == wide
    assert traits.from_any_row == (wide and form == "ragged_m")
    at_any_address = replace(lying, scales=replace(given.scales, a=strides, alignment=(8, own)))
    assert not variant(at_any_address).traits.wide_scales


@pytest.mark.parametrize(
    ("N", "strides", "alignment", "wide"),
    [
        (264, (0, 264, 1), 16, True),
        (264, (0, 268, 1), 16, True),
        (264, (0, 266, 1), 16, False),
        (264, (0, 1, 56), 16, False),
        (264, (0, 264, 1), 8, False),
        (258, (0, 260, 1), 16, False),
    ],
)
def test_tma_loads_the_scales_of_columns_where_those_of_each_tile_begin_at_16_bytes(
    N: int, strides: tuple[int, int, int], alignment: int, wide: bool
) -> None:
    """Else the warp that copies them copies those of rows as well."""
    given = problem("ragged_k", M=128, N=N, out_dtype=F32)
    assert given.scales is not None
    scales = replace(given.scales, a=(0, 1, 128), b=strides, alignment=(16, alignment))

    assert variant(replace(given, scales=scales)).traits.wide_scales == wide


def test_tiles_of_256_rows_share_operands_where_tma_loads_all_scales() -> None:
    given = problem("ragged_k", M=4096, K=65536)
    assert given.scales is not None
    loaded = replace(given, scales=replace(given.scales, a=(0, 1, 4096), alignment=(16, 16)))

    configs = [host.config_for(layouts.in_words(each), H100) for each in (given, loaded)]

    assert [(c.tile_m, c.cluster_m, c.cluster_n) for c in configs] == [(256, 1, 1), (256, 1, 2)]
    assert [c.producer_registers for c in configs] == [64, 40]


@pytest.mark.parametrize(
    "given",
    [
        problem(),
        problem("ragged_k"),
        problem("ragged_k", activation="swiglu"),
        problem(N=2096, activation="swiglu"),
        problem(activation="swiglu"),
    ],
    ids=str,
)
def test_every_tile_has_room_for_the_sums_and_the_scales_of_its_stages(
    given: GroupedProblem,
) -> None:
    words = layouts.in_words(given)
    in_halves = has_whole_halves(words)
    configs = candidates(words)

    assert len(configs) >= 4
    assert {c.mma_n for c in configs} == ({0, 128} if in_halves else {0})
    for config in configs:
        traits = variant_of(words, config).traits
        assert traits.whole_halves == in_halves
        assert promoted_reason(config, gated=in_halves) is None
        assert block_scaled_reason(config, traits.block_b) is None
        assert gated_reason(config, in_halves=in_halves) is None
        assert config.stages >= 4
        assert config.shared_memory_bytes < SHARED_MEMORY


@pytest.mark.parametrize(
    ("given", "tile"),
    [
        (problem(M=32768, N=4096), (256, 128)),
        (problem(M=128), (64, 128)),
        (problem("masked", M=128), (64, 128)),
        (problem("masked", M=4096), (256, 128)),
        (problem("ragged_k", M=4096, K=65536), (256, 128)),
        (problem(M=32768, activation="swiglu"), (128, 256)),
        (problem("masked", M=4096, activation="swiglu"), (128, 256)),
        (problem(M=32768, N=2096, activation="swiglu"), (128, 128)),
        (problem("ragged_k", M=4096, K=65536, activation="swiglu"), (256, 128)),
    ],
    ids=str,
)
def test_the_tile_suits_the_groups(given: GroupedProblem, tile: tuple[int, int]) -> None:
    config = host.config_for(layouts.in_words(given), H100)

    assert (config.tile_m, config.tile_n) == tile


@pytest.mark.parametrize("columns", [128, 4096])
def test_rows_are_gathered_into_memory_with_their_scales(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = draw("ragged_m", "a_index", N=columns, K=272)
    t = call.tensors
    out = torch.empty(43, columns, dtype=BF16)
    given = GroupedTensors(a_index=t["a_index"], scale_a=t["scale_a"], scale_b=t["scale_b"])
    tensors = in_kernel_form(given, 43)
    operands = t["mat_a"], t["mat_b"], out
    launched: list[Any] = []
    monkeypatch.setattr(
        host, "launch", lambda given, **_: lambda *rest: launched.append((given, *rest))
    )

    a, b, c, moved = in_planned_form("ragged_m", *operands, tensors)
    host.run(describe("ragged_m", *operands, 5, tensors), a, b, c, t["offs"], moved)

    ((plain, rows, *_, used),) = launched
    chosen = t["a_index"].clamp(0, 42)
    assert torch.equal(rows.float(), t["mat_a"].float()[chosen])
    assert torch.equal(used.scale_a, t["scale_a"][chosen])
    assert not plain.gathers
    assert plain.scales.a == (0, *used.scale_a.stride())
    assert host.unsupported(replace(plain, device=torch.device("cuda"))) is None
