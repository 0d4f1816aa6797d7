"""`outblas profile`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core import configs, progress, registry
from ..core.shapes import LAYOUTS
from ..inspect import instructions as page
from ..inspect import ncu, roofline
from ..inspect.counters import TIME, Counters, Launch, SharedMemory, combine
from ..inspect.profiled import CUBLAS, Request
from . import cycles, progress_line
from .common import (
    NO_GPU,
    NONE,
    SHAPES_HELP,
    JsonOption,
    SaveOption,
    check_dtype,
    check_one_of,
    check_runs,
    check_writable,
    figure,
    give,
    note,
    parse_shapes,
    split,
    table,
    usage_errors,
    without_nulls,
)

if TYPE_CHECKING:
    import torch

DTYPES = ("bfloat16", "float16", "float32")
NOTE = (
    "The time is ncu's: one run with cold caches, at whatever clock the GPU has. `outblas bench` "
    "measures speed. Rates are per cycle in which SMs are active."
)
SMALLEST_STALL = 0.005  # warps per issue; the table leaves out less


@dataclass(frozen=True)
class Profile:
    """One provider at one shape; `codes` are the memory instructions of the launches, None if not
    asked for.
    """

    provider: str
    request: Request
    launches: list[Launch]
    counters: Counters
    codes: list[page.Code] | None = None

    def formulas(self) -> dict[str, float | None]:
        """Intensities to hold the counters to, FLOP per byte: A, B and C moved once between DRAM
        and L2; the slices of a CTA's tile moved by every CTA alone between L2 and the SMs (None:
        the configuration names no tile).
        """
        import torch

        request, size = self.request, getattr(torch, self.request.dtype).itemsize
        settings = {} if self.provider == CUBLAS else dict(configs.items(request.resolved()))
        tile = [int(settings[name]) for name in ("block_m", "block_n") if name in settings]
        return {
            "compulsory_flop_per_dram_byte": roofline.compulsory(request.shape, size, size),
            "tile_flop_per_l2_byte": roofline.of_tile(tile[0], tile[1], size)
            if len(tile) == 2
            else None,
        }

    @property
    def ffma_reuse(self) -> float | None:
        """The share of the FFMAs in the hot loop that keep an operand for the next instruction
        (`.reuse` in the SASS); None for cuBLAS, whose code ncu shows without these flags.
        """
        shares = [code.ffma_reuse for code in self.codes or ()]
        return shares[0] if len(shares) == 1 else None

    def record(self) -> dict[str, Any]:
        """The profile as JSON-able values, units as in `Counters` and `instructions.Counts`;
        `launch` is an index.

        `stalls` names no reason for which no warp stalls, and `memory` nothing that such accesses
        do not have.
        """
        request = self.request
        memory: dict[str, Any] = {}
        if self.codes is not None:
            memory = {"ffma_reuse": self.ffma_reuse, "instructions": [], "memory": []}
        for launch, code in enumerate(self.codes or ()):
            memory["instructions"] += [
                {"launch": launch, **access.record()} for access in code.accesses
            ]
            memory["memory"] += [
                {"launch": launch, **without_nulls(page.total_record(*kind, counts))}
                for kind, counts in code.totals().items()
            ]
        return {
            "provider": self.provider,
            "shape": list(request.shape),
            "dtype": request.dtype,
            "layout": request.layout,
            **({"addend": True} if request.addend else {}),
            "config": "" if self.provider == CUBLAS else request.config,
            "resolved": "" if self.provider == CUBLAS else request.resolved(),
            "launches": [
                {
                    "kernel": launch.kernel,
                    "grid": launch.grid,
                    "block": launch.block,
                    "us": launch.values.get(TIME),
                }
                for launch in self.launches
            ],
            **asdict(self.counters),
            "stalls": {
                reason: warps for reason, warps in self.counters.stalls.items() if warps != 0
            },
            **self.formulas(),
            **memory,
        }


def profile(
    kernel: Annotated[str, typer.Argument(help="Name of a kernel, or cublas.")],
    shapes: Annotated[str, typer.Option(help=SHAPES_HELP)] = "4096",
    config: Annotated[
        str, typer.Option(help="Config of the kernel, such as tile_m=128,tile_n=256.")
    ] = "",
    dtype: Annotated[
        str,
        typer.Option(
            help="bfloat16, float16 or float32. Default: the dtype that the seed documents measure."
        ),
    ] = "",
    layout: Annotated[
        str,
        typer.Option(
            help=(
                "nt, nn, tn or tt: how A and B are stored, n row-major, t transposed. Default: the "
                "layout that the seed documents measure."
            )
        ),
    ] = "",
    phases: Annotated[
        bool,
        typer.Option(
            "--phases",
            help="Count the cycles of each phase and warp role in an instrumented compile. It "
            "needs no ncu.",
        ),
    ] = False,
    addend: Annotated[
        bool, typer.Option("--addend", help="Profile alpha·A·B + beta·C instead of A·B.")
    ] = False,
    instructions: Annotated[
        bool,
        typer.Option(
            "--instructions",
            help="Also show what each memory instruction did, from a second run of ncu.",
        ),
    ] = False,
    json: JsonOption = False,
    save: SaveOption = None,
) -> None:
    """Shows ncu's counters for a kernel and for cuBLAS, or the kernel's cycles.

    It exits with code 3 if there is no GPU, if ncu is not installed, or if the driver does not let
    it read the counters.
    """
    try:
        with usage_errors():
            check_writable(save)
            for option, given in (("--instructions", instructions), ("--addend", addend)):
                if phases and given:
                    raise ValueError(f"--phases and {option} are both given, expected one of them")
            requests = _requests(kernel, shapes, config, dtype, layout, addend)
            if phases:
                cycles.check(kernel)
            device = _device(kernel)
            environment = _environment(ncu_too=not phases)
    except (ncu.CannotMeasure, ImportError) as error:
        raise _stop(f"Nothing can be measured here: {error}", NO_GPU) from None
    if phases:
        cycles.run(requests, device, environment, json=json, save=save)
        return
    try:
        with usage_errors(ncu.Refused), progress_line.shown():
            profiles = [
                each
                for request in progress.counted(requests, cycles.described)
                for each in _measure(request, device, instructions)
            ]
    except ncu.CannotMeasure as error:
        raise _stop(f"Nothing can be measured here: {error}", NO_GPU) from None
    except RuntimeError as error:
        raise _stop(f"Profiling failed: {error}", 1) from None

    def show() -> None:
        for request in requests:
            _show(
                request, [each for each in profiles if each.request is request], environment["gpu"]
            )

    report = {"environment": environment, "results": [each.record() for each in profiles]}
    give(report, show, json=json, save=save)


def _requests(
    kernel: str, shapes: str, config: str, dtype: str, layout: str, addend: bool
) -> list[Request]:
    """The products that the arguments ask for. Raises ValueError for arguments that name none."""
    names = (CUBLAS, *(each.name for each in registry.ladder()))
    if kernel not in names:
        raise ValueError(registry.unknown_name(kernel, names))
    dtype, layout = dtype or registry.dtype_of(kernel), layout or registry.layout_of(kernel)
    dtypes = DTYPES if kernel == CUBLAS else registry.find(kernel).dtypes
    check_dtype(dtype, kernel, dtypes)
    check_one_of("--layout", layout, LAYOUTS)
    config = ",".join(split(config))
    if config and kernel == CUBLAS:
        raise ValueError(f"--config is {config!r}, expected none for {CUBLAS}")
    if config:
        configs.from_text(registry.load(kernel).Config, config)
    sizes = dict.fromkeys(parse_shapes(shapes, least=1))
    return [Request(kernel, shape, dtype, layout, config, addend) for shape in sizes]


def _stop(message: str, code: int) -> typer.Exit:
    typer.echo(message, err=True)
    return typer.Exit(code)


def _device(kernel: str) -> torch.device:
    """The GPU that calls go to. Raises CannotMeasure without one, ValueError if the kernel does not
    run on it.
    """
    import torch

    if not torch.cuda.is_available() or torch.version.cuda is None:
        raise ncu.CannotMeasure("there is no NVIDIA GPU that torch can use")
    device = torch.device("cuda", torch.cuda.current_device())
    if kernel != CUBLAS:
        check_runs(registry.find(kernel), device)
    return device


def _environment(*, ncu_too: bool) -> dict[str, Any]:
    from ..bench.environment import environment

    return {**environment(), **({"ncu": ncu.version()} if ncu_too else {})}


def _measure(request: Request, device: torch.device, instructions: bool) -> list[Profile]:
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    arch = 10 * major + minor
    progress.say(f"ncu counts {' and '.join(request.providers)}")
    found = ncu.profile(request, arch)
    codes: dict[str, list[page.Code]] = {}
    if instructions:
        progress.say("ncu counts memory instructions")
        codes = ncu.source_page(request, found)
        if artifact := page.artifact(request, arch):
            codes[request.kernel] = [code.with_artifact(artifact) for code in codes[request.kernel]]
    return [
        Profile(name, request, launches, combine(launches, request.flop), codes.get(name))
        for name, launches in found.items()
    ]


def _show(request: Request, profiles: list[Profile], gpu: str) -> None:
    names = [each.provider for each in profiles]
    counters = [each.counters for each in profiles]
    what = " alpha·A·B + beta·C" if request.addend else ""
    title = f"{cycles.sizes(request)} {request.dtype} {request.layout}{what} on {gpu}"
    rows = [(label, *cells) for label, *cells in zip(LABELS, *map(_cells, profiles), strict=True)]
    table(title, ("counter", *names), rows)
    table("Stalled warps per issued instruction, by reason", ("reason", *names), _stalls(counters))
    launches = [
        (
            each.provider,
            _kernel(one.kernel),
            _grid(one.grid),
            _grid(one.block),
            figure(one.values.get(TIME), ".1f"),
        )
        for each in profiles
        for one in each.launches
    ]
    table("Launches", ("provider", "kernel", "grid", "block", "µs"), launches)
    if memory := [row for each in profiles for row in _memory(each)]:
        table("Memory accesses by instruction", MEMORY, memory, keys=3)
    note(NOTE)


LABELS = (
    "time under ncu, one cold run (µs)",
    "L2 hit rate",
    "L1 hit rate",
    "DRAM read (MB)",
    "DRAM written (MB)",
    "L1 global loads (MB)",
    "L2 → SM (MB)",
    "L1 (GB/s)",
    "L2 (GB/s)",
    "DRAM (GB/s)",
    "global load requests",
    "global store requests",
    "FLOP / DRAM byte",
    "… if A, B, C move once",
    "FLOP / L2→SM byte",
    "… of the CTA's tile",
    "tensor pipe active",
    "FMA pipe active",
    "fp32 FMAs (10⁶)",
    "fp32 FMAs / M·N·K",
    "FFMAs with .reuse",
    "IPC",
    "achieved occupancy",
    "not selected, share of cycles between issues",
    "registers / thread",
    "shared wavefronts: loads",
    "shared wavefronts: stores",
    "shared wavefronts: wgmma",
)


MEMORY = (
    "provider",
    "operand",
    "access",
    "requests",
    "transactions / request",
    "sectors / request",
    "efficiency",
    "shared wavefronts",
    "ideal",
    "excess",
)


def _memory(profile: Profile) -> list[tuple[str, ...]]:
    """Rows of the table MEMORY; a provider's launches are numbered from 1 if there are several."""
    rows = []
    for number, code in enumerate(profile.codes or (), start=1):
        name = profile.provider if len(profile.launches) == 1 else f"{profile.provider} {number}"
        for kind, counts in code.totals().items():
            of = page.total_record(*kind, counts)
            each = (
                figure(of[key], ".2f")
                for key in ("transactions_per_request", "sectors_per_request")
            )
            passes = (figure(of[key], ",.0f") for key in ("wavefronts", "ideal", "excess"))
            access = f"{of['space']} {of['operation']}"
            requests, efficiency = f"{of['requests']:,}", figure(of["efficiency"], ".1%")
            rows.append((name, of["operand"] or NONE, access, requests, *each, efficiency, *passes))
    return rows


