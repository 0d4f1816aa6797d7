"""The warm path, which all calls share: is the call unobserved? → its key → the plan of calls like
it → the launch.

Planning costs thousands of times what a plan costs that is there, and a call through torch's
dispatcher costs the host more than all else but the launch. So a call is looked up before anything
is checked. What a plan depends on is compared twice over: a key has what is cheap to compare and
tells most calls apart, and Dynamo's guard compares every property of every tensor, and the state of
the dispatcher, in one call.

A key is a record: the kind of the call; its options; the SMs that it leaves free; where A and B
begin in a cache line; whether they are one tensor; the number of B's elements; and for each other
tensor of the kind where it begins in 16 bytes, or None. Plans that serve any number of rows have
this key, others have the number of A's elements beside it.
"""

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import torch

from outblas.base import forks
from outblas.base.compat.torch_private import any_autocast as _any_autocast
from outblas.base.compat.torch_private import dispatch_mode_count as _dispatch_modes
from outblas.base.compat.torch_private import forward_levels as _forward_levels
from outblas.base.compat.torch_private import fp32_precision as _precision
from outblas.base.compat.torch_private import get_sm_carveout as _sm_carveout
from outblas.base.compat.torch_private import has_override as _has_override
from outblas.base.compat.torch_private import profiled as _profiled
from outblas.base.compat.torch_private import tensor_guard, tracing_state, transform_level
from outblas.call import dispatch
from outblas.call.sm_carveout import call_limit as _limit
from outblas.call.tensor_memory import LINE, packed_strides
from outblas.call.tensor_memory import read_address as _address

Tensor = torch.Tensor
Parameter = torch.nn.Parameter
# All tensors of a call but A and B, in the order of its kind, None for those that it has not. Those
# at the end may be left out.
Others = Sequence[Tensor | None]
Key = tuple[Any, ...]


class Kind(IntEnum):
    """The function that a call came through, as in `call_key.h`. Calls of different functions have
    plans of their own, since their operands lie differently. `_OTHERS` has the order of others.
    """

    MATMUL = 0
    LINEAR = 1  # B is the weight as it is stored, (N, K)
    SCALED_MM = 2
    GROUPED_MM = 3
    # Calls that come from torch's dispatcher, which has shown them to whoever observes operators.
    GROUPED_OPERATOR = 4
    MM = 5
    BMM = 6
    ADDMM = 7
    ATEN = 8  # the operator's name is an option; in C++ it is one of the three above


# What types have that override nothing.
_RUNS_AS_PLAIN: Any = Tensor.__torch_dispatch__
_WRAPS_NOTHING: Any = Parameter.__torch_function__

_FROM_DISPATCHER = int(Kind.GROUPED_OPERATOR)
# Where A and B begin in a cache line decides how a GEMM runs, and how a grouped one where they
# begin in 16 bytes.
_MASKS = tuple(15 if "GROUPED" in kind.name else LINE - 1 for kind in Kind)
_MOST_PER_PLACE = 16
# The others of calls whose plans may serve any number of rows. Those of grouped calls are offs and
# the fields of `GroupedTensors`, those of aten's operators are in the order of `aten_calls`.
_OTHERS = {
    Kind.MATMUL: ("c", "out", "bias", "residual", "aux"),
    Kind.LINEAR: ("bias", "residual", "out"),
    Kind.SCALED_MM: ("scale_a", "scale_b", "bias", "residual"),
}


