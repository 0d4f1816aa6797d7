"""The oracles. Each runs a kernel on a `Case` and reports whether the whole result, and nothing
else, was written, and whether it is correct.
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import torch

from outblas.verify.call import Fill, GuardedCall, Run, prepare
from outblas.verify.cases import Case

# The largest integers to multiply; each dtype represents all integers up to its value here. 4095 in
# fp32 needs a bit more than tf32 has.
_LARGEST = {torch.bfloat16: 256, torch.float16: 2048, torch.float32: 4095}
_EXACT = 1 << 24  # fp32 represents every integer up to it
_FP16_LIMIT = 65504.0
_UNIT = 2.0**-24  # unit roundoff of fp32
# Unit roundoff of tf32 with rounding to nearest. Plain fp32 registers would be truncated, which
# doubles the error.
_TF32_UNIT = 2.0**-11
# Rounding errors are nearly independent, so the norm of n of them varies by about 1/√n: 6% at 256
# elements. A factor of 2 between two such norms is then no accident; with fewer elements it can be.
_STATISTIC = 256


@dataclass(frozen=True)
class Result:
    """The result of one oracle on one call. `message` holds figures if ok, otherwise what went
    wrong.
    """

    case: Case
    oracle: str
    ok: bool
    message: str

    def record(self) -> dict[str, str | bool]:
        """Returns the result as a JSON object."""
        return {
            "case": str(self.case),
            "oracle": self.oracle,
            "ok": self.ok,
            "message": self.message,
        }


def exact(run: Run, case: Case, device: torch.device | str = "cpu") -> Result:
    """Checks a product of small integers, whose partial sums fp32 all represents: the result must
    equal the float64 product rounded once, bit for bit.

    Only the sign of zero is free. The sign of an exact zero sum depends on the order of its terms
    and on the initial value of the sum, which neither torch nor IEEE 754 prescribes. Raises
    ValueError if K, alpha or beta leave no room for exact integers.
    """
    return Exact(case, device)(run)


class Exact:
    """The exact oracle for many kernels on one case. Operands and their product are made once.

    Kernels must not change the operands. A kernel whose result is not ok may have changed them, so
    create a new object after it.
    """

    def __init__(self, case: Case, device: torch.device | str = "cpu") -> None:
        ra, rb, rc = integer_ranges(case)
        self._figures = f"a within ±{ra}, b within ±{rb}"
        self._call = prepare(case, device, _integers(ra), _integers(rb), _integers(rc))
        self._want = torch.empty(self._call.out.shape, dtype=case.result_dtype, device=device)
        for rows in self._call.row_chunks():
            # torch rounds float64 to 16 bits by way of fp32, which represents these sums exactly:
            # one rounding.
            self._want[..., rows, :] = self._call.product(rows)

    @property
    def operands(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns a, b and out as `run` receives them."""
        return self._call.a.view, self._call.b.view, self._call.out.view

    def __call__(self, run: Run) -> Result:
        call = self._call
        call.out.reset()
        call.run(run)
        return _result("exact", call, call.out.view != self._want, self._figures)


def bounded(run: Run, case: Case, device: torch.device | str = "cpu") -> Result:
    """Checks a product of normal data: elementwise |out - out₆₄| ≤ 2·K·2⁻²⁴·(|A||B|) + ½ ulp(out),
    and a Frobenius error similar to torch's.

    An addend counts as two more terms. The relative Frobenius error may be at most twice that of
    torch in the same dtypes on the same device; it is not checked for fewer than 256 different
    elements.
    """
    return against("bounded", run, case, device, GuardedCall.torch_product, "torch's", 2.0)


def chained(run: Run, case: Case, device: torch.device | str = "cpu") -> Result:
    """Checks what `bounded` checks, for kernels that sum along K in one chain of FMAs: the
    Frobenius error must equal that of such a chain within 1%.

    torch is not a suitable reference where cuBLAS splits K, because several short chains have a
    smaller error.
    """
    return against("chained", run, case, device, GuardedCall.chained_product, "the chain's", 1.01)


