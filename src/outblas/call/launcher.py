"""From a problem to the launch of a kernel: the named kernel, or the best one known."""

import contextlib
import functools
import os
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from outblas.base import compiling, configs, pack, registry
from outblas.base.compiling import CompileForbidden, CompilePending
from outblas.call import default_kernel, fallback, fp8, hooks
from outblas.call import problem as operands
from outblas.call.epilogue import NONE, Epilogue, apply
from outblas.call.problem import Launch, Problem

PORTABLE = "portable"
KEEPS_CARVEOUT = default_kernel.PRODUCTION  # the kernel that leaves SMs to others
SLOWER = (
    "a float32 product takes a kernel only where a sweep on this model of GPU measured it to be "
    "faster than torch"
)


# ---- why a kernel does not run
def unsupported_reason(record: registry.Kernel, problem: Problem) -> str | None:
    """Returns why a kernel's registry record excludes a problem (device, architecture, dtype), or
    None.
    """
    if reason := unsupported_device_reason(record, problem.device):
        return reason
    name = operands.dtype_name(problem.dtype)
    if name not in record.dtypes:
        return f"needs operands of dtype {' or '.join(record.dtypes)}, but was given {name}"
    return None


def unsupported_device_reason(record: registry.Kernel, device: torch.device) -> str | None:
    """Returns why a kernel cannot run on a device, or None."""
    if device.type == "cpu":
        return None if record.dsl == "triton" else "needs an NVIDIA GPU, but was given CPU tensors"
    if torch.version.cuda is None:
        return "needs an NVIDIA GPU, but torch was built for another vendor's"
    major, minor = torch.cuda.get_device_capability(device)
    return registry.arch_reason(record, 10 * major + minor, torch.cuda.get_device_name(device))


def no_kernel_reason(problem: Problem) -> str | None:
    """Returns why torch computes a call that names no kernel, or None if a kernel does."""
    if problem.device.type == "cpu":
        return "CPU tensors"
    if reason := unsupported_reason(registry.find(PORTABLE), problem):
        return f"the portable kernel {reason}"
    named = PORTABLE
    if problem.sm_carveout:
        named = KEEPS_CARVEOUT
        if reason := unsupported_reason(registry.find(named), problem):
            return f"an SM carveout of {problem.sm_carveout}, for which kernel {named!r} {reason}"
    try:
        module = registry.load(named)
    except ImportError as error:
        return str(error)
    return _unsupported_config_reason(module, problem, None)


def slower_reason(problem: Problem, tune: str) -> str | None:
    """Returns why torch computes a call that names no kernel, although kernels support it; None for
    calls that take a kernel.

    On float32 operands the kernels are slower than cuBLAS at most sizes (0.28 to 0.53 of it where
    `portable` was not tuned, on an H100). Such a call takes one only where it was measured to be
    faster at exactly this product, where rows must be batch-invariant, and where shapes are tuned
    when they are first met. Without terms nothing is multiplied.
    """
    if problem.dtype != torch.float32 or problem.formats or problem.batch_invariant:
        return None
    if problem.device.type != "cuda" or problem.K == 0 or is_empty(problem):
        return None
    if (tune or os.environ.get("OUTBLAS_TUNE")) == "on":
        return None
    posed = tuned_as(problem)
    choices = () if posed is None else hooks.tuner.get().choices(posed, tune, only_faster=True)
    return None if any(_takes(kernel, config, problem) for kernel, config in choices) else SLOWER


def _takes(kernel: str, config: str, problem: Problem) -> bool:
    """Returns whether a kernel supports a problem with a config."""
    try:
        module = registry.load(kernel)
        _check_features(kernel, module, problem)
        chosen = configs.from_text(module.Config, config) if config else None
    except (ValueError, ImportError):
        return False
    record = registry.find(kernel)
    return not (unsupported_reason(record, problem) or module.unsupported(problem, chosen))


def _unsupported_config_reason(module: ModuleType, problem: Problem, config: Any) -> str | None:
    reason: str | None = module.unsupported(problem, config)
    return reason


# ---- launches
def is_empty(problem: Problem) -> bool:
    """Returns whether the product has no elements."""
    return 0 in (problem.M, problem.N, *problem.batch)


def best_launcher(problem: Problem, tune: str, *, no_product: bool) -> Launch:
    """Returns the launch of the best kernel known: a tuned one if there is one, else the default.

    Batch-invariant products always take the default, because the tuned choice depends on M.
    `no_product`: K or alpha is 0, so nothing is multiplied.
    """
    if no_product or is_empty(problem):
        return named_launcher(PORTABLE, "", problem, no_product=no_product)
    if tuned := _tuned_launcher(problem, tune):
        return tuned
    default = KEEPS_CARVEOUT if problem.sm_carveout else default_kernel.kernel_for(problem)
    if default == PORTABLE or problem.batch_invariant:
        return named_launcher(default, "", problem, no_product=False)
    try:
        return named_launcher(default, "", problem, no_product=False)
    except ImportError as error:
        fallback.warn_once(str(error))
    except ValueError:  # the kernel does not support this call
        pass
    return named_launcher(PORTABLE, "", problem, no_product=False)


