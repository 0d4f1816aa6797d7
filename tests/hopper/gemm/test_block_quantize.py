"""Outputs of hopper.gemm in fp8, without a GPU: what its own source makes of sums, which problems
and configs it takes, and what it hands to a launch.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support import ptx
from support.gemm_problems import BF16, gemm_config, record_launches
from support.own_source import run_source

from outblas.call import fp8, quantization
from outblas.call import problem as operands
from outblas.call.epilogue import EpilogueArgs
from outblas.hopper import gemm
from outblas.hopper.gemm import block_quantize
from outblas.torch_ops.quantize import by_torch

Tensor = torch.Tensor

E4M3 = torch.float8_e4m3fn
BLOCKS = "e4m3 e4m3 promoted 1x128 128x128"
WARPGROUP, ROWS, COLUMNS = 128, 64, 128
THREADS = np.arange(WARPGROUP)
OWN_ROW = THREADS // 32 * 16 + THREADS % 32 // 4


# ---- arithmetic: the module's own source for all threads of a consumer at once
class Scales(dict[tuple[int, int], float]):
    """The scales in memory, of which only what was written is there."""

    def __setitem__(self, at: Any, value: Any) -> None:
        row, block = map(int, at)
        assert (row, block) not in self, "a scale is written twice"
        super().__setitem__((row, block), value)


class Float32:
    """A number in the registers of every thread."""

    def __new__(cls, value: float) -> Any:
        return np.full(WARPGROUP, value, dtype=np.float32)


def source() -> dict[str, Any]:
    """The module over stand-ins. A register is an array that has it of every thread."""

    def inline_ptx(code: str, write_only_types: list[Any], read_only_args: list[Any]) -> Any:
        types = ["Float32" if kind is Float32 else kind for kind in write_only_types]
        return ptx.inline_ptx(code, types, read_only_args)

    arch = SimpleNamespace(
        inline_ptx=inline_ptx,
        shuffle_sync_bfly=lambda values, distance: values[THREADS ^ distance],
        fmax=np.fmax,
    )
    return run_source(
        block_quantize,
        cute={"size": len, "arch": arch, "recast_tensor": lambda t, dtype: t},
        torch=torch,
        fp8=fp8,
        FORMATS=quantization.FORMATS,
        LEAST_SCALE=quantization.LEAST_SCALE,
        EpilogueTile=object,
        Float32=Float32,
        Uint16="Uint16",
    )


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
