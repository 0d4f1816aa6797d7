"""`outblas doctor`."""

import platform
from collections.abc import Collection
from typing import Any

import typer

from outblas import __version__
from outblas.base import cache, compat, compile_worker, progress, registry, requirements
from outblas.base.ownership import shown
from outblas.cli import progress_line
from outblas.cli.common import NONE, JsonOption, console, give, note, number_of, table

_DSL = "nvidia-cutlass-dsl"


def doctor(json: JsonOption = False) -> None:
    """Checks whether outblas runs well on this machine.

    It checks the GPU and its driver, the installed versions against the tested ranges, the caches,
    and which kernels run here. It exits with code 1 if it finds a problem.
    """
    with progress_line.shown("checking the GPU"):
        report = examine()
    give(report, lambda: _show(report), json=json)
    raise typer.Exit(1 if report["problems"] else 0)


def examine() -> dict[str, Any]:
    """Everything the command prints, as JSON-able values; `problems` lists what keeps a kernel from
    running well.
    """
    from outblas.bench.environment import driver
    from outblas.torch_ops import native

    versions = [
        {"name": s.name, "installed": s.installed, "tested": s.tested, "problem": s.problem}
        for s in requirements.statuses()
    ]
    parts = {"cache": _cache(), "tuning": _tuning()}
    problems = [(version["name"], version["problem"]) for version in versions]
    problems += [(_DSL, _cuda_problem())]
    problems += [(name, part["problem"]) for name, part in parts.items()]
    failures = compile_worker.failures()  # of this process
    problems += [(kernel, f"cannot be compiled: {why}") for kernel, why in failures.items()]
    return {
        "outblas": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "driver": driver(),
        "gpus": _gpus(),
        "versions": versions,
        **parts,
        "kernels": [
            {"name": kernel.name, "runs": _runs(kernel)}
            for kernel in progress.counted(registry.ladder(), lambda kernel: kernel.name)
        ],
        "native": native.is_used(),
        "lacking": [  # now that kernels have imported their DSLs
            {"name": private.name, "without": private.without} for private in compat.lacking()
        ],
        "problems": [f"{name}: {problem}" for name, problem in problems if problem],
    }


def _cuda_problem() -> str | None:
    """What the CuTe DSL lacks to compile for the CUDA version that torch was built for, or None."""
    import torch

    cuda = torch.version.cuda
    version = requirements.installed(_DSL)
    if cuda is None or version is None:
        return None
    major = cuda.partition(".")[0]
    if requirements.installed(f"{_DSL}-libs-cu{major}") == version:
        return None
    return (
        f"no libraries of version {version} for CUDA {major}, which torch {torch.__version__} is "
        f"built for: {requirements.install_command(_DSL)}"
    )


def _tuning() -> dict[str, Any]:
    """The store of sweeps, and the GPU models that tables come along for."""
    from outblas.autotune.store.store import Store, StoreError
    from outblas.autotune.store.tables import TABLES

    tables = sorted(path.stem for path in TABLES.glob("*.json"))
    try:
        with Store(read_only=True) as store:
            sweeps = {"store": str(store.path), "winners": len(store.winners()), "problem": None}
    except (StoreError, ValueError) as error:
        sweeps = {"winners": 0, "problem": str(error)}
    return {"tables": tables, **sweeps}


def _gpus() -> list[dict[str, Any]]:
    import torch

    return [
        {
            "name": p.name,
            "arch": 10 * p.major + p.minor,
            "sms": p.multi_processor_count,
            "memory_gib": round(p.total_memory / 2**30, 1),
        }
        for p in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    ]


def _cache() -> dict[str, Any]:
    """The compile cache. `network`: the type of its file system, if other machines share it."""
    values: dict[str, Any] = {"directory": None, "network": None, "objects": 0, "bytes": 0}
    try:
        folder = cache.directory()
        values |= {"directory": str(folder), "network": cache.network_filesystem(folder)}
        objects = cache.objects(cache.objects_folder())
    except (ValueError, OSError) as error:
        return values | {"problem": str(error)}
    size = sum(entry.size for entry in objects)
    return values | {"objects": len(objects), "bytes": size, "problem": None}


def _runs(kernel: registry.Kernel) -> str:
    """Where a kernel runs on this machine, or what it lacks."""
    import torch

    from outblas.call import launcher

    try:
        registry.load(kernel.name)
    except ImportError as error:
        return f"no: {error}"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = [torch.device("cuda", i) for i in range(count)] or [torch.device("cpu")]
    gaps = [launcher.unsupported_device_reason(kernel, device) for device in devices]
    if count:
        return "yes" if None in gaps else f"no: it {gaps[0]}"
    if None in gaps:
        return "on the CPU, in Triton's interpreter"
    return "not without an NVIDIA GPU; it compiles here"


def _show(report: dict[str, Any]) -> None:
    """The verdict first, then what it rests on."""
    problems, gpus = report["problems"], report["gpus"]
    if problems:
        note(f"{number_of(len(problems), 'problem')}:", "bold yellow")
    elif gpus:
        note("No problems found.", "bold green")
    else:
        note("No problems found, but there is no NVIDIA GPU here.", "bold")
    for problem in problems:
        note(f"! {problem}", "yellow")
    console.print(f"outblas {report['outblas']}, Python {report['python']}, {report['platform']}")
    if gpus:
        rows = [(g["name"], f"sm_{g['arch']}", g["sms"], f"{g['memory_gib']} GiB") for g in gpus]
        title = f"GPUs (driver {report['driver'] or 'unknown'})"
        table(title, ("name", "arch", "SMs", "memory"), rows)
    else:
        console.print("There is no NVIDIA GPU: calls that name no kernel run in torch.")
    versions = [
        (v["name"], v["installed"] or NONE, v["tested"], v["problem"] or "")
        for v in report["versions"]
    ]
    table("Versions", ("package", "installed", "tested", "problem"), versions)
    _show_stores(report)
    names: dict[str, list[str]] = {}
    for kernel in report["kernels"]:
        names.setdefault(kernel["runs"], []).append(kernel["name"])
    answers = [(answer, _by_ladder(kernels)) for answer, kernels in names.items()]
    table("Kernels", ("runs here", "kernels"), answers)
    way = "C++ (outblas-native)" if report["native"] else "Python"
    note(f"Warm calls run in {way}.", None)
    for private in report["lacking"]:
        note(f"The installed versions lack {private['name']}: {private['without']}", None)


def _show_stores(report: dict[str, Any]) -> None:
    """The cache of compiled kernels, and what is known of tuning."""
    store, tuning = report["cache"], report["tuning"]
    kernels = f"{store['objects']} compiled kernels, {store['bytes'] / 2**20:.1f} MiB"
    state = store["problem"] or kernels
    if store["network"]:
        state += (
            f", on a network file system ({store['network']}): if its locks do not work between "
            "machines, some kernels are compiled more than once"
        )
    note(f"Cache {shown(store['directory'] or NONE)}: {state}", None)
    gpus = ", ".join(tuning["tables"]) or "no GPU"
    note(f"Tuning: {tuning['winners']} tuned configs in the store; shipped tables for {gpus}", None)


def _by_ladder(names: Collection[str]) -> str:
    """Kernels by name, where a ladder of which all are there stands for its rungs: "all of
    hopper".
    """
    parts = []
    for ladder, rungs in registry.LADDERS.items():
        here = [rung for rung in rungs if rung in names]
        whole = len(rungs) > 1 and len(here) == len(rungs)
        parts += [f"all {len(rungs)} of {ladder}"] if whole else here
    return ", ".join(parts)
