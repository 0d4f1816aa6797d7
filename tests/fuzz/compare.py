"""In what the outcomes of a call by outblas and by torch differ."""

import re
from dataclasses import dataclass
from typing import Any

import torch

from . import calls
from .calls import Outcome, described
from .spec import OPAQUE, is_fused

Tensor = torch.Tensor


@dataclass(frozen=True)
class Difference:
    """`kind` says in what, in a few words; `detail` is for people."""

    kind: str
    detail: str

    @property
    def cause(self) -> str:
        """The detail without numbers, dtypes and activations, to count alike ones together."""
        text = re.sub(r"\((?:[\d, -]*)\)|\[(?:[\d, -]*)\]", "(…)", self.detail)
        text = re.sub(r"\btorch\.(?:b?float|complex|u?int|bool)\w*", "dtype", text)
        text = re.sub(r"'(?:relu|gelu|silu|reglu|geglu|swiglu)(?:_tanh)?'", "…", text)
        text = re.sub(r"[-+\d.e]+j\b|\b(?:nan|inf)[-+](?:[\d.e]+|nan|inf)j", "#j", text)
        return re.sub(r"-?\b\d[\d.e+-]*\b|\bnan\b|-?\binf\b", "#", text)[:150]


def differences(spec: dict, ours: Outcome, theirs: Outcome) -> list[Difference]:
    # What is handed to one function of torch is refused as late as torch refuses it.
    alike = ours.error is not None and not is_fused(spec)
    alike = alike and described(ours.error) == described(theirs.error)
    faults = [fault for fault in ours.faults if not (alike and fault in theirs.faults)]
    notes = [Difference("memory", fault) for fault in faults]
    if ours.error is not None or theirs.error is not None:
        compiled = "compile" in spec
        return notes + of_errors(spec, ours.error, theirs.error, "raises", compiled=compiled)
    notes += of_facts(spec, ours, theirs)
    if len(ours.results) != len(theirs.results):
        counts = f"{len(ours.results)} results, torch's are {len(theirs.results)}"
        return [*notes, Difference("results", counts)]
    truths = Truths(spec)
    for i, pair in enumerate(zip(ours.results, theirs.results, strict=True)):
        notes += of_results(spec, *pair, i, truths)
    notes += of_errors(spec, ours.gradient_error, theirs.gradient_error, "backward raises")
    if ours.gradient_error is None and theirs.gradient_error is None:
        for order in ("gradients", "second"):
            notes += of_gradients(spec, getattr(ours, order), getattr(theirs, order), order, truths)
    return notes


def of_errors(
    spec: dict, ours: Any, theirs: Any, what: str, *, compiled: bool = False
) -> list[Difference]:
    if ours is None and theirs is None:
        return []
    if ours is None and "!this_view_meta->has_fw_view() INTERNAL ASSERT FAILED" in str(theirs):
        # torch cannot transpose a negating view that carries a forward-mode gradient: no rule, but
        # a fault
        return []
    if ours is None:
        return [Difference(f"only torch {what}", described(theirs))]
    if theirs is None:
        return [Difference(f"only outblas {what}", described(ours))]
    if compiled:  # whose errors are the compiler's
        return []
    kind = RuntimeError if type(theirs) is NotImplementedError else type(theirs)
    if isinstance(ours, kind) or another_fault(spec, ours, theirs):
        return []
    slips = IndexError, AssertionError, AttributeError, KeyError, OverflowError
    if isinstance(ours, TypeError | ValueError | RuntimeError) and isinstance(theirs, slips):
        return []
    text = f"{described(ours)} | torch: {type(theirs).__name__}"
    return [Difference("another type of error", text)]


_SCALAR = r"\b(alpha|beta|number|overflow|[Bb]oolean|invalid combination|converted|finite)"
_TENSOR = r"\b(Tensor|Duck|ndarray|list|float|NoneType|tensors)\b"
_ACTIVATION = r"\bactivation\b|must be a str"


