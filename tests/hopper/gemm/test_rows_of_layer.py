"""The launches of one layer for any number of rows: each is the launch that is planned for that
number alone, whatever number the layer was met with first.
"""

import random
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from support.gemm_problems import RESIDENT_CLUSTERS, gemm_config
from support.probed_gpu import unprobed_context

from outblas.call.epilogue import NONE, EpilogueArgs, glu_split
from outblas.call.problem import Problem, problem
from outblas.device import driver
from outblas.hopper import gemm
from outblas.hopper.gemm import workspace
from outblas.hopper.gemm.host import GemmLayer
from outblas.hopper.parts import compile, tile_order

SMALL = "tile_m=64,consumers=1,producer_registers=0,consumer_registers=0,cluster_m=1"
CONFIGS = [
    "",
    "order=hilbert",
    "order=consecutive,cluster_m=1",
    "tile_n=128,cluster_m=1,cluster_n=2",
    f"{SMALL},tile_n=64",
    f"{SMALL},tile_n=32,swap_ab=True",
    "tile_n=208,variable_tile_n=True,cluster_m=1",
    "tile_n=64,cluster_m=1,split_k=4,k_serpentine=False",
    "tile_n=128,cluster_m=1,stream_k=True,k_serpentine=False",
    "tile_n=128,cluster_m=2,cluster_k=2,k_serpentine=False",
    "tile_n=128,stagger=always,epilogue_stages=1",
]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
KINDS = {  # of the tensors of the epilogue
    "bias": (None, None, "columns", "column", "one"),
    "residual": (None, None, "matrix", "columns", "column"),
    "aux": (None, None, None, "matrix"),
}


class Layer(NamedTuple):
    """A product, an epilogue and a config without a number of rows."""

    N: int
    K: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    by_columns: tuple[bool, bool]  # how A and B are stored
    pad: int  # of rows
    activation: str
    epilogue: dict[str, str | None]
    adds: bool
    config: str

    def tensors(self, M: int) -> tuple[Any, ...]:
        """A, B, C, the output, and the tensors of the epilogue, without data."""
        columns, like = self.N * glu_split(self.activation), torch.empty(0, device="meta")

        def matrix(rows: int, width: int, dtype: torch.dtype, by_columns: bool = False) -> Any:
            line = 9000 + self.pad if by_columns else width + self.pad
            strides = (1, line) if by_columns else (line, 1)
            return like.new_empty_strided((rows, width), strides, dtype=dtype)

        def of_epilogue(name: str) -> Any:
            width = self.N if name == "residual" else columns
            match self.epilogue[name]:
                case "matrix":
                    return matrix(M, width, self.out_dtype)
                case "columns":
                    return like.new_empty(width, dtype=self.out_dtype)
                case "column":
                    return like.new_empty(M, 1, dtype=self.out_dtype)
                case "one":
                    return like.new_empty(1, dtype=self.out_dtype)
            return None

        a, b = self.by_columns
        return (
            matrix(M, self.K, self.dtype, a),
            matrix(self.K, columns, self.dtype, b),
            matrix(M, columns, self.out_dtype) if self.adds else None,
            matrix(M, self.N, self.out_dtype),
            *map(of_epilogue, KINDS),
        )

    def problem(self, M: int) -> Problem:
        """The product with M rows."""
        a, b, c, out, *extra = self.tensors(M)
        given = EpilogueArgs(self.activation, *extra)
        return problem(a, b, out, c, scaled=self.adds, extra=given)


def random_layer(rng: random.Random) -> Layer:
    dtype = rng.choice([BF16, FP16])
    return Layer(
        rng.choice([1, 8, 100, 384, 1000, 4096]),
        rng.choice([64, 72, 512, 4096]),
        dtype,
        rng.choice([dtype, dtype, FP32]),
        (rng.random() < 0.2, rng.random() < 0.7),
        rng.choice([0, 0, 8, 64]),
        rng.choice(["", "", "gelu", "relu", "swiglu"]),
        {name: rng.choice(kinds) for name, kinds in KINDS.items()},
        rng.random() < 0.2,
        rng.choice(CONFIGS),
    )


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What each launch hands to which kernel, on a GPU that never waits: whatever would fails."""
    launches: list[Any] = []

    def described(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.tolist() if value.device.type == "cpu" else (value.shape, value.stride())

    def load(variant: Any, build: Any) -> Any:
        return lambda *given: launches.append((variant, *map(described, given)))

    def lent(index: int, floats: int, counters: int) -> Any:
        return workspace.Workspace(
            *(torch.empty(size, device="meta") for size in (floats, counters))
        )

    context = unprobed_context()
    monkeypatch.setattr(tile_order, "clusters", lambda *_: RESIDENT_CLUSTERS)
    monkeypatch.setattr(tile_order, "_copied", lambda device, tiles: torch.from_numpy(tiles))
    monkeypatch.setattr(tile_order, "_kept", {})
    monkeypatch.setattr(workspace, "get_workspace", lent)
    monkeypatch.setattr(compile, "load", load)
    monkeypatch.setattr(driver, "context", lambda: context)
    monkeypatch.setattr(driver, "background", lambda: SimpleNamespace(submit=lambda job: None))
    return launches


def test_a_launch_is_the_one_of_its_number_of_rows_alone(launched: list[Any]) -> None:
    """The kernel, its clusters, the order of tiles, the workspace and the views of all tensors."""
    rng, compared = random.Random(0), 0
    while compared < 1200:
        layer = random_layer(rng)
        first, *others = (rng.choice([2, 3, *range(4, 600), *range(8, 9000, 8)]) for _ in range(9))
        config = gemm_config(layer.config)
        if gemm.unsupported(layer.problem(first), config):
            continue
        rows = GemmLayer(layer.problem(first), config)
        if not rows.any_rows:
            continue
        for M in others:
            alone = layer.problem(M)
            matrices, epilogue = layer.tensors(M)[:4], layer.tensors(M)[4:]
            launched.clear()

            for launch in (rows.launch(M), gemm.plan(alone, config)):
                launch(*matrices, 1.0, 1.0, *(epilogue if alone.epilogue != NONE else ()))

            of_layer, of_plan = launched
            assert of_layer == of_plan, f"{layer} for {M} rows, met with {first}"
            compared += 1
