"""A user's program with every public call, for type checkers: no line of it needs a comment for
them. `make lint` checks it, and nothing of it is run.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.nn.functional import ScalingType

import outblas
from outblas import FallbackWarning, Kernel, OperandError
from outblas.autotune import (
    Candidate,
    Search,
    Strategy,
    Sweep,
    SweepOptions,
    TuneTarget,
    Workload,
    plan,
    sweep,
)
from outblas.hopper.config import HopperConfig
from outblas.inspect import Inspection, inspect
from outblas.kernels.simt_config import SimtConfig
from outblas.nn import Linear

a, b, c = torch.randn(64, 32), torch.randn(32, 48), torch.randn(64, 48)
bias = torch.randn(48)

# ---- products
product: Tensor = outblas.matmul(a, b)
product = outblas.matmul(a, b, out=torch.empty(64, 48))
product = outblas.matmul(a, b, out_dtype=torch.float32, batch_invariant=True)
product = outblas.matmul(a, b, bias=bias, activation="gelu", residual=c, aux=torch.empty(64, 48))
product = outblas.matmul(a, b, kernel="portable", tune="off")
product = outblas.matmul(input=a, other=b)
total: Tensor = outblas.addmm(c, a, b, alpha=0.5, beta=2)
total = outblas.addmm(bias, a, b, activation="relu")
layer_output: Tensor = outblas.linear(a, b.T, bias, activation="silu")
layer_output = outblas.linear(input=a, weight=b.T)
scale = torch.ones(())
eighths: Tensor = outblas.scaled_mm(
    a.to(torch.float8_e4m3fn),
    b.to(torch.float8_e4m3fn),
    scale,
    ScalingType.TensorWise,
    [scale],
    [ScalingType.TensorWise],
    bias=bias,
    use_fast_accum=True,
)
rounded: tuple[Tensor, Tensor] = outblas.scaled_mm(
    a.to(torch.float8_e4m3fn),
    b.to(torch.float8_e4m3fn),
    scale,
    ScalingType.TensorWise,
    scale,
    ScalingType.TensorWise,
    output_dtype=torch.float8_e4m3fn,
    out_recipe="1x128",
    out_power_of_two=True,
)
tokens: Tensor = outblas.moe_mlp(
    a,
    torch.randn(4, 32, 96),
    torch.randn(4, 48, 32),
    torch.zeros(64, 2, dtype=torch.int32),
    torch.ones(64, 2),
    activation="geglu",
    gate_up_bias=torch.zeros(4, 96),
    down_bias=None,
)

# ---- layers
layer = Linear(32, 48, activation="gelu")
layer = Linear(32, 48, True, torch.device("cpu"), torch.float32)
activation: str | None = layer.activation
hidden: Tensor = layer(a)
model = torch.nn.Sequential(torch.nn.Linear(32, 48), outblas.Linear(48, 16, bias=False))
patched = outblas.patch(model)
summary: str = str(patched)
outblas.unpatch(model)

frozen = outblas.FP8Linear(32, 48, bias=False, dtype=torch.bfloat16)
frozen = outblas.FP8Linear.from_linear(torch.nn.Linear(32, 48), dtype=torch.float8_e5m2)
values, scales = outblas.quantize(a, "1x128", dtype=torch.float8_e4m3fn, power_of_two=True)
frozen = outblas.FP8Linear.from_fp8(values, scales, bias=None)

# ---- kernels
kernels: tuple[Kernel, ...] = outblas.ladder()
names: list[str] = [kernel.name for kernel in outblas.ladder("hopper")]
oldest: int = min(kernel.min_arch for kernel in kernels)

# ---- contexts, CUDA graphs, Inductor
invariant: AbstractContextManager[None] = outblas.batch_invariant()
with outblas.accumulate_gradients():
    summed: Tensor = outblas.linear(a, b)
with outblas.batch_invariant(False):
    outblas.warmup(outblas.matmul, a, b, tune="off")
outblas.inductor_choice()


def checked(x: Tensor, y: Tensor) -> Tensor | None:
    """A product, None where the operands do not fit together."""
    try:
        return outblas.matmul(x, y)
    except OperandError as error:
        print(str(error))
        return None


warning: type[Warning] = FallbackWarning
version: str = outblas.__version__

# ---- tuning
best = outblas.tune(a, b, budget=10.0, top_k=4)
best = outblas.tune(input=a, other=b, weights="cold", epilogue="bias+gelu")
kernel_name: str = best.kernel
configuration: str = best.config
tuned: Sweep = sweep("portable", 64, options=SweepOptions(trials=4), weights="warm")
planned = plan([TuneTarget("portable", "outblas.kernels.portable")], Workload(8, 8, 8), best.gpu)


class FirstHalf(Strategy):
    def propose(self, search: Search) -> Iterator[Sequence[Candidate]]:
        yield search.ranked()[: len(search.candidates) // 2]


# ---- machine code, configs
inspected: Inspection = inspect("simt.naive", arch=80, config=SimtConfig(block_n=16))
spilled: int = inspected.require(has=["FFMA"]).spill_loads
product = outblas.matmul(a, b, kernel="hopper.gemm", config=HopperConfig(tile_m=128))
