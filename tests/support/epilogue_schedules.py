"""Calls of hopper.gemm in which a CTA has several tiles, with epilogues that differ in what they
load and store: on a GPU, each as often as is wanted.
"""

from typing import Any

import torch

from outblas.base import configs

from .fused import Fused, run

# Consumers in turn, stages that carry residuals between those of two tiles, epilogue stages that
# are used again, tiles of variable width, which overlap but come in other stages.
SCHEDULES = {
    "two": "tile_n=256,sms=8",
    "variable_tile_n": "tile_n=160,variable_tile_n=True,sms=8",
    "pingpong": "tile_n=176,pingpong=True,cluster_m=1,stages=4,epilogue_stages=1,sms=8",
    "few slots": "tile_m=256,tile_n=128,stages=2,epilogue_stages=1,sms=8",
    "registers": "tile_n=128,epilogue_stages=0,sms=8",
    "pieces": "tile_n=256,split_k=3,k_serpentine=False,sms=8",
}
EPILOGUES: dict[str, dict[str, Any]] = {
    "all": {"activation": "gelu", "bias": "row", "residual": "matrix", "aux": True},
    "addend": {"activation": "silu", "alpha": 2.0, "beta": 0.5},
    "pairs": {"activation": "swiglu", "bias": "row", "residual": "matrix"},
    "columns": {"activation": "gelu", "bias": "column", "residual": "matrix", "layout": "ntt"},
}


def check(schedule: str, epilogue: str, options: str, times: int) -> None:
    """A call made so many times: right, and the same bits each time, also where C is the addend's
    own memory. `options` are further fields of the config.
    """
    from outblas.hopper import gemm

    config = configs.from_text(gemm.Config, SCHEDULES[schedule] + options)
    first: torch.Tensor | None = None

    def run_often(a: Any, b: Any, c: Any, out: Any, *given: Any, **extra: Any) -> None:
        nonlocal first
        for _ in range(times):
            run(a, b, c, out, *given, config=config, **extra)
            first = first if first is not None else out.clone()
            assert torch.equal(out, first)
            if c is not None:
                run(a, b, out.copy_(c), out, *given, config=config, **extra)
                assert torch.equal(out, first)

    call = Fused(520, 776, 584, **EPILOGUES[epilogue])
    try:
        call.check("hopper.gemm", "cuda", run_often)
    except ValueError as error:
        # Gated pairs want tiles of their own.
        assert (epilogue, "gated pairs" in str(error)) == ("pairs", True)
