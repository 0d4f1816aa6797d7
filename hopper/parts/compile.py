"""Compiles Hopper kernels, with or without a GPU, and keeps the compiled code on disk."""

import dataclasses
import functools
import platform
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from outblas.base import cache, forks
from outblas.base.configs import to_text
from outblas.base.facts import version_of
from outblas.call.artifact import Artifact, cta_threads, example
from outblas.call.grouped import GroupedProblem
from outblas.call.problem import Problem, dtype_name
from outblas.device import exported, sources
from outblas.hopper.parts.config import HopperConfig

ARCH = "sm_90a"
OPTIONS = "--enable-tvm-ffi --opt-level 3"
LONGEST_NAME = 200  # characters of a kernel's name

SHORT = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float8_e4m3fn: "e4m3",
}


def full_name(variant: Any, parts: Sequence[str]) -> str:
    """Returns the name of a variant in profilers, which is a C identifier: readable parts, cut off
    where they are too long, then twelve digits of a digest of all fields, of the config and of the
    traits.
    """
    readable = re.sub(r"\W+", "_", "_".join(part for part in parts if part), flags=re.ASCII)
    return f"{readable[: LONGEST_NAME - 13]}_{cache.digest(dataclasses.asdict(variant))[:12]}"


class KernelKey(Protocol):
    """Identifies one compilation, compared by value."""

    @property
    def name(self) -> str: ...
    @property
    def cache_key_fields(self) -> dict[str, object]: ...


@dataclasses.dataclass(frozen=True)
class CompiledCode:
    """The compilers' output for a variant: machine code, PTX, the complete output of ptxas, and the
    MLIR of the function that launches the kernel.
    """

    cubin: bytes
    ptx: str
    log: str
    launch: str


V = TypeVar("V", bound=KernelKey)

_compiling = forks.Lock()  # cute.compile is not thread-safe
_loading = forks.Lock()
_loaded: dict[KernelKey, Callable[..., None]] = {}


def load(variant: V, build: Callable[[], Any]) -> Callable[..., None]:
    """Returns the compiled kernel as a function of the tensors that it was compiled for, from
    memory, from disk, or newly built: by the worker, if the variant has a `keeper` and the call
    does not wait for it. Raises CompilePending then.
    """
    kernel = _loaded.get(variant)
    if kernel is None:
        key: Any = variant if hasattr(variant, "keeper") else None
        kernel = cache.fetch(
            variant.cache_key_fields,
            build=lambda: _alone(build),
            save=_saver(variant),
            load=lambda code: _load(code, variant.name),
            key=key,
        )
        kernel = _loaded.setdefault(variant, kernel)
    return kernel


def _load(code: bytes, name: str) -> Callable[..., None]:
    with _loading:
        return exported.load(code, name)


def _alone(build: Callable[[], Any]) -> Any:
    with _compiling:
        return build()


def is_loaded(variant: KernelKey) -> bool:
    """Returns whether `load` returns a kernel from memory."""
    return variant in _loaded


def keep(variant: KernelKey, build: Callable[[], Any]) -> None:
    """Builds a kernel onto disk for a later `load`, without loading it."""
    cache.warm(variant.cache_key_fields, build=lambda: _alone(build), save=_saver(variant))


def _saver(variant: KernelKey) -> Callable[[Any, Path], None]:
    def save(compiled: Any, path: Path) -> None:
        with _compiling:
            compiled.export_to_c(str(path), function_name=variant.name)

    return save


def cache_key_fields(
    name: str, config: HopperConfig, dtype: torch.dtype, out_dtype: torch.dtype
) -> dict[str, object]:
    """Returns the facts that a compiled kernel on disk depends on."""
    return {
        "kernel": name,
        "config": to_text(config),
        "dtypes": (dtype_name(dtype), dtype_name(out_dtype)),
    } | toolchain_fields()