def against(
    oracle: str,
    run: Run,
    case: Case,
    device: torch.device | str,
    reference: Callable[[GuardedCall], torch.Tensor],
    whose: str,
    times: float,
) -> Result:
    """Checks normal data against the elementwise bound, and its Frobenius error against `times`
    that of a reference product.

    Messages call the reference `whose`.
    """
    call = prepare(case, device, _normal, _normal, _normal)
    call.run(run)
    theirs = reference(call)

    # Squares: our error, the reference's error, the norm.
    sums = torch.zeros(3, dtype=torch.float64, device=theirs.device)
    worst = torch.zeros((), dtype=torch.float64, device=theirs.device)

    def judge(got: torch.Tensor, want: torch.Tensor, rows: slice) -> torch.Tensor:
        error = (got.double() - want).abs_()
        allowed = _allowance(call, want, rows)
        if error.numel():
            torch.maximum(
                worst, (error / allowed).nan_to_num_(nan=0.0, posinf=math.inf).max(), out=worst
            )
        sums.add_(
            torch.stack(
                [t.square().sum() for t in (error, theirs[..., rows, :].double() - want, want)]
            )
        )
        return ~(error <= allowed)

    wrong = _mask(call, judge)
    figures = [f"largest error {float(worst):.3g} of its bound"]
    faults = []
    different = wrong.numel() // max(1, {"a": case.M, "b": case.N}.get(case.expand, 1))
    if different < _STATISTIC or case.K == 0:
        figures.append(f"no Frobenius statistic of {different} different elements")
    else:
        ours, other = (float(x) for x in (sums[:2] / sums[2]).sqrt())
        limit = times * other
        figures.append(
            f"relative Frobenius error {ours:.3g}, {whose} {other:.3g}, allowed {limit:.3g}"
        )
        if ours > limit and not bool(wrong.any()):
            faults = [figures[-1]]
    return _result(oracle, call, wrong, "; ".join(figures), faults)


def nonfinite(run: Run, case: Case, device: torch.device | str = "cpu") -> Result:
    """Checks a product with NaN, ±Inf and 0 · Inf in the operands: NaN, +Inf, -Inf and finite
    results must be where torch.matmul has them.

    The reference is the float64 product, which follows IEEE 754. So does torch.matmul, except for
    bf16 with odd K on the CPU, where oneDNN pads K and turns Inf times padding into NaN.
    """
    call = prepare(case, device, _nonfinite_a, _nonfinite_b, _nonfinite_c)
    call.run(run)

    def judge(got: torch.Tensor, want: torch.Tensor, rows: slice) -> torch.Tensor:
        return (
            (got.isnan() != want.isnan())
            | (got.isposinf() != want.isposinf())
            | (got.isneginf() != want.isneginf())
        )

    wrong = _mask(call, judge)
    return _result(
        "nonfinite",
        call,
        wrong,
        f"{int((~call.out.view.isfinite()).sum())} NaN or Inf in the right places",
    )


def determinism(
    run: Run, case: Case, device: torch.device | str = "cpu", times: int = 10
) -> Result:
    """Checks that the same call returns the same bits `times` times; on a GPU, every other call
    runs concurrently with work on another stream.
    """
    call = prepare(case, device, _normal, _normal, _normal)
    call.run(run)
    first = call.out.bits().clone()
    differs = torch.zeros(call.out.shape, dtype=torch.bool, device=first.device)
    differing = 0
    for repeat in range(1, times):
        call.out.reset()
        if repeat % 2 and first.is_cuda:
            _disturb(first.device)
        call.run(run)
        changed = call.out.bits() != first
        differing += bool(changed.any())
        differs |= changed
    faults = (
        [f"{differing} of {times - 1} repeats differ from the first call in {where(differs)}"]
        if differing
        else []
    )
    return _result("determinism", call, call.out.unwritten(), f"{times} calls, equal bits", faults)