# Reading slots is faster than reading a NamedTuple's fields; `eq` and `repr` would cost import
# time.
@dataclass(slots=True, eq=False, repr=False)
class WarmPlan:
    """What is kept of a call for calls like it; its plan is None before there is one.

    call: the key, the number of A's elements, the others and the tensors of the call; None once its
        plan is kept.
    matches: whether tensors equal those of the call in type, sizes, strides, dtype, device,
        requires_grad and dispatch keys, but for the number of rows where the plan serves any.
    details: what else the caller has to know of calls like this one.
    columns: the last size of A as the plan takes it.
    gradients: whether gradients are on; None where no tensor requires them, or autograd has had its
        part. tf32: whether fp32 products use tf32; None for other operands. depends: whether either
        is to be compared.
    used: whether a call took it since the clock's hand passed.
    offered: when the plan was offered to the C++ module, as `native.generation` counts.
    """

    call: "tuple[Key, int, Others, tuple[Tensor, ...]] | None"
    matches: Callable[..., bool] = bool
    plan: Any = None
    details: Any = None
    columns: int = 0
    gradients: bool | None = None
    tf32: bool | None = None
    depends: bool = False
    used: bool = False
    offered: int = -1

    def keep(
        self, plan: Any, *, any_rows: bool = False, columns: int = 0, details: Any = None
    ) -> bool:
        """Takes the plan of the call, and keeps it for calls like it unless it is pending. Returns
        False where it cannot: no guard compares tensors of which one is there twice.

        any_rows: whether the plan serves any number of A's rows, and of all tensors that have them.
            It is kept for all numbers then, and its part for this one besides. columns: the last
            size of A as the plan takes it, if it is another than in the call.
        """
        assert self.call is not None, "a plan is kept once"
        key, count, others, tensors = self.call
        a = tensors[0]
        guard = tensor_guard(tensors)
        if guard is None or len({id(t) for t in tensors}) < len(tensors):
            return False
        self.matches = guard
        if key[0] < _FROM_DISPATCHER and any(t.requires_grad for t in tensors):
            self.gradients = _gradients_enabled()
        if a.dtype is torch.float32:
            self.tf32 = dispatch.tf32_requested()
        self.depends = self.gradients is not None or self.tf32 is not None
        self.plan, self.details, self.call = plan, details, None
        if any_rows:
            self.columns = columns or a.shape[-1]
            self.plan = _part(plan, a, self.columns)
            if guard := _guard_of_any_rows(_OTHERS[key[0]], others, tensors):
                _insert(key, None, replace(self, matches=guard, plan=plan))
        _insert(key, count, self)
        return True

    def alike(self, kind: int) -> "tuple[WarmPlan, ...]":
        """Returns what is kept of calls of another kind that have the key of this one, which has no
        plan yet.
        """
        assert self.call is not None, "there is no plan yet"
        key, count, *_ = self.call
        return _table.get((kind, *key[1:]), {}).get(count, ())


# By key and, but for plans of any number of rows, by the number of A's elements.
_table: dict[Key, dict[int | None, tuple[WarmPlan, ...]]] = {}
_clock: deque[tuple[Key, int | None]] = deque()  # all places of the table; the hand is at the left
_lock = forks.Lock()
_gradients_enabled = torch.is_grad_enabled


def _insert(key: Key, place: int | None, entry: WarmPlan) -> None:
    """Adds an entry to the table, unless torch stands in for its plan for a while."""
    if dispatch.is_pending(entry.plan):
        return
    with _lock:
        entries = _table.get(key, {}).get(place, ())
        if not entries:
            while len(_clock) >= dispatch.PLAN_LIMIT:
                _pass_hand()
            _clock.append((key, place))
        elif len(entries) == _MOST_PER_PLACE:
            idle = next((kept for kept in entries if not kept.used), entries[0])
            entries = tuple(kept for kept in entries if kept is not idle)
            for kept in entries:
                kept.used = False
        _table.setdefault(key, {})[place] = (*entries, entry)


def _pass_hand() -> None:
    """Forgets the entries that the hand of the clock points at, unless a call took one since the
    hand passed them.
    """
    key, place = _clock.popleft()
    entries = _table[key][place]
    if any(entry.used for entry in entries):
        for entry in entries:
            entry.used = False
        _clock.append((key, place))
    else:
        del _table[key][place]
        if not _table[key]:
            del _table[key]


# ---- unobserved?
def is_observed(*tensors: Any) -> bool:
    """Returns whether a mode, the profiler or the type of an operand would see an operator."""
    return (
        _has_override(*tensors)
        or _dispatch_modes() > 0
        or _forward_levels._current_level >= 0
        or _profiled()
    )


def is_plain(t: object) -> bool:
    """Returns whether a value is a tensor of a type that changes nothing: one of torch's own two,
    or one that overrides no operator, and has switched functions off, which wrap results otherwise.
    """
    kind: Any = type(t)
    return isinstance(t, Tensor) and (
        kind is Tensor
        or kind is Parameter
        or (kind.__torch_dispatch__ is _RUNS_AS_PLAIN and kind.__torch_function__ is _WRAPS_NOTHING)
    )


def is_unchanged(tensors: Sequence[Tensor]) -> bool:
    """Returns whether operators would only compute with these tensors, without casting, recording
    or resolving them.
    """
    transformed = transform_level() is not None or tracing_state() is not None or _any_autocast()
    return not transformed and all(
        _address(t) and not (t.is_nested or t.is_neg() or t.is_conj()) for t in tensors
    )


