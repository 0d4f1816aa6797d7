"""Makes a described call, by outblas or by torch, and notes all that can be seen of it."""

import contextlib
import functools
import math
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import outblas
from outblas.call.epilogue import FUNCTIONS, GATED

from . import tensors
from .spec import COMPLEX, FLOATS, is_fused

Tensor = torch.Tensor
WRITTEN = "out", "aux"
MEMORY = "", "parameter", "subclass", "function", "inference"  # kinds whose memory can be looked at


@dataclass
class Outcome:
    """What came of a call. `results` are its tensors; `facts` what else is compared, by name."""

    error: BaseException | None = None
    results: list = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    second: dict[str, Tensor | None] = field(default_factory=dict)
    gradient_error: BaseException | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    # What no outcome may have: memory that changed, say.
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        if self.error is not None:
            return described(self.error)
        return ", ".join(
            f"{type(r).__name__} {shape_of(r)} {getattr(r, 'dtype', '')}" for r in self.results
        )


def described(error: BaseException) -> str:
    text = str(error).strip()
    of_dynamo = r"making fake tensor call.*?: got (\w+)\(['\"](.*?)['\"]\)\n"
    if inner := re.search(of_dynamo, text, re.DOTALL):
        return f"{inner[1]}: {inner[2]}"
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"


def shape_of(result: Any) -> Any:
    return tuple(result.shape) if isinstance(result, Tensor) and not result.is_nested else "..."


# ---- the two sides
def scalar(spec: dict | None, default: float) -> Any:
    if spec is None:
        return default
    kind, value = spec["kind"], spec["value"]
    if kind.startswith("numpy"):
        return getattr(np, kind.split()[1])(value)
    special = {"nan": float("nan"), "inf": float("-inf"), "None": None, "complex": 1j}
    if kind in special:
        return special[kind]
    if kind == "vector":
        return torch.tensor([value])
    return torch.tensor(value) if kind.endswith("tensor") else value


NAMES = {  # of the operands of a function: in descriptions, in torch
    "matmul": {"a": "input", "b": "other"},
    "addmm": {"c": "input", "a": "mat1", "b": "mat2"},
    "linear": {"a": "input", "b": "weight", "bias": "bias"},
    "scaled_mm": {"a": "mat_a", "b": "mat_b"},
}


def passed(spec: dict, t: dict) -> tuple[list, dict]:
    """The operands of a public function, by place or by name."""
    named = {other: t[name] for name, other in NAMES[spec["call"]].items() if name in t}
    return ([], named) if spec.get("names") else ([*named.values()], {})


def dtype_of(spec: dict) -> torch.dtype | None:
    return getattr(torch, spec["out_dtype"]) if "out_dtype" in spec else None


def layer(spec: dict, t: dict, cls: type, **how: Any) -> Any:
    """A linear layer that has these parameters, which `functional_call` may bring."""
    module = cls(2, 2, bias="bias" in t, **how)
    brought = {"weight": t["b"]} | ({"bias": t["bias"]} if "bias" in t else {})
    module.out_features, module.in_features = t["b"].shape
    if spec.get("functional_call"):
        return lambda x: torch.func.functional_call(module, brought, (x,))
    for name, p in brought.items():
        setattr(module, name, p)
    return module


def by_outblas(spec: dict, t: dict) -> Any:
    """The call as a user of outblas writes it."""
    name = spec["call"]
    if name.startswith("op."):
        return by_operator(spec, t)
    if name == "patch":
        if spec.get("functional_call"):
            columns, rows = t["b"].shape
            model = torch.nn.Sequential(torch.nn.Linear(rows, columns, bias="bias" in t))
            outblas.patch(model)
            brought = {"0.weight": t["b"]} | ({"0.bias": t["bias"]} if "bias" in t else {})
            return torch.func.functional_call(model, brought, (t["a"],))
        model = torch.nn.Sequential(layer(spec, t, torch.nn.Linear))
        outblas.patch(model)
        return model(t["a"])
    if name == "Linear":
        return layer(spec, t, outblas.Linear, activation=spec.get("activation"))(t["a"])
    positional, how = passed(spec, t)
    optional = ["residual", "out", "aux", *(["bias"] if name != "linear" else [])]
    options = "activation", "kernel", "use_fast_accum", "batch_invariant"
    how |= {n: t[n] for n in optional if n in t}
    how |= {n: spec[n] for n in options if n in spec}
    how |= {n: scalar(spec[n], 1) for n in ("alpha", "beta") if n in spec}
    if "out_dtype" in spec:
        how["output_dtype" if name == "scaled_mm" else "out_dtype"] = dtype_of(spec)
    if name == "scaled_mm":
        how |= with_recipes(spec, t)
    return getattr(outblas, name)(*positional, **how)


