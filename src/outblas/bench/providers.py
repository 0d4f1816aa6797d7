"""Who is timed: cuBLAS, its alternatives, torch.compile, `outblas.matmul` as called, and every
kernel by name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..core import configs, registry
from ..runtime import launcher
from ..verify.cases import Case
from ..verify.kernels import Refused
from ..verify.oracle import ORACLES
from .record import BASE

# By the name of a precision, the dtype of the operands.
OPERANDS = {"bfloat16": "bfloat16", "float16": "float16", "float32": "float32", "tf32": "float32"}

# prepare(a, b, out) returns a call without arguments that writes a @ b to out; raises Refused if it
# cannot.
Prepare = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Callable[[], object]]


@dataclass(frozen=True)
class Provider:
    """`config` holds what a kernel's config changes of its defaults, as text; `trusted` providers
    are not checked.
    """

    name: str
    config: str
    prepare: Prepare
    trusted: bool = False

    @property
    def label(self) -> str:
        return f"{self.name}[{self.config}]" if self.config else self.name

    def fault(self, case: Case) -> str | None:
        """What the exact oracle finds wrong with this provider's product, or None. Raises
        Refused.
        """
        if self.trusted:
            return None

        def run(
            a: torch.Tensor, b: torch.Tensor, c: Any, out: torch.Tensor, alpha: float, beta: float
        ) -> None:
            self.prepare(a, b, out)()

        result = ORACLES["exact"](run, case, "cuda")
        return None if result.ok else result.message


def parse(text: str) -> Provider:
    """`cublas`, `cublaslt-best`, `torch.compile`, `outblas`, or a kernel's name, perhaps with a
    config: `NAME[k=v,k=v]`.

    Raises ValueError for an unknown name or config.
    """
    name, bracket, rest = text.partition("[")
    if bracket and not rest.endswith("]"):
        raise ValueError(f"--kernels has {text!r}, expected NAME or NAME[k=v,...]")
    if name in LIBRARIES:
        if bracket:
            raise ValueError(f"--kernels has {text!r}, but {name} takes no config")
        return LIBRARIES[name]
    try:
        registry.find(name)
    except ValueError as error:
        raise ValueError(f"{error}; or {', '.join(LIBRARIES)}") from None
    return kernel(name, rest.removesuffix("]"))


def kernel(name: str, config: str = "") -> Provider:
    """A kernel of the registry; `config` as text. Raises ValueError for a config that it does not
    have.
    """
    from ..api import matmul

    chosen = configs.from_text(registry.load(name).Config, config) if config else None

    def prepare(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Callable[[], object]:
        def call() -> object:
            return matmul(a, b, out=out, kernel=name, config=chosen)

        try:
            call()
        except ValueError as error:
            raise Refused(str(error)) from None
        return call

    return Provider(name, configs.brief(chosen) if chosen else "", prepare)


def runnable(device: torch.device, dtype: str, ladder: str | None = None) -> list[Provider]:
    """The kernels that run on a device and take a dtype (one of `OPERANDS`)."""
    return [
        kernel(record.name)
        for record in registry.ladder(ladder)
        if launcher.unsupported_device_reason(record, device) is None
        and OPERANDS[dtype] in record.dtypes
    ]


def _cublas(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Callable[[], object]:
    return lambda: torch.mm(a, b, out=out)


def _cublaslt_best(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Callable[[], object]:
    from . import cublaslt

    try:
        return cublaslt.best(a, b, out)
    except cublaslt.CublasLtError as error:
        raise Refused(f"cublaslt-best: {error}") from None


def _compiled(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Callable[[], object]:
    """Inductor's choice among its Triton templates and cuBLAS; graphs are the bench's own
    business.
    """
    # after eight shapes of one function Dynamo would run it eagerly, and we would time cuBLAS
    torch.compiler.reset()
    product = torch.compile(torch.mm, mode="max-autotune-no-cudagraphs", dynamic=False)
    out.copy_(product(a, b))  # compiles here, and gives the oracle what it looks at
    return lambda: product(a, b)


def _outblas(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Callable[[], object]:
    """What a caller gets who names no kernel: tuned, else by rule."""
    from ..api import matmul

    return lambda: matmul(a, b, out=out)


LIBRARIES = {
    BASE: Provider(BASE, "", _cublas, trusted=True),
    "cublaslt-best": Provider("cublaslt-best", "", _cublaslt_best),
    "torch.compile": Provider("torch.compile", "", _compiled),
    "outblas": Provider("outblas", "", _outblas),
}
