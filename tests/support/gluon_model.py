"""What stands for Gluon while bodies of the CUDA-core and Turing ladders run on the CPU: their own
functions over numpy, one CTA after the other.

A tensor of the model is an array of all elements of its CTA, whatever layout its threads hold it
in. Shared memory begins as NaN. An asynchronous copy leaves NaN where it goes until its group is
waited for, so that a missing wait shows in the product. Races of threads do not show: barriers do
nothing.
"""

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.experimental.gluon import language as gl

from outblas.base.compat import triton_private
from outblas.call.problem import Problem
from outblas.device import gluon, launch
from outblas.device.grid import chunks_of
from outblas.device.records import EpilogueRefs, TensorRef
from outblas.device.rung import Rung


class Tensor(np.ndarray):
    """A tensor of a CTA."""

    def to(self, dtype: Any) -> "Tensor":
        return self

    def expand_dims(self, axis: int) -> "Tensor":
        return np.expand_dims(self, axis).view(Tensor)


class Scalar(int):
    """An integer of a CTA, such as its number."""

    def to(self, dtype: Any) -> "Scalar":
        return self


def _scalar_operation(name: str) -> Callable[..., Any]:
    compute = getattr(int, name)

    def operation(self: int, other: Any) -> Any:
        found = compute(self, other)
        return Scalar(found) if isinstance(found, int) else found

    return operation


for _name in ("add", "sub", "mul", "floordiv", "mod"):
    for _prefix in ("__", "__r"):
        setattr(Scalar, f"{_prefix}{_name}__", _scalar_operation(f"{_prefix}{_name}__"))


class Everyone:
    """The number of a thread, of which every comparison holds: some thread takes each branch."""

    def __lt__(self, other: int) -> bool:
        return True

    __ge__ = __lt__


@dataclass
class Pointer:
    """Pointers into the memory of a torch tensor, at element `at` of its storage."""

    memory: torch.Tensor
    at: Any

    @classmethod
    def to_tensor(cls, t: torch.Tensor | None) -> "Pointer | None":
        """A pointer to a tensor's first element, None for no tensor."""
        if t is None:
            return None
        elements = t.untyped_storage().nbytes() // t.element_size()
        return cls(t.as_strided((elements,), (1,), 0), t.storage_offset())

    @property
    def dtype(self) -> Any:
        return types.SimpleNamespace(element_ty=self.memory.dtype)

    def __add__(self, steps: Any) -> "Pointer":
        return Pointer(self.memory, self.at + steps)

    def __getitem__(self, index: Any) -> "Pointer":
        return Pointer(self.memory, self.at[index])