# ---- key, plan
def find(kind: int, options: Any, a: Tensor, b: Tensor, others: Others = ()) -> WarmPlan | None:
    """Returns the entry of calls like this one, which has no plan yet where this is the first.
    Returns None where something observes the call, or a tensor has no address.

    kind: a value of `Kind`. options: what the plan depends on besides tensors, which can be hashed;
    values of different types must not be equal. Arguments may have any type otherwise. Dynamo must
    not trace this function, because it must see the operator.
    """
    if kind < _FROM_DISPATCHER and (
        _has_override(a, b)
        or _dispatch_modes()  # a guard does not see those of tracers and of fake tensors
        or _forward_levels._current_level >= 0
        or _profiled()
    ):
        return None
    tensors: tuple[Tensor, ...] = (a, b) if b is not a else (a,)
    try:
        count = a.numel()
        left = (_limit.ever and _limit.count()) or _sm_carveout()
        mask = _MASKS[kind]
        place_a, place_b = _address(a) & mask, _address(b) & mask
        key: Key = (kind, options, left, place_a, place_b, b.numel(), b is a)
        for t in others:
            if t is None:
                key += (None,)
            elif t is a or t is b or t is tensors[-1]:  # a guard takes no tensor twice
                key += (-1 if t is a else -2 if t is b else -3,)
            elif type(t) is not Tensor and kind < _FROM_DISPATCHER and _has_override(t):
                return None
            else:
                tensors += (t,)
                key += (_address(t) & 15,)
    except (RuntimeError, TypeError, AttributeError):  # wrapped or sparse tensors, or no tensors
        return None
    bucket = _table.get(key)
    if bucket is not None:
        for entry in bucket.get(count, ()):
            if entry.matches(*tensors) and (
                not entry.depends
                or (  # as in `_is_state_of`, whose call would cost as much
                    ((on := entry.gradients) is None or on is _gradients_enabled())
                    and (
                        (on := entry.tf32) is None or on is (_precision("cuda", "matmul") == "tf32")
                    )
                )
            ):
                entry.used = True
                return entry
        for entry in bucket.get(None, ()):
            if entry.matches(*tensors) and (not entry.depends or _is_state_of(entry)):
                entry.used = True
                return _at(entry, key, count, tensors)
    return WarmPlan((key, count, others, tensors))


def _is_state_of(entry: WarmPlan) -> bool:
    gradients, tf32 = entry.gradients, entry.tf32
    return (gradients is None or gradients is _gradients_enabled()) and (
        tf32 is None or tf32 is (_precision("cuda", "matmul") == "tf32")
    )


def _part(plan: Any, a: Tensor, columns: int) -> Any:
    """Returns the part of a plan for the rows of A."""
    return dispatch.at_rows(plan, torch.Size((*a.shape[:-1], columns)))


def _at(entry: WarmPlan, key: Key, count: int, tensors: tuple[Tensor, ...]) -> WarmPlan:
    """Returns the entry of a call with a number of rows that is met for the first time, from one
    that serves any.
    """
    plan = _part(entry.plan, tensors[0], entry.columns)
    guard = tensor_guard(tensors)
    assert guard is not None, "there was one for other rows"
    exact = replace(entry, matches=guard, plan=plan, used=False, offered=-1)
    _insert(key, count, exact)
    return exact


def _guard_of_any_rows(
    names: Sequence[str], others: Others, tensors: tuple[Tensor, ...]
) -> Callable[..., bool] | None:
    """Returns a guard of a GEMM that leaves the number of rows open, from 2 on: the strides of a
    single row are free. Returns None where there is none: a tensor depends on the rows in another
    way, or is there twice. `names`: those of others.
    """
    lead, with_rows = tensors[0].shape[:-1], {id(tensors[0])}
    for name, t in zip(names, others, strict=False):
        if t is None or name == "scale_b":
            continue
        if t.shape[:-1] == lead and name != "bias":
            with_rows.add(id(t))
        elif t.numel() > 1 and (name == "scale_a" or t.shape[:-1].numel() > 1):
            return None
    free = [id(t) in with_rows for t in tensors]
    n = len(lead)  # strides of a row and of its elements stay as they are
    sizes = [
        [None] * n + [t.shape[-1]] if is_free else list(t.shape)
        for t, is_free in zip(tensors, free, strict=True)
    ]
    strides = [
        [None] * (n - 1) + [*t.stride()[-2:]] if is_free else list(t.stride())
        for t, is_free in zip(tensors, free, strict=True)
    ]
    check = tensor_guard(tensors, sizes, strides)
    if check is None or len(tensors) < 2 + sum(t is not None for t in others):
        return None

    def matches(*call: Tensor) -> bool:
        lead = call[0].shape[:-1]
        with_rows = [*itertools.compress(call, free)]
        return (
            check(*call)
            and lead.numel() > 1
            and all(t.shape[:-1] == lead for t in with_rows)
            and (len(lead) == 1 or all(t.stride() == packed_strides(t.shape) for t in with_rows))
        )

    return matches if matches(*tensors) else None


def clear() -> None:
    """Forgets all plans."""
    with _lock:
        _table.clear()
        _clock.clear()


dispatch.on_clear.append(clear)
