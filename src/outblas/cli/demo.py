"""`outblas demo`: the main job, on whatever machine this is."""

from __future__ import annotations

import typer

from outblas.base import progress, registry
from outblas.cli import progress_line
from outblas.cli.common import NONE, console, figure, note, table

N = 4096
# Commands to try next: everywhere, on a GPU, and without one.
STEPS = (
    ("outblas list", "every kernel and its idea"),
    ("outblas inspect hopper.gemm", "registers, occupancy, instructions"),
)
STEPS_ON_GPU = (
    ("outblas bench --shapes 2048,8192", "time other sizes"),
    ("outblas tune --shapes 4096 --budget 5m", "tune for this GPU"),
)
STEPS_WITHOUT_GPU = (
    ("outblas tune --shapes 64 --kernels portable --gpus cpu --trials 4", "a sweep"),
    ("outblas verify portable --shapes quick", "check one kernel"),
)


def demo() -> None:
    """Multiplies a few matrices and checks every element: a first look.

    On a GPU it then times every kernel beside cuBLAS. Without a GPU it compiles the Hopper kernels
    and shows what the assembler made of them.
    """
    import torch

    on_gpu = torch.cuda.is_available()
    passed = _on_gpu() if on_gpu else _without_gpu()
    note("\nTry next:", None)
    for command, what in (*STEPS, *(STEPS_ON_GPU if on_gpu else STEPS_WITHOUT_GPU)):
        note(f"  {command}  # {what}", None, highlight=False)
    raise typer.Exit(0 if passed else 1)


def _on_gpu() -> bool:
    """Every kernel that runs here at N = 4096 in bf16: the exact oracle, then the burst
    protocol.
    """
    import torch

    from outblas.bench.campaign import Campaign
    from outblas.bench.providers import parse, runnable
    from outblas.bench.record import BASE
    from outblas.bench.tasks import GemmTask

    device = torch.device("cuda", torch.cuda.current_device())
    console.print(
        f"{torch.cuda.get_device_name(device)}: C = A·B, {N}×{N}×{N} in bfloat16, B transposed."
    )
    with progress_line.shown():
        campaign = Campaign([parse(BASE), *runnable(device)])
        records = list(campaign.run([GemmTask((N, N, N), "nt")], ["burst"]))
    rows = [
        (
            r.label,
            r.check,
            figure(r.us, ".1f"),
            figure(r.tflops, ".0f"),
            NONE if r.ratio is None else f"{r.ratio:.3f} ({r.ratio_low:.3f}–{r.ratio_high:.3f})",
        )
        for r in records
    ]
    columns = ("kernel", "check", "µs", "TFLOP/s", "× cuBLAS")
    table("Burst: the GPU idles, then one warm-up call and 8 timed calls", columns, rows)
    return all(record.passed for record in records)


def _without_gpu() -> bool:
    """The portable kernel on small matrices through the interpreter, and the Hopper rungs
    compiled.
    """
    import torch

    from outblas.verify.cases import Case
    from outblas.verify.kernels import check

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
    try:
        with progress_line.shown():
            results = [check("portable", case, "exact", "cpu") for case in progress.counted(cases)]
    except ImportError as error:
        note(str(error), None)
        return False
    rows = [(r.case, "every element is exact" if r.ok else r.message) for r in results]
    table("portable in the interpreter: C = A·B against float64", ("product", "check"), rows)
    return _compile_hopper() and all(result.ok for result in results)


def _compile_hopper() -> bool:
    """What the assembler makes of every Hopper rung for sm_90a; false if registers spill or it
    warns.
    """
    from outblas.inspect import inspect

    try:
        with progress_line.shown():
            rungs = progress.counted(registry.ladder("hopper"), lambda kernel: kernel.name)
            inspections = [inspect(kernel.name) for kernel in rungs]
    except ImportError as error:
        note(str(error), None)
        return False
    rows = [
        (
            i.kernel,
            i.registers,
            f"{i.spill_stores + i.spill_loads} B",
            f"{i.smem_bytes} B",
            " ".join(f"{n} × {op}" for op, n in i.instructions.items() if op.startswith("HGMMA")),
            i.count("UTMALDG"),
        )
        for i in inspections
    ]
    columns = ("kernel", "registers", "spills", "shared memory", "wgmma", "TMA loads")
    table("Compiled for sm_90a: bfloat16, B transposed", columns, rows)
    return not any(i.spill_stores or i.spill_loads or i.warnings for i in inspections)