def another_fault(spec: dict, ours: BaseException, theirs: BaseException) -> bool:
    """Whether a call has an argument of a wrong kind, of which one of the errors speaks and the
    other does not: there was something else to complain about, and nothing says what comes first.
    """
    if not isinstance(ours, TypeError | ValueError | RuntimeError):
        return False
    wrong_kinds = {"string", "None", "vector", "complex", "huge"}
    if spec["call"].startswith("op."):  # operators take Python's numbers
        wrong_kinds |= {"tensor", "int tensor", "numpy float32", "numpy float64", "numpy int64"}
    several = [spec.get(n, {}).get("kind") in wrong_kinds for n in ("alpha", "beta")]
    if all(several):
        return True
    scalars = any(several)
    kinds = any(t.get("kind") in OPAQUE for t in spec["tensors"].values())
    wrong = [
        (scalars, _SCALAR),
        (kinds, _TENSOR),
        (spec.get("activation") in (3, "tanh"), _ACTIVATION),
    ]
    patterns = [pattern for is_wrong, pattern in wrong if is_wrong]
    return any(bool(re.search(p, str(ours))) != bool(re.search(p, str(theirs))) for p in patterns)


def of_facts(spec: dict, ours: Outcome, theirs: Outcome) -> list[Difference]:
    notes = []
    for name in sorted({*ours.facts, *theirs.facts}):
        mine, other = ours.facts.get(name), theirs.facts.get(name)
        if name == "returns out":
            if mine is False and other is not False:
                notes.append(Difference("fact", "out is not what is returned"))
        elif name == "functions":
            if bool(mine) != bool(other):
                text = f"__torch_function__ is called with {mine}, torch: {other}"
                notes.append(Difference("fact", text))
        elif name.startswith("version") and other is None:
            continue
        elif mine != other:
            # Reading an operand leaves its memory shared, even where torch's scaled_mm copies it.
            # Where nothing is written, products of torch leave memory shared, and copies do not.
            unwritten = not any(t.numel() for t in ours.results)
            is_read = name.removesuffix(" is copy-on-write") not in calls.WRITTEN
            is_shared = (mine and is_read) or ((mine or copied(spec)) and unwritten)
            if not (name.endswith("copy-on-write") and is_shared):
                notes.append(Difference("fact", f"{name}: {mine}, torch: {other}"))
    return notes


def copied(spec: dict) -> bool:
    """Whether what goes to `out` is computed elsewhere first, by outblas or by `composed`."""
    kinds = {t.get("kind") for t in spec["tensors"].values()}
    return is_fused(spec) or bool(kinds & {"subclass", "function"})


def undefined(spec: dict) -> bool:
    """Whether what torch writes depends on the order in which it writes: where outblas leaves a
    call to it whole.
    """
    out = spec["tensors"].get("out", {})
    in_place = out.get("alias") == "c" and "from" not in out
    return ("alias" in out and not in_place) or out.get("layout") in ("expanded", "overlapping")


def promised(spec: dict) -> bool:
    """Whether torch promises that a result is contiguous."""
    is_new = "out" not in spec["tensors"] and "transform" not in spec
    return is_new and spec["call"] != "op.activation_backward"


