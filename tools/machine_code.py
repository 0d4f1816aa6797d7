"""The snapshot of machine code: what every kernel compiles to, beside what it did when somebody
last looked. It needs no GPU.

    python -m tools.machine_code [KERNEL ...]   compare; all of the snapshot by default
    python -m tools.machine_code --update       write what is compiled now

It exits with 0 if the machine code is the same, with 1 if it differs or a variant is missing or
unknown, and with 3 if other compilers made the snapshot and nothing was compared.

The snapshot is tests/data/machine_code.json. `variants` maps names to `compile`, the fields of a
`KernelVariant`, and `code`, the figures that `figures` returns; `compilers` holds the versions that
made the code. A new entry needs only `compile`: `--update` adds the rest.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from outblas.base import registry
from outblas.base.compat.triton_private import ptxas
from outblas.base.configs import from_text
from outblas.call import epilogue, fp8, quantization
from outblas.call import problem as operands
from outblas.call.artifact import cta_threads
from outblas.call.grouped import Form, GroupedProblem, GroupedTensors, describe
from outblas.call.problem import Problem
from outblas.inspect import read_cubin
from outblas.inspect.inspection import compilable

SNAPSHOT = Path(__file__).parents[1] / "tests" / "data" / "machine_code.json"
TOTAL_TOLERANCE = 0.01  # fraction of the total number of instructions
ACTIVATION_BACKWARD = "activation_backward"  # a kernel that is not on a ladder
FP8 = "float8_e4m3fn"
DIFFERENT, NOTHING_COMPARED = 1, 3  # exit codes

# Operations whose instructions are counted, each by its full mnemonic.
_MMA = "HGMMA QGMMA IGMMA HMMA QMMA IMMA DMMA WARPGROUP"
_TMA = "UTMALDG UTMASTG UTMAREDG UTMAPF UTMACCTL UTMACMDFLUSH UBLKCP UBLKRED UBLKPF"
_BARRIERS = (
    "BAR SYNCS UCGABAR_ARV UCGABAR_WAIT DEPBAR LDGDEPBAR ARRIVES MEMBAR ERRBAR CGAERRBAR CCTL FENCE"
    " WARPSYNC NANOSLEEP ACQBULK PREEXIT ATOM ATOMG ATOMS RED REDG REDAS"
)
_MEMORY = "LDG STG LDGSTS LDS STS LDSM STSM STAS LDL STL USETMAXREG SHFL"
COUNTED = frozenset(f"{_MMA} {_TMA} {_BARRIERS} {_MEMORY}".split())


@dataclass(frozen=True, kw_only=True)
class KernelVariant:
    """What to compile. All fields except `kernel` and `arch` default to those of a plain call.

    `kernel` is a name of the registry, or "activation_backward". `arch` is 75, 80 or 90. `config`
    is the text of a config ("tile_m=128"), "" for the kernel's choice. `dtype`, `out_dtype` ("":
    the same as `dtype`), `layout` and `shape` (M, N, K) describe the GEMM, `batch` holds the
    extents of leading dimensions, and `tf32` allows tf32 products.

    `out` is the layout of the output: by "rows", by "columns", or "strided", without a contiguous
    dimension. `alignment` holds bytes that divide the addresses of A, B and the output; if empty,
    these are whole cache lines, and 16 bytes.

    Epilogue: `scaled` means that alpha is not 1. `addend` is C of `addmm`, `bias`, `residual` and
    `aux` are tensors of the epilogue, and `activation` is one of `epilogue.ACTIVATIONS`. A tensor
    is "" for none, a "row" or a "column" that broadcasts, or a matrix by "rows" or by "columns";
    `aux`, which is written, is a matrix.

    `formats` are those of fp8 operands, "e4m3 e5m2" or "e4m3 e5m2 promoted". Their scales `scale_a`
    and `scale_b` are "one" for the whole tensor, or a "column" of A's rows and a "row" of B's
    columns; with formats such as "e4m3 e4m3 promoted 1x128 128x128" they vary along K. `dtype` is
    bfloat16 then. With formats `out_dtype` may be "float8_e4m3fn": the output has scales of 128
    columns of a row then, powers of two where `power_of_two`, and tensors of the epilogue are
    float32.

    `form`: "ragged_m", "ragged_n", "ragged_k" or "masked" where `groups` groups divide the product,
    as `core.grouped` has it; then `formats` must have scales that vary along K. With `gathers` an
    index names the rows of A, with `scatters` another one those of the output, which are weighted.
    """

    kernel: str
    arch: int
    config: str = ""
    dtype: str = "bfloat16"
    out_dtype: str = ""
    layout: str = "nt"
    shape: tuple[int, int, int] = (4096, 4096, 4096)
    batch: tuple[int, ...] = ()
    tf32: bool = False
    out: str = "rows"
    alignment: tuple[int, ...] = ()
    scaled: bool = False
    addend: str = ""
    activation: str = ""
    bias: str = ""
    residual: str = ""
    aux: str = ""
    formats: str = ""
    scale_a: str = "one"
    scale_b: str = "one"
    power_of_two: bool = False
    form: Form | None = None
    groups: int = 8
    gathers: bool = False
    scatters: bool = False


# ---- compiling a variant
def variant(entry: Mapping[str, Any]) -> KernelVariant:
    """The variant of a snapshot's entry. Raises TypeError for a field that there is not."""
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in entry["compile"].items()
    }
    return KernelVariant(**fields)


