"""The providers that are timed: cuBLAS, its alternatives, torch.compile, `outblas.matmul` as
called, and every kernel by name.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from outblas.base import configs, registry
from outblas.bench.operation import OPERANDS, Extras, Operation
from outblas.bench.record import BASE, BEST
from outblas.runtime import launcher
from outblas.verify.cases import Case
from outblas.verify.kernels import Refused
from outblas.verify.oracle import ORACLES

Tensor = torch.Tensor

PLAIN = Operation()

# A call on its own operands, or with other weights instead of b, of its shape and strides.
Call = Callable[..., object]
# prepare(a, b, out) returns a call that writes a @ b to out, or returns the result with the
# operation's epilogue. Raises Refused if it cannot.
Prepare = Callable[[Tensor, Tensor, Tensor], Call]


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
    on_integers: Prepare | None = None

    @property
    def label(self) -> str:
        return f"{self.name}[{self.config}]" if self.config else self.name

    @property
    def is_checked_exactly(self) -> bool:
        """Whether the check is the exact oracle for a bare product, or includes exact products of
        block-scaled integers.
        """
        exactly = self.checked is not None or self.on_integers is not None
        return exactly or self.operation.is_bare

    def fault(self, case: Case) -> str | None:
        """Returns what is wrong with this provider's results, or None: by the exact oracle for a
        bare product, on normal data for another operation, and on integers first where they have
        block scales. Raises Refused.
        """
        if self.trusted:
            return None
        exact = self.operation.on_integers()
        if self.on_integers is not None and exact is not None:
            shape = case.M, case.N, case.K
            return exact.fault(self.on_integers, shape) or self.operation.fault(self.prepare, shape)
        prepare = self.checked or self.prepare
        if not self.is_checked_exactly:
            return self.operation.fault(prepare, (case.M, case.N, case.K))

        def run(a: Tensor, b: Tensor, c: Any, out: Tensor, alpha: float, beta: float) -> None:
            prepare(a, b, out)()

        result = ORACLES["exact"](run, case, "cuda")
        return None if result.ok else result.message


def parse(text: str, operation: Operation = PLAIN) -> Provider:
    """Parses a name of `LIBRARIES`, or a kernel's name, optionally with a config:
    `NAME[k=v,k=v]`.

    Raises ValueError for an unknown name or config.
    """
    name, bracket, rest = text.partition("[")
    if bracket and not rest.endswith("]"):
        raise ValueError(f"--kernels has {text!r}, expected NAME or NAME[k=v,...]")
    if name in LIBRARIES:
        if bracket:
            raise ValueError(f"--kernels has {text!r}, but {name} takes no config")
        return library(name, operation)
    try:
        registry.find(name)
    except ValueError as error:
        raise ValueError(f"{error}, or one of {', '.join(LIBRARIES)}") from None
    return kernel(name, rest.removesuffix("]"), operation)


def library(name: str, operation: Operation = PLAIN) -> Provider:
    """Returns a provider of `LIBRARIES`."""
    computed = operation.without_steps() if name == BARE else operation
    exact = computed.on_integers()
    rounds_between = name == BEST and bool(operation.steps)
    make = LIBRARIES[name]
    return Provider(
        name,
        "",
        partial(make, computed),
        trusted=name in (BASE, FAST_ACCUM),
        operation=computed,
        checked=partial(make, operation.without_steps()) if rounds_between else None,
        on_integers=partial(make, exact) if exact is not None else None,
    )


def kernel(name: str, config: str = "", operation: Operation = PLAIN) -> Provider:
    """Returns the provider of a registered kernel; `config` is text. Raises ValueError for an
    invalid config.
    """
    chosen = configs.from_text(registry.load(name).Config, config) if config else None

    def prepare(a: Tensor, b: Tensor, out: Tensor) -> Call:
        if operation.scaling:
            raise Refused(
                f"no kernel can be named with --dtype {operation.dtype}: "
                "time outblas, which chooses one"
            )
        extras = operation.extras(a, b, out)

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


def _cublas(operation: Operation, a: Tensor, b: Tensor, out: Tensor) -> Call:
    if operation.is_bare:
        return lambda b=b: torch.mm(a, b, out=out)
    extras = operation.extras(a, b, out)
    return lambda b=b: operation.by_torch(a, b, out, extras)


def _fast_accum(operation: Operation, a: Tensor, b: Tensor, out: Tensor) -> Call:
    """Calls torch._scaled_mm with sums that stay in the tensor cores."""
    if not operation.scaling:
        raise Refused(f"{FAST_ACCUM} takes fp8 operands, not {operation.dtype}")
    if operation.scaling == "block":
        raise Refused(f"{FAST_ACCUM} takes no {operation.dtype}: sums of a block are scaled apart")
    extras = operation.extras(a, b, out)
    return lambda b=b: operation.by_torch(a, b, out, extras, fast_accum=True)


def _cublaslt_best(operation: Operation, a: Tensor, b: Tensor, out: Tensor) -> Call:
    """Prepares cuBLASLt's fastest product; torch computes the epilogue."""
    from outblas.bench import cublaslt

    if operation.scaling:
        raise Refused(f"{BEST} does not take {operation.dtype}")
    product = out if operation.is_bare else out.new_empty(a.shape[0], b.shape[1])
    try:
        best = cublaslt.best(a, b, product)
    except cublaslt.CublasLtError as error:
        raise Refused(f"{BEST}: {error}") from None
    if operation.is_bare:
        return best
    extras = operation.extras(a, b, out)

    def call(b: Tensor = b) -> object:
        best(b)
        x = product if extras.bias is None else product + extras.bias
        return operation.after(x, extras)

    return call


