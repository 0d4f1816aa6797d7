"""The faults to plant, by what they are in."""

from ..fault import Fault
from . import (
    autotuner,
    block_scales,
    caches,
    gluon_kernels,
    grouped,
    grouped_operator,
    hopper_epilogue,
    hopper_grouped,
    host,
    moe,
    operators,
    oracles,
    protocol,
    quantize,
    scaled_grouped,
    schedulers,
    triton_kernels,
)

FAULTS: tuple[Fault, ...] = (
    *schedulers.FAULTS,
    *protocol.FAULTS,
    *hopper_epilogue.FAULTS,
    *host.FAULTS,
    *triton_kernels.FAULTS,
    *gluon_kernels.FAULTS,
    *caches.FAULTS,
    *autotuner.FAULTS,
    *oracles.FAULTS,
    *operators.FAULTS,
    *grouped.FAULTS,
    *moe.FAULTS,
    *quantize.FAULTS,
    *hopper_grouped.FAULTS,
    *grouped_operator.FAULTS,
    *scaled_grouped.FAULTS,
    *block_scales.FAULTS,
)