def of_results(spec: dict, ours: Any, theirs: Any, i: int, truths: "Truths") -> list[Difference]:
    if not isinstance(ours, Tensor) or not isinstance(theirs, Tensor):
        same = type(ours) is type(theirs) and (isinstance(ours, Tensor) or ours == theirs)
        return [] if same else [Difference("result", f"{ours!r}, torch: {theirs!r}")]
    if i and spec["call"] == "op.gemm_aux" and type(ours) is not type(theirs):
        return []  # the operator hands both its results to a subclass that takes part
    if type(ours) is not type(theirs):
        return [Difference("type", f"{type(ours).__name__}, torch: {type(theirs).__name__}")]
    traits = ["dtype", "device", "layout", "is_nested", "requires_grad", "is_leaf"]
    if not ours.is_nested:
        traits.insert(0, "shape")
    notes = []
    for trait in traits:
        mine, other = getattr(ours, trait), getattr(theirs, trait)
        if mine != other:
            notes.append(Difference(trait, f"result's {trait} is {mine}, torch: {other}"))
    grows = ours.grad_fn is not None, theirs.grad_fn is not None
    if grows[0] != grows[1]:
        notes.append(Difference("grad_fn", f"{grows[0]}, torch: {grows[1]}"))
    inference = ours.is_inference(), theirs.is_inference()
    if inference[0] != inference[1]:
        notes.append(Difference("inference", f"{inference[0]}, torch: {inference[1]}"))
    strided = ours.layout == torch.strided and not ours.is_nested and promised(spec)
    if strided and theirs.is_contiguous() and not ours.is_contiguous():
        text = f"{ours.stride()}, torch: {theirs.stride()} for {tuple(ours.shape)}"
        notes.append(Difference("strides", text))
    # Beside a meta tensor torch computes nothing.
    kinds = {t.get("kind") for t in spec["tensors"].values()}
    if notes or ours.is_meta or "meta" in kinds or spec["tensors"]["a"].get("kind") == "fake":
        return notes
    if undefined(spec):
        return notes
    what = f"result {i}" if i else "result"
    return [*notes, *of_values(spec, ours, theirs, what, ("results", i), truths)]


def of_gradients(
    spec: dict, ours: dict, theirs: dict, order: str, truths: "Truths"
) -> list[Difference]:
    notes = []
    for name in sorted({*ours, *theirs}):
        mine, other = ours.get(name), theirs.get(name)
        what = f"{'second ' if order == 'second' else ''}gradient of {name}"
        if (mine is None) != (other is None):
            zero = all(t is None or not bool(t.detach().abs().any()) for t in (mine, other))
            kind = "None or zero gradient" if zero else "missing gradient"
            of_ours = "None" if mine is None else f"{tuple(mine.shape)}"
            of_torch = "None" if other is None else "a tensor"
            notes.append(Difference(kind, f"{what} is {of_ours}, torch: {of_torch}"))
            continue
        if mine is None or other is None:
            continue
        traits = "shape", "dtype", "layout", "requires_grad"
        pairs = [(t, getattr(mine, t), getattr(other, t)) for t in traits]
        wrong = [f"{t} is {x}, torch: {y}" for t, x, y in pairs if x != y]
        if wrong:
            notes.append(Difference("gradient", f"{what}: {', '.join(wrong)}"))
            continue
        accumulated = order == "gradients" and not spec["gradients"].get("double")
        if mine.layout == torch.strided and accumulated and significant(mine) != significant(other):
            text = f"{what}: {mine.stride()}, torch: {other.stride()}"
            notes.append(Difference("gradient strides", text))
        key = (order, name) if order == "gradients" else None
        notes += of_values(spec, mine, other, what, key, truths)
    return notes


def significant(t: Tensor) -> list[int]:
    """Strides of dimensions that have more than one element, of tensors that have any."""
    return [s for n, s in zip(t.shape, t.stride(), strict=True) if n > 1] if t.numel() else []


# ---- values
def dense(t: Tensor) -> Tensor:
    if t.is_nested:
        parts = t.detach().unbind()
        return torch.cat([torch.zeros(0), *(part.reshape(-1).cpu() for part in parts)])
    t = t.detach()
    if hasattr(t, "a") and type(t).__name__ == "TwoTensor":
        t = t.a
    if t.layout != torch.strided:
        t = t.to_dense()
    return t.as_subclass(Tensor).cpu().resolve_conj().resolve_neg()


