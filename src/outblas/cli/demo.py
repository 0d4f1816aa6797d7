"""`outblas demo`: the main job, on whatever machine this is."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import dispatch, registry
from .common import check_writable, console, save_json, table, usage_error

if TYPE_CHECKING:
    from ..verify.cases import Case

N = 4096
KERNEL_SECONDS = 90


def demo(save: Annotated[Path | None, typer.Option(help="Write the times to a JSON file.")] = None) -> None:
    """Multiplies matrices, checks every element, and shows times beside cuBLAS's; without a GPU, the machine code."""
    import torch

    try:
        check_writable(save)
    except ValueError as error:
        raise usage_error(error) from None
    passed = _on_gpu(save) if torch.cuda.is_available() else _without_gpu()
    raise typer.Exit(0 if passed else 1)


def _on_gpu(save: Path | None) -> bool:
    """Every kernel that runs here at N = 4096 in bf16: the exact oracle, then the burst protocol."""
    import torch

    from ..bench import burst, environment
    from ..ops import matmul
    from ..verify.cases import Case
    from ..verify.watchdog import watchdog

    device = torch.device("cuda", torch.cuda.current_device())
    case = Case(N, N, N, torch.bfloat16, layout="nt")
    console.print(f"{torch.cuda.get_device_name(device)}: C = A·B, {N}×{N}×{N} bf16, B stored N×K.")
    checks = {}
    for kernel in registry.ladder():
        if dispatch.lacks_device(kernel, device) is None and "bfloat16" in kernel.dtypes:
            status = console.status(f"{kernel.name}: compiling, and checking {N * N} elements")
            with status, watchdog(KERNEL_SECONDS, kernel.name):
                checks[kernel.name] = _check(kernel.name, case, "cuda")
    a, b, c = (torch.randn(N, N, device=device).bfloat16() for _ in range(3))
    calls = {"cuBLAS": partial(torch.mm, a, b.t(), out=c)}
    calls |= {name: partial(matmul, a, b.t(), out=c, kernel=name) for name, fault in checks.items() if fault is None}
    with console.status("timing"):
        timings = burst(calls, base="cuBLAS")
    results = [
        {
            "provider": name,
            "shape": [N, N, N],
            "dtype": "bfloat16",
            "layout": "nt",
            "mode": "burst",
            "check": checks.get(name) or ("–" if name == "cuBLAS" else "exact"),
            **({"tflops": 2 * N**3 / timings[name].us / 1e6, **asdict(timings[name])} if name in timings else {}),
        }
        for name in ("cuBLAS", *checks)
    ]
    columns = ("kernel", "check", "µs", "TFLOP/s", "× cuBLAS")
    table("Burst: idle, one warm call, 8 timed", columns, map(_row, results))
    if save is not None:
        save_json(save, {"environment": environment(), "results": results})
    return not any(checks.values())


def _row(result: dict[str, Any]) -> tuple[str, ...]:
    figures = ("–",) * 3
    if "us" in result:
        spread = f"{result['ratio']:.3f} ({result['ratio_low']:.3f}–{result['ratio_high']:.3f})"
        figures = (f"{result['us']:.1f}", f"{result['tflops']:.0f}", spread)
    return (result["provider"], result["check"], *figures)


def _without_gpu() -> bool:
    """The portable kernel on small matrices through the interpreter, and the Hopper rungs compiled."""
    import torch

    from ..verify.cases import Case

    console.print("No NVIDIA GPU: small products run through Triton's interpreter, Hopper kernels are only compiled.")
    cases = [
        Case(128, 128, 128, torch.bfloat16, layout="nt"),
        Case(200, 120, 72, torch.float16),
        Case(65, 130, 257, torch.float32, layout="tn"),
        Case(33, 40, 50, torch.bfloat16, batch_a=(2, 1), batch_b=(3,)),
        Case(1, 300, 1000, torch.float32, layout="nt"),
    ]
    rows, passed = [], True
    for case in cases:
        with console.status(f"portable: {case}"):
            fault = _check("portable", case, "cpu")
        rows.append((str(case), "every element exact" if fault is None else fault))
        passed &= fault is None
    table("portable, interpreted: C = A·B against float64", ("product", "check"), rows)
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
    """What the assembler makes of every Hopper rung for sm_90a; false if registers spill."""
    from ..inspect import read_cubin

    rows, passed = [], True
    for kernel in registry.ladder("hopper"):
        try:
            module = registry.load(kernel.name)
        except ImportError as error:
            console.print(str(error), markup=False)
            return False
        with console.status(f"{kernel.name}: compiling for sm_90a"):
            code = read_cubin(module.cubin())
        passed &= code.spills == 0
        wgmma, tma = code.count("HGMMA"), code.count("UTMALDG")
        shared = module.Config().shared_memory_bytes
        rows.append((kernel.name, code.registers, code.spills, f"{shared} B", f"{wgmma} × {code.first('HGMMA')}", tma))
    columns = ("kernel", "registers", "spills", "shared memory", "wgmma", "TMA loads")
    table("Compiled for sm_90a, bf16, B stored N×K", columns, rows)
    return passed
