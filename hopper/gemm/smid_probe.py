"""A kernel that reports on which SM each of its CTAs runs, and its launch."""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
import torch
from cutlass import Int32
from cutlass.cute.runtime import make_fake_stream

from outblas.hopper.parts import compile

SHARED = 200 * 1024  # bytes, so that an SM has one CTA at a time
STAY = 20_000  # cycles that a CTA stays, by when all others are running


class Probe:
    """Each CTA writes the index of its SM, then stays: up to 8 times as long where `jitter` is
    1.
    """

    def __init__(self, cluster: int):
        self.cluster = cluster

    @cute.jit
    def __call__(self, sms, jitter: Int32, stream):
        self.kernel(sms, jitter).launch(
            grid=(sms.shape[0], 1, 1),
            block=(32, 1, 1),
            cluster=(self.cluster, 1, 1),
            smem=SHARED,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, sms, jitter: Int32):
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        begun = cute.arch.clock64()
        if thread == 0:
            sms[cta] = Int32(cute.arch.smid())
        stay = STAY + jitter * STAY * (cta * 40503 // 64 % 8)
        while cute.arch.clock64() - begun < stay:
            pass


@dataclass(frozen=True)
class ProbeVariant:
    """The key of a compiled probe."""

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
    Probe.kernel.set_name_prefix(variant.name, remove_cutlass_symbol=True, keep_mangled_name=False)
    arguments = (
        compile.compact(Int32, 1),
        Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
    with compile.target_arch():
        return cute.compile(Probe(variant.cluster), *arguments, options=compile.OPTIONS)