def _deepgemm(operation: Operation, a: Tensor, b: Tensor, out: Tensor) -> Call:
    """Prepares DeepGEMM's product of block-scaled operands, where it is installed."""
    from outblas.bench import deepgemm

    if operation.scaling != "block" or operation.steps:
        raise Refused(f"{DEEPGEMM} takes --dtype fp8-block without an epilogue")
    extras = operation.extras(a, b, out)
    assert extras.scale_a is not None
    assert extras.scale_b is not None
    return deepgemm.prepared(a, b, extras.scale_a, extras.scale_b, out)


def _compiled(operation: Operation, a: Tensor, b: Tensor, out: Tensor) -> Call:
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
    extras = operation.extras(a, b, out)
    tensors = extras.bias, extras.residual, extras.scale_a, extras.scale_b

    def eager(a: Tensor, b: Tensor, *tensors: Tensor | None) -> Tensor:
        return operation.by_torch(a, b, None, Extras(*tensors))

    fused = torch.compile(eager, **options)
    fused(a, b, *tensors)
    return lambda b=b: fused(a, b, *tensors)


def _outblas(operation: Operation, a: Tensor, b: Tensor, out: Tensor) -> Call:
    """Prepares the call of a user who names no kernel: a tuned kernel, otherwise the default."""
    extras = operation.extras(a, b, out)
    return lambda b=b: operation.by_outblas(a, b, out, extras)


def _bare(operation: Operation, a: Tensor, b: Tensor, out: Tensor) -> Call:
    """Prepares the product without its epilogue, to show the cost of the epilogue. It may be wider
    than the output.
    """
    if out.shape[1] != b.shape[1]:
        out = out.new_empty(a.shape[0], b.shape[1])
    return _outblas(operation, a, b, out)


def _plain(operation: Operation, a: Tensor, b: Tensor, out: Tensor) -> Call:
    """Prepares the call of a user who asks for no batch invariance, to show what that costs."""
    return _outblas(replace(operation, batch_invariant=False), a, b, out)


def _without_workspace(operation: Operation, a: Tensor, b: Tensor, out: Tensor) -> Call:
    """Prepares cuBLASLt's first algorithm that needs no workspace."""
    from outblas.bench import cublaslt

    if not operation.is_bare:
        raise Refused(f"{NO_WORKSPACE} takes bare products")
    try:
        return cublaslt.without_workspace(a, b, out)
    except cublaslt.CublasLtError as error:
        raise Refused(f"{NO_WORKSPACE}: {error}") from None


def _persistent(operation: Operation, a: Tensor, b: Tensor, out: Tensor) -> Call:
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
