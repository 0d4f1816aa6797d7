"""Rungs of the Triton and Gluon ladders: their configs and what they compile to."""

import random
from dataclasses import fields, replace
from typing import Any

import torch

from outblas.base import registry
from outblas.call.artifact import example
from outblas.call.problem import Problem
from outblas.kernels.simt_config import SimtConfig, invalid_reason

NAMES = [kernel.name for kernel in registry.ladder("simt")]


FP32 = torch.float32


VALUES: dict[str, tuple[Any, ...]] = {
    "block_m": (8, 32, 64, 128, 256),
    "block_n": (8, 32, 64, 128, 256),
    "block_k": (1, 2, 4, 8, 16),
    "warp_m": (1, 8, 16, 32, 64, 128),
    "warp_n": (1, 8, 16, 32, 64, 128),
    "thread_m": (1, 2, 4, 8, 16),
    "thread_n": (1, 2, 4, 8, 16),
    "piece_m": (1, 2, 4, 8),
    "piece_n": (1, 2, 4, 8),
    "interleave": (False, True),
    "vector": (1, 2, 4),
    "transpose_a": (False, True),
    "pad": (0, 1, 4, 8),
    "group_m": (1, 3, 8),
    "prefetch": (False, True),
    "store_at": (0, 1, 3),
    "ctas": (1, 2),
}


def valid_configs(count: int, seed: int = 0) -> list[SimtConfig]:
    draw = random.Random(seed)
    found: list[SimtConfig] = []
    while len(found) < count:
        config = SimtConfig(**{name: draw.choice(values) for name, values in VALUES.items()})
        if invalid_reason(config, 48 * 1024, 2) is None:
            found.append(config)
    return found


def bodies(config: SimtConfig) -> list[str]:
    """A rung of every kernel body that takes the config."""
    return ["simt.naive"] if config.block_k == 1 else ["simt.shared", "simt.pipelined"]


def fitted(kernel: str, config: SimtConfig) -> SimtConfig:
    """The config as a rung's own, where its body does not read a field with the rung's value."""
    read = {f.name for f in fields(SimtConfig)}.difference(rung(kernel).unread)
    return own(kernel, **{name: getattr(config, name) for name in read})


def own(kernel: str, **changes: Any) -> Any:
    return replace(registry.load(kernel).Config(), **changes)


def rung(kernel: str) -> Any:
    return registry.load(kernel).plan.__self__


def problem(
    layout: str = "nn", shape: tuple[int, int, int] = (4096, 4096, 4096), dtype: torch.dtype = FP32
) -> Problem:
    return example(dtype, None, layout, shape)