def _tuned_launcher(problem: Problem, tune: str) -> Launch | None:
    """Returns the launch of the best tuned kernel that supports the problem, if there is one."""
    asked = tuned_as(problem) if problem.device.type == "cuda" else None
    if asked is None:
        return None
    for kernel, config in hooks.tuner.get().choices(asked, tune):
        try:
            if unsupported_reason(registry.find(kernel), problem) is None:
                return named_launcher(kernel, config, problem, no_product=False)
        except CompilePending:  # another kernel would keep this one's place when it is there
            raise
        # The kernel or its config does not support this call, or may not be compiled.
        except (ValueError, ImportError, CompileForbidden):
            continue
        except Exception as error:
            fallback.warn_once(f"{kernel}[{config}], which was tuned for this call, fails: {error}")
    return None


def packed_launcher(problem: Problem) -> Launch | None:
    """Returns the launch of a kernel that a pack has, while the one that was chosen is compiled:
    that of the production kernel, None without one.
    """
    if not pack.loaded() or problem.batch_invariant or is_empty(problem):
        return None
    if default_kernel.kernel_for(problem) != default_kernel.PRODUCTION:
        return None
    try:
        module = registry.load(default_kernel.PRODUCTION)
        _check_features(default_kernel.PRODUCTION, module, problem)
        if module.unsupported(problem, None):
            return None
        with torch.cuda.device(problem.device), compiling.deferred():
            launch: Launch | None = module.packed_plan(problem)
    except (ValueError, ImportError, CompileForbidden):
        return None
    return launch


def tuned_rows(problem: Problem, tune: str) -> frozenset[int]:
    """Returns the numbers of rows at which a problem with any number of them was tuned: each has a
    choice of its own, all others that of `default_kernel.rows_of_choice`.
    """
    posed = None if no_kernel_reason(problem) else tuned_as(problem)
    return frozenset() if posed is None else hooks.tuner.get().tuned_rows(posed, tune)


def tuned_as(problem: Problem) -> Problem | None:
    """Returns the problem whose tuned choices a problem takes, or None if it takes none."""
    if problem.batch or problem.batch_invariant:
        return None
    if not problem.formats:
        return problem
    # What is best for promoted sums was not tuned, and the kernel's rule knows them. A call whose
    # result is fp8 names the kernel.
    if fp8.formats(problem.formats).promoted or problem.epilogue.scale_out is not None:
        return None
    # Other fp8 operands use the tuned choice for 16-bit operands of the same number of bytes.
    return replace(problem, out_dtype=problem.dtype)


def named_launcher(kernel: str, config: str, problem: Problem, *, no_product: bool) -> Launch:
    """Returns the launch of a named kernel, or its replacement where nothing is written or
    multiplied.

    Raises ValueError where the kernel does not support the problem, ImportError without its DSL.
    """
    module = registry.load(kernel)
    chosen = configs.from_text(module.Config, config) if config else None
    _check_features(kernel, module, problem)
    if is_empty(problem):
        return lambda *_: None
    if no_product:
        if problem.epilogue == NONE:
            return _scale_c
        return functools.partial(_epilogue_of_zero, problem.epilogue)
    on_cpu = problem.device.type == "cpu"
    if problem.sm_carveout and not on_cpu and kernel != KEEPS_CARVEOUT:
        raise ValueError(
            f"kernel {kernel!r} uses all SMs, but an SM carveout of {problem.sm_carveout} is set, "
            f"expected {KEEPS_CARVEOUT!r}"
        )
    if reason := _unsupported_config_reason(module, problem, chosen):
        raise ValueError(f"kernel {kernel!r}: {reason}")
    asks_packs = bool(getattr(module, "PACKED", False) and pack.loaded())
    if registry.find(kernel).dsl != "cute" and not on_cpu and not asks_packs:
        compiling.check_allowed(kernel)  # nobody knows what Triton's cache has
    with contextlib.nullcontext() if on_cpu else torch.cuda.device(problem.device):
        launch: Callable[..., None] = module.plan(problem, chosen)
    return launch


def _check_features(kernel: str, module: ModuleType, problem: Problem) -> None:
    """Raises ValueError where a call needs a feature that the kernel's module does not declare."""
    if problem.batch_invariant and not getattr(module, "BATCH_INVARIANT", False):
        raise ValueError(
            f"kernel {kernel!r} does not promise batch_invariant=True: with it, the bits "
            "of a row may depend on M"
        )
    if problem.formats and not getattr(module, "FP8", False):
        raise ValueError(
            f"kernel {kernel!r} takes no fp8 operands, but was given {problem.formats}"
        )
    if problem.epilogue != NONE and not getattr(module, "EPILOGUES", False):
        raise ValueError(
            f"kernel {kernel!r} has no epilogue besides alpha and C, but was given "
            f"{problem.epilogue}"
        )


def _scale_c(a: Tensor, b: Tensor, c: Tensor | None, out: Tensor, alpha: Any, beta: Any) -> None:
    """The launch where K or alpha is 0: the product is zero, whatever A and B contain."""
    if c is None or beta == 0:
        out.zero_()
    else:
        torch.mul(c.expand_as(out), beta, out=out)


def _epilogue_of_zero(
    epilogue: Epilogue,
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    out: Tensor,
    alpha: Any,
    beta: Any,
    bias: Tensor | None,
    residual: Tensor | None,
    aux: Tensor | None,
) -> None:
    """The launch where K or alpha is 0 and an epilogue follows."""
    shape = (*out.shape[:-1], 2 * out.shape[-1]) if epilogue.gated else out.shape
    x = torch.zeros(shape, dtype=torch.float32, device=out.device)
    if c is not None and beta != 0:
        x += beta * c.float()
    if bias is not None:
        x += bias.float()
    if aux is not None:
        aux.copy_(x)
    out.copy_(apply(x, epilogue.activation, None if residual is None else residual.float()))
