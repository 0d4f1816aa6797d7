"""Calls share a plan only where it is right for both: what a plan depends on changes its key, or a
guard tells it. From one call each field is varied, alone and together with each other one, and at
random all at once.

A stand-in for the kernels says which plan ran. Calls run cold and warm, so that the keys of all
caches are asked, with outblas-native that of C++ too.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.fp8 import E4M3, E5M2

import outblas
from outblas.call import dispatch, sm_carveout, warm
from outblas.call.grouped import NO_TENSORS, GroupedTensors
from outblas.kernels import portable
from outblas.torch_ops import aten, aten_calls, eager_scaled, grouped_plans, native
from outblas.torch_ops.aten_grouped import Grouped
from outblas.torch_ops.aten_scaled import Scaled

Tensor = torch.Tensor
Fields = dict[str, Sequence[Any]]  # the values of each field, of which the first is a call's own

M, N, K = 16, 24, 32
F32, BF16 = torch.float32, torch.bfloat16
TF32 = "float32 as tf32"
LEFT = ((0, 0), (16, 0), (0, 48))  # SMs of a context, and of a call


@functools.cache
def matrix(
    rows: int, columns: int, dtype: torch.dtype, place: int | str = 0, use: str = ""
) -> Tensor:
    """A matrix that begins so many elements past a cache line, or lies "by columns"; another one
    for each use.
    """
    memory = torch.zeros(rows * columns + 256, dtype=dtype)
    start = -memory.data_ptr() % 128 // memory.element_size()
    start += 0 if isinstance(place, str) else place
    flat = memory[start : start + rows * columns]
    return flat.view(columns, rows).t() if isinstance(place, str) else flat.view(rows, columns)


def variants(fields: Fields) -> Iterator[dict[str, Any]]:
    """The call of all first values; those with one other value; those with two."""
    first = {name: values[0] for name, values in fields.items()}
    changes = [(name, value) for name, values in fields.items() for value in values[1:]]
    yield first
    yield from (first | {name: value} for name, value in changes)
    for (name, value), (other, beside) in itertools.combinations(changes, 2):
        if name != other:
            yield first | {name: value, other: beside}


def described(value: Any) -> Any:
    """A value of a field as a message shows it: of a tensor, what a key has."""
    if not isinstance(value, Tensor):
        return value
    where = value.data_ptr() % 128
    return f"{value.dtype} {tuple(value.shape)}, strides {value.stride()}, at {where} of 128"


# ---- plans that run
@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The numbers of the plans that ran. Operands count as those of a GPU of 132 SMs."""
    numbers, ran = itertools.count(), list[int]()

    def plan(*_: object, no_product: bool) -> Callable[..., None]:
        number = next(numbers)
        return lambda *_: ran.append(number)

    monkeypatch.setattr(dispatch.launcher, "no_kernel_reason", lambda problem: None)
    monkeypatch.setattr(dispatch.launcher, "unsupported_reason", lambda kernel, problem: None)
    monkeypatch.setattr(dispatch.launcher, "best_launcher", plan)
    monkeypatch.setattr(dispatch.launcher, "named_launcher", plan)
    monkeypatch.setattr(sm_carveout, "_present", lambda operands: 132)
    dispatch.clear_cache()
    yield ran
    outblas.disable()
    dispatch.clear_cache()


def assert_plans_differ(call: Callable[..., object], fields: Fields, ran: list[int]) -> None:
    """Every call has a plan of its own, cold and, in another order, warm."""
    calls = list(variants(fields))
    plans: dict[int, int] = {}
    for order in (range(len(calls)), reversed(range(len(calls)))):
        for i in order:
            ran.clear()
            call(**calls[i])
            (plan,) = ran
            assert plans.setdefault(i, plan) == plan, f"two plans serve {calls[i]}"
    others: dict[int, int] = {}
    for i, plan in plans.items():
        other = others.setdefault(plan, i)
        assert other == i, f"one plan serves {calls[other]} and {calls[i]}"


