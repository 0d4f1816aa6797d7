"""`outblas demo`: the main job, on whatever machine this is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..core import progress, registry
from . import progress_line
from .common import (
    NONE,
    check_writable,
    console,
    note,
    save_json,
    table,
    usage_errors,
    without_nulls,
)

if TYPE_CHECKING:
    from ..bench.record import Record
    from ..verify.cases import Case

N = 4096


def demo(
    save: Annotated[
        Path | None, typer.Option(help="Write the times to a JSON file (on a GPU).")
    ] = None,
) -> None:
    """Multiplies a few matrices and checks every element: a first look.

    On a GPU it then times every kernel beside cuBLAS. Without a GPU it compiles the Hopper kernels
    and shows what the assembler made of them.
    """
    import torch

    with usage_errors():
        check_writable(save)
    passed = _on_gpu(save) if torch.cuda.is_available() else _without_gpu()
    _show_next_steps(on_gpu=torch.cuda.is_available())
    raise typer.Exit(0 if passed else 1)


def _show_next_steps(*, on_gpu: bool) -> None:
    """Commands to try after this one."""
    steps = [
        ("outblas list", "every kernel and its idea"),
        ("outblas inspect hopper.gemm", "registers, occupancy, instructions"),
    ]
    steps += (
        [
            ("outblas bench --shapes 2048,8192", "time other sizes"),
            ("outblas tune --shapes 4096 --budget 5m", "tune for this GPU"),
        ]
        if on_gpu
        else [
            (
                "outblas tune --shapes 64 --kernels portable --gpus cpu --trials 4",
                "a sweep",
            ),
            ("outblas report roofline", "see what limits each kernel"),
        ]
    )
    note("\nTry next:", None)
    for command, what in steps:
        note(f"  {command}  # {what}", None, highlight=False)


def _on_gpu(save: Path | None) -> bool:
    """Every kernel that runs here at N = 4096 in bf16: the exact oracle, then the burst
    protocol.
    """
    import torch

    from ..bench.campaign import Campaign
    from ..bench.environment import environment
    from ..bench.providers import parse, runnable
    from ..bench.record import BASE

    device = torch.device("cuda", torch.cuda.current_device())
    console.print(
        f"{torch.cuda.get_device_name(device)}: C = A·B, {N}×{N}×{N} in bfloat16, B transposed."
    )
    with progress_line.shown():
        campaign = Campaign([parse(BASE), *runnable(device)])
        records = list(campaign.run([(N, N, N)], ["nt"], ["burst"]))
    columns = ("kernel", "check", "µs", "TFLOP/s", "× cuBLAS")
    table(
        "Burst: the GPU idles, then one warm-up call and 8 timed calls", columns, map(_row, records)
    )
    if save is not None:
        save_json(
            save,
            {
                "environment": environment(),
                "results": [without_nulls(record.record()) for record in records],
            },
        )
    return all(record.passed for record in records)


def _row(record: Record) -> tuple[str, ...]:
    r, figures = record, (NONE,) * 3
    if r.us is not None:
        figures = (
            f"{r.us:.1f}",
            f"{r.tflops:.0f}",
            f"{r.ratio:.3f} ({r.ratio_low:.3f}–{r.ratio_high:.3f})",
        )
    return (r.label, r.check, *figures)


def _without_gpu() -> bool:
    """The portable kernel on small matrices through the interpreter, and the Hopper rungs
    compiled.
    """
    import torch

    from ..verify.cases import Case

    console.print(
        "There is no NVIDIA GPU: small products run in Triton's interpreter, and the Hopper "
        "kernels are compiled but not run."
    )
    cases = [
        Case(128, 128, 128, torch.bfloat16, layout="nt"),
        Case(200, 120, 72, torch.float16),
        Case(65, 130, 257, torch.float32, layout="tn"),
        Case(33, 40, 50, torch.bfloat16, batch_a=(2, 1), batch_b=(3,)),
        Case(1, 300, 1000, torch.float32, layout="nt"),
    ]
    rows, passed = [], True
    with progress_line.shown():
        for case in progress.counted(cases):
            fault = _check("portable", case, "cpu")
            rows.append((str(case), "every element is exact" if fault is None else fault))
            passed &= fault is None
    table("portable in the interpreter: C = A·B against float64", ("product", "check"), rows)
    return _compile_hopper() and passed


def _check(kernel: str, case: Case, device: str) -> str | None:
    """What is wrong with a kernel's product of small integers, or None when every bit is right."""
    from ..verify.kernels import check

    try:
        result = check(kernel, case, "exact", device)
    except ImportError as error:
        return str(error)
    return None if result.ok else result.message


def _compile_hopper() -> bool:
    """What the assembler makes of every Hopper rung for sm_90a; false if registers spill or it
    warns.
    """
    from ..inspect import inspect

    try:
        with progress_line.shown():
            rungs = progress.counted(registry.ladder("hopper"), lambda kernel: kernel.name)
            inspections = [inspect(kernel.name) for kernel in rungs]
    except ImportError as error:
        note(str(error), None)
        return False
    rows, passed = [], True
    for found in inspections:
        spilled = found.spill_stores + found.spill_loads
        passed &= not spilled and not found.warnings
        wgmma = " ".join(
            f"{n} × {op}" for op, n in found.instructions.items() if op.startswith("HGMMA")
        )
        tma = found.count("UTMALDG")
        rows.append(
            (found.kernel, found.registers, f"{spilled} B", f"{found.smem_bytes} B", wgmma, tma)
        )
    columns = ("kernel", "registers", "spills", "shared memory", "wgmma", "TMA loads")
    table("Compiled for sm_90a: bfloat16, B transposed", columns, rows)
    return passed