def with_recipes(spec: dict, t: dict) -> dict[str, Any]:
    """The scales of a description, with the recipes that their shapes tell, as torch's public
    function takes them.
    """
    shapes = {name: list(tensor["shape"]) for name, tensor in spec["tensors"].items()}
    (rows, *_, terms), (*_, columns) = ([*shapes[name], 1, 1][:2] for name in ("a", "b"))
    of_a, of_b = shapes["scale_a"], shapes["scale_b"]
    kinds = ["TensorWise" if math.prod(shape) == 1 else "RowWise" for shape in (of_a, of_b)]
    if not all(
        kind == "TensorWise" or shape == by_row
        for kind, shape, by_row in zip(kinds, (of_a, of_b), ([rows, 1], [1, columns]), strict=True)
    ):
        blocks = -(-terms // BLOCK)
        square_b = [blocks, -(-columns // BLOCK)]
        kinds = [
            "BlockWise1x128" if of_a == [rows, blocks] else "BlockWise128x128",
            "BlockWise128x128" if of_b == square_b else "BlockWise1x128",
        ]
    turned = [kinds[0] == "BlockWise128x128", kinds[1] == "BlockWise1x128"]
    how: dict[str, Any] = {}
    for operand, kind, turn in zip("ab", kinds, turned, strict=True):
        scale = t[f"scale_{operand}"]
        how[f"scale_{operand}"] = scale.t() if turn and isinstance(scale, Tensor) else scale
        how[f"scale_recipe_{operand}"] = getattr(F.ScalingType, kind)
    return how


def by_operator(spec: dict, t: dict) -> Any:
    name = spec["call"].removeprefix("op.")
    operator = getattr(torch.ops.outblas, name)
    alpha, beta = scalar(spec.get("alpha"), 1), scalar(spec.get("beta"), 1)
    activation = spec.get("activation", "")
    if name.startswith("matmul"):
        more: Sequence[Any] = [dtype_of(spec)] if "out_dtype" in spec else []
        result = operator(t["a"], t["b"], *([t["out"]] if "out" in t else []), *more)
    elif name.startswith("addmm"):
        result = operator(t["c"], t["a"], t["b"], *([t["out"]] if "out" in t else []), alpha, beta)
    elif name.startswith("gemm"):
        written = [t["out"], t.get("aux")] if "out" in t else []
        extra = [t.get(n) for n in ("c", "bias", "residual")]
        result = operator(*written, t["a"], t["b"], *extra, alpha, beta, activation, dtype_of(spec))
    elif name == "scaled_mm":
        scales = t["scale_a"], t["scale_b"]
        fast = spec.get("use_fast_accum", False)
        more = t.get("bias"), dtype_of(spec), fast, activation, t.get("residual")
        result = operator(t["a"], t["b"], *scales, *more)
    else:
        result = operator(t["grad"], t["a"], spec["activation"])
    return t["out"] if "out" in t and result is None else result


def by_torch(spec: dict, t: dict) -> Any:
    """The same call as a user of torch writes it, epilogues as functions one after the other."""
    name = spec["call"].removeprefix("op.")
    activation = spec.get("activation")
    t = {n: x for n, x in t.items() if x is not None or n not in ("bias", "residual", "out", "aux")}
    linear = name == "linear" and ("out" in t or ("bias" in t and ndim(spec, t, "bias") != 1))
    are_tensors = all(isinstance(x, Tensor) for x in t.values())
    if (is_fused(spec) or name == "scaled_mm" or linear) and not are_tensors:
        raise TypeError("expected tensors")
    if activation and activation not in (*FUNCTIONS, *GATED):
        raise (ValueError if isinstance(activation, str) else TypeError)("activation")
    if name == "activation_backward":
        return backward_of(t["grad"], t["a"], activation)
    if name in ("Linear", "patch"):
        return epilogue(layer(spec, t, torch.nn.Linear)(t["a"]), activation, None)
    extra = activation or any(n in t for n in ("residual", "aux"))
    extra = extra or ("bias" in t and not name.startswith("linear"))
    fits(spec, t)
    if not extra and "out_dtype" not in spec and name != "scaled_mm" and not linear:
        return plain(spec, t)
    if name == "scaled_mm" and not activation and "residual" not in t and not spec.get("composed"):
        scales, bias = (t["scale_a"], t["scale_b"]), t.get("bias")
        if bias is not None and spec.get("device", "cpu") == "cpu":
            bias = bias.contiguous()  # torch 2.13 reads any bias as if it were, past its memory
        how = {"bias": bias, "use_fast_accum": spec.get("use_fast_accum", False)}
        wide = dtype_of(spec) or torch.bfloat16
        return torch._scaled_mm(t["a"], t["b"], *scales, out_dtype=wide, **how)
    if not any(n in t for n in WRITTEN):
        return composed(spec, t, activation)
    if torch.is_grad_enabled() and any(
        isinstance(x, Tensor) and x.requires_grad for x in t.values()
    ):
        raise RuntimeError("functions with out=... arguments don't support differentiation")
    with torch.autocast(spec.get("device", "cpu"), enabled=False):  # it leaves out= alone
        return composed(spec, t, activation)


def composed(spec: dict, t: dict, activation: str | None) -> Any:
    """Functions of torch, one after the other."""
    x = before_activation(spec, t)
    if "aux" in t:
        write(t["aux"], x)
    y = epilogue(x, activation, t.get("residual"))
    if "out" in t:
        result = write(t["out"], y)
        return t["out"] if spec["call"].startswith("op.") else result
    return (y, x) if spec["call"] == "op.gemm_aux" else y


def ndim(spec: dict, t: dict, name: str) -> int:
    """Of one call, where torch.func maps over several; not a question to a tensor that listens."""
    return len(spec["tensors"][name]["shape"]) - (spec.get("in_dims", {}).get(name) is not None)


def fits(spec: dict, t: dict) -> None:
    """The rules for what torch has no argument for."""
    wide, a = dtype_of(spec), t["a"]
    narrow = torch.bfloat16, torch.float16
    if wide is None or not isinstance(a, Tensor):
        return
    if spec["call"].endswith("scaled_mm"):
        return
    cast = spec.get("setting") == "autocast" and not any(n in t for n in WRITTEN)
    cast = cast and not a.is_meta and a.is_floating_point() and a.dtype != torch.float64
    dtype = torch.bfloat16 if cast else a.dtype
    if wide != dtype and not (wide == torch.float32 and dtype in narrow):
        raise RuntimeError("out_dtype must be the operands' dtype or float32")


def plain(spec: dict, t: dict) -> Any:
    """One function of torch."""
    name = spec["call"].removeprefix("op.").removesuffix("_out").removesuffix("_aux")
    how = {"out": t["out"]} if "out" in t else {}
    if name == "gemm":
        name = "addmm" if "c" in t else "matmul"
    positional, named = passed(spec | {"call": name}, t)
    if name == "addmm" and spec["call"].startswith("op."):  # as operators read their arguments
        scalars = {n: scalar(spec.get(n), 1) for n in ("beta", "alpha")}
        addmm = torch.ops.aten.addmm.out if how else torch.ops.aten.addmm
        result = addmm(*positional, **scalars, **how)
    elif name == "addmm":
        named |= {n: scalar(spec[n], 1) for n in ("alpha", "beta") if n in spec}
        result = cast(Callable[..., Any], torch.addmm)(*positional, **named, **how)
    elif name == "linear":
        result = F.linear(*positional, **named)
    else:
        result = cast(Callable[..., Any], torch.matmul)(*positional, **named, **how)
    if spec["call"].endswith("_out"):
        return t["out"]
    return (result, result) if spec["call"] == "op.gemm_aux" else result


class NoGradient(torch.autograd.Function):
    """torch._scaled_mm has no gradients, and says so in the backward pass."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        raise NotImplementedError("derivative for aten::_scaled_mm is not implemented")


BLOCK = 128  # values that have one scale


def scales_of_values(t: dict) -> list[Tensor]:
    """The scales of fp8 operands, those of blocks with one element for each value along a dimension
    that they divide.
    """
    scales = []
    for scale, operand in ((t["scale_a"], t["a"]), (t["scale_b"], t["b"])):
        for dim in range(scale.dim() if scale.numel() > 1 else 0):
            size = operand.shape[dim]
            if scale.shape[dim] not in (1, size):
                scale = scale.repeat_interleave(BLOCK, dim).narrow(dim, 0, size)
        scales.append(scale)
    return scales


def fit_together(spec: dict, t: dict) -> None:
    """The rules for fp8 operands and their scales."""
    a, b, scale_a, scale_b = (t[n] for n in ("a", "b", "scale_a", "scale_b"))
    if not {a.dtype, b.dtype} <= {torch.float8_e4m3fn, torch.float8_e5m2}:
        raise RuntimeError("expected fp8 operands")
    if {scale_a.dtype, scale_b.dtype} != {torch.float32}:
        raise RuntimeError("expected float32 scales")
    if a.dim() != 2 or b.dim() != 2:
        raise RuntimeError("expected matrices")
    (M, K), N = a.shape, b.shape[1]
    if (scale_a.numel() == 1 or tuple(scale_a.shape) == (M, 1)) and (
        scale_b.numel() == 1 or tuple(scale_b.shape) == (1, N)
    ):
        return
    of_rows, of_columns, terms = (-(-n // BLOCK) for n in (M, N, K))
    of_a, of_b = [(M, terms), (of_rows, terms)], [(terms, N), (terms, of_columns)]
    if tuple(scale_a.shape) not in of_a or tuple(scale_b.shape) not in of_b:
        raise RuntimeError("expected one scale, or one a row or a column, or blocks of both")
    if spec.get("use_fast_accum"):
        raise RuntimeError("expected sums in float32 with scales of blocks")


def before_activation(spec: dict, t: dict) -> Tensor:
    name, bias, wide = spec["call"].removeprefix("op."), t.get("bias"), dtype_of(spec)
    if name == "scaled_mm":
        fit_together(spec, t)
        scale_a, scale_b = scales_of_values(t)
        x = NoGradient.apply((t["a"].float() * scale_a) @ (t["b"].float() * scale_b))
        x = x.to(wide or torch.bfloat16)
        return x if bias is None else x + bias
    if name == "linear":
        inside = bias is not None and ndim(spec, t, "bias") == 1
        x = F.linear(t["a"], t["b"], bias if inside else None)
        return x if inside or bias is None else x + bias
    if "c" in t:
        addmm = torch.ops.aten.addmm if spec["call"].startswith("op.") else torch.addmm
        x = addmm(t["c"], t["a"], t["b"], **{n: scalar(spec.get(n), 1) for n in ("beta", "alpha")})
    elif wide is not None and wide != t["a"].dtype and spec.get("setting") != "autocast":
        if t["a"].dtype != t["b"].dtype:
            raise RuntimeError("expected m1 and m2 to have the same dtype")
        x = torch.matmul(t["a"].to(wide), t["b"].to(wide))
    else:
        x = torch.matmul(t["a"], t["b"])
        x = x if wide is None else x.to(wide)
    return x if bias is None else x + bias


def write(out: Tensor, y: Tensor) -> Tensor:
    """What `out=` of a function of torch's takes, but that it does not resize."""
    if out.shape != y.shape or out.dtype != y.dtype:
        raise RuntimeError("out has another shape or dtype than the result")
    return out.copy_(y)


def epilogue(x: Tensor, activation: str | None, residual: Tensor | None) -> Tensor:
    if activation in GATED:
        if not x.dim() or x.shape[-1] % 2:
            raise RuntimeError("a gated activation takes an even number of columns")
        gate, other = x.chunk(2, -1)
        x = FUNCTIONS[GATED[activation]](gate) * other
    elif activation:
        x = FUNCTIONS[activation](x)
    return x if residual is None else x + residual


def backward_of(grad: Tensor, x: Tensor, activation: str) -> Tensor:
    """The gradient of x, written out; of 16-bit tensors in fp32, rounded once."""
    gate = 2 if activation in GATED else 1
    shape = (*x.shape[:-1], x.shape[-1] // gate)
    if tuple(grad.shape) != shape or grad.dtype != x.dtype:
        raise RuntimeError("grad has another shape or dtype than the output")
    dtype = x.dtype
    if dtype in (torch.bfloat16, torch.float16):
        grad, x = grad.float(), x.float()
    if gate == 1:
        return (grad * derivative(x, activation)).to(dtype)
    first, other = x.chunk(2, -1)
    function = GATED[activation]
    parts = grad * other * derivative(first, function), grad * FUNCTIONS[function](first)
    return torch.cat(parts, -1).to(dtype)


def derivative(x: Tensor, function: str) -> Tensor:
    if x.is_complex() and function != "silu":
        raise NotImplementedError(f"{function} of complex numbers")
    if function == "relu":  # its derivative is 0, and not None
        return torch.ops.aten.threshold_backward(torch.ones_like(x), x, 0)
    if function == "silu":
        s = 1 / (1 + torch.exp(-x))
        return s * (1 + x * (1 - s))
    if function == "gelu":
        return 0.5 * (1 + torch.erf(x / 2**0.5)) + x * torch.exp(-x * x / 2) / (2 * torch.pi) ** 0.5
    inner = (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)
    t = torch.tanh(inner)
    slope = (2 / torch.pi) ** 0.5 * (1 + 3 * 0.044715 * x * x)
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * slope


# ---- how a call is made
class PassingFunctions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class PassingDispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def setting(spec: dict, ours: bool) -> contextlib.AbstractContextManager:
    name, device = spec.get("setting", ""), spec.get("device", "cpu")
    made: dict[str, Callable[[], contextlib.AbstractContextManager]] = {
        "no_grad": torch.no_grad,
        "inference": torch.inference_mode,
        "autocast": lambda: torch.autocast(device, dtype=torch.bfloat16),
        "default_dtype": lambda: default_dtype(getattr(torch, spec["default_dtype"])),
        "default_device": lambda: torch.device(device),
        "function_mode": PassingFunctions,
        "dispatch_mode": PassingDispatch,
        "deterministic": deterministic,
        "batch_invariant": outblas.batch_invariant if ours else contextlib.nullcontext,
    }
    return made.get(name, contextlib.nullcontext)()


def transformed(spec: dict, t: dict, call: Any) -> Any:
    """A call under a transform of torch.func, of the tensors that a description names."""
    names = list(t)
    transform = spec["transform"]

    def function(*inputs: Tensor) -> Any:
        return call(spec, dict(zip(names, inputs, strict=True)))

    def loss(*inputs: Tensor) -> Tensor:
        y = function(*inputs)
        y = y[0] if isinstance(y, tuple) else y
        return y.abs().sum() if y.is_complex() else y.square().sum()

    inputs = [t[name] for name in names]
    chosen = tuple(names.index(name) for name in spec.get("of", ()))
    dims = tuple(spec["in_dims"][name] for name in names) if "in_dims" in spec else ()
    if transform == "vmap":
        return torch.func.vmap(function, dims)(*inputs)
    if transform == "grad":
        return torch.func.grad(loss, chosen)(*inputs)
    if transform == "vmap grad":
        return torch.func.vmap(torch.func.grad(loss, chosen), dims)(*inputs)

    def of_chosen(*changed: Tensor) -> Any:
        all_inputs = list(inputs)
        for i, value in zip(chosen, changed, strict=True):
            all_inputs[i] = value
        return function(*all_inputs)

    primals = tuple(inputs[i] for i in chosen)
    tangents = tuple(torch.ones_like(p) for p in primals)
    return torch.func.jvp(of_chosen, primals, tangents)


def make(spec: dict, call: Any) -> Outcome:
    """Builds the tensors of a call, makes it, differentiates it, and looks at what it left
    behind.
    """
    ours = call is by_outblas
    is_fake = any(t.get("kind") == "fake" for t in spec["tensors"].values())
    mode = FakeTensorMode() if is_fake else None
    needs = tuple(spec.get("gradients", {}).get("of", ()))
    outcome = Outcome()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        t = tensors.build(spec["tensors"], spec.get("device", "cpu"), needs, mode)
        watched = {
            name: Watch(x)
            for name, x in t.items()
            if isinstance(x, Tensor) and spec["tensors"][name].get("kind", "") in MEMORY
        }
        versions = {name: version(x) for name, x in t.items()}
        tensors.Function.called.clear()
        function = call
        if spec.get("compile"):
            torch._dynamo.reset()
            function = torch.compile(functools.partial(call, spec), backend=spec["compile"])
            function = (lambda compiled: lambda spec, t: compiled(t))(function)
        try:
            with setting(spec, ours), mode or contextlib.nullcontext():
                value = transformed(spec, t, function) if "transform" in spec else function(spec, t)
        except Exception as error:
            outcome.error = error
        outcome.facts["functions"] = list(tensors.Function.called)
        for name, x in t.items():
            if spec["tensors"][name].get("kind") == "cow" and isinstance(x, Tensor):
                lazy = torch._C._is_cow_tensor(x)  # type: ignore[attr-defined]
                outcome.facts[f"{name} is copy-on-write"] = lazy
        if ours or not (outcome.error is not None and broken(spec, outcome.error)):
            look(spec, t, watched, versions, outcome)
        if outcome.error is None:
            outcome.results = flat(value)
            if "out" in t and spec["call"] != "op.gemm_aux":
                outcome.facts["returns out"] = value is t["out"]
            if "aux" in t:
                outcome.results.append(t["aux"])
            differentiate(spec, t, outcome)
    return outcome


def flat(value: Any) -> list:
    return [x for part in value for x in flat(part)] if isinstance(value, tuple) else [value]


def version(t: Any) -> int | None:
    if not isinstance(t, Tensor) or t.is_inference():
        return None
    return t._version


class Watch:
    """The memory of a tensor as it was."""

    def __init__(self, t: Tensor) -> None:
        self.tensor = t.detach()
        self.storage = t.untyped_storage()
        self.before = self.bytes().clone()

    def bytes(self) -> Tensor:
        with torch.inference_mode(False):
            return torch.empty(0, dtype=torch.uint8, device=self.tensor.device).set_(self.storage)

    def changed(self) -> bool:
        return not torch.equal(self.before, self.bytes())

    def changed_outside(self) -> bool:
        """Whether anything but the tensor's own elements changed."""
        now, t = self.bytes(), self.tensor
        if now.numel() != self.before.numel():
            return False
        expected = self.before.clone()
        if tensors.overlaps_itself(t):
            return False
        where = t.storage_offset(), t.shape, t.stride()
        memories = self.storage, expected.untyped_storage()
        empty = torch.empty(0, dtype=t.dtype, device=t.device)
        raw, into = (empty.detach().set_(memory, *where) for memory in memories)
        with torch.no_grad():
            into.copy_(raw)
        return not torch.equal(expected, now)


def broken(spec: dict, error: BaseException) -> bool:
    """Whether torch may have broken memory that nobody may look at any more: a lazy clone's that it
    resized.
    """
    tensors = spec["tensors"]
    kinds = [tensors[t["alias"]].get("kind") for t in tensors.values() if "alias" in t]
    return "COW.cpp" in str(error) or "cow" in kinds


def look(spec: dict, t: dict, watched: dict, versions: dict, outcome: Outcome) -> None:
    """Notes which memory changed that must not have, and which versions did."""
    ok = outcome.error is None
    written = {
        watched[name].storage.data_ptr()
        for name in WRITTEN
        if name in watched and watched[name].before.numel()
    }
    for name, watch in watched.items():
        if not ok or name not in WRITTEN:
            if ok and watch.storage.data_ptr() in written:
                continue  # shares memory with what is written
            if watch.changed():
                outcome.faults.append(
                    f"{name} is modified" + ("" if ok else ", although the call raises")
                )
        elif watch.changed_outside() and len(written) == 1:
            outcome.faults.append(f"memory around {name} is modified")
    for name, before in versions.items():
        after = version(t[name])
        if before is None or after is None:
            continue
        if name in WRITTEN:
            if ok:
                outcome.facts[f"version of {name} grows"] = after > before
        elif after != before and t[name] is not t.get("out"):
            outcome.faults.append(f"the version of {name} grows")


def differentiate(spec: dict, t: dict, outcome: Outcome) -> None:
    how = spec.get("gradients")
    y = outcome.results[0]
    if not how or "transform" in spec or not isinstance(y, Tensor) or not y.requires_grad:
        return
    if y.layout != torch.strided or y.is_meta or y.is_nested:
        return
    if spec["tensors"]["a"].get("kind") in ("fake", "nested"):
        return
    leaves = {name: t[name] for name in how["of"] if t[name].requires_grad}
    grad = tensors.lay(tuple(y.shape), y.dtype, how["layout"], "normal", how["seed"], y.device)
    try:
        if how.get("double"):
            grad = grad.detach().requires_grad_()
            inputs = list(leaves.values())
            first = torch.autograd.grad(y, inputs, grad, create_graph=True, allow_unused=True)
            outcome.gradients = dict(zip(leaves, first, strict=True))
            squares = [g.abs() ** 2 for g in first if g is not None and g.requires_grad]
            total = sum((square.sum() for square in squares), y.new_zeros(()))
            if total.requires_grad:
                second = torch.autograd.grad(total.real, [*inputs, grad], allow_unused=True)
                outcome.second = dict(zip([*leaves, "grad"], second, strict=True))
        else:
            y.backward(grad)
            outcome.gradients = {name: leaf.grad for name, leaf in leaves.items()}
    except Exception as error:
        outcome.gradient_error = error


# ---- the truth
def upcast(t: Any) -> Any:
    if not isinstance(t, Tensor):
        return t
    return t.to(torch.complex128 if t.is_complex() else torch.float64)


def truth(spec: dict, *, magnitude: bool) -> tuple[list, dict[str, Tensor | None]]:
    """Results and gradients in float64; or for their error bounds those of the sums of all
    magnitudes.
    """
    read = {name: t for name, t in spec["tensors"].items() if name not in WRITTEN}
    built = {name: upcast(tensors.base(t)) for name, t in read.items()}
    if magnitude:
        built = {name: x.abs() for name, x in built.items()}
    needs = spec.get("gradients", {}).get("of", ())
    needs = () if spec.get("setting") in ("no_grad", "inference") else needs
    built = {name: x.detach().requires_grad_(name in needs) for name, x in built.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = exact(spec, built, magnitude)
    gradients: dict[str, Tensor | None] = {}
    leaves = [name for name in needs if name in built]
    y = results[0]
    if leaves and y.requires_grad and not spec["gradients"].get("double"):
        how = spec["gradients"]
        dtype = spec.get("out_dtype") or spec["tensors"]["a"]["dtype"]
        if spec.get("setting") == "autocast" and dtype in FLOATS and dtype != "float64":
            dtype = "bfloat16"
        kind, shape = getattr(torch, dtype), tuple(y.shape)
        grad = upcast(tensors.lay(shape, kind, how["layout"], "normal", how["seed"]))
        grad = (grad.abs() if magnitude else grad).to(y.dtype)
        inputs = [built[n] for n in leaves]
        result = torch.autograd.grad(y, inputs, grad, allow_unused=True)
        gradients = dict(zip(leaves, result, strict=True))
    return results, gradients


def exact(spec: dict, t: dict, magnitude: bool) -> list:
    name = spec["call"].removeprefix("op.").removesuffix("_out")
    activation = spec.get("activation")
    alpha, beta = (number(scalar(spec.get(n), 1)) for n in ("alpha", "beta"))
    if magnitude:
        alpha, beta = abs(alpha), abs(beta)
    if name == "activation_backward":
        if magnitude:
            if activation not in GATED:
                return [2 * t["grad"] * (1 + t["a"])]
            gate, other = t["a"].chunk(2, -1)
            return [torch.cat((2 * t["grad"] * other * (1 + gate), 2 * t["grad"] * gate), -1)]
        return [backward_of(t["grad"], t["a"], activation)]
    a, b = t["a"], t["b"]
    if "scale_a" in t:
        scale_a, scale_b = scales_of_values(t)
        a, b = a * scale_a, b * scale_b
    x = F.linear(a, b) if name in ("linear", "Linear", "patch") else torch.matmul(a, b)
    x = torch.zeros_like(x) if alpha == 0 else x * alpha
    if "c" in t and beta != 0:
        x = x + t["c"] * beta
    if "bias" in t:
        x = x + t["bias"]
    if magnitude and activation:
        gate, other = x.chunk(2, -1) if activation in GATED else (x, 1)
        y = epilogue(1.2 * gate * other, None, t.get("residual"))
    else:
        y = epilogue(x, activation, t.get("residual"))
    aux = name == "gemm_aux" or "aux" in spec["tensors"]
    return [y, x] if aux else [y]


def number(value: Any) -> Any:
    value = value.item() if isinstance(value, Tensor | np.generic) else value
    return value if isinstance(value, complex) else float(value)


def inexact(dtype: torch.dtype) -> bool:
    return str(dtype).removeprefix("torch.") in FLOATS + COMPLEX
