"""The record of a provider at a shape, and the computation of its figures from times, clocks and
watts.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outblas.base import machines
from outblas.base.grouped_shapes import Distribution, Form, GroupedWorkload
from outblas.base.shapes import Shape, flop, to_text
from outblas.bench.statistics import Ratio

BASE = "cublas"
# Of grouped products: torch.nn.functional.grouped_mm, or for fp8 operands with scales of blocks,
# which it does not take, one torch._scaled_mm for each group.
GROUPED_BASE = "torch"
BEST = "cublaslt-best"
MODES = ("burst", "cold", "sustained")
EXACT = "exact"  # bit for bit on integers; with block scales also within the error of fp32 sums
BOUNDED = "bounded"  # within the error of fp32 sums on normal data
UNCHECKED = "–"
REFUSED = "refused: "


@dataclass(frozen=True, kw_only=True)
class Record:
    """One provider at one shape. `check` is "exact" or "bounded" (an epilogue, or fp8), "–" for
    cuBLAS, or why there are no figures (then all are None). Of grouped products, those of torch
    (`GROUPED_BASE`) stand where cuBLAS's do.

    epilogue: the steps after the product, as `bias+gelu+residual`.
    product: "dA" or "dB" for a product of the backward pass, of this shape and layout.
    experts, form, distribution: of a grouped product, as in `GroupedWorkload`; its shape is that
        of the products of all groups.
    mode: "burst", "sustained", or "cold", a burst over copies of the weights that L2 cannot hold.
    us: per call on the device; host_us: of an eager call on the host.
    ratio: cuBLAS's time divided by this one's (above 1 is faster), its 10th and 90th percentile.
    ratio_best: the time of the fastest of cuBLASLt's algorithms divided by this one's.
    ratio_apart: the ratio with a foreign kernel between calls.
    graph: timed inside a CUDA graph of `calls` calls.
    clock_mhz: counted by the SMs; joules: per call.
    gbs: GB/s at which A, B and C pass between the GPU and its memory, each once; of groups that
        have scales, these too.
    bandwidth_share: `gbs` divided by what a large copy reaches.
    """

    provider: str
    config: str
    shape: Shape
    dtype: str
    layout: str
    mode: str
    check: str
    epilogue: str = ""
    batch_invariant: bool = False
    product: str = ""
    experts: int | None = None
    form: Form | None = None
    distribution: Distribution | None = None
    rounds: int | None = None
    calls: int | None = None
    graph: bool | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    verdict: str | None = None
    ratio_best: float | None = None
    ratio_apart: float | None = None
    us_apart: float | None = None
    tflops: float | None = None
    gbs: float | None = None
    bandwidth_share: float | None = None
    us: float | None = None
    host_us: float | None = None
    clock_mhz: float | None = None
    utilisation: float | None = None
    watts: float | None = None
    joules: float | None = None
    pj_per_flop: float | None = None

    @property
    def label(self) -> str:
        return f"{self.provider}[{self.config}]" if self.config else self.provider

    @property
    def is_plain(self) -> bool:
        """Whether it is one product of the forward pass, without an epilogue or batch
        invariance.
        """
        return not (self.epilogue or self.product or self.batch_invariant or self.experts)

    @property
    def workload(self) -> GroupedWorkload | None:
        """The workload of a grouped product; None for any other."""
        if self.experts is None or self.form is None or self.distribution is None:
            return None
        return GroupedWorkload.of(self.experts, self.shape, self.distribution, self.form)

    @property
    def size(self) -> str:
        """The text of the shape, or of the workload of a grouped product."""
        return str(self.workload or to_text(self.shape))

    @property
    def passed(self) -> bool:
        """Whether the check passed. False for a wrong product; a call that a kernel does not
        support is not a failure.
        """
        return self.check in (EXACT, BOUNDED, UNCHECKED) or self.check.startswith(REFUSED)


@dataclass(frozen=True)
class Device:
    """`flops_per_clock`: FLOP that all SMs of the device can do per clock in the campaign's dtype;
    None where no table lists it. `l2_bytes`: the capacity of L2.
    """

    flops_per_clock: int | None
    l2_bytes: int = 50 << 20

    @classmethod
    def current(cls, dtype: str) -> Device:
        """Returns the current GPU, for a precision named as in `--dtype`."""
        import torch

        properties = torch.cuda.get_device_properties()
        machine = machines.of_device(properties.name)
        unit = "fp8" if dtype.startswith("fp8") else dtype
        per_sm = machine.flops_per_sm_clock.get(unit) if machine else None
        flops = per_sm * properties.multi_processor_count if per_sm else None
        return cls(flops, properties.L2_cache_size)


def figures(
    shape: Shape,
    us: Sequence[float],
    mhz: Sequence[float],
    spread: Ratio,
    device: Device,
    moved: int,
) -> dict[str, Any]:
    """Returns medians over rounds. Utilisation is FLOP/s divided by what the SMs can do at the
    clock of the same round. `moved`: the bytes of the operands and of the result.
    """
    work, peak, median = flop(shape), device.flops_per_clock, statistics.median(us)
    shares = [work / (t * f * peak) for t, f in zip(us, mhz, strict=True)] if peak else []
    return {
        "us": median,
        "tflops": work / median / 1e6,
        "gbs": moved / median / 1e3,
        "ratio": spread.median,
        "ratio_low": spread.low,
        "ratio_high": spread.high,
        "rounds": len(us),
        "clock_mhz": statistics.median(mhz),
        "utilisation": statistics.median(shares) if shares else None,
    }


def energy(
    shape: Shape, us: Sequence[float], watts: Sequence[float | None]
) -> dict[str, float | None]:
    """Returns the mean watts over turns, joules per call and pJ/FLOP; None unless every turn has
    watts.
    """
    powers = [w for w in watts if w is not None]
    if len(powers) < len(us):
        return {"watts": None, "joules": None, "pj_per_flop": None}
    power = statistics.fmean(powers)
    joules = power * statistics.median(us) / 1e6
    return {"watts": power, "joules": joules, "pj_per_flop": joules * 1e12 / flop(shape)}
