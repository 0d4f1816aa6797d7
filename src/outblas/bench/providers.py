"""The providers that are timed: cuBLAS, its alternatives, torch.compile, `outblas.matmul` as
called, and every kernel by name.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from outblas.base import configs, registry
from outblas.bench import cublaslt, deepgemm
from outblas.bench.operation import OPERANDS, Extras, Operation
from outblas.bench.record import BASE, BEST
from outblas.bench.tasks import GroupedCase
from outblas.call import launcher
from outblas.verify.cases import Case
from outblas.verify.kernels import Refused
from outblas.verify.oracle import ORACLES

Tensor = torch.Tensor

PLAIN = Operation()
PRECISIONS = tuple(OPERANDS)

# A call on its own operands, or with other weights instead of b, of its shape and strides.
Call = Callable[..., object]
# prepare(a, b, out, extras) returns a call that writes a @ b to out, or returns the result with the
# operation's epilogue; of groups it takes A, B, their scales and `offs`. Raises Refused if it
# cannot.
Prepare = Callable[..., Call]


@dataclass(frozen=True)
class Provider:
    """`config` holds the fields that differ from a kernel's default config, as text; `trusted`
    providers are not checked. `operation` is what its calls compute. `checked` is what the check
    runs, where that is not `prepare`: the bare product, if torch functions follow it and round in
    between.
    """

    name: str
    config: str
    prepare: Prepare
    trusted: bool = False
    operation: Operation = PLAIN
    checked: Prepare | None = None

    @property
    def label(self) -> str:
        return f"{self.name}[{self.config}]" if self.config else self.name

    @property
    def is_checked_exactly(self) -> bool:
        """Whether the check is the exact oracle for a bare product, or includes exact products of
        block-scaled integers.
        """
        operation = self.operation
        return self.checked is not None or operation.has_exact_blocks or operation.is_bare

    def fault(self, case: Case | GroupedCase) -> str | None:
        """Returns what is wrong with this provider's results, or None: by the exact oracle for a
        bare product, on normal data for another operation, and on integers first where they have
        block scales. Raises Refused.
        """
        if self.trusted:
            return None
        if isinstance(case, GroupedCase):
            return case.fault(self.prepare)
        prepare, shape, fault = self.checked or self.prepare, (case.M, case.N, case.K), None
        on_data = partial(self.operation.fault, prepare, shape, layout=case.layout)
        if self.operation.has_exact_blocks:
            fault = on_data(integers=True)
        if self.checked is None and not self.operation.is_bare:
            return fault or on_data()

        def run(a: Tensor, b: Tensor, c: Any, out: Tensor, alpha: float, beta: float) -> None:
            prepare(a, b, out, Extras())()

        result = ORACLES["exact"](run, case, "cuda")
        return None if result.ok else result.message


def parse(name: str, operation: Operation = PLAIN) -> Provider:
    """Parses a name of `LIBRARIES`, or a kernel's name, optionally with a config:
    `NAME[k=v,k=v]`.

    Raises ValueError for an unknown name or config.
    """
    bare_name, bracket, rest = name.partition("[")
    if bracket and not rest.endswith("]"):
        raise ValueError(f"--kernels has {name!r}, expected NAME or NAME[k=v,...]")
    if bare_name in LIBRARIES:
        if bracket:
            raise ValueError(f"--kernels has {name!r}, but {bare_name} takes no config")
        return library(name, operation)
    try:
        registry.find(bare_name)
    except ValueError as error:
        raise ValueError(f"{error}, or one of {', '.join(LIBRARIES)}") from None
    return kernel(bare_name, rest.removesuffix("]"), operation)


def library(name: str, operation: Operation = PLAIN) -> Provider:
    """Returns a provider of `LIBRARIES`."""
    computed = operation.without_steps() if name == BARE else operation
    rounds_between = name == BEST and bool(operation.steps)
    make = LIBRARIES[name]
    return Provider(
        name,
        "",
        partial(make, computed),
        trusted=name in (BASE, FAST_ACCUM),
        operation=computed,
        checked=partial(make, operation.without_steps()) if rounds_between else None,
    )


def kernel(name: str, config: str = "", operation: Operation = PLAIN) -> Provider:
    """Returns the provider of a registered kernel; `config` is text. Raises ValueError for an
    invalid config.
    """
    chosen = configs.from_text(registry.load(name).Config, config) if config else None

    def prepare(a: Tensor, b: Tensor, out: Tensor, extras: Extras) -> Call:
        if operation.scaling:
            raise Refused(
                f"no kernel can be named with --dtype {operation.dtype}: "
                "time outblas, which chooses one"
            )

        def call(b: Tensor = b) -> object:
            return operation.by_outblas(a, b, out, extras, kernel=name, config=chosen)

        try:
            call()
        except ValueError as error:
            raise Refused(str(error)) from None
        return call

    label = configs.brief(chosen) if chosen else ""
    return Provider(name, label, prepare, operation=operation)


def runnable(
    device: torch.device, operation: Operation = PLAIN, ladder: str | None = None
) -> list[Provider]:
    """Returns the kernels that run on a device and support an operation's dtype; for fp8 the one
    that outblas chooses.
    """
    if operation.scaling:
        return [library("outblas", operation)]
    return [
        kernel(record.name, "", operation)
        for record in registry.ladder(ladder)
        if launcher.unsupported_device_reason(record, device) is None
        and OPERANDS[operation.dtype] in record.dtypes
    ]


def competitors(
    chosen: list[Provider], operation: Operation, device: torch.device, ladder: str | None = None
) -> list[Provider]:
    """Returns cuBLAS, the best of cuBLASLt's algorithms, and the chosen providers with the kernels
    of a ladder; by default all kernels that run on a device.
    """
    bases = [BASE] if BEST in [provider.name for provider in chosen] else [BASE, BEST]
    if ladder is not None or not chosen:
        chosen = chosen + runnable(device, operation, ladder)
    return [*(library(name, operation) for name in bases), *chosen]


def _cublas(operation: Operation, a: Tensor, b: Tensor, out: Tensor, extras: Extras) -> Call:
    if operation.is_bare:
        return lambda b=b: torch.mm(a, b, out=out)
    return lambda b=b: operation.by_torch(a, b, out, extras)


def _fast_accum(operation: Operation, a: Tensor, b: Tensor, out: Tensor, extras: Extras) -> Call:
    """Calls torch._scaled_mm with sums that stay in the tensor cores."""
    if not operation.scaling:
        raise Refused(f"{FAST_ACCUM} takes fp8 operands, not {operation.dtype}")
    if operation.scaling == "block":
        raise Refused(f"{FAST_ACCUM} takes no {operation.dtype}: sums of a block are scaled apart")
    return lambda b=b: operation.by_torch(a, b, out, extras, fast_accum=True)


def _cublaslt_best(operation: Operation, a: Tensor, b: Tensor, out: Tensor, extras: Extras) -> Call:
    """Prepares cuBLASLt's fastest product; torch computes the epilogue."""
    if operation.scaling:
        raise Refused(f"{BEST} does not take {operation.dtype}")
    product = out if operation.is_bare else out.new_empty(a.shape[0], b.shape[1])
    best = cublaslt.best(a, b, product)
    if operation.is_bare:
        return best

    def call(b: Tensor = b) -> object:
        best(b)
        x = product if extras.bias is None else product + extras.bias
        return operation.after(x, extras)

    return call