class Shared:
    """A tensor in shared memory."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def slice(self, start: int, length: int, axis: int) -> "Shared":
        part = (slice(None),) * axis + (slice(start, start + length),)
        return Shared(self.values[part])

    def permute(self, order: list[int]) -> "Shared":
        return Shared(self.values.transpose(order))

    def load(self, layout: Any) -> Tensor:
        return self.values.copy().view(Tensor)

    def store(self, values: np.ndarray) -> None:
        assert values.shape == self.values.shape, f"{values.shape} into {self.values.shape}"
        self.values[...] = values


class Cta:
    """The CTA that runs: its number, and the groups of copies that have not landed."""

    def __init__(self) -> None:
        self.program = 0
        self.issued: list[tuple[Shared, np.ndarray]] = []
        self.groups: list[list[tuple[Shared, np.ndarray]]] = []

    def begin(self, program: int) -> None:
        self.program, self.issued, self.groups = program, [], []

    def copy(self, smem: Shared, ptr: Pointer, mask: Any = None) -> None:
        self.issued.append((smem, load(ptr, mask, 0.0)))
        smem.values[...] = np.nan

    def commit(self) -> None:
        self.groups.append(self.issued)
        self.issued = []

    def wait(self, pending: int) -> None:
        """Until no more than so many groups are on their way."""
        while len(self.groups) > pending:
            for smem, values in self.groups.pop(0):
                smem.store(values)


_cta = Cta()


def load(ptr: Pointer, mask: Any = None, other: float = 0.0, **_: Any) -> Tensor:
    at, wanted = np.broadcast_arrays(ptr.at, True if mask is None else mask)
    found = np.full(at.shape, other)
    found[wanted] = ptr.memory[torch.from_numpy(at[wanted])].double().numpy()
    return found.view(Tensor)


def store(ptr: Pointer, values: Any, mask: Any = None) -> None:
    at, values, wanted = np.broadcast_arrays(ptr.at, values, True if mask is None else mask)
    written = torch.from_numpy(np.array(values[wanted], np.float32))
    ptr.memory[torch.from_numpy(np.array(at[wanted]))] = written.to(ptr.memory.dtype)


def full(shape: Any, value: float, dtype: Any, layout: Any = None) -> Tensor:
    made = np.full(tuple(shape), value, bool if dtype == gl.int1 else np.float64)
    return made.view(Tensor)


def arange(start: int, end: int, layout: Any = None) -> Tensor:
    return np.arange(start, end).view(Tensor)


def where(condition: Any, x: Any, y: Any) -> Any:
    found = np.where(condition, x, y)
    return found.view(Tensor) if found.ndim else Scalar(found)


def split(x: np.ndarray) -> tuple[Tensor, Tensor]:
    return x[..., 0].view(Tensor), x[..., 1].view(Tensor)


def inline_asm(text: str, constraints: str, arguments: list[Any], *_: Any) -> Any:
    """What the few lines of assembly in the ladders compute."""
    if "fma.rn" in text:
        column, row, acc = arguments
        return column * row + acc
    if "%tid" in text:
        return Everyone()
    return arguments[0] if arguments else 0


def nothing(*_: Any, **__: Any) -> None:
    """A layout, or a barrier."""


LANGUAGE = types.SimpleNamespace(
    **dict.fromkeys(("SliceLayout", "DotOperandLayout"), nothing),
    **{name: getattr(gl, name) for name in ("int1", "int32", "int64", "float32", "constexpr")},
    bfloat16=tl.bfloat16,
    load=load,
    store=store,
    full=full,
    arange=arange,
    static_range=range,
    program_id=lambda axis: Scalar(_cta.program),
    num_warps=lambda: 1,
    minimum=lambda x, y: Scalar(min(x, y)),
    where=where,
    convert_layout=lambda x, layout: x,
    broadcast=np.broadcast_arrays,
    allocate_shared_memory=lambda dtype, shape, layout: Shared(np.full(tuple(shape), np.nan)),
    inline_asm_elementwise=inline_asm,
    reshape=lambda x, shape: x.reshape(shape),
    permute=lambda x, order: x.transpose(order),
    split=split,
)

_STAND_INS: dict[int, Any] = {
    id(gl): LANGUAGE,
    id(tl): LANGUAGE,
    id(triton_private.mma): lambda a, b, acc: acc + a @ b,
    id(gluon.barrier): nothing,
    id(gluon.copy_async): _cta.copy,
    id(gluon.commit_copies): _cta.commit,
    id(gluon.wait_copies): _cta.wait,
}


class _Module:
    """A module whose device functions run on the model."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return stand_in(getattr(self._module, name))


_functions: dict[int, types.FunctionType] = {}


def stand_in(value: Any) -> Any:
    """What a global of a device function is in the model."""
    if id(value) in _STAND_INS:
        return _STAND_INS[id(value)]
    if isinstance(value, triton.JITFunction):
        return on_cpu(value)
    if isinstance(value, types.ModuleType) and value.__name__.startswith("outblas."):
        return _Module(value)
    return value


def on_cpu(body: triton.JITFunction) -> types.FunctionType:
    """A device function that runs over the model, with all functions that it calls."""
    if id(body) not in _functions:
        scope: dict[str, Any] = {}
        function = types.FunctionType(
            body.fn.__code__, scope, body.fn.__name__, body.fn.__defaults__
        )
        _functions[id(body)] = function
        scope |= {name: stand_in(value) for name, value in body.fn.__globals__.items()}
    return _functions[id(body)]


def launch_of(rung: Rung[Any], problem: Problem, config: Any, arch: int) -> Any:
    """The launch of a rung's body on the model, as `Rung.plan` makes it for a GPU."""
    constants = rung.constants(config, problem, arch)
    body = on_cpu(rung.body)

    def run(programs: int) -> Callable[..., None]:
        def start(*arguments: Any) -> None:
            pointers, others = map(Pointer.to_tensor, arguments[:4]), list(arguments[4:])
            if rung.fused and others[-1] is not None:
                others[-1] = _epilogue_tensors(others[-1])
            arguments = *pointers, *others
            with np.errstate(all="ignore"):
                for program in range(programs):
                    _cta.begin(program)
                    body(*arguments)

        return start

    return launch.bind(problem, chunks_of(problem, config), run, constants)


def _epilogue_tensors(tensors: tuple[tuple[Any, ...], ...]) -> EpilogueRefs:
    """The tensors of an epilogue as a body takes them."""
    return EpilogueRefs(*(TensorRef(Pointer.to_tensor(t), *strides) for t, *strides in tensors))
