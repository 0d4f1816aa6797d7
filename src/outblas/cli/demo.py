"""`outblas demo`: the main job, on whatever machine this is."""

from __future__ import annotations

import typer

from outblas.base import progress, registry
from outblas.cli import bench, inspect, progress_line, verify
from outblas.cli.common import console, note

N = 4096
CHECKED = "65x130x257,1x300x1000,128"  # shapes, in the interpreter
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
    try:
        passed = _on_gpu() if on_gpu else _without_gpu()
    except ImportError as error:
        note(str(error), None)
        passed = False
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
    campaign = Campaign([parse(BASE), *runnable(device)])
    records = campaign.run([GemmTask((N, N, N), "nt")], ["burst"])
    _, passed = bench.shown(campaign, records)
    note("Burst: the GPU idles, then one warm-up call and 8 timed calls.")
    return passed


def _without_gpu() -> bool:
    """The portable kernel on small matrices through the interpreter, and the Hopper rungs
    compiled; false if an element is wrong, registers spill or the assembler warns.
    """
    from outblas.inspect import inspect as inspection_of

    console.print(
        "There is no NVIDIA GPU: small products run in Triton's interpreter, and the Hopper "
        "kernels are compiled but not run."
    )
    with progress_line.shown():
        tally = verify.Tally("portable", "float32")
        verify.count(tally, "cpu", verify.cases_of("float32", CHECKED, ["nt", "tn"]))
    verify.show("cpu", [tally])
    with progress_line.shown():
        rungs = progress.counted(registry.ladder("hopper"), lambda kernel: kernel.name)
        inspections = [inspection_of(kernel.name) for kernel in rungs]
    inspect.show(inspections)
    spilled = any(i.spill_stores or i.spill_loads or i.warnings for i in inspections)
    return not (tally.failed or spilled)