def _deepgemm(operation: Operation, a: Tensor, b: Tensor, out: Tensor, extras: Extras) -> Call:
    """Prepares DeepGEMM's product of block-scaled operands, where it is installed."""
    if operation.scaling != "block" or operation.steps:
        raise Refused(f"{DEEPGEMM} takes --dtype fp8-block without an epilogue")
    scale_a, scale_b = extras.scales
    return deepgemm.prepared(a, b, scale_a, scale_b, out)


def _compiled(operation: Operation, a: Tensor, b: Tensor, out: Tensor, extras: Extras) -> Call:
    """Prepares Inductor's choice among its Triton templates and cuBLAS. Its CUDA graphs are off,
    because the benchmark makes them.
    """
    # After eight shapes of one function Dynamo would run it eagerly, and cuBLAS would be timed.
    torch.compiler.reset()
    options: dict[str, Any] = {"mode": "max-autotune-no-cudagraphs", "dynamic": False}
    if operation.is_bare:
        product = torch.compile(torch.mm, **options)
        out.copy_(product(a, b))  # compiles here, and provides the result for the oracle
        return lambda b=b: product(a, b)
    fused = torch.compile(operation.by_torch, **options)
    fused(a, b, None, extras)
    return lambda b=b: fused(a, b, None, extras)


def _outblas(operation: Operation, a: Tensor, b: Tensor, out: Tensor, extras: Extras) -> Call:
    """Prepares the call of a user who names no kernel: a tuned kernel, otherwise the default."""
    return lambda b=b: operation.by_outblas(a, b, out, extras)


def _bare(operation: Operation, a: Tensor, b: Tensor, out: Tensor, extras: Extras) -> Call:
    """Prepares the product without its epilogue, to show the cost of the epilogue. It may be wider
    than the output.
    """
    if out.shape[1] != b.shape[1]:
        out = out.new_empty(a.shape[0], b.shape[1])
    return _outblas(operation, a, b, out, extras._replace(bias=None, residual=None))


def _plain(operation: Operation, a: Tensor, b: Tensor, out: Tensor, extras: Extras) -> Call:
    """Prepares the call of a user who asks for no batch invariance, to show what that costs."""
    return _outblas(replace(operation, batch_invariant=False), a, b, out, extras)


def _without_workspace(
    operation: Operation, a: Tensor, b: Tensor, out: Tensor, extras: Extras
) -> Call:
    """Prepares cuBLASLt's first algorithm that needs no workspace."""
    if not operation.is_bare:
        raise Refused(f"{NO_WORKSPACE} takes bare products")
    return cublaslt.without_workspace(a, b, out)


def _persistent(operation: Operation, a: Tensor, b: Tensor, out: Tensor, extras: Extras) -> Call:
    """Prepares a persistent Triton kernel with one tile for every shape."""
    from outblas.bench import triton_persistent

    if not operation.is_bare or a.dtype not in triton_persistent.BLOCK_K:
        raise Refused(f"{PERSISTENT} takes bare products of 16-bit and float32 operands")
    return triton_persistent.prepared(a, b, out)


FAST_ACCUM = "cublas-fast-accum"
NO_WORKSPACE = "cublas-no-workspace"
PERSISTENT = "triton-persistent"
PLAIN_CALLS = "outblas-plain"
DEEPGEMM = "deepgemm"
BARE = "outblas-bare"
# The functions that prepare the calls of providers that are not kernels, by name.
LIBRARIES: dict[str, Callable[..., Call]] = {
    BASE: _cublas,
    BEST: _cublaslt_best,
    FAST_ACCUM: _fast_accum,
    DEEPGEMM: _deepgemm,
    "torch.compile": _compiled,
    "outblas": _outblas,
    BARE: _bare,
    PLAIN_CALLS: _plain,
    NO_WORKSPACE: _without_workspace,
    PERSISTENT: _persistent,
}