def same_bits(x: Tensor, y: Tensor) -> bool:
    """NaNs are alike, zeros of either sign are not."""
    if x.is_complex():
        x, y = torch.view_as_real(x), torch.view_as_real(y)
    if not x.is_floating_point():
        return torch.equal(x, y)
    if x.dtype.itemsize == 1:
        x, y = x.float(), y.float()
    nan = x.isnan()
    if not torch.equal(nan, y.isnan()):
        return False
    x, y = x.masked_fill(nan, 0), y.masked_fill(nan, 0)
    return torch.equal(x, y) and torch.equal(x.signbit(), y.signbit())


def exactly(spec: dict) -> bool:
    """Whether outblas hands the call to the very function of torch."""
    name, tensors = spec["call"].removeprefix("op."), spec["tensors"]
    if spec.get("device", "cpu") != "cpu" or name.removesuffix("_out") not in ("matmul", "addmm"):
        return False
    if {"kernel", "activation", "out_dtype", "transform", "compile"} & spec.keys():
        return False
    if {"bias", "residual", "aux"} & tensors.keys():
        return False
    if spec.get("setting") in ("dispatch_mode", "autocast"):
        return False
    for t in tensors.values():  # operators get copies that lie otherwise, and may negate
        if "lazy" in t or t["layout"] == "imag" or t.get("kind") == "two":
            return False
    out = tensors.get("out")
    if out is None:
        return True
    rank = max(len(tensors[n]["shape"]) for n in ("a", "b"))
    is_plain = out["layout"] in ("contiguous", "offset") and "alias" not in out
    return is_plain and len(out["shape"]) == rank and not copied(spec)


class Truths:
    """What is right, computed when first asked for."""

    def __init__(self, spec: dict) -> None:
        self.spec = spec
        self.computed: dict[bool, Any] = {}

    def of(self, key: tuple | None, *, magnitude: bool) -> Tensor | None:
        spec = self.spec
        usual = {"", "parameter", "subclass", "function", "cow"}
        kinds = {t.get("kind", "") for t in spec["tensors"].values()} - usual
        if key is None or "transform" in spec or kinds:
            return None
        if key[0] == "gradients" and spec["call"] == "op.activation_backward":
            return None
        if magnitude not in self.computed:
            self.computed[magnitude] = calls.truth(spec, magnitude=magnitude)
        results, gradients = self.computed[magnitude]
        group, which = key
        value = results[which] if group == "results" else gradients.get(which)
        return None if value is None else value.detach()

    def slope(self) -> float:
        """How much the error of x is amplified on its way to a gradient, at most."""
        if "activation" not in self.spec:
            return 1.0
        largest = self.of(("results", 0), magnitude=True)
        finite = largest[largest.isfinite()] if largest is not None else torch.zeros(0)
        return 1.0 + float(finite.max()) if finite.numel() else 1.0