ORACLES: dict[str, Callable[[Run, Case, torch.device | str], Result]] = {
    "exact": exact,
    "bounded": bounded,
    "chained": chained,
    "nonfinite": nonfinite,
    "determinism": determinism,
}


def integer_ranges(case: Case) -> tuple[int, int, int]:
    """Returns the largest |a|, |b| and |c| for the exact oracle.

    Every intermediate must be a multiple of one power of two and less than 2²⁴ times it in size. A
    B is computed in whole numbers; alpha · A B and beta · C, which get half of the range each, in
    units of the last bit of alpha and beta. An fp16 result must stay finite: its maximum or, for
    many terms, eight standard deviations are below 65504. fp32 operands have unequal ranges, a wide
    one times a narrow one, because a wide one reveals rounding to tf32.
    """
    quantum = 1 / max(case.alpha.as_integer_ratio()[1], case.beta.as_integer_ratio()[1])
    half = 0.5 if case.beta else 1.0
    room = half * _EXACT * quantum
    ceiling = half * _FP16_LIMIT if case.result_dtype == torch.float16 else math.inf
    largest = 2048 if case.tf32 else _LARGEST[case.dtype]

    def fits(ra: int, rb: int) -> bool:
        peak = case.K * ra * rb
        likely = 8 * math.sqrt(case.K * ra * (ra + 1) * rb * (rb + 1)) / 3
        alpha = abs(case.alpha)
        return peak < _EXACT and alpha * peak < room and alpha * min(peak, likely) < ceiling

    def most(condition: Callable[[int], bool]) -> int:
        return bisect_left(range(1, largest + 1), True, key=lambda r: not condition(r))

    rc = most(lambda r: abs(case.beta) * r < min(room, ceiling))
    ra = rb = most(lambda r: fits(r, r))
    if case.dtype == torch.float32 and not case.tf32 and fits(largest, 1):
        ra, rb = largest, most(lambda r: fits(largest, r))
    if min(ra, rb, rc) < 1:
        raise ValueError(
            f"K is {case.K}, alpha {case.alpha} and beta {case.beta}, expected K < 2**24, and "
            "alpha and beta of few "
            "bits: fp32 cannot hold every partial sum"
        )
    return ra, rb, rc