def _cells(profile: Profile) -> tuple[str, ...]:
    """The column of one provider, in the order of LABELS."""
    c, formulas, mega = profile.counters, profile.formulas(), 1e-6
    moved = (c.dram_read_bytes, c.dram_write_bytes, c.l1_load_bytes, c.l2_to_sm_bytes)
    return (
        figure(c.us, ",.1f"),
        *(figure(rate, ".1%") for rate in (c.l2_hit_rate, c.l1_hit_rate)),
        *(figure(size, ",.1f", mega) for size in moved),
        *(figure(speed, ",.0f") for speed in (c.l1_gbs, c.l2_gbs, c.dram_gbs)),
        _requests_of(c.global_load_requests, c.global_load_sectors),
        _requests_of(c.global_store_requests, c.global_store_sectors),
        figure(c.flop_per_dram_byte, ",.1f"),
        figure(formulas["compulsory_flop_per_dram_byte"], ",.1f"),
        figure(c.flop_per_l2_byte, ",.1f"),
        figure(formulas["tile_flop_per_l2_byte"], ",.1f"),
        *(figure(share, ".1%") for share in (c.tensor_active, c.fma_active)),
        figure(c.ffma, ",.1f", mega),
        figure(c.ffma_per_mnk, ".3f"),
        figure(profile.ffma_reuse, ".1%"),
        figure(c.ipc, ".2f"),
        *(figure(share, ".1%") for share in (c.occupancy, c.not_selected_share)),
        figure(c.registers, ".0f"),
        *map(_wavefronts, c.shared.values()),
    )


