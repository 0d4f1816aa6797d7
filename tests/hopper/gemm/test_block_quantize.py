"""Outputs of hopper.gemm in fp8, without a GPU: what its own source makes of sums, which problems
and configs it takes, and what it hands to a launch.
"""

import ast
import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support import ptx
from support.gemm_problems import BF16, gemm_config, record_launches, variant_of

import outblas.hopper.gemm
from outblas.base import configs
from outblas.core import fp8, quantization
from outblas.core import problem as operands
from outblas.core.epilogue import EpilogueArgs, glu_split
from outblas.core.problem import Problem
from outblas.hopper import gemm
from outblas.hopper.gemm import heuristic
from outblas.hopper.gemm.compile import shared_memory
from outblas.hopper.parts.config import SHARED_MEMORY
from outblas.hopper.parts.config_limits import (
    block_scaled_reason,
    gated_reason,
    promoted_reason,
    quantized_reason,
)
from outblas.torch_ops.quantize import by_torch

Tensor = torch.Tensor

H100 = heuristic.Rates()
E4M3 = torch.float8_e4m3fn
BLOCKS = "e4m3 e4m3 promoted 1x128 128x128"
SOURCE = Path(outblas.hopper.gemm.__file__).with_name("block_quantize.py")
WARPGROUP, ROWS, COLUMNS = 128, 64, 128
THREADS = np.arange(WARPGROUP)
OWN_ROW = THREADS // 32 * 16 + THREADS % 32 // 4


