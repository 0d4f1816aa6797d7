"""A GPU whose SMs `outblas.hopper.gemm.gpc_placement` probes, as a test plays it."""

import itertools

import torch

from .clocks import Clock

SM_COUNT = 20  # SMs of the GPU that tests play
_contexts = itertools.count(-1, -1)


def unprobed_context() -> int:
    """A context in which nothing was probed. CUDA numbers its own from 0 on."""
    return next(_contexts)


class FakeGpu:
    """A GPU as probes see it.

    order: the SMs that the CTAs of a launch get.
    disturbed: what the next launches of few CTAs see instead.
    busy: how many of the next probes find nothing but one SM, the others having other work.
    failure: what probes raise.
    eights: the SMs that a probe of clusters of eight sees.
    context: that of the caller, by default one that no test had before.
    capturing: whether the caller captures a CUDA graph.
    clock: the time.
    probes, probes_of_gpcs: how many there were, and how many of clusters of eight.
    """

    def __init__(self) -> None:
        self.order = list(range(SM_COUNT))
        self.disturbed: list[list[int]] = []
        self.busy = 0
        self.failure: Exception | None = None
        self.eights = [*range(16)]
        self.context = unprobed_context()
        self.capturing = False
        self.clock = Clock()
        self.probes = self.probes_of_gpcs = 0

    def sm_of_each_cta(
        self, device: torch.device, cluster: int, ctas: int, *, jitter: bool
    ) -> list[int]:
        """Stands for `smid_probe.sm_of_each_cta`."""
        self.probes += 1
        self.probes_of_gpcs += jitter
        if self.failure is not None:
            raise self.failure
        if self.busy:
            self.busy -= 1
            return [0] * ctas
        if jitter:
            return self.eights
        if self.disturbed and ctas < SM_COUNT:
            return self.disturbed.pop(0)
        return self.order[:ctas]
