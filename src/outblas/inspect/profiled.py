"""The process that ncu watches: `python -m outblas.inspect.profiled STATUS REQUEST`, with both
arguments as `Request` describes.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

CUBLAS = "cublas"
WARM_CALLS = 2
ALPHA, BETA = 1.5, 0.5  # with an addend; kernels cannot skip either of them


@dataclass(frozen=True)
class Request:
    """One product to profile, C[M, N] = A[M, K] B[K, N]: `kernel` by name together with cuBLAS, or
    only "cublas".

    `shape` is (M, N, K), `layout` two letters as in `verify.cases.Case`, `config` the kernel's
    configuration as text ("": the kernel's default); `addend`: C = ALPHA · A B + BETA · D, with a
    matrix D. The request is passed as a JSON argument. The process answers in a status file:
    {"started"}, then {"done"}, {"refused": why} where the kernel does not support the product,
    {"unavailable": why} where its DSL is not installed, or {"failed": what}.
    """

    kernel: str
    shape: tuple[int, int, int]
    dtype: str
    layout: str
    config: str = ""
    addend: bool = False

    @property
    def providers(self) -> tuple[str, ...]:
        """The names of the NVTX ranges, in the order of the calls."""
        return tuple(dict.fromkeys((CUBLAS, self.kernel)))

    @property
    def flop(self) -> int:
        M, N, K = self.shape
        return 2 * M * N * K

    def chosen(self) -> Any:
        """Returns the configuration that `config` describes, or None if it is empty. Raises
        ValueError for an invalid one.
        """
        from ..core import configs, registry

        return (
            configs.from_text(registry.load(self.kernel).Config, self.config)
            if self.config
            else None
        )

    def resolved(self) -> str:
        """Returns every field of the configuration that runs; "" for cuBLAS and for a kernel that
        chooses by shape.
        """
        from ..core import configs, registry
        from ..runtime import default_kernel

        if self.kernel == CUBLAS:
            return ""
        module = registry.load(self.kernel)
        by_shape = hasattr(module, "choose") or self.kernel == default_kernel.PRODUCTION
        chosen = self.chosen() or (None if by_shape else module.Config())
        return "" if chosen is None else configs.to_text(chosen)

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Request:
        fields = json.loads(text)
        return cls(**{**fields, "shape": tuple(fields["shape"])})


def _calls(request: Request) -> dict[str, Callable[[], object]]:
    """Returns the call of each provider, on operands from normal(0, 1)."""
    import torch

    from ..api import addmm, matmul
    from ..bench.operands import normal

    a, b, out = normal(request.shape, request.layout, getattr(torch, request.dtype))
    theirs: Callable[..., object] = partial(torch.mm, a, b, out=out)
    ours: Callable[..., object] = partial(matmul, a, b, out=out)
    if request.addend:
        given: dict[str, Any] = {"alpha": ALPHA, "beta": BETA, "out": out}
        c = torch.randn_like(out)
        theirs, ours = partial(torch.addmm, c, a, b, **given), partial(addmm, c, a, b, **given)
    calls: dict[str, Callable[[], object]] = {CUBLAS: theirs}
    if request.kernel != CUBLAS:
        calls[request.kernel] = partial(ours, kernel=request.kernel, config=request.chosen())
    return calls


def _profile(request: Request) -> None:
    """Warms up every provider, then shows ncu one call of each, inside an NVTX range with its
    name.
    """
    import torch

    for name, call in _calls(request).items():
        for _ in range(WARM_CALLS):
            call()
        torch.cuda.synchronize()
        torch.cuda.nvtx.range_push(name)
        torch.cuda.cudart().cudaProfilerStart()
        call()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()
        torch.cuda.nvtx.range_pop()


def main(status: str, request: str) -> int:
    """Profiles a request. Returns exit code 0, 2 if it was refused, 3 without the DSL, 1 if it
    failed.
    """
    os.dup2(2, 1)  # standard output is reserved for ncu's CSV

    def say(**answer: object) -> None:
        Path(status).write_text(json.dumps(answer))

    say(started=True)
    try:
        _profile(Request.from_text(request))
    except ValueError as error:
        say(refused=" ".join(str(error).split()))
        return 2
    except ImportError as error:
        say(unavailable=" ".join(str(error).split()))
        return 3
    except Exception as error:
        say(failed=f"{type(error).__name__}: {' '.join(str(error).split())}")
        return 1
    say(done=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
