"""The alternatives of cuBLASLt: requests many algorithms from its heuristic and keeps the fastest,
through the C library.

torch.mm runs the first algorithm that cuBLASLt's heuristic returns. This module requests more of
them, so that a claim to outrun cuBLAS does not rest on mistakes of the heuristic. The library is
the one that torch has loaded, called through ctypes.
"""

import ctypes
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from outblas.bench import burst, schedule, turn
from outblas.bench.clock import Clock
from outblas.bench.statistics import BURST_TOLERANCE, ratio
from outblas.runtime.dispatch import tf32_requested

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


class CublasLtError(RuntimeError):
    """cuBLASLt could not be loaded, or returned an error."""


@cache
def _library() -> Any:
    name = f"libcublasLt.so.{(torch.version.cuda or '').split('.')[0]}"
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        raise CublasLtError(f"{name} cannot be loaded: {error}") from None
    library.cublasLtGetVersion.restype = ctypes.c_size_t
    return library


def version() -> int:
    """Returns the library's version, 130100 for 13.1.0. Raises CublasLtError where it cannot be
    loaded.
    """
    return int(_library().cublasLtGetVersion())


@cache
def _handle(device: int) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    _call("cublasLtCreate", ctypes.byref(handle))
    return handle


def _call(function: str, *arguments: Any) -> None:
    status = getattr(_library(), function)(*arguments)
    if status != 0:
        raise CublasLtError(f"{function} returned status {status}")


@dataclass(frozen=True)
class _Matmul:
    """One product in cuBLASLt's terms: out's transpose, column-major, so B comes first."""

    operation: ctypes.c_void_p
    first: ctypes.c_void_p
    second: ctypes.c_void_p
    result: ctypes.c_void_p
    workspace: torch.Tensor

    def run(self, algo: _Algo, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> int:
        """Launches on the current stream; returns cuBLASLt's status."""
        one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (a, b, out, self.workspace)]
        return int(
            _library().cublasLtMatmul(
                _handle(out.device.index),
                self.operation,
                ctypes.byref(one),
                pointers[1],
                self.first,
                pointers[0],
                self.second,
                ctypes.byref(zero),
                pointers[2],
                self.result,
                pointers[2],
                self.result,
                ctypes.byref(algo),
                pointers[3],
                ctypes.c_size_t(WORKSPACE_BYTES),
                ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
            )
        )


def best(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Callable[..., None]:
    """Returns the fastest of cuBLASLt's algorithms for out[M, N] = a[M, K] @ b[K, N], timed here,
    as a call without arguments, or with other weights of b's shape and strides.

    Operands may be stored either way, out by rows. Raises CublasLtError if no algorithm runs.
    """
    matmul = _describe(a, b, out)
    return _call_of(matmul, _fastest(_key(a, b, out), matmul, a, b, out), a, b, out)


def without_workspace(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Callable[..., None]:
    """Returns the product by the first algorithm that needs no workspace, as `best` does: it has no
    room for the partial sums of a divided K. That is how projects hold cuBLAS to one order of sums,
    which cuBLASLt does not promise.
    """
    matmul = _describe(a, b, out)
    found = _algorithms(matmul, a.device.index, 0)
    chosen = next((algo for algo in found if matmul.run(algo, a, b, out) == 0), None)
    if chosen is None:
        raise CublasLtError("cuBLASLt offered no algorithm without a workspace")
    return _call_of(matmul, chosen, a, b, out)


def _call_of(
    matmul: _Matmul, algo: _Algo, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor
) -> Callable[..., None]:
    """Returns the call of an algorithm, which takes other weights of b's shape and strides too."""

    def call(b: torch.Tensor = b) -> None:
        matmul.run(algo, a, b, out)

    return call


_chosen: dict[tuple[Any, ...], _Algo] = {}


def _key(*tensors: torch.Tensor) -> tuple[Any, ...]:
    return (tf32_requested(), *((t.shape, t.stride(), t.dtype, t.device) for t in tensors))


def _fastest(
    key: tuple[Any, ...], matmul: _Matmul, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor
) -> _Algo:
    """Chooses once per problem, so that the checked algorithm is the one that is timed."""
    if key not in _chosen:
        runnable = [
            algo for algo in _algorithms(matmul, a.device.index) if matmul.run(algo, a, b, out) == 0
        ]
        if not runnable:
            raise CublasLtError("cuBLASLt offered no algorithm that runs")
        _chosen[key] = runnable[
            _winner([partial(matmul.run, algo, a, b, out) for algo in runnable])
        ]
    return _chosen[key]


def _winner(calls: list[turn.Call]) -> int:
    """Returns the fastest by the burst protocol among the first algorithm and those that are
    fastest back to back; the first one on a tie.
    """
    short = min(map(turn.rough_us, calls)) < turn.SHORT_US
    batches = [turn.graph(call, SCREEN_CALLS) if short else turn.eager(call) for call in calls]
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


def _algorithms(
    matmul: _Matmul, device: int, workspace_bytes: int = WORKSPACE_BYTES
) -> list[_Algo]:
    """Returns what the heuristic offers, the best first by its own estimate."""
    preference = ctypes.c_void_p()
    _call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
    size = ctypes.c_uint64(workspace_bytes)
    _call(
        "cublasLtMatmulPreferenceSetAttribute",
        preference,
        _MAX_WORKSPACE,
        ctypes.byref(size),
        ctypes.c_size_t(8),
    )
    found = (_Heuristic * ALGORITHMS)()
    count = ctypes.c_int()
    layouts = (matmul.first, matmul.second, matmul.result, matmul.result)
    _call(
        "cublasLtMatmulAlgoGetHeuristic",
        _handle(device),
        matmul.operation,
        *layouts,
        preference,
        ALGORITHMS,
        found,
        ctypes.byref(count),
    )
    _call("cublasLtMatmulPreferenceDestroy", preference)
    return [found[i].algo for i in range(count.value) if found[i].state == 0]


def _describe(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> _Matmul:
    (M, K), N = a.shape, b.shape[1]
    tf32 = a.dtype == torch.float32 and tf32_requested()
    operation = ctypes.c_void_p()
    compute = _COMPUTE_32F_FAST_TF32 if tf32 else _COMPUTE_32F
    _call("cublasLtMatmulDescCreate", ctypes.byref(operation), compute, _TYPES[torch.float32])
    first, transposed_b = _layout(b, N, K)
    second, transposed_a = _layout(a, K, M)
    for attribute, transposed in ((_TRANSA, transposed_b), (_TRANSB, transposed_a)):
        flag = ctypes.c_int32(transposed)
        _call(
            "cublasLtMatmulDescSetAttribute",
            operation,
            attribute,
            ctypes.byref(flag),
            ctypes.c_size_t(4),
        )
    result, _ = _layout(out, N, M)
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=a.device)
    return _Matmul(operation, first, second, result, workspace)


def _layout(t: torch.Tensor, rows: int, columns: int) -> tuple[ctypes.c_void_p, bool]:
    """Returns the column-major rows×columns matrix that t's transpose is, or its transpose where t
    is stored transposed.
    """
    transposed = t.stride(1) != 1
    if transposed:
        rows, columns = columns, rows
    leading = t.stride(1) if transposed else t.stride(0)
    layout = ctypes.c_void_p()
    sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(leading)
    _call("cublasLtMatrixLayoutCreate", ctypes.byref(layout), _TYPES[t.dtype], *sizes)
    return layout, transposed