def _requests_of(requests: float | None, sectors: float | None) -> str:
    each = (
        f" ({sectors / requests:.1f} sectors / request)" if requests and sectors is not None else ""
    )
    return figure(requests, ",.0f") + each


def _wavefronts(shared: SharedMemory) -> str:
    share = "" if shared.excess is None else f" ({shared.excess:.1%} conflicts)"
    return figure(shared.wavefronts, ",.0f") + share


def _kernel(name: str) -> str:
    """A kernel's name without the parameters of its C++ signature."""
    head, found, _ = name.partition(">(")
    return f"{head}>" if found else name


def _grid(sizes: tuple[int, ...]) -> str:
    return "×".join(map(str, sizes))


def _stalls(counters: list[Counters]) -> list[tuple[str, ...]]:
    """Reasons by size, the last provider's before cuBLAS's; what stalls nobody is left out, except
    not_selected.
    """
    sizes = {reason: [c.stalls[reason] for c in counters] for reason in counters[0].stalls}
    shown = [
        r
        for r, of in sizes.items()
        if r == "not_selected" or any((s or 0) >= SMALLEST_STALL for s in of)
    ]
    shown.sort(key=lambda reason: [-(size or 0) for size in reversed(sizes[reason])])
    return [
        (reason.replace("_", " "), *(figure(size, ".2f") for size in sizes[reason]))
        for reason in shown
    ]
