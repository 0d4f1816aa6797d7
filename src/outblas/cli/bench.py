"""`outblas bench`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from outblas.base import grouped_shapes, registry
from outblas.base.shapes import LAYOUTS
from outblas.cli import progress_line
from outblas.cli.common import (
    NO_GPU,
    NONE,
    JsonOption,
    LayoutOption,
    ShapesOption,
    check_dtype,
    check_one_of,
    check_runs,
    check_writable,
    console,
    figure,
    make_table,
    parse_shapes,
    print_json,
    save_json,
    split,
    usage_errors,
    without_nulls,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from outblas.bench.campaign import Campaign
    from outblas.bench.operation import Operation
    from outblas.bench.providers import Provider
    from outblas.bench.record import Record
    from outblas.bench.tasks import Task

OPS = ("gemm", "grouped")


def bench(
    kernels: Annotated[
        str,
        typer.Option(
            help="Names of kernels, or NAME\\[k=v,...] for a config. Other names: outblas (what "
            "matmul chooses), outblas-bare (without the epilogue), cublas (against itself), "
            "outblas-plain (without batch invariance), torch.compile, cublas-no-workspace and "
            "triton-persistent (what else keeps the sums of a row apart from other rows), "
            "cublas-fast-accum (for fp8), deepgemm (for fp8-block, where it is installed; groups "
            "of multiples of 128 rows). Default: all kernels that run here. "
            "cublas and cublaslt-best are always timed; with --op grouped, torch is."
        ),
    ] = "",
    ladder: Annotated[
        str | None,
        typer.Option(help="Time the kernels of one ladder: simt, portable, turing or hopper."),
    ] = None,
    op: Annotated[
        str,
        typer.Option(
            help="What is timed: gemm (one product), or grouped (the products of all experts, "
            "beside torch's grouped_mm, or with --dtype fp8-block beside one torch._scaled_mm a "
            "group; --shapes has EXPERTSxROWSxNxK, with :zipf for skewed groups and :terms for "
            "gradients of weights, moe:MODEL, or deepgemm)."
        ),
    ] = "gemm",
    shapes: ShapesOption = "4096",
    dtype: Annotated[
        str,
        typer.Option(
            help="Precision: bfloat16, float16, float32 (IEEE products), tf32, fp8 (e4m3 with one "
            "scale per operand), fp8-rowwise (one scale per row of A and column of B) or fp8-block "
            "(one scale per 1x128 block of A and 128x128 block of B, or with :terms 128x1 block). "
            "--op grouped takes bfloat16, float16, float32 and fp8-block."
        ),
    ] = "bfloat16",
    layout: LayoutOption = "nt",
    epilogue: Annotated[
        str,
        typer.Option(help="What follows the product, joined by +: bias, an activation, residual."),
    ] = "",
    batch_invariant: Annotated[
        bool,
        typer.Option(
            "--batch-invariant",
            help="Time calls with batch_invariant=True: a row's bits depend on no other row.",
        ),
    ] = False,
    backward: Annotated[
        bool,
        typer.Option(
            "--backward", help="Time the two products of the backward pass of each shape instead."
        ),
    ] = False,
    mode: Annotated[
        str,
        typer.Option(
            help="Comma-separated: burst, cold (weights that are not in L2; only calls that memory "
            "bounds) and sustained (seconds at a time, with power)."
        ),
    ] = "burst,cold",
    rounds: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Minimum number of rounds in burst and cold (15), or of passes in sustained (3).",
        ),
    ] = None,
    json: JsonOption = False,
    save: Annotated[
        Path | None, typer.Option(help="Write the JSON to a file, again after every figure.")
    ] = None,
) -> None:
    """Times kernels beside cuBLAS and the best cuBLASLt algorithm on one GPU.

    Every kernel is checked before it is timed, and all take turns. It exits with code 1 if a kernel
    is wrong, and with code 3 without a GPU.
    """
    import torch

    from outblas.bench import grouped_providers, providers
    from outblas.bench.campaign import ROUNDS, Campaign
    from outblas.bench.operation import Operation
    from outblas.bench.record import MODES
    from outblas.call.steps import Steps

    is_grouped = op == "grouped"
    peers: Any = grouped_providers if is_grouped else providers
    with usage_errors(ImportError, options={"kernel": "--kernels", "name": "--ladder"}):
        check_writable(save)
        check_one_of("--op", op, OPS)
        modes, layouts = _choice("--mode", mode, MODES), _choice("--layout", layout, LAYOUTS)
        options = {"ladder": ladder, "epilogue": epilogue, "batch-invariant": batch_invariant}
        for option, value in options.items():
            if value and is_grouped:
                raise ValueError(f"--{option} cannot be combined with --op grouped")
        if ladder is not None:
            registry.ladder(ladder)
        check_one_of("--dtype", dtype, peers.PRECISIONS)
        operation = Operation(dtype, Steps.parse(epilogue), batch_invariant)
        tasks = _tasks(operation, shapes, layouts, backward=backward, is_grouped=is_grouped)
        chosen = [peers.parse(name, operation) for name in split_names(kernels)]
        if not torch.cuda.is_available():
            typer.echo(
                "There is no NVIDIA GPU that torch can use: nothing can be timed here.", err=True
            )
            raise typer.Exit(NO_GPU)
        device = torch.device("cuda", torch.cuda.current_device())
        if not is_grouped:
            _check_kernels(chosen, device, dtype)
        least = dict.fromkeys(ROUNDS, rounds) if rounds else ROUNDS
        campaign = Campaign(peers.competitors(chosen, operation, device, ladder), operation, least)
    report, passed = shown(campaign, campaign.run(tasks, modes), save, quiet=json)
    if json:
        print_json(report)
    raise typer.Exit(0 if passed else 1)


def split_names(text: str) -> list[str]:
    """`a,b[k=v,k=v]` → a and b[k=v,k=v]: commas inside brackets do not separate."""
    return [
        part.strip() for part in re.findall(r"[^,\[]+(?:\[[^\]]*\]?)?[^,]*", text) if part.strip()
    ]


def _choice(option: str, text: str, allowed: tuple[str, ...]) -> list[str]:
    values = split(text)
    for value in values or [text]:
        if value not in allowed:
            raise ValueError(f"{option} is {value!r}, expected some of {', '.join(allowed)}")
    return values


def _tasks(
    operation: Operation, shapes: str, layouts: list[str], *, backward: bool, is_grouped: bool
) -> Sequence[Task]:
    """The products of a campaign. Raises ValueError."""
    from outblas.bench.tasks import grouped_tasks, tasks

    sizes = [] if is_grouped else parse_shapes(shapes, least=1)
    workloads = grouped_shapes.parse(shapes) if is_grouped else []
    operation.check(sizes, layouts, backward=backward)
    if not is_grouped:
        return tasks(sizes, layouts, backward)
    for letters in layouts:
        if letters not in grouped_shapes.ROWS_LAYOUTS:
            raise ValueError(
                f"--layout has {letters!r}, expected nt or nn with --op grouped: the rows that "
                f"groups divide are contiguous; gradients of weights are always "
                f"{grouped_shapes.TERMS_LAYOUT}"
            )
    if backward and any(workload.form == "terms" for workload in workloads):
        raise ValueError("--shapes has :terms, expected none with --backward, which times both")
    return grouped_tasks(workloads, layouts, backward, operation)


def _check_kernels(chosen: list[Provider], device: torch.device, dtype: str) -> None:
    """Raises ValueError for kernels that the device or the dtype rules out."""
    from outblas.bench.operation import OPERANDS
    from outblas.bench.providers import LIBRARIES

    for kernel in (registry.find(p.name) for p in chosen if p.name not in LIBRARIES):
        check_runs(kernel, device)
        if OPERANDS[dtype] not in kernel.dtypes:
            check_dtype(dtype, kernel.name, kernel.dtypes)


def shown(
    campaign: Campaign, records: Iterator[Record], save: Path | None = None, *, quiet: bool = False
) -> tuple[dict[str, Any], bool]:
    """Runs the campaign, prints a table unless `quiet`, and says whether every product was right.

    An interrupted campaign leaves what is done in `save` and on the screen.
    """
    from outblas.bench.environment import environment

    report: dict[str, Any] = {"environment": environment(), "results": []}
    rows: list[tuple[str, ...]] = []
    passed = True
    try:
        with progress_line.shown():
            for record in records:
                if record.bandwidth_share is not None:
                    report["environment"]["copy_gbs"] = campaign.copy_gbs
                report["results"].append(asdict(record))
                rows.append(row(record))
                passed &= record.passed
                if save is not None:
                    results = [without_nulls(entry) for entry in report["results"]]
                    save_json(save, {**report, "results": results})
    finally:
        if rows and not quiet:
            title = f"{report['environment']['gpu']}, {campaign.operation.dtype}"
            console.print(_view(title, rows, campaign.base))
    return report, passed


def _view(title: str, rows: list[tuple[str, ...]], base: str) -> RenderableType:
    """A table without the columns in which nothing was measured; shape, layout and mode go to the
    title if all share them.
    """
    base = "cuBLAS" if base == "cublas" else base
    indices = []
    for i, column in enumerate(COLUMNS):
        values = {row[i] for row in rows}
        if column in ("shape", "layout", "mode") and len(values) == 1:
            title += f", {values.pop()}"
        elif values != {NONE}:
            indices.append(i)
    return make_table(
        f"{title}; × {base}: its time / the provider's time",
        [COLUMNS[i].replace("cuBLAS", base) for i in indices],
        ([row[i] for i in indices] for row in rows),
    )


def _spread(r: Record) -> str:
    if r.ratio is None:
        return NONE
    return f"{r.ratio:.3f} ({r.ratio_low:.3f}–{r.ratio_high:.3f})"


# The cells of one record by the headings of their columns; a dash where nothing was measured.
CELLS: dict[str, Callable[[Record], str]] = {
    "shape": lambda r: r.size,
    "layout": lambda r: r.layout,
    "mode": lambda r: r.mode,
    "product": lambda r: r.product or NONE,
    "epilogue": lambda r: r.epilogue or NONE,
    "provider": lambda r: r.label,
    "check": lambda r: r.check,
    "µs": lambda r: figure(r.us, ".1f" if (r.us or 0) >= 100 else ".2f"),
    "TFLOP/s": lambda r: figure(r.tflops, ".0f" if (r.tflops or 0) >= 100 else ".1f"),
    "GB/s": lambda r: figure(r.gbs, ".0f"),
    "of copy": lambda r: figure(r.bandwidth_share, ".1%"),
    "× cuBLAS": _spread,
    "× best": lambda r: figure(r.ratio_best, ".3f"),
    "apart": lambda r: figure(r.ratio_apart, ".3f"),
    "verdict": lambda r: r.verdict or NONE,
    "host µs": lambda r: figure(r.host_us, ".1f"),
    "MHz": lambda r: figure(r.clock_mhz, ".0f"),
    "util.": lambda r: figure(r.utilisation, ".3f"),
    "W": lambda r: figure(r.watts, ".0f"),
    "pJ/FLOP": lambda r: figure(r.pj_per_flop, ".3f"),
}
COLUMNS = tuple(CELLS)


def row(record: Record) -> tuple[str, ...]:
    """The cells of one record."""
    return tuple(cell(record) for cell in CELLS.values())
