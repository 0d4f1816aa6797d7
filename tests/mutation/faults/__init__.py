"""The faults to plant, by what they are in."""

from ..fault import Fault
from . import (
    autotuner,
    caches,
    gluon_kernels,
    grouped,
    grouped_operator,
    hopper_epilogue,
    host,
    operators,
    oracles,
    protocol,
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
    *grouped_operator.FAULTS,
)