def of_values(
    spec: dict, ours: Tensor, theirs: Tensor, what: str, key: tuple | None, truths: Truths
) -> list[Difference]:
    mine, other = dense(ours), dense(theirs)
    if mine.shape != other.shape:
        return [Difference("shape", f"{what}: {tuple(mine.shape)}, torch: {tuple(other.shape)}")]
    if same_bits(mine, other):
        return []
    if not calls.inexact(mine.dtype):
        wide = torch.float32 if mine.is_floating_point() else mine.dtype
        text = f"{what} of {mine.dtype}: {first(mine.to(wide), other.to(wide))}"
        return [Difference("values", text)]
    if key is not None and key[0] == "results" and exactly(spec):
        if torch.allclose(mine, other, rtol=1e-3, atol=1e-3, equal_nan=True):
            return [Difference("bits", f"{what} differs in its last bits: {first(mine, other)}")]
        return [Difference("values", f"{what}: {first(mine, other)}")]
    right, scale = (truths.of(key, magnitude=m) for m in (False, True))
    narrow = torch.finfo(mine.dtype)
    # The largest extent, for the number of terms of a sum.
    k = max((n for t in spec["tensors"].values() for n in t["shape"]), default=1)
    unit = narrow.eps
    wide = torch.complex128 if mine.is_complex() else torch.float64
    mine, other = mine.to(wide), other.to(wide)
    # What accumulates in fp32 may lose a little of every sum; what is stored, a few roundings.
    share = 4 * unit + (2 * k * 2**-24 if narrow.bits <= 32 and unit > 1e-10 else 2 * k * unit)
    if spec.get("setting") == "autocast":
        share += 4 * 2**-8
    if spec["call"].endswith("scaled_mm") and spec.get("device", "cpu") != "cpu":
        share += 2.0**-12  # the tensor cores of sm_90 keep about 14 bits of sums of fp8
    if any(t["dtype"] in ("bfloat16", "float16") for t in spec["tensors"].values()):
        share += 0 if key is None or key[0] == "results" else 4 * 2**-8
    if right is None or right.shape != mine.shape:
        # Without a truth, near to torch's; as torch's own operators, these may round in between.
        finite = other[other.isfinite()]
        largest = float(finite.abs().max()) if finite.numel() else 1.0
        share = 8 * (share + 1e-12) * max(1.0, largest) * max(1.0, k**0.5)
        limit = torch.full(mine.shape, min(share, 1e300), dtype=torch.float64)
    else:
        right, scale = right.cpu(), scale.cpu()
        scale = scale.abs() if scale.is_complex() else scale
        limit = share * scale * (truths.slope() if key[0] != "results" else 1) + narrow.tiny * 4
        # Where infinities meet zeros, the sum of magnitudes is none, and the values may be finite.
        unknown = 8 * share * k * (1 + right.abs().double())
        limit = torch.where(limit.isnan(), unknown, limit)
        right = right.to(wide)
        far = scale.nan_to_num(float("inf")) > narrow.max / 4  # may overflow on either way
        bad_far = far & ~near(mine, other, limit) & ~mine.abs().ge(narrow.max / 8)
        bad_far = bad_far & mine.isfinite() & other.isfinite() & right.isfinite()
        bad = ~far & ~near(mine, right, limit) & ~near(mine, other, torch.zeros_like(limit))
        bad = bad | bad_far
        if not bad.any():
            return []
        place = tuple(bad.nonzero()[0].tolist())
        got, want, of_torch = (f"{complex(t[place]):.6g}" for t in (mine, right, other))
        text = f"{what}: {got} at {place}, expected {want}, torch: {of_torch}"
        return [Difference("values", f"{text}, within {float(limit[place].real):.2g}")]
    bad = ~near(mine, other, limit)
    # Squares of such numbers cancel, and their sum has no digit that is certain.
    if right is None and special(spec):
        both_overflow = other.isnan() & ~mine.isfinite()  # to infinity, or to inf - inf
        bad = bad & ~other.abs().ge(narrow.max**0.5) & ~both_overflow
    if not bad.any():
        return []
    return [Difference("values", f"{what}: {first(mine, other, bad)}")]


def special(spec: dict) -> bool:
    """Whether a transform's loss squares the largest numbers of a dtype."""
    return "grad" in spec.get("transform", "") and any(
        t.get("fill") == "special" for t in spec["tensors"].values()
    )


def near(x: Tensor, y: Tensor, limit: Tensor) -> Tensor:
    """Elementwise; alike NaNs and infinities are near."""
    if x.is_complex():  # what is infinite in one part has any other
        wild = ~x.isfinite() & ~y.isfinite()
        return wild | (near(x.real, y.real, limit) & near(x.imag, y.imag, limit))
    return ((x - y).abs() <= limit) | (x == y) | (x.isnan() & y.isnan())


def first(mine: Tensor, other: Tensor, bad: Tensor | None = None) -> str:
    bad = (mine != other) & ~(mine.isnan() & other.isnan()) if bad is None else bad
    if not bad.any():
        return "the signs of zeros"
    place = tuple(bad.nonzero()[0].tolist())
    return f"{complex(mine[place]):.9g} at {place}, torch: {complex(other[place]):.9g}"