def toolchain_fields() -> dict[str, object]:
    """Returns the facts that every compiled kernel on disk depends on."""
    # Its libraries for CUDA 12 and 13 have different assemblers, and the driver decides which load.
    return {
        "arch": ARCH,
        "options": OPTIONS,
        "machine": platform.machine(),
        "dsl": version_of("nvidia-cutlass-dsl"),
        "cuda": exported.cuda_of_dsl(),
        "tvm_ffi": version_of("apache-tvm-ffi"),
        "source": source_fingerprint(),
    }


def source_fingerprint() -> str:
    """Returns a digest that changes with any source file that a kernel of the ladder may call."""
    return sources.fingerprint(sys.modules[__name__.rpartition(".parts")[0]])


def compile_code(variant: KernelKey, build: Callable[[str], Any]) -> CompiledCode:
    """Returns the code of a variant, without a GPU. `build` compiles it with further options of the
    DSL.
    """
    with tempfile.TemporaryDirectory() as folder, _compiling:
        remarks = Path(folder) / "remarks.yaml"
        made = build(
            f"--keep-cubin --keep-ptx --dump-dir={folder} --remark-output={remarks} remarks{{ptx}}"
        )
        log = assembler_log(remarks.read_text(encoding="utf-8"))
    return CompiledCode(bytes(made.__cubin__), str(made.__ptx__), log, str(made.ir_module))


def artifact(
    kernel: str,
    config: HopperConfig,
    unsupported: Callable[[Problem, HopperConfig], str | None],
    variant_of: Callable[[Problem, HopperConfig], V],
    build: Callable[[V, str], Any],
    shared_memory: Callable[[V], int],
    *,
    arch: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    out_dtype: torch.dtype | None = None,
    layout: str = "nt",
    shape: tuple[int, int, int] = (4096, 4096, 4096),
    problem: Problem | None = None,
) -> Artifact:
    """Returns the machine code of the variant for a problem. `build` compiles it with the given
    options of the DSL; `shared_memory` returns the bytes of shared memory per CTA.

    `problem` replaces the aligned problem with a row-major output that `dtype`, `out_dtype`,
    `layout` and `shape` describe. Raises ValueError for an architecture other than 90, and for
    problems that the kernel does not support.
    """
    if arch not in (None, 90):
        raise ValueError(f"arch is {arch}, expected 90: {kernel} uses TMA and wgmma")
    problem = problem or example(dtype, out_dtype, layout, shape)
    if problem.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"dtype is {dtype_name(problem.dtype)}, expected bfloat16 or float16")
    if reason := unsupported(problem, config):
        raise ValueError(reason)
    variant = variant_of(problem, config)
    build_variant = functools.partial(build, variant)
    return artifact_of(
        kernel, config, variant, build_variant, shared_memory(variant), problem, layout
    )


def artifact_of(
    kernel: str,
    config: HopperConfig,
    variant: KernelKey,
    build: Callable[[str], Any],
    smem_bytes: int,
    problem: Problem | GroupedProblem,
    layout: str,
) -> Artifact:
    """Returns the machine code of a variant, which `build` compiles. Raises AssertionError unless
    its launch asks for `smem_bytes` of shared memory.
    """
    code = compile_code(variant, build)
    if f"({smem_bytes} : i64)" not in code.launch:
        raise AssertionError(f"{kernel} asks for other than {smem_bytes} bytes of shared memory")
    return Artifact(
        kernel=kernel,
        arch=ARCH,
        config=to_text(config),
        dtype=dtype_name(problem.dtype),
        out_dtype=dtype_name(problem.out_dtype),
        layout=layout,
        cubin=code.cubin,
        ptx=code.ptx,
        log=code.log,
        threads=cta_threads(code.ptx),
        smem_bytes=smem_bytes,
        stages=config.stages,
        tile=(config.tile_m, config.tile_n, config.tile_k),
    )


def assembler_log(remarks: str) -> str:
    """Extracts the output of ptxas -v from the DSL's YAML remarks, where it is a quoted scalar over
    several lines.
    """
    logs = re.findall(r"- Remark: +'ptxas output: ((?:[^']|'')*)'", remarks)
    return "\n".join(log.replace("''", "'").strip() for log in logs) + "\n"