def compile_variant(variant: KernelVariant) -> tuple[bytes, int, int]:
    """Compiles a kernel, without a GPU, and returns its cubin, and bytes of shared memory and
    threads of a CTA.

    Raises ValueError for a config or a call that the kernel does not support, ImportError when its
    DSL is not installed.
    """
    if variant.kernel == ACTIVATION_BACKWARD:
        compiled = _activation_backward(variant)
        return compiled.asm["cubin"], compiled.metadata.shared, cta_threads(compiled.asm["ptx"])
    module = registry.load("hopper.gemm" if variant.form else variant.kernel)
    config = from_text(module.Config, variant.config) if variant.config else None
    if variant.form:
        from outblas.hopper import grouped

        artifact = grouped.artifact(grouped_problem(variant), config)
    else:
        call = problem(variant)
        artifact = module.artifact(config, arch=variant.arch, layout=variant.layout, problem=call)
    return artifact.cubin, artifact.smem_bytes, artifact.threads


def problem(variant: KernelVariant) -> Problem:
    """The call in normal form, with tensors on the meta device."""
    M, N, K = variant.shape
    dtype = getattr(torch, variant.dtype)
    out_dtype = getattr(torch, variant.out_dtype or variant.dtype)
    is_quantized = variant.out_dtype == FP8
    epilogue_dtype = torch.float32 if is_quantized else out_dtype
    columns = N * epilogue.glu_split(variant.activation)  # of B, C, bias and aux
    terms = K // 2 if variant.formats else K  # two fp8 values are one of 16 bits

    def matrix(rows: int, columns: int, layout: str, dtype: torch.dtype) -> torch.Tensor:
        return _matrix((*variant.batch, rows, columns), layout, dtype)

    def extra(layout: str, columns: int) -> torch.Tensor | None:
        if layout in ("row", "column"):
            shape = (columns,) if layout == "row" else (M, 1)
            return torch.empty(shape, dtype=epilogue_dtype, device="meta")
        return matrix(M, columns, layout, epilogue_dtype) if layout else None

    scales = _scales(variant, M, columns) if variant.formats else None
    if scales and is_quantized:
        scales += (quantization.empty_scales((M, N), "1x128", torch.device("meta")),)
    addend = extra(variant.addend, columns)
    call = operands.problem(
        matrix(M, terms, "columns" if variant.layout[0] == "t" else "rows", dtype),
        matrix(terms, columns, "columns" if variant.layout[1] == "t" else "rows", dtype),
        matrix(M, N, variant.out, out_dtype),
        addend,
        tf32=variant.tf32,
        scaled=variant.scaled or addend is not None,
        extra=epilogue.EpilogueArgs(
            variant.activation,
            bias=extra(variant.bias, columns),
            residual=extra(variant.residual, N),
            aux=extra(variant.aux, columns),
        ),
        scales=scales,
        formats=variant.formats,
        power_of_two=variant.power_of_two,
    )
    if not variant.alignment:
        return call
    return replace(call, alignment=(*variant.alignment, *call.alignment[3:]))