def problem(
    M: int = 4096, N: int = 4096, K: int = 4096, formats: str = BLOCKS, **given: Any
) -> Problem:
    """A product of K fp8 terms into fp8, without data. `given`: an activation, tensors of the
    epilogue, and `power_of_two`.
    """
    power_of_two = given.pop("power_of_two", False)
    columns = N * glu_split(given.get("activation", ""))
    found = fp8.formats(formats)
    of_a, of_b = torch.empty(M, 1, device="meta"), torch.empty(1, columns, device="meta")
    if found.block_a:
        of_a = torch.empty(-(-K // 128), -(-M // found.block_a), device="meta").t()
        of_b = torch.empty(-(-columns // found.block_b), -(-K // 128), device="meta").t()
    scale_out = quantization.empty_scales((M, N), "1x128", torch.device("meta"))
    return operands.problem(
        torch.empty(M, K // 2, dtype=BF16, device="meta"),
        torch.empty(columns, K // 2, dtype=BF16, device="meta").t(),
        torch.empty(M, N, dtype=E4M3, device="meta"),
        extra=EpilogueArgs(**{"activation": "", **given}),
        scales=(of_a, of_b, scale_out),
        formats=formats,
        power_of_two=power_of_two,
    )


# ---- arithmetic: the module's own source for all threads of a consumer at once
class Scales(dict[tuple[int, int], float]):
    """The scales in memory, of which only what was written is there."""

    def __setitem__(self, at: Any, value: Any) -> None:
        row, block = map(int, at)
        assert (row, block) not in self, "a scale is written twice"
        super().__setitem__((row, block), value)


def stand_ins() -> dict[str, Any]:
    """What the module imports. A register is an array that has it of every thread."""

    def shuffle_sync_bfly(values: Any, distance: int) -> Any:
        return values[THREADS ^ distance]

    arch = SimpleNamespace(
        inline_ptx=ptx.inline_ptx, shuffle_sync_bfly=shuffle_sync_bfly, fmax=np.fmax
    )
    cute = SimpleNamespace(
        jit=lambda function: function, size=len, arch=arch, recast_tensor=lambda t, dtype: t
    )
    cutlass = SimpleNamespace(const_expr=bool, range_constexpr=range, Constexpr=object)
    every_thread = np.ones(WARPGROUP, dtype=np.float32)

    class Float32:
        def __new__(cls, value: float) -> Any:
            return every_thread * np.float32(value)

        def __eq__(self, other: object) -> bool:
            return False

    return {
        "cute": cute,
        "cutlass": cutlass,
        "torch": torch,
        "fp8": fp8,
        "FORMATS": quantization.FORMATS,
        "LEAST_SCALE": quantization.LEAST_SCALE,
        "EpilogueTile": object,
        "Float32": Float32,
        "Uint16": "Uint16",
        "__name__": __name__,
    }


def source() -> dict[str, Any]:
    """The module over the stand-ins."""
    tree = ast.parse(SOURCE.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom)]
    made = stand_ins()
    of_type = made["Float32"]
    made["cute"].arch.inline_ptx = lambda code, write_only_types, read_only_args: ptx.inline_ptx(
        code,
        ["Float32" if each is of_type else each for each in write_only_types],
        read_only_args,
    )
    exec(compile(tree, str(SOURCE), "exec"), made)
    return made


def quantized(
    x: Tensor, power_of_two: bool, row: int = 0, column: int = 0, M: int = 64, N: int = 128
) -> tuple[Tensor, Scales]:
    """The bytes and the scales that the source makes of 64 by 128 outputs, which are at (row,
    column) of a matrix C of M by N.
    """
    module, scale_out = source(), Scales()

    def tile(thread: Any) -> Any:
        own = row + thread // 32 * 16 + thread % 32 // 4
        return SimpleNamespace(
            epilogue=SimpleNamespace(
                traits=SimpleNamespace(power_of_two=power_of_two),
                tensors=SimpleNamespace(scale_out=scale_out),
                extents=(M, N),
            ),
            consumer=SimpleNamespace(context=SimpleNamespace(thread=thread)),
            first_coord=lambda i, start: (own, column + start + thread % 4 * 2, None),
        )

    store = module["store_scales"]

    def store_of_each(_: Any, scales: Any, *place: int) -> None:
        for thread in range(WARPGROUP):
            store(tile(thread), [float(each[thread]) for each in scales], *place)

    module["store_scales"] = store_of_each
    at = [
        (OWN_ROW + v % 4 // 2 * 8, v // 4 * 8 + THREADS % 4 * 2 + v % 2)
        for v in range(ROWS * COLUMNS // WARPGROUP)
    ]
    values = [x.numpy()[place] for place in at]
    pairs: list[Any] = [None] * (len(values) // 2)
    module["quantize"](tile(0), values, 0, 0, Pairs(pairs))
    found = np.zeros((ROWS, COLUMNS), dtype=np.uint8)
    for v, place in enumerate(at):
        found[place] = pairs[v // 2] >> np.uint32(8 * (v % 2)) & np.uint32(0xFF)
    return torch.from_numpy(found), scale_out


class Pairs:
    """The rounded subtile as words of two bytes."""

    def __init__(self, words: list[Any]) -> None:
        self.words = words

    def __setitem__(self, index: int, word: Any) -> None:
        assert self.words[index] is None, "a pair is rounded twice"
        self.words[index] = word


def outputs(kind: str) -> Tensor:
    """64 by 128 outputs."""
    torch.manual_seed(0)
    x = torch.randn(ROWS, COLUMNS)
    match kind:
        case "magnitudes":  # down to subnormal ones, and up to the largest
            x = (x.abs().clamp(0.1, 3) * torch.logspace(-45, 38, ROWS)[:, None]).mul(x.sign())
        case "special":
            x[0], x[1], x[2] = 0.0, torch.nan, -torch.inf
            x[3, 7], x[3, 9], x[4, 11] = torch.inf, torch.nan, -torch.inf
            x[5], x[5, 127] = -0.0, 3e38
            x[6], x[7] = 1e-45, 448.0
        case "ties":
            x = torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS).float() * 0.0625
            x[:, 0] = 448
    return x


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("kind", ["normal", "magnitudes", "special", "ties"])
def test_a_block_has_the_bits_that_quantize_gives_it(kind: str, power_of_two: bool) -> None:
    x = outputs(kind)
    values, scale = by_torch(x, "1x128", E4M3, power_of_two)

    found, scales = quantized(x, power_of_two)

    assert scales == {(row, 0): float(scale[row, 0]) for row in range(ROWS)}
    different = (found != values.view(torch.uint8)).nonzero().tolist()
    assert not different, f"{len(different)} differ, as {different[:3]}"


def test_scales_are_stored_for_the_rows_and_columns_that_c_has() -> None:
    x = outputs("normal")
    _, scale = by_torch(x, "1x128", E4M3, False)

    _, inside = quantized(x, False, row=128, column=256, M=171, N=384)
    _, beyond = quantized(x, False, row=128, column=384, M=171, N=384)

    assert inside == {(128 + row, 2): float(scale[row, 0]) for row in range(43)}
    assert beyond == {}


# ---- what is refused
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "columns of half a block": ("tile_n=192,stages=3,cluster_m=1", {}, "a CTA stores 192 columns"),
    "half of a block of pairs": (
        "tile_n=128",
        {"activation": "swiglu"},
        "a CTA stores 64 columns, expected a multiple of 128",
    ),
    "a block in two CTAs": (
        "tile_n=128,cluster_k=2,cluster_m=1,stages=3,epilogue_stages=1",
        {},
        "a CTA stores 64 columns",
    ),
    "rows for columns": ("tile_n=128,swap_ab=True", {}, "needs swap_ab, variable_tile_n"),
    "two widths": ("tile_n=128,variable_tile_n=True", {}, "needs swap_ab, variable_tile_n"),
    "partitions of K": ("tile_n=128,split_k=2", {}, "stream_k False, and split_k 1"),
    "a stream": ("tile_n=128,stream_k=True", {}, "stream_k False, and split_k 1"),
    "registers straight to memory": ("tile_n=128,epilogue_stages=0", {}, "epilogue_stages is 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_config_that_cannot_store_blocks_is_refused(name: str) -> None:
    text, how, reason = REFUSED[name]

    found = gemm.unsupported(problem(**how), gemm_config(text))

    assert found is not None
    assert reason in found


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"N": 4096 + 64}, "multiples of 128 columns, but was given 4160"),
        ({"residual": torch.empty(4096, 4096, device="meta")}, "no residual of outputs in fp8"),
    ],
)
def test_a_problem_that_cannot_be_stored_in_blocks_is_refused(
    how: dict[str, Any], reason: str
) -> None:
    assert reason in str(gemm.unsupported(problem(**how)))


def test_an_output_that_tma_cannot_store_is_refused() -> None:
    given = problem()

    assert gemm.unsupported(given) is None
    for moved in (
        replace(given, alignment=(*given.alignment[:2], 8)),
        replace(given, out=(4100, 1)),
        replace(given, out=(1, 4096)),
    ):
        assert "contiguous matrices" in str(gemm.unsupported(moved))


@pytest.mark.parametrize(
    ("mma_n", "gated", "reason"),
    [
        (128, True, None),
        (64, True, "mma_n is 64, expected 0 or 128"),
        (0, True, "needs 256 registers for its sums"),
        (128, False, "needs 256 registers for its sums"),
    ],
)
def test_wide_pairs_have_room_for_the_sums_of_one_half(
    mma_n: int, gated: bool, reason: str | None
) -> None:
    config = gemm_config(f"tile_n=256,mma_n={mma_n},cluster_m=1,stages=4,epilogue_stages=1")

    found = gemm.unsupported(problem(activation="swiglu" if gated else ""), config)

    assert found is None if reason is None else reason in str(found)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_pairs_of_whole_blocks_are_summed_half_by_half(out_dtype: torch.dtype) -> None:
    """So are those that do not become fp8; others, and unscaled sums, are not, nor tuned so."""
    config = gemm_config("tile_n=256,mma_n=128,cluster_m=1,stages=4,epilogue_stages=1")
    quantized = problem(activation="swiglu")
    plain = replace(
        quantized, out_dtype=out_dtype, epilogue=replace(quantized.epilogue, scale_out=None)
    )
    uneven = replace(plain, N=plain.N - 8)
    unscaled = replace(plain, formats="e4m3 e4m3")

    assert gemm.unsupported(quantized, config) is None
    assert gemm.unsupported(plain, config) is None
    assert "mma_n 0" in str(gemm.unsupported(uneven, config))
    assert "mma_n 0" in str(gemm.unsupported(unscaled, config))


# ---- the rule
@pytest.mark.parametrize("activation", ["", "silu", "swiglu"])
@pytest.mark.parametrize(
    "formats",
    [BLOCKS, "e4m3 e4m3 promoted 1x128 1x128", "e4m3 e5m2 promoted", "e5m2 e4m3"],
)
def test_configs_of_the_rule_store_blocks(formats: str, activation: str) -> None:
    rows, others = (1, 16, 64, 128, 500, 4096, 16384), ((512, 7168), (4096, 512), (24576, 1536))
    for M, (N, K) in itertools.product(rows, others):
        given = problem(M, N, K, formats, activation=activation)
        gated = activation == "swiglu"

        config: Any = heuristic.config(given, H100)

        assert gemm.Gemm.invalid_reason(config) is None
        assert gemm.unsupported(given, config) is None
        assert quantized_reason(config, gated) is None
        if gated:
            assert gated_reason(config, in_halves=True) is None
            assert (gated_reason(config) is None) == (config.mma_n == 0)
        if "promoted" in formats:
            assert promoted_reason(config, gated) is None
        made = variant_of(given, config)
        assert made.traits.staged
        if made.traits.block_scaled:
            assert block_scaled_reason(config, made.traits.block_b) is None
        assert shared_memory(made) <= SHARED_MEMORY
        assert configs.from_text(gemm.Config, configs.to_text(config)) == config


def test_a_warp_that_copies_scales_of_wide_pairs_has_registers_for_them() -> None:
    """With fewer it spills."""
    found = {
        pair: heuristic.config(
            problem(8192, formats=f"e4m3 e4m3 promoted {pair}", activation="swiglu"),
            H100,
        )
        for pair in ("1x128 128x128", "1x128 1x128", "128x128 1x128")
    }

    registers = [(c.producer_registers, c.consumer_registers) for c in found.values()]
    assert registers == [(40, 232), (56, 224), (56, 224)]


def test_large_products_are_quantized_in_the_kernel_and_narrow_ones_of_few_rows_are_not() -> None:
    """Of few rows, CTAs that hold 128 columns of pairs are too few for the GPU."""

    def found(M: int, N: int, K: int) -> bool:
        given = problem(M, N, K, activation="swiglu")
        return heuristic.quantizes(given, H100)

    assert found(8192, 4096, 4096)
    assert found(16, 24576, 4096)
    assert not found(16, 1024, 7168)


# ---- a launch
def test_a_launch_gets_the_output_as_bytes_and_the_scales_to_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launches = record_launches(monkeypatch)
    M, N, K = 200, 384, 256
    a, b = torch.zeros(M, K // 2, dtype=BF16), torch.zeros(N, K // 2, dtype=BF16).t()
    out, bias = torch.zeros(M, N).to(E4M3), torch.zeros(N)
    scale_a, scale_b = torch.ones(2, M).t(), torch.ones(2, 3)
    scale_out = quantization.empty_scales((M, N), "1x128", a.device)
    scales = scale_a, scale_b, scale_out
    extra = EpilogueArgs("", bias)
    given = operands.problem(a, b, out, extra=extra, scales=scales, formats=BLOCKS)

    gemm.plan(given, gemm_config("tile_n=128,gpc_local=False"))(
        a, b, None, out, 1.0, 0.0, bias, None, None, *scales
    )

    (launch,) = launches
    assert launch.out.dtype is torch.uint8
    assert launch.out.data_ptr() == out.data_ptr()
    assert launch.epilogue["scale_out"] is scale_out
    assert launch.epilogue["scale_a"] is scale_a
    assert launch.epilogue["bias"] is bias
    assert launch.epilogue["residual"] is None
