"""The private parts of Triton and Gluon that outblas uses. Only kernels import this module, because
it imports Triton.
"""

import contextlib
import io
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import triton
from triton.experimental.gluon import language as gl

from outblas.base.compat import find, take

CompiledKernel = Any  # what `triton.compile` returns
_NO_KERNELS = (
    "Triton kernels fail to import with an error that says so, and torch computes the calls"
)


def _required(name: str, purpose: str) -> Any:
    """Returns a name without which Triton's kernels cannot be compiled. Raises ImportError where it
    is missing.
    """
    found = take(name, None, purpose, _NO_KERNELS)
    if found is None:
        raise ImportError(f"triton {triton.__version__} has no {name.replace(':', '.')}")
    return found


# ---- compiling ahead of a launch, without a GPU
ASTSource: Any = _required("triton.compiler:ASTSource", "compiling a kernel ahead of its launch")
GPUTarget: Any = _required("triton.backends.compiler:GPUTarget", "compiling for a named GPU")


def _no_gluon_source(*_: Any) -> Any:
    raise ImportError(f"triton {triton.__version__} has no GluonASTSource to compile Gluon kernels")


def _gluon_source() -> Any:
    """Returns the class of Gluon's sources, by its public name where there is one."""
    public, found = find("triton.experimental.gluon:GluonASTSource")
    if public:
        return found
    return take(
        "triton.experimental.gluon._runtime:GluonASTSource",
        _no_gluon_source,
        "compiling a Gluon kernel ahead of its launch, before Triton 3.9 made it public",
        "Gluon kernels raise ImportError; the portable kernel takes their calls",
    )


GluonASTSource: Any = _gluon_source()


# ---- the interpreter
def _interpreted_by_environment(function: Any) -> Any:
    """Prepares a function for the interpreter, as `triton.jit` does under TRITON_INTERPRET=1."""
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        return triton.jit(function)
    finally:
        del os.environ["TRITON_INTERPRET"]
        if before is not None:
            os.environ["TRITON_INTERPRET"] = before


interpreted_function: Callable[[Any], Any] = take(
    "triton.runtime.interpreter:InterpretedFunction",
    _interpreted_by_environment,
    "running a kernel on the CPU",
    "triton.jit does the same while TRITON_INTERPRET is 1",
)

# ---- mma.sync
_builtin = take(
    "triton.experimental.gluon.language._core:builtin",
    None,
    "mma.sync for sm_75, which Gluon's own function does not support",
    "Gluon's mma_v2 supports sm_80 and newer; kernels for sm_75 do not compile",
)


def _dot(a, b, acc, _semantic=None):  # type: ignore[no-untyped-def]
    dot = _semantic.dot(
        a, b, acc, input_precision=None, max_num_imprecise_acc=None, out_dtype=acc.dtype
    )
    return gl.tensor(dot.handle, acc.type)


# acc + a b on tensor cores by mma.sync; a and b are in DotOperandLayout of acc's layout, k_width 2.
mma: Any = gl.nvidia.ampere.mma_v2 if _builtin is None else _builtin(_dot)

# ---- the assembler
_make_backend = take(
    "triton.compiler:make_backend",
    None,
    "assembling a kernel's PTX as Triton does, to read the assembler's report",
    "outblas calls ptxas itself, without the options that only Triton knows",
)
_get_ptxas = take(
    "triton.backends.nvidia.compiler:get_ptxas",
    None,
    "which of its assemblers Triton uses for an architecture",
    "triton.knobs.nvidia.ptxas is used for all",
)


def ptxas(arch: int) -> str:
    """The path of the assembler for an architecture."""
    tool = triton.knobs.nvidia.ptxas if _get_ptxas is None else _get_ptxas(arch)
    return str(tool.path)


def assemble(ptx: str, metadata: dict[str, Any], arch: int) -> tuple[bytes, str]:
    """Assembles PTX for an architecture with the options of a compiled kernel; returns the cubin
    and the assembler's log. Standard output of the whole process is redirected meanwhile.
    """
    options = {name: metadata.get(name) for name in ("enable_fp_fusion", "ptx_options")}
    if _make_backend is None:
        return _assemble_alone(ptx, options, arch)
    backend = _make_backend(metadata["target"])
    log = io.StringIO()
    with triton.knobs.nvidia.scope(), contextlib.redirect_stdout(log):
        triton.knobs.nvidia.dump_ptxas_log = True
        cubin = backend.make_cubin(ptx, {}, backend.parse_options(options), arch)
    return cubin, log.getvalue()


def _assemble_alone(ptx: str, options: dict[str, Any], arch: int) -> tuple[bytes, str]:
    """Does what `assemble` does in a ptxas process of our own."""
    with _file(ptx) as source:
        cubin = source.with_suffix(".cubin")
        command = [ptxas(arch), "-v", "-lineinfo", f"--gpu-name=sm_{arch}{'a' * (arch >= 90)}"]
        command += [] if options["enable_fp_fusion"] else ["--fmad=false"]
        command += str(options["ptx_options"] or "").split()
        done = subprocess.run(
            [*command, str(source), "-o", str(cubin)], capture_output=True, text=True, check=True
        )
        return cubin.read_bytes(), done.stderr


@contextlib.contextmanager
def _file(ptx: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx, encoding="utf-8")
        yield path
