"""The alternatives of cuBLASLt: requests many algorithms from its heuristic and keeps the fastest,
through the C library.

torch.mm runs the first algorithm that cuBLASLt's heuristic returns. This module requests more of
them, so that a claim to outrun cuBLAS does not rest on mistakes of the heuristic. The library is
the one that torch has loaded, called through ctypes.
"""

import ctypes
import statistics
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from outblas.bench import burst, schedule, turn
from outblas.bench.clock import Clock
from outblas.bench.statistics import BURST_TOLERANCE, ratio
from outblas.call.dispatch import tf32_requested
from outblas.verify.kernels import Refused

Tensor = torch.Tensor

ALGORITHMS = 32
WORKSPACE_BYTES = 32 << 20  # torch's own workspace on Hopper
SCREEN_CALLS, SCREEN_ROUNDS = 100, 3
FINALISTS, FINAL_ROUNDS = 3, 8

_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}  # cudaDataType
_COMPUTE_32F, _COMPUTE_32F_FAST_TF32 = 68, 77  # cublasComputeType_t
_TRANSA, _TRANSB = 3, 4  # cublasLtMatmulDescAttributes_t
_MAX_WORKSPACE = 1  # cublasLtMatmulPreferenceAttributes_t


class _Algo(ctypes.Structure):
    _fields_ = (("data", ctypes.c_uint64 * 8),)


class _Heuristic(ctypes.Structure):
    _fields_ = (
        ("algo", _Algo),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@cache
def _library() -> Any:
    name = f"libcublasLt.so.{(torch.version.cuda or '').split('.')[0]}"
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        raise Refused(f"{name} cannot be loaded: {error}") from None
    return library


def _call(function: str, *arguments: Any) -> None:
    status = getattr(_library(), function)(*arguments)
    if status != 0:
        raise Refused(f"{function} returned status {status}")


def _create(function: str, *arguments: Any) -> ctypes.c_void_p:
    """Returns the object that a function of the library creates."""
    handle = ctypes.c_void_p()
    _call(function, ctypes.byref(handle), *arguments)
    return handle


def _set(function: str, target: ctypes.c_void_p, attribute: int, value: Any) -> None:
    _call(function, target, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)))


@cache
def _handle(device: int) -> ctypes.c_void_p:
    return _create("cublasLtCreate")


class _Matmul:
    """One product in cuBLASLt's terms: out's transpose, column-major, so B comes first."""

    def __init__(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        (M, K), N = a.shape, b.shape[1]
        tf32 = a.dtype == torch.float32 and tf32_requested()
        compute = _COMPUTE_32F_FAST_TF32 if tf32 else _COMPUTE_32F
        self.a, self.b, self.out = a, b, out
        self.operation = _create("cublasLtMatmulDescCreate", compute, _TYPES[torch.float32])
        first, transposed_b = _layout(b, N, K)
        second, transposed_a = _layout(a, K, M)
        result, _ = _layout(out, N, M)
        self.layouts = first, second, result
        for attribute, transposed in ((_TRANSA, transposed_b), (_TRANSB, transposed_a)):
            flag = ctypes.c_int32(transposed)
            _set("cublasLtMatmulDescSetAttribute", self.operation, attribute, flag)
        self.workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=a.device)

    def run(self, algo: _Algo, b: Tensor | None = None) -> int:
        """Launches on the current stream, with other weights of b's shape and strides if they are
        given; returns cuBLASLt's status.
        """
        one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        tensors = self.a, self.b if b is None else b, self.out, self.workspace
        left, right, out, workspace = (ctypes.c_void_p(t.data_ptr()) for t in tensors)
        first, second, result = self.layouts
        return int(
            _library().cublasLtMatmul(
                _handle(self.out.device.index),
                self.operation,
                *(ctypes.byref(one), right, first, left, second),
                *(ctypes.byref(zero), out, result, out, result),
                ctypes.byref(algo),
                workspace,
                ctypes.c_size_t(WORKSPACE_BYTES),
                ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
            )
        )

    def algorithms(self, workspace_bytes: int = WORKSPACE_BYTES) -> list[_Algo]:
        """Returns those of the heuristic that run, the best first by its own estimate."""
        preference = _create("cublasLtMatmulPreferenceCreate")
        size = ctypes.c_uint64(workspace_bytes)
        _set("cublasLtMatmulPreferenceSetAttribute", preference, _MAX_WORKSPACE, size)
        results = (_Heuristic * ALGORITHMS)()
        count = ctypes.c_int()
        _call(
            "cublasLtMatmulAlgoGetHeuristic",
            _handle(self.out.device.index),
            self.operation,
            *(*self.layouts, self.layouts[-1]),
            preference,
            ALGORITHMS,
            results,
            ctypes.byref(count),
        )
        _call("cublasLtMatmulPreferenceDestroy", preference)
        offered = [results[i].algo for i in range(count.value) if results[i].state == 0]
        return [algo for algo in offered if self.run(algo) == 0]


