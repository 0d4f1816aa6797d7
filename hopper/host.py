"""The host side of the Hopper rungs: what they can take, compiling, the compile cache, launching.

One compile serves every size of a layout and dtype: sizes and strides are symbolic, and TMA's demands on them are
checked here, before anything compiles.
"""

import contextlib
import functools
import os
import platform
import re
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass.base_dsl.dsl import BaseDSL
from cutlass.cute.runtime import load_module, make_fake_stream, make_fake_tensor

from .. import cache
from ..artifact import Artifact, cta_threads, example
from ..configs import to_text
from ..operands import Launch, Problem, dtype_name
from ..registry import Kernel
from .base import HopperGemm
from .config import HopperConfig, invalid_reason

ARCH = "sm_90a"
OPTIONS = "--enable-tvm-ffi --opt-level 3"

_NUMERIC = {
    torch.bfloat16: cutlass.BFloat16,
    torch.float16: cutlass.Float16,
    torch.float32: cutlass.Float32,
}
_SHORT = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}


@dataclass(frozen=True)
class Variant:
    """What one compile serves. `layout` is that of A and B ("nt").

    `row_major`: C's rows are contiguous; `pairs`: and all start at multiples of two elements in memory.
    """

    kernel: str
    config: HopperConfig
    dtype: torch.dtype
    out_dtype: torch.dtype
    layout: str
    row_major: bool
    pairs: bool

    @property
    def name(self) -> str:
        """The kernel's name in profilers."""
        c = self.config
        tile = f"{c.tile_m}x{c.tile_n}x{c.tile_k}"
        parts = [
            "outblas",
            self.kernel.replace(".", "_"),
            tile,
            self.layout,
            _SHORT[self.dtype],
            _SHORT[self.out_dtype],
        ]
        flags = {"strided": not self.row_major, "single": self.row_major and not self.pairs, "jitter": c.jitter}
        return "_".join(parts + [flag for flag, on in flags.items() if on])


def unsupported(problem: Problem, config: HopperConfig | None = None) -> str | None:
    """Why TMA and wgmma cannot take this problem: what they need, and what they were given."""
    if config is not None and (reason := invalid_reason(config)):
        return f"config: {reason}"
    if problem.scaled:
        return "it computes A @ B alone, and was given an addend or a scale (addmm)"
    if problem.batch:
        return f"it takes matrices, or a batch that shares B, and was given batches of shape {problem.batch}"
    if max(problem.M, problem.N, problem.K) >= 1 << 31:
        return f"it takes extents below 2**31, and was given {problem.M}x{problem.N}x{problem.K}"
    for name, rows, columns, strides, alignment in (
        ("a", problem.M, problem.K, problem.a, problem.alignment[0]),
        ("b", problem.K, problem.N, problem.b, problem.alignment[1]),
    ):
        if alignment < 16:
            return f"TMA needs addresses that are multiples of 16 bytes, and {name}'s is a multiple of {alignment}"
        if _tma_strides(rows, columns, strides) is None:
            return (
                "TMA needs one stride of 1 and the other a multiple of 8 elements (16 bytes), "
                f"and {name} has strides {strides} for {rows}x{columns}"
            )
    return None


def _tma_strides(rows: int, columns: int, strides: tuple[int, ...]) -> tuple[int, int] | None:
    """Strides under which TMA can read a matrix, the stride of an extent of 1 chosen freely; None if there are none."""
    row, column = strides

    if (column == 1 or columns == 1) and (rows == 1 or row % 8 == 0):
        return (row if rows > 1 else 8), 1
    if (row == 1 or rows == 1) and (columns == 1 or column % 8 == 0):
        return 1, (column if columns > 1 else 8)
    return None


def entry(
    kernel: Kernel, gemm: type[HopperGemm]
) -> tuple[Callable[..., str | None], Callable[..., Launch], Callable[..., Artifact]]:
    """What a rung's module offers: `unsupported`, `plan` and `artifact`."""
    return unsupported, functools.partial(plan, kernel.name, gemm), functools.partial(artifact, kernel.name, gemm)