def grouped_problem(variant: KernelVariant) -> GroupedProblem:
    """The product of groups in normal form, with tensors on the meta device. M, N or K of the shape
    are those of all groups together.
    """
    (M, N, K), groups, form = variant.shape, variant.groups, variant.form or "ragged_m"
    dtype = torch.float8_e4m3fn if variant.formats else getattr(torch, variant.dtype)
    columns = N * epilogue.glu_split(variant.activation)  # of B, bias and aux
    lead = {"masked": (groups, M // groups), "ragged_n": (groups, M)}.get(form, (M,))
    result = {"masked": lead, "ragged_k": (groups, M)}.get(form, (M,))
    has_matrices = form in ("ragged_m", "masked")

    def tensor(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    def operand(lead: tuple[int, ...], layout: str, *shape: int) -> torch.Tensor:
        return _matrix((*lead, *shape), "columns" if layout == "t" else "rows", dtype)

    out_dtype = getattr(torch, variant.out_dtype or variant.dtype)
    scales: dict[str, torch.Tensor] = {}
    if variant.formats:
        blocks, columns_of_b = K // fp8.BLOCK, columns // (1 if form == "ragged_k" else fp8.BLOCK)
        scales["scale_a"] = tensor(*lead[:-1], blocks, lead[-1], dtype=torch.float32).mT
        shape = (*((groups,) * has_matrices), blocks, columns_of_b)
        scales["scale_b"] = tensor(*shape, dtype=torch.float32)
    rows = tensor(M, dtype=torch.int32)
    tensors = GroupedTensors(
        bias=tensor(groups, columns, dtype=out_dtype) if variant.bias else None,
        residual=tensor(*result, N, dtype=out_dtype) if variant.residual else None,
        aux=tensor(*result, columns, dtype=out_dtype) if variant.aux else None,
        a_index=rows if variant.gathers else None,
        scatter_index=rows if variant.scatters else None,
        scatter_weights=rows.float() if variant.scatters else None,
        counts=tensor(groups, dtype=torch.int32) if form == "masked" else None,
        **scales,
    )
    return describe(
        form,
        operand(lead[:-1], variant.layout[0], lead[-1], K),
        operand((groups,) * has_matrices, variant.layout[1], K, columns),
        tensor(*result, N, dtype=out_dtype),
        groups,
        tensors,
        activation=variant.activation,
    )


def _scales(variant: KernelVariant, M: int, columns: int) -> tuple[torch.Tensor, ...]:
    """The scales of fp8 operands on the meta device; in those that vary along K the blocks of A's
    rows are neighbours, and the blocks of K of B's columns.
    """
    formats = fp8.formats(variant.formats)
    if formats.block_a:
        blocks = -(-variant.shape[2] // fp8.BLOCK)
        scale_a = torch.empty(blocks, -(-M // formats.block_a), device="meta").t()
        scale_b = torch.empty(-(-columns // formats.block_b), blocks, device="meta").t()
        return scale_a, scale_b
    one = torch.empty((), device="meta")
    return (
        one if variant.scale_a == "one" else torch.empty(M, 1, device="meta"),
        one if variant.scale_b == "one" else torch.empty(1, columns, device="meta"),
    )


def _matrix(shape: tuple[int, ...], layout: str, dtype: torch.dtype) -> torch.Tensor:
    """A tensor on the meta device whose matrices lie by "rows", by "columns", or "strided"."""
    *batch, rows, columns = shape
    if layout == "columns":
        return torch.empty(*batch, columns, rows, dtype=dtype, device="meta").mT
    if layout == "strided":
        return torch.empty(*batch, rows, 2 * columns, dtype=dtype, device="meta")[..., ::2]
    if layout != "rows":
        raise ValueError(f"a matrix is {layout!r}, expected rows, columns or strided")
    return torch.empty(*batch, rows, columns, dtype=dtype, device="meta")


def _activation_backward(variant: KernelVariant) -> Any:
    """Triton's compile of the gradient of an activation, for contiguous tensors."""
    from outblas.device.launch import TYPES
    from outblas.kernels import activation, passes

    types = dict.fromkeys(("grad", "x", "out"), TYPES[getattr(torch, variant.dtype)])
    constants = {
        "FUNCTION": epilogue.GATED.get(variant.activation, variant.activation),
        "GATE": variant.activation in epilogue.GATED,
        "WIDE": False,
        "BLOCK": activation.BLOCK,
    }
    types |= {"elements": "i32", "columns": "i32"}
    return passes.compile_for(activation.backward_kernel, types, constants, variant.arch)


# ---- comparison
def figures(variant: KernelVariant) -> dict[str, Any]:
    """Compiles a variant and returns the figures that are compared.

    `registers` and bytes of `stack`, `spill_stores` and `spill_loads` are per thread, `smem_bytes`
    and `threads` per CTA. `instructions` is their total number, `counts` the numbers of `COUNTED`
    instructions by mnemonic. Raises the errors of `compile_variant`.
    """
    cubin, smem_bytes, threads = compile_variant(variant)
    code = read_cubin(cubin)
    counts = {name: n for name, n in code.instructions.items() if name.split(".")[0] in COUNTED}
    return {
        "registers": code.registers,
        "stack": code.stack,
        "spill_stores": code.spill_stores,
        "spill_loads": code.spill_loads,
        "smem_bytes": smem_bytes,
        "threads": threads,
        "instructions": sum(code.instructions.values()),
        "counts": dict(sorted(counts.items())),
    }


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A line for each figure that has changed. The total number of instructions may change by
    `TOTAL_TOLERANCE`.
    """
    was, is_now = ({**code, **code["counts"], "counts": 0} for code in (before, now))
    tolerance = {"instructions": TOTAL_TOLERANCE * before["instructions"]}
    return [
        f"{name}: {was.get(name, 0)} -> {is_now.get(name, 0)}"
        for name in dict.fromkeys((*was, *is_now))
        if abs(is_now.get(name, 0) - was.get(name, 0)) > tolerance.get(name, 0)
    ]


def compare(entry: Mapping[str, Any]) -> list[str]:
    """Compiles an entry's variant, and returns how its code has changed; missing code counts as
    changed.
    """
    if "code" not in entry:
        return ["code: missing, run `make snapshot`"]
    try:
        now = figures(variant(entry))
    except ImportError:  # a DSL is not installed, which is not the variant's fault
        raise
    except Exception as error:  # compilers raise errors of any kind
        return [f"compile: {type(error).__name__}: {error}"]
    return differences(entry["code"], now)


def uncovered(entries: Iterable[Mapping[str, Any]]) -> list[str]:
    """The kernels of the registry, each with an architecture that it compiles for, that none of the
    entries is a variant of.
    """
    covered = {(entry["compile"]["kernel"], entry["compile"]["arch"]) for entry in entries}
    return [
        f"{kernel.name} sm_{arch}"
        for kernel in registry.ladder()
        for arch in compilable(kernel)
        if (kernel.name, arch) not in covered
    ]


def compilers() -> dict[str, str]:
    """The versions of the programs that make machine code here: the DSLs, and the assemblers that
    Triton calls.
    """
    versions = {}
    for name in ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-cu13", "triton"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    for arch in (80, 90):
        command = [ptxas(arch), "--version"]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        number = re.search(r"\bV(\d[\d.]*)", told)
        versions[f"ptxas for sm_{arch}"] = number[1] if number else told.strip()
    return versions


def other_compilers(snapshot: Mapping[str, Any]) -> list[str]:
    """How the installed compilers differ from the snapshot's. Their code may differ too, so no code
    is compared then.
    """
    before, here = snapshot["compilers"], compilers()
    return [
        f"{name} is {here.get(name, 'not installed')}, "
        f"the snapshot was made with {before.get(name, 'none')}"
        for name in sorted(here.keys() | before.keys())
        if here.get(name) != before.get(name)
    ]


# ---- the file and the command
def load(path: Path = SNAPSHOT) -> dict[str, Any]:
    """The snapshot in a file: `compilers` and `variants`."""
    snapshot: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return snapshot


def to_text(snapshot: Mapping[str, Any]) -> str:
    """A snapshot as it is written, with compilers and variants in the order of their names."""
    parts = {key: dict(sorted(snapshot[key].items())) for key in ("compilers", "variants")}
    return json.dumps({**snapshot, **parts}, indent=2) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Compares, or updates with --update. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.machine_code", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("kernels", nargs="*", metavar="KERNEL", help="names of kernels")
    parser.add_argument("--update", action="store_true", help="write what is compiled now")
    parser.add_argument("--file", type=Path, default=SNAPSHOT, help="another snapshot")
    options = parser.parse_args(arguments)
    snapshot = load(options.file)
    entries = {
        name: entry
        for name, entry in snapshot["variants"].items()
        if not options.kernels or entry["compile"]["kernel"] in options.kernels
    }
    if not entries or (options.update and options.kernels):
        parser.error("expected kernels that the snapshot has, and none with --update")
    if not options.update and (changed := other_compilers(snapshot)):
        print("Nothing was compared: other compilers made the snapshot.", *changed, sep="\n")
        return NOTHING_COMPARED
    changes = []
    if not options.kernels and not options.update:
        changes = [f"{name}: no variant" for name in uncovered(entries.values())]
    steps = track(entries.items(), "compiling", console=Console(stderr=True), transient=True)
    for name, entry in steps:
        if options.update:
            before = entry.get("code")
            entry["code"] = figures(variant(entry))
            lines = differences(before, entry["code"]) if before else []
        else:
            lines = compare(entry)
        changes += [f"{name}: {line}" for line in lines]
    if options.update:
        options.file.write_text(to_text({**snapshot, "compilers": compilers()}), encoding="utf-8")
    if changes:
        print(*changes, sep="\n")
        return 0 if options.update else DIFFERENT
    print(f"{len(entries)} variants have the same machine code as in {options.file.name}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