@contextlib.contextmanager
def state(numbers: torch.dtype | str, carveout: int = 0, limit: int = 0) -> Iterator[torch.dtype]:
    """Settings of torch and a limit of SMs to leave free, and the dtype of operands."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32" if numbers == TF32 else "ieee"
    try:
        with outblas.sm_carveout(carveout), sm_carveout.call_limit.within(limit):
            yield numbers if isinstance(numbers, torch.dtype) else F32
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


OPERANDS: Fields = {
    "rows": (M, 5, 1),
    "a": (0, 1, 16, "by columns"),
    "b": (0, 1, 16, "by columns"),
    "numbers": (F32, BF16, TF32),
    "left": LEFT,
}
TENSOR = (None, 0, 1)
CHOICE: Fields = {
    "kernel": (None, "portable", "simt.naive"),
    "tune": (None, "off", "lookup"),
    "batch_invariant": (False, True),
}


def optional(*shape: Any, place: Any, use: str = "") -> Tensor | None:
    return None if place is None else matrix(*shape, place, use)


def limited(left: tuple[int, int]) -> int | None:
    return 132 - left[1] if left[1] else None


def matmul(rows: int, numbers: Any, left: Any, out: Any, wide: bool, **named: Any) -> None:
    with state(numbers, left[0]) as dtype:
        result = F32 if wide else dtype
        a, b = matrix(rows, K, dtype, named.pop("a")), matrix(K, N, dtype, named.pop("b"))
        for name in ("bias", "residual", "aux"):
            named[name] = optional(rows, N, result, place=named[name], use=name)
        named |= {"out_dtype": F32 if wide else None, "sms": limited(left)}
        outblas.matmul(a, b, out=optional(rows, N, result, place=out, use="out"), **named)


def addmm(rows: int, numbers: Any, left: Any, out: Any, **named: Any) -> None:
    with state(numbers, left[0]) as dtype:
        a, b = matrix(rows, K, dtype, named.pop("a")), matrix(K, N, dtype, named.pop("b"))
        where = optional(rows, N, dtype, place=out, use="out")
        c = matrix(rows, N, dtype, named.pop("c"))
        outblas.addmm(c, a, b, out=where, sms=limited(left), **named)


def linear(rows: int, numbers: Any, left: Any, bias: Any, ready: bool, **named: Any) -> None:
    with state(numbers, left[0]) as dtype, outblas.weights_ready(ready), torch.no_grad():
        x, w = matrix(rows, K, dtype, named.pop("a")), matrix(N, K, dtype, named.pop("b"))
        for name, use in (("residual", ""), ("out", "out")):
            named[name] = optional(rows, N, dtype, place=named[name], use=use)
        row = None if bias is None else matrix(1, N, dtype, bias)[0]
        outblas.linear(x, w, row, sms=limited(left), **named)


def with_config(config: Any, kernel: str) -> None:
    a, b = matrix(M, K, F32), matrix(K, N, F32)
    outblas.matmul(a, b, kernel=kernel, config=config)


ACTIVATION = {"activation": (None, "relu", "gelu")}
CALLS: dict[str, tuple[Callable[..., None], Fields]] = {
    "matmul": (
        matmul,
        OPERANDS
        | CHOICE
        | ACTIVATION
        | dict.fromkeys(("out", "bias", "residual", "aux"), TENSOR)
        | {"wide": (False, True)},
    ),
    "addmm": (
        addmm,
        OPERANDS
        | CHOICE
        | ACTIVATION
        | {"c": (0, 1), "out": TENSOR, "alpha": (2, 0, 1), "beta": (2, 0)},
    ),
    "linear": (
        linear,
        OPERANDS
        | CHOICE
        | ACTIVATION
        | {"bias": TENSOR, "residual": TENSOR, "out": TENSOR, "ready": (False, True)},
    ),
    "configs": (
        with_config,
        {"config": [None, portable.Config(block_m=32), portable.Config(block_m=64)]}
        | {"kernel": ["portable"]},
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_differ_have_plans_of_their_own(name: str, ran: list[int]) -> None:
    call, fields = CALLS[name]

    assert_plans_differ(call, fields, ran)


# ---- products of torch
def product(
    operator: str, rows: int, numbers: Any, left: Any, invariant: bool, **scalars: Any
) -> None:
    a, b, c, out = (scalars.pop(name) for name in ("a", "b", "c", "out"))
    with state(numbers, *left) as dtype, outblas.batch_invariant(invariant):
        tensors = [matrix(rows, K, dtype, a), matrix(K, N, dtype, b)]
        where = optional(rows, N, dtype, place=out, use="out")
        if operator in ("bmm", "baddbmm"):
            tensors = [t[None] for t in tensors]
            where = None if where is None else where[None]
        if operator.endswith(("addmm", "addbmm", "addmm_")):
            tensors.insert(0, matrix(rows, N, dtype, c))
        into = {} if where is None else {"out": where}
        if operator == "addmm_":
            tensors[0].addmm_(*tensors[1:], **scalars)
        else:
            getattr(torch, operator)(*tensors, **into, **scalars)


BARE = OPERANDS | {"c": (0,), "invariant": (False, True), "out": TENSOR}
SCALARS = {"alpha": (2, 0, 1), "beta": (2, 0)}
PRODUCTS: dict[str, Fields] = {
    "mm or bmm": BARE | {"operator": ("mm", "bmm")},
    "addmm": BARE | SCALARS | {"operator": ("addmm",), "c": (0, 1)},
    "addmm_": BARE | SCALARS | {"operator": ("addmm_",), "c": (0, 1), "out": (None,)},
    "baddbmm": BARE | {"operator": ("baddbmm",), "c": (0, 1)},
    "baddbmm that reads no addend": BARE | {"operator": ("baddbmm",), "beta": (0,)},
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_torch_that_differ_have_plans_of_their_own(name: str, ran: list[int]) -> None:
    rules = aten.Rules((F32, BF16), 0, 0, None, key="CPU", kernel="portable")

    with aten._enable(rules):
        assert_plans_differ(product, PRODUCTS[name], ran)


# ---- calls that operators plan
FP8: Fields = {
    "a": [matrix(M, K, E4M3, place) for place in (0, 1, 16)] + [matrix(M, K, E5M2)],
    "b": [matrix(N, K, E4M3, place).t() for place in (0, 1)] + [matrix(2 * N, K, E4M3).t()],
    "scale_a": [matrix(1, 1, F32), matrix(1, 1, F32, 1), matrix(M, 1, F32)],
    "scale_b": [matrix(1, 1, F32, 2), matrix(1, 1, F32, 3), matrix(1, N, F32), None],
    "bias": [None, *(matrix(1, N, BF16, place)[0] for place in (0, 1))],
    "use_fast_accum": [False, True],
}


def scales(scale_a: Tensor, scale_b: Tensor | None) -> tuple[Tensor, Tensor]:
    """Both scales; they are one tensor where that of B is None."""
    return scale_a, scale_a if scale_b is None else scale_b


def scaled(a: Any, b: Any, scale_a: Any, scale_b: Any, **options: Any) -> warm.WarmPlan | None:
    """Of `outblas.scaled_mm`."""
    bias, residual, fast = (options.pop(n) for n in ("bias", "residual", "use_fast_accum"))
    operands = a, b, *scales(scale_a, scale_b), bias, residual
    given = options.pop("out_dtype"), fast, options.pop("activation"), *options.pop("rounding")
    return eager_scaled._entry(operands, given)


def of_torch(attempt: Callable[..., object], call: Any) -> warm.WarmPlan | None:
    """Of a function that `outblas.enable` overrides."""
    entries: list[warm.WarmPlan | None] = []

    def find(*given: Any) -> warm.WarmPlan | None:
        entries.append(warm.find(*given))
        return entries[-1]

    rules = aten.Rules((F32, BF16), 0, 0, None, key="CPU", kernel="portable")
    with (
        mock.patch.object(aten_calls, "_active", aten.Active(rules, {})),
        mock.patch.object(aten_calls, "_find", find),
        mock.patch.object(aten_calls, "_decide", return_value="torch"),
    ):
        attempt(call)
    (entry,) = entries
    return entry


def scaled_of_torch(a: Any, b: Any, scale_a: Any, scale_b: Any, **options: Any) -> Any:
    call = Scaled(a, b, *scales(scale_a, scale_b), **options)
    return of_torch(aten_calls.attempt_scaled, call)


TOKENS: Fields = {
    "mat_a": [matrix(M, K, F32, place) for place in (0, 1, "by columns")] + [matrix(M, K, BF16)],
    "mat_b": [torch.zeros(3, K, N), torch.zeros(3, K, 2 * N), torch.zeros(4, K, N)],
    "offs": [
        matrix(1, 8, torch.int32, place)[0, :size] for place, size in ((0, 3), (1, 3), (0, 4))
    ],
}


def grouped_of_torch(mat_a: Any, mat_b: Any, **others: Any) -> Any:
    return of_torch(aten_calls.attempt_grouped, Grouped(mat_a, mat_b, **others))


def grouped(
    kind: int, mat_a: Any, mat_b: Any, offs: Any, options: Any, **tensors: Any
) -> warm.WarmPlan | None:
    """Of `outblas.grouped_mm`, and of its operator."""
    is_bare = all(t is None for t in tensors.values())
    others = NO_TENSORS if is_bare else GroupedTensors(**tensors)
    return grouped_plans._entry(kind, mat_a, mat_b, offs, others, options)


GROUPED_OPTIONS = [
    (activation, out_dtype, kernel, zero_tail)
    for activation in ("", "relu")
    for out_dtype in (None, F32, BF16)
    for kernel in ("", "portable")
    for zero_tail in (False, True)
]
BESIDE: Fields = {
    name: [None, *(torch.zeros(8)[place : place + 3] for place in (0, 1))]
    for name in GroupedTensors._fields
    if name not in ("aux", "counts")
}
ROUNDING = [(), ("row", False), ("row", True), ("block", False)]
KINDS = [int(warm.Kind.GROUPED_MM), int(warm.Kind.GROUPED_OPERATOR)]
ENTRIES: dict[str, tuple[Callable[..., warm.WarmPlan | None], Fields]] = {
    "scaled_mm": (
        scaled,
        FP8
        | {"out_dtype": [BF16, F32, torch.float16], "activation": [None, "", "relu"]}
        | {"residual": [None, matrix(M, N, BF16), matrix(M, N, BF16, 1)], "rounding": ROUNDING},
    ),
    "torch's scaled_mm": (
        scaled_of_torch,
        FP8
        | {"scale_result": [None, torch.ones(())], "out_dtype": [None, BF16, F32]}
        | {"out": [None, *(matrix(M, N, BF16, place) for place in (0, 1, "by columns"))]},
    ),
    "torch's grouped_mm": (
        grouped_of_torch,
        TOKENS | {"bias": [None, torch.zeros(3, N)], "out_dtype": [None, F32, BF16]},
    ),
    "grouped_mm": (grouped, TOKENS | BESIDE | {"kind": KINDS, "options": GROUPED_OPTIONS}),
}


class RowsPlan:
    """Stands for a plan that serves any number of rows. Its parts return its number and sizes."""

    any_rows = True

    def __init__(self, number: int) -> None:
        self.number = number

    def at(self, sizes: Sequence[int], by_torch: bool = True) -> Callable[..., Any]:
        return lambda *_: (self.number, sizes)


def take_plan(entry_of: Callable[..., warm.WarmPlan | None], ran: list[Any], **fields: Any) -> None:
    """Notes the plan of a call, which gets one if it has none."""
    with state(F32, *fields.pop("left")):
        entry = entry_of(**fields)
        assert entry is not None
        if entry.call is not None:
            any_rows = entry.call[0][0] == warm.Kind.SCALED_MM
            plan = RowsPlan(next(NUMBERS))
            assert entry.keep(plan if any_rows else plan.at(()), any_rows=any_rows)
    ran[:] = [entry.plan()]


NUMBERS = itertools.count()


@pytest.mark.parametrize("name", ENTRIES)
def test_calls_that_operators_plan_have_plans_of_their_own(name: str, ran: list[int]) -> None:
    entry_of, fields = ENTRIES[name]

    assert_plans_differ(functools.partial(take_plan, entry_of, ran), {**fields, "left": LEFT}, ran)


# ---- calls at random
ALL: dict[str, tuple[Callable[..., Any], Fields]] = {
    **CALLS,
    **{name: (product, fields) for name, fields in PRODUCTS.items()},
    **ENTRIES,
}


@pytest.mark.parametrize("name", ALL)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_calls_at_random_share_a_plan_only_if_they_are_alike(
    name: str, ran: list[int], data: st.DataObject
) -> None:
    call, fields = ALL[name]
    if name in ENTRIES:
        call, fields = functools.partial(take_plan, call, ran), {**fields, "left": LEFT}
    places = st.fixed_dictionaries({f: st.integers(0, len(v) - 1) for f, v in fields.items()})
    one, other = data.draw(places), data.draw(places)
    rules = aten.Rules((F32, BF16), 0, 0, None, key="CPU", kernel="portable")
    plans = []
    with aten._enable(rules) if name in PRODUCTS else contextlib.nullcontext():
        for chosen in (one, other, one):
            ran.clear()
            call(**{field: values[chosen[field]] for field, values in fields.items()})
            plans += ran

    assert plans[0] == plans[2], "a warm call has the plan of the cold one"
    assert (plans[0] == plans[1]) is (one == other)


# ---- keys of C++
NATIVE: Fields = {
    "kind": list(native.Kind),
    "a": [matrix(M, K, F32, place) for place in (0, 1, 16, "by columns")] + [matrix(M, K, BF16)],
    "b": [matrix(K, N, F32, place) for place in (0, 1, "by columns")] + [matrix(K, 2 * N, F32)],
    "c": [None, *(matrix(M, N, F32, place) for place in (0, 1, "by columns"))],
    "bias": [None, *(matrix(1, N, F32, place)[0] for place in (0, 1))],
    "residual": [None, *(matrix(M, N, F32, place) for place in (0, 1))],
    "out": [None, *(matrix(M, N, F32, place) for place in (0, 1))],
    "activation": ["", "relu", "gelu"],
    "batch_invariant": [False, True],
    "recorded": [False, True],
    "alpha": [1.0, 0.0, 0.5],
    "beta": [0.0, 1.0, 0.5],
    "left": LEFT,
    "autocast": [False, True],
    "inference": [False, True],
}


def test_keys_of_cpp_differ() -> None:
    """A plan is added where there is none of an equal key."""
    package = native._package
    if package is None:
        pytest.skip("needs outblas-native")
    output = [M, N], [N, 1], F32, torch.device("cpu")
    dispatch.clear_cache()
    for numbers in (F32, TF32):
        for fields in variants(NATIVE):
            call = dict(fields)
            tensors = tuple(call.pop(name) for name in ("a", "b", "c", "bias", "residual", "out"))
            if numbers == TF32 and tensors[0].dtype is BF16:
                continue
            scalars = call.pop("alpha"), call.pop("beta")
            with (
                state(numbers, *call.pop("left")),
                torch.autocast("cpu", enabled=call.pop("autocast")),
                torch.inference_mode(call.pop("inference")),
            ):
                size = package.counts()[0]
                package.remember(
                    int(call.pop("kind")),
                    tensors,
                    call.pop("activation"),
                    call.pop("batch_invariant"),
                    call.pop("recorded"),
                    scalars,
                    *(lambda *_: None, lambda *_: None),
                    output,
                    *(False, False, None, dispatch.PLAN_LIMIT),
                )
            told = {name: described(value) for name, value in fields.items()}
            assert package.counts()[0] == size + 1, f"another call has the key of {numbers} {told}"
            assert not call
    dispatch.clear_cache()
