"""Which kernel computes a product under `outblas.enable`, or why torch does."""

from outblas.base import compiling, registry
from outblas.base.compiling import CompilePending
from outblas.base.cuda_graphs import capturing
from outblas.call import dispatch, fallback, hooks, launcher
from outblas.call.dispatch import Call
from outblas.call.errors import OperandError
from outblas.call.problem import Problem
from outblas.torch_ops.aten_grouped import Grouped, kernels_for, refusal
from outblas.torch_ops.aten_rules import BATCHED, GROUPED, Product, Rules, unwanted_reason
from outblas.torch_ops.aten_scaled import OPERATOR as SCALED
from outblas.torch_ops.aten_scaled import Scaled

# Why torch computes a product for the time being.
IN_CAPTURE = "a CUDA graph is captured, and the kernel is not loaded yet"
PENDING = "its kernel is being compiled"


def choose(rules: Rules, operator: str, call: Call) -> tuple[dispatch.Plan | str, str]:
    """Returns the plan of a call, or why torch computes it, and how `decisions` calls the
    product.
    """
    try:
        _check_dimensions(operator, call)
        if operator == GROUPED and (reason := refusal(call.a, call.b)):
            raise OperandError(reason)
        problem = dispatch.problem_of(call)
    except OperandError as error:  # torch says what is wrong, or accepts it
        shapes = " and ".join("x".join(map(str, t.shape)) for t in (call.a, call.b))
        return str(error), f"{operator} of {shapes}"
    batch = call.a.shape[0] if call.a.dim() == 3 else 1
    product = Product(operator, batch, call.a.shape[-2], call.b.shape[-1], problem.K, problem.dtype)
    reason = _reason(rules, product, problem)
    return reason or _planned(product, call), str(product)


def choose_scaled(rules: Rules, given: Scaled) -> tuple[dispatch.Plan | str, str]:
    """Returns the plan of a product of fp8 operands, or why torch computes it, and how `decisions`
    calls it.
    """
    if reason := given.reason():
        shapes = " and ".join("x".join(map(str, t.shape)) for t in (given.a, given.b))
        return reason, f"{SCALED} of {shapes}"
    (M, K), N = given.a.shape, given.b.shape[1]
    product = Product(SCALED, 1, M, N, K, given.a.dtype)
    reason = unwanted_reason(rules, product)
    return reason or _planned(product, given.call()), str(product)


def choose_grouped(rules: Rules, given: Grouped) -> tuple[dispatch.Plan | str, str]:
    """Returns the plan of a grouped product, or why torch computes it, and how `decisions` calls
    it.
    """
    if reason := given.reason():
        shapes = " and ".join("x".join(map(str, t.shape)) for t in (given.a, given.b))
        return reason, f"{GROUPED} of {shapes}"
    product = given.product()
    if reason := unwanted_reason(rules, product):
        return reason, str(product)
    kernels = kernels_for(rules, given, product)
    if isinstance(kernels, str):
        return kernels, str(product)
    if capturing(given.a.device):
        return IN_CAPTURE, str(product)
    plan = given.plan(given.problem(), kernels)
    try:
        with compiling.deferred():
            plan(given.a, given.b, given.offs)  # loads the kernel, which a capture may not do
    except CompilePending:
        return PENDING, str(product)
    except Exception as error:  # torch computed this product before `enable`, and still can
        fallback.warn_once(f"{product} stays with torch: {error}")
        return str(error), str(product)
    return plan, str(product)


def _planned(product: Product, call: Call) -> dispatch.Plan | str:
    """Returns the plan of a call that a kernel is to compute, or why there is none."""
    known = dispatch.cached_plan(call)
    if known is None and capturing(call.a.device):
        return IN_CAPTURE
    try:
        plan = known or dispatch.find_plan(call, by_torch=False)
        plan = dispatch.at_rows(plan, call.a.shape, by_torch=False)
        if dispatch.is_pending(plan):
            return PENDING
    except CompilePending:
        return PENDING
    except Exception as error:  # torch computed this product before `enable`, and still can
        fallback.warn_once(f"{product} stays with torch: {error}")
        return str(error)
    # A call of `matmul` may have found that torch computes such products. Its plan calls the
    # operator that is overridden here.
    return dispatch.torch_reason(plan) or plan


def _check_dimensions(operator: str, call: Call) -> None:
    """Raises OperandError for operands that `matmul` takes and the operator does not."""
    dimensions = 3 if operator in BATCHED else 2
    if not call.a.dim() == call.b.dim() == dimensions:
        raise OperandError(
            f"the operands have {call.a.dim()} and {call.b.dim()} dimensions, expected {dimensions}"
        )
    if call.a.shape[:-2] != call.b.shape[:-2]:
        raise OperandError(
            f"the batches are {call.a.shape[0]} and {call.b.shape[0]}, expected equal ones"
        )


def _reason(rules: Rules, product: Product, problem: Problem) -> str:
    """Returns why a product stays with torch; "" if it does not."""
    if reason := unwanted_reason(rules, product):
        return reason
    if rules.kernel:
        return launcher.unsupported_reason(registry.find(rules.kernel), problem) or ""
    if missing := launcher.no_kernel_reason(problem) or launcher.slower_reason(problem, ""):
        return missing
    gain = hooks.tuner.get().measured_gain(problem)
    if gain is not None and gain < rules.min_gain:
        measured = f"it is {gain:.3f} times as fast as cuBLAS by a sweep"
        return f"{measured}, and min_gain is {rules.min_gain:g}"
    return ""