_chosen: dict[tuple[Any, ...], _Algo] = {}


def best(a: Tensor, b: Tensor, out: Tensor) -> Callable[..., int]:
    """Returns the fastest of cuBLASLt's algorithms for out[M, N] = a[M, K] @ b[K, N], timed here,
    as a call without arguments, or with other weights of b's shape and strides. It is chosen once
    per problem, so that the checked algorithm is the one that is timed.

    Operands may be stored either way, out by rows. Raises Refused if no algorithm runs.
    """
    matmul = _Matmul(a, b, out)
    tensors = ((t.shape, t.stride(), t.dtype, t.device) for t in (a, b, out))
    key = (tf32_requested(), *tensors)
    if key not in _chosen:
        runnable = matmul.algorithms()
        if not runnable:
            raise Refused("cuBLASLt offered no algorithm that runs")
        _chosen[key] = runnable[_winner([partial(matmul.run, algo) for algo in runnable])]
    return partial(matmul.run, _chosen[key])


def without_workspace(a: Tensor, b: Tensor, out: Tensor) -> Callable[..., int]:
    """Returns the product by the first algorithm that needs no workspace, as `best` does: it has no
    room for the partial sums of a divided K. That is how projects hold cuBLAS to one order of sums,
    which cuBLASLt does not promise.
    """
    matmul = _Matmul(a, b, out)
    runnable = matmul.algorithms(0)
    if not runnable:
        raise Refused("cuBLASLt offered no algorithm without a workspace")
    return partial(matmul.run, runnable[0])


def _winner(calls: list[turn.Call]) -> int:
    """Returns the fastest by the burst protocol among the first algorithm and those that are
    fastest back to back; the first one on a tie.
    """
    short = min(map(turn.rough_us, calls)) < turn.SHORT_US
    batches = [
        turn.graph([c] * SCREEN_CALLS) if short else turn.eager([c] * turn.CALLS) for c in calls
    ]
    times = [0.0] * len(calls)
    for order in schedule.rounds(range(len(calls)), SCREEN_ROUNDS):
        for i in order:
            times[i] += turn.elapsed_us(batches[i])
    finalists = sorted({0, *sorted(range(len(calls)), key=lambda i: times[i])[:FINALISTS]})
    rounds = schedule.whole_rounds(len(finalists), FINAL_ROUNDS)
    samples = burst.run({str(i): (calls[i], batches[i]) for i in finalists}, Clock(), rounds=rounds)
    best = min(finalists, key=lambda i: statistics.median(samples[str(i)].us))
    faster = ratio(samples["0"].us, samples[str(best)].us).verdict(BURST_TOLERANCE) == "faster"
    return best if faster else 0


def _layout(t: Tensor, rows: int, columns: int) -> tuple[ctypes.c_void_p, bool]:
    """Returns the column-major rows×columns matrix that t's transpose is, or its transpose where t
    is stored transposed.
    """
    transposed = t.stride(1) != 1
    if transposed:
        rows, columns = columns, rows
    leading = t.stride(1) if transposed else t.stride(0)
    sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(leading)
    return _create("cublasLtMatrixLayoutCreate", _TYPES[t.dtype], *sizes), transposed