def plan(kernel: str, gemm: type[HopperGemm], problem: Problem, config: HopperConfig | None = None) -> Launch:
    """Compiles or loads what the problem needs and returns its launch. The problem must be supported."""
    a_strides, b_strides = _operand_strides(problem)
    variant = _variant(kernel, problem, config or HopperConfig())
    run = load(gemm, variant)
    shape_a, shape_b, shape_out = (problem.M, problem.K), (problem.K, problem.N), (problem.M, problem.N)
    out_strides = (_row_stride(problem), 1) if variant.row_major else problem.out

    def launch(a: torch.Tensor, b: torch.Tensor, c: Any, out: torch.Tensor, alpha: float, beta: float) -> None:
        run(_view(a, shape_a, a_strides), _view(b, shape_b, b_strides), _view(out, shape_out, out_strides))

    return launch


def _variant(kernel: str, problem: Problem, config: HopperConfig) -> Variant:
    """The compile that serves a supported problem."""
    a_strides, b_strides = _operand_strides(problem)
    layout = ("n" if a_strides[1] == 1 else "t") + ("n" if b_strides[1] == 1 else "t")
    row_major = problem.out[1] == 1 or problem.N == 1
    aligned = problem.alignment[2] % (2 * problem.out_dtype.itemsize) == 0
    pairs = row_major and aligned and _row_stride(problem) % 2 == 0 and problem.N % 2 == 0
    return Variant(kernel, config, problem.dtype, problem.out_dtype, layout, row_major, pairs)


def _operand_strides(problem: Problem) -> tuple[tuple[int, int], tuple[int, int]]:
    a_strides = _tma_strides(problem.M, problem.K, problem.a)
    b_strides = _tma_strides(problem.K, problem.N, problem.b)
    assert a_strides, "plan() takes problems for which unsupported() is None"
    assert b_strides, "plan() takes problems for which unsupported() is None"
    return a_strides, b_strides


def _row_stride(problem: Problem) -> int:
    return problem.out[0] if problem.M > 1 else 0


def _view(t: torch.Tensor, shape: tuple[int, int], strides: tuple[int, ...]) -> torch.Tensor:
    return t if t.shape == shape and t.stride() == strides else t.as_strided(shape, strides)


_loaded: dict[Variant, Callable[..., None]] = {}
_lock = threading.Lock()  # cute.compile is not thread-safe


def load(gemm: type[HopperGemm], variant: Variant) -> Callable[..., None]:
    """The compiled kernel as a function of three torch tensors: from memory, from disk, or compiled."""
    with _lock:
        if variant not in _loaded:
            _loaded[variant] = cache.fetch(
                _facts(variant),
                build=lambda: compile_variant(gemm, variant),
                save=lambda compiled, path: compiled.export_to_c(str(path), function_name=variant.name),
                load=lambda path: load_module(str(path), enable_tvm_ffi=True)[variant.name],
            )
        return _loaded[variant]


def _facts(variant: Variant) -> dict[str, object]:
    return {
        "kernel": variant.name,
        "config": to_text(variant.config),
        "dtypes": (dtype_name(variant.dtype), dtype_name(variant.out_dtype)),
        "arch": ARCH,
        "options": OPTIONS,
        "machine": platform.machine(),
        "dsl": metadata.version("nvidia-cutlass-dsl"),
        "tvm_ffi": metadata.version("apache-tvm-ffi"),
        "source": _source_fingerprint(),
    }


@functools.cache
def _source_fingerprint() -> str:
    files = sorted(Path(__file__).parent.glob("*.py"))
    return cache.digest({f.name: f.read_text(encoding="utf-8") for f in files})