def ulp(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the spacing of `dtype` at each |x| (float64). A power of two has the spacing of the
    binade that it starts; subnormals all have the same.
    """
    info = torch.finfo(dtype)
    mantissa, _ = torch.frexp(x)  # in [½, 1): x / mantissa is a power of two, and exact
    power = (x / mantissa).abs_().div_(2).nan_to_num_(nan=0.0)
    return power.clamp_(min=info.smallest_normal).mul_(info.eps)


def _allowance(call: GuardedCall, want: torch.Tensor, rows: slice) -> torch.Tensor:
    case = call.case
    unit = 2 * _UNIT * (case.K + 2 * bool(case.addend)) + 2 * _TF32_UNIT * case.tf32
    slack = call.product(rows, absolute=True).mul_(unit)
    # The sum before rounding is up to `slack` away from `want`, perhaps in the next binade.
    return slack.add_(ulp(want.abs() + slack, case.result_dtype), alpha=0.5)


def _mask(
    call: GuardedCall, judge: Callable[[torch.Tensor, torch.Tensor, slice], torch.Tensor]
) -> torch.Tensor:
    """Returns a mask of the elements for which `judge(got, want, rows)` is true."""
    wrong = torch.empty(call.out.shape, dtype=torch.bool, device=call.out.storage.device)
    for rows in call.row_chunks():
        wrong[..., rows, :] = judge(call.out.view[..., rows, :], call.product(rows), rows)
    return wrong


def _result(
    oracle: str,
    call: GuardedCall,
    wrong: torch.Tensor,
    figures: str,
    faults: list[str] | None = None,
) -> Result:
    faults = [*describe(call, wrong), *(faults or []), *call.violations()]
    return Result(call.case, oracle, not faults, "; ".join(faults) or figures)


def _integers(largest: int) -> Fill:
    return lambda t, generator: t.random_(-largest, largest + 1, generator=generator)


def _normal(t: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return t.normal_(generator=generator)


def _nonfinite_a(t: torch.Tensor, generator: torch.Generator) -> None:
    """Puts +Inf at the last row and the last k, and NaN in a middle row at the first k."""
    _normal(t, generator)
    if t.numel():
        if t.shape[-2] > 2:
            t[..., t.shape[-2] // 2, 0] = math.nan
        t[..., -1, -1] = math.inf


def _nonfinite_b(t: torch.Tensor, generator: torch.Generator) -> None:
    """Puts 0 where A's Inf meets the first column, and -Inf in the last column at a middle k."""
    _normal(t, generator)
    if t.numel():
        t[..., -1, 0] = 0.0
        t[..., t.shape[-2] // 2, -1] = -math.inf


def _nonfinite_c(t: torch.Tensor, generator: torch.Generator) -> None:
    """Puts -Inf in the last column."""
    _normal(t, generator)
    if t.numel():
        t[..., -1] = -math.inf


def _disturb(device: torch.device) -> None:
    """Starts a few milliseconds of work on another stream."""
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        x = torch.ones(2048, 2048, device=device)
        for _ in range(4):
            x = x @ x


# ---- what went wrong
def describe(call: GuardedCall, wrong: torch.Tensor) -> list[str]:
    """Returns one line about elements that were never written and one about wrong ones. `wrong` is
    a mask of out's shape.
    """
    unwritten = call.out.unwritten()
    lines = []
    if bool(unwritten.any()):
        lines.append(f"unwritten: {where(unwritten)}")
    values = wrong & ~unwritten
    if bool(values.any()):
        lines.append(f"wrong: {where(values)}; {_errors(call, values)}")
    return lines


def where(mask: torch.Tensor) -> str:
    """Returns the number of marked elements, the first index, and the bounding box. A box that is
    completely marked points at a tile, a row or a column.
    """
    batches = mask.flatten(0, -3) if mask.dim() > 2 else mask[None]
    used = int(batches.flatten(1).any(-1).sum())
    rows, columns = (batches.any(dim).any(0).nonzero().flatten().tolist() for dim in (-1, -2))
    count = int(mask.sum())
    area = used * (rows[-1] - rows[0] + 1) * (columns[-1] - columns[0] + 1)
    box = (
        f"{'all of' if area == count else 'within'} rows {rows[0]}-{rows[-1]}, columns "
        f"{columns[0]}-{columns[-1]}"
    )
    matrices = f" of {used} of {len(batches)} matrices" if mask.dim() > 2 else ""
    return f"{count} of {mask.numel()} elements, first at {list(_first_of(mask))}, {box}{matrices}"


def _first_of(mask: torch.Tensor) -> tuple[int, ...]:
    """Returns the index of the first True, one dimension at a time, because torch.nonzero does not
    support 2³¹ elements.
    """
    index: list[int] = []
    while mask.dim():
        index.append(
            int(mask.flatten(1).any(-1).nonzero()[0]) if mask.dim() > 1 else int(mask.nonzero()[0])
        )
        mask = mask[index[-1]]
    return tuple(index)


def _errors(call: GuardedCall, wrong: torch.Tensor) -> str:
    """Returns the expected and the actual value of the first wrong element, and the number of
    NaN.
    """
    *batch, row, column = index = _first_of(wrong)
    want = call.product(slice(row, row + 1))[(*batch, 0, column)].to(call.out.view.dtype)
    text = f"expected {float(want):.9g}, got {float(call.out.view[index]):.9g}"
    if nans := int((call.out.view.isnan() & wrong).sum()):
        text += f"; {nans} are NaN (read outside the operands, where all is NaN?)"
    return text
