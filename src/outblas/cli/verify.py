"""`outblas verify`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core import progress, registry
from ..core.shapes import LAYOUTS
from . import progress_line
from .common import (
    JsonOption,
    SaveOption,
    check_dtype,
    check_given,
    check_one_of,
    check_runs,
    check_writable,
    give,
    note,
    parse_shapes,
    split,
    table,
    usage_errors,
)

if TYPE_CHECKING:
    from ..verify.cases import Case

CASE_SECONDS = 120


@dataclass
class Tally:
    """What came of one kernel and dtype."""

    kernel: str
    dtype: str
    passed: int = 0
    failures: list[dict[str, Any]] = field(default_factory=list)
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
    save: SaveOption = None,
) -> None:
    """Checks that kernels compute the right product.

    Products of small integers must be exact, products of random numbers must stay within an error
    bound, and NaN and Inf must stand where torch has them. It exits with code 1 if a check fails.
    """
    import torch

    device = (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    with usage_errors():
        check_writable(save)
        for option, text in (("--shapes", shapes), ("--dtype", dtype), ("--layout", layout)):
            check_given(option, text)
        layouts = split(layout or "")
        for letters in layouts:
            check_one_of("--layout", letters, LAYOUTS)
        if shapes not in (None, "quick", "full"):
            parse_shapes(shapes)
        chosen = [registry.find(name) for name in kernels or _runnable(device)]
        for kernel in chosen:
            check_runs(kernel, device)
            for name in split(dtype or ""):
                check_dtype(name, kernel.name, kernel.dtypes)
        pairs = [(each, name) for each in chosen for name in split(dtype or "") or each.dtypes]
        with progress_line.shown():
            tallies = [
                _tally(each, name, device, shapes, layouts)
                for each, name in progress.counted(pairs, lambda pair: f"{pair[0].name} {pair[1]}")
            ]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    report = {
        "device": name,
        "results": [
            {
                "kernel": t.kernel,
                "dtype": t.dtype,
                "passed": t.passed,
                "failed": t.failures,
                "refused": dict(t.refused),
            }
            for t in tallies
        ],
    }
    give(report, lambda: _show(name, tallies), json=json, save=save)
    raise typer.Exit(1 if any(t.failures or not t.passed for t in tallies) else 0)


def _runnable(device: Any) -> list[str]:
    from ..runtime import launcher

    return [
        kernel.name
        for kernel in registry.ladder()
        if launcher.unsupported_device_reason(kernel, device) is None
    ]


def _tally(
    kernel: registry.Kernel,
    dtype: str,
    device: Any,
    shapes: str | None,
    layouts: list[str],
) -> Tally:
    from ..verify.kernels import Refused, check, oracles
    from ..verify.watchdog import watchdog

    tally = Tally(kernel.name, dtype)
    cases = list(_cases(dtype, device, shapes, layouts))
    for case in progress.counted(cases):
        for oracle in oracles(kernel.name):
            try:
                with watchdog(CASE_SECONDS, f"{kernel.name} {case} {oracle}"):
                    result = check(kernel.name, case, oracle, device)
            except Refused as refusal:
                tally.refused[_kind(str(refusal))] += 1
                break
            if result.ok:
                tally.passed += 1
            else:
                tally.failures.append(result.record())
    return tally


def _kind(refusal: str) -> str:
    """A refusal without the figures of the call."""
    return refusal.split(", and ")[0]


def _cases(dtype: str, device: Any, shapes: str | None, layouts: list[str]) -> Iterator[Case]:
    import torch

    from ..verify import cases

    kind = getattr(torch, dtype)
    match shapes or ("quick" if device.type == "cpu" else "full"):
        case "quick":
            found = cases.quick(kind)
        case "full":
            found = cases.full(kind)
        case sizes:
            found = (
                cases.Case(*s, kind, layout=letter)
                for s in parse_shapes(sizes)
                for letter in LAYOUTS
            )
    return (case for case in found if not layouts or case.layout in layouts)


def _show(device: str, tallies: list[Tally]) -> None:
    rows = [
        (
            t.kernel,
            t.dtype,
            t.passed,
            len(t.failures),
            sum(t.refused.values()),
            "FAIL" if t.failures else "ok",
        )
        for t in tallies
    ]
    table(
        f"Verified on {device}",
        ("kernel", "dtype", "passed", "failed", "cases not supported", ""),
        rows,
    )
    for t in tallies:
        for reason, count in t.refused.items():
            note(f"{t.dtype}: {count} × {reason}")
        for failure in t.failures[:10]:
            note(f"{t.kernel} {failure['oracle']} {failure['case']}: {failure['message']}", None)