def compile_variant(gemm: type[HopperGemm], variant: Variant, options: str = "") -> Any:
    """Compiles for sm_90a, with or without a GPU. Returns CuTe DSL's compiled function."""
    M, N, K = cute.sym_int(), cute.sym_int(), cute.sym_int()

    def matrix(dtype: torch.dtype, shape: tuple[Any, Any], row_major: bool) -> Any:
        outer = cute.sym_int64(divisibility=8)
        return make_fake_tensor(_NUMERIC[dtype], shape, (outer, 1) if row_major else (1, outer), assumed_align=16)

    a = matrix(variant.dtype, (M, K), variant.layout[0] == "n")
    b = matrix(variant.dtype, (K, N), variant.layout[1] == "n")
    width = 2 if variant.pairs else 1
    c_strides = (cute.sym_int64(divisibility=width), 1 if variant.row_major else cute.sym_int64())
    align = width * variant.out_dtype.itemsize
    c = make_fake_tensor(_NUMERIC[variant.out_dtype], (M, N), c_strides, assumed_align=align)
    gemm.kernel.set_name_prefix(variant.name, remove_cutlass_symbol=True, keep_mangled_name=False)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    with _target_arch():
        return cute.compile(gemm(variant.config, pairs=variant.pairs), a, b, c, stream, options=f"{OPTIONS} {options}")


def artifact(
    kernel: str,
    gemm: type[HopperGemm],
    config: HopperConfig | None = None,
    *,
    arch: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    out_dtype: torch.dtype | None = None,
    layout: str = "nt",
    shape: tuple[int, int, int] = (4096, 4096, 4096),
) -> Artifact:
    """What `plan` would launch for aligned, row-major operands; needs no GPU.

    Raises ValueError for an architecture other than 90, and for what the kernel cannot take.
    """
    if arch not in (None, 90):
        raise ValueError(f"arch is {arch}, expected 90: {kernel} is made of TMA and wgmma")
    config = config or HopperConfig()
    problem = example(dtype, out_dtype, layout, shape)
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"dtype is {dtype_name(dtype)}, expected bfloat16 or float16")
    if reason := unsupported(problem, config):
        raise ValueError(reason)
    with tempfile.TemporaryDirectory() as folder, _lock:
        remarks = Path(folder) / "remarks.yaml"
        keep = f"--keep-cubin --keep-ptx --dump-dir={folder} --remark-output={remarks} remarks{{ptx}}"
        compiled = compile_variant(gemm, _variant(kernel, problem, config), keep)
        log = _assembler_log(remarks.read_text(encoding="utf-8"))
    ptx = str(compiled.__ptx__)
    return Artifact(
        kernel=kernel,
        arch=ARCH,
        config=to_text(config),
        dtype=dtype_name(dtype),
        out_dtype=dtype_name(problem.out_dtype),
        layout=layout,
        cubin=bytes(compiled.__cubin__),
        ptx=ptx,
        log=log,
        threads=cta_threads(ptx),
        smem_bytes=config.shared_memory_bytes,
        stages=gemm.slots,
        tile=(config.tile_m, config.tile_n, config.tile_k),
    )


def _assembler_log(remarks: str) -> str:
    """The output of ptxas -v inside the DSL's YAML remarks, a quoted scalar that spans lines."""
    logs = re.findall(r"- Remark: +'ptxas output: ((?:[^']|'')*)'", remarks)
    return "\n".join(log.replace("''", "'").strip() for log in logs) + "\n"


@contextlib.contextmanager
def _target_arch() -> Iterator[None]:
    """Compiles for ARCH whatever GPU is present: the DSL's own choice without one is sm_100a."""
    environment: Any = BaseDSL._get_dsl().envar
    before = os.environ.get("CUTE_DSL_ARCH")
    os.environ["CUTE_DSL_ARCH"] = environment.arch = ARCH
    try:
        yield
    finally:
        del environment.arch
        del os.environ["CUTE_DSL_ARCH"]
        if before is not None:
            os.environ["CUTE_DSL_ARCH"] = before
