"""Rungs of the tensor-core ladder: their configs and what they compile to."""

import random

import torch

from outblas.base import registry
from outblas.turing.config import TuringConfig, invalid_reason
from support.rungs import own, rung

NAMES = [kernel.name for kernel in registry.ladder("turing")]


FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


VALUES = {
    "block_m": (16, 32, 64, 128, 256),
    "block_n": (8, 16, 32, 64, 128, 256),
    "block_k": (16, 32, 64),
    "warps_m": (1, 2, 4),
    "warps_n": (1, 2, 4),
    "vector": (1, 2, 4, 8),
    "pad": (0, 2, 4, 8, 16),
    "swizzle": (False, True),
    "stages": (2, 3, 4, 6),
    "ahead": (False, True),
    "stage_out": (False, True),
    "group_m": (1, 3, 8),
    "ctas": (1, 2),
}


def valid_configs(count: int, seed: int = 0) -> list[tuple[str, TuringConfig]]:
    """Kernels, and configs that they take with 48 KiB of shared memory."""
    draw = random.Random(seed)
    found: list[tuple[str, TuringConfig]] = []
    while len(found) < count:
        name = ("turing.wmma", "turing.shared", "turing.double_buffer", "turing.cp_async")[
            len(found) % 4
        ]
        values = {
            key: draw.choice(options)
            for key, options in VALUES.items()
            if key not in rung(name).unread
        }
        config = own(name, **values)
        if invalid_reason(config, 48 * 1024) is None:
            found.append((name, config))
    return found
