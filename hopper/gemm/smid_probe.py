"""The launch of a kernel that reports on which SM each of its CTAs runs (`smid_kernel`)."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from outblas.hopper.parts import compile


@dataclass(frozen=True)
class ProbeVariant:
    """The key of a compiled probe."""

    keeper: ClassVar[str] = "outblas.hopper.gemm.packed:keep"
    cluster: int

    @property
    def name(self) -> str:
        return f"outblas_hopper_probe_{self.cluster}"

    @property
    def cache_key_fields(self) -> dict[str, object]:
        return {"kernel": self.name} | compile.toolchain_fields()


def sm_of_each_cta(device: torch.device, cluster: int, ctas: int, *, jitter: bool) -> list[int]:
    """Launches a probe and returns the SM that each CTA ran on. Waits for the stream."""
    variant = ProbeVariant(cluster)
    sms = torch.full((ctas,), -1, dtype=torch.int32, device=device)
    with torch.cuda.device(device):
        compile.load(variant, lambda: compile_variant(variant))(sms, int(jitter))
    seen: list[int] = sms.tolist()
    return seen


def compile_variant(variant: ProbeVariant) -> Any:
    """Compiles for sm_90a, with or without a GPU. Returns CuTe DSL's compiled function."""
    from outblas.hopper.gemm import smid_kernel

    return smid_kernel.compiled_probe(variant.cluster, variant.name)
