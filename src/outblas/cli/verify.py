"""`outblas verify`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outblas.base import progress, registry
from outblas.base.shapes import LAYOUTS
from outblas.cli import progress_line
from outblas.cli.common import (
    JsonOption,
    check_dtype,
    check_given,
    check_one_of,
    check_runs,
    give,
    note,
    parse_shapes,
    split,
    table,
    usage_errors,
)

if TYPE_CHECKING:
    from outblas.verify.cases import Case

CASE_SECONDS = 120
MOST_FAILURES = 10  # that are shown of a kernel


@dataclass
class Tally:
    """What came of one kernel and dtype."""

    kernel: str
    dtype: str
    passed: int = 0
    failed: list[dict[str, Any]] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)


def verify(
    kernels: Annotated[
        list[str] | None, typer.Argument(help="Names of kernels. Default: all that run here.")
    ] = None,
    shapes: Annotated[
        str | None,
        typer.Option(
            help="quick, full, or shapes: N or MxNxK, comma-separated. Default: full on a GPU, "
            "else quick."
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="bfloat16, float16 or float32, comma-separated. Default: all that a kernel takes."
        ),
    ] = None,
    layout: Annotated[
        str | None, typer.Option(help="nt, nn, tn or tt, comma-separated. Default: all.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Checks that kernels compute the right product.

    Products of small integers must be exact, products of random numbers must stay within an error
    bound, and NaN and Inf must stand where torch has them. It exits with code 1 if a check fails.
    """
    import torch

    from outblas.call import launcher

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    with usage_errors():
        for option, text in (("--shapes", shapes), ("--dtype", dtype), ("--layout", layout)):
            check_given(option, text)
        layouts = split(layout or "") or list(LAYOUTS)
        for letters in layouts:
            check_one_of("--layout", letters, LAYOUTS)
        sizes = shapes or ("full" if on_gpu else "quick")
        if sizes not in ("quick", "full"):
            parse_shapes(sizes)
        chosen = [registry.find(name) for name in kernels or ()] or [
            kernel
            for kernel in registry.ladder()
            if launcher.unsupported_device_reason(kernel, device) is None
        ]
        for kernel in chosen:
            check_runs(kernel, device)
            for name in split(dtype or ""):
                check_dtype(name, kernel.name, kernel.dtypes)
        pairs = [(kernel.name, d) for kernel in chosen for d in split(dtype or "") or kernel.dtypes]
        with progress_line.shown():
            tallies = [
                count(Tally(*pair), device, cases_of(pair[1], sizes, layouts))
                for pair in progress.counted(pairs, " ".join)
            ]
    device_name = torch.cuda.get_device_name(device) if on_gpu else "cpu"
    report = {"device": device_name, "results": [asdict(tally) for tally in tallies]}
    give(report, lambda: show(device_name, tallies), json=json)
    raise typer.Exit(1 if any(t.failed or not t.passed for t in tallies) else 0)


def count(tally: Tally, device: Any, cases: Iterator[Case]) -> Tally:
    """Runs every oracle on every case, and counts what came of it."""
    from outblas.verify.kernels import Refused, check, oracles
    from outblas.verify.watchdog import watchdog

    for case in progress.counted(list(cases)):
        for oracle in oracles(tally.kernel):
            try:
                with watchdog(CASE_SECONDS, f"{tally.kernel} {case} {oracle}"):
                    result = check(tally.kernel, case, oracle, device)
            except Refused as refusal:
                tally.refused[str(refusal).split(", and ")[0]] += 1  # without the call's figures
                break
            if result.ok:
                tally.passed += 1
            else:
                tally.failed.append(result.record())
    return tally


def cases_of(dtype: str, sizes: str, layouts: list[str]) -> Iterator[Case]:
    """The cases of "quick", of "full", or of shapes, in the layouts."""
    import torch

    from outblas.verify import cases

    kind = getattr(torch, dtype)
    if sizes in ("quick", "full"):
        generate = cases.quick if sizes == "quick" else cases.full
        return (case for case in generate(kind) if case.layout in layouts)
    pairs = ((shape, layout) for shape in parse_shapes(sizes) for layout in layouts)
    return (cases.Case(*shape, kind, layout=layout) for shape, layout in pairs)


def show(device: str, tallies: list[Tally]) -> None:
    """Prints a table of what came of each, and the first failures."""
    columns = ("kernel", "dtype", "passed", "failed", "cases not supported", "")
    rows = [
        (
            t.kernel,
            t.dtype,
            t.passed,
            len(t.failed),
            t.refused.total(),
            "FAIL" if t.failed else "ok",
        )
        for t in tallies
    ]
    table(f"Verified on {device}", columns, rows)
    for t in tallies:
        for reason, count in t.refused.items():
            note(f"{t.dtype}: {count} × {reason}")
        for failure in t.failed[:MOST_FAILURES]:
            note(f"{t.kernel} {failure['oracle']} {failure['case']}: {failure['message']}", None)
