"""Measures the host side of one tree of outblas, or of two in turns, in fresh processes."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from ..core.ownership import shown
from . import host
from .host import Figure, Timing

PROBE = Path(__file__).with_name("host_probe.py")
LEAST_ROUNDS = 3
PROCESS_SECONDS = 120  # after which a process counts as hanging
WARM_ROUNDS = 40  # of warm calls per process

PASS = "python -c pass"
IMPORT_TORCH = "python -c 'import torch'"
COMMANDS = (("--help",), ("list",), ("cache", "ls"))
# Its ratio characterises the machine and torch, not outblas.
FOREIGN = (IMPORT_TORCH,)


class ProbeError(Exception):
    """A measuring process failed; the message explains why."""


@dataclass(frozen=True)
class Tree:
    """A tree of outblas that processes import.

    Attributes:
        name: its name in messages.
        path: the folder that contains the package, for PYTHONPATH; None for the installed package.
    """

    name: str
    path: Path | None = None


@dataclass
class Samples:
    """The measurements of one tree: the samples of each figure and its reference, and why some
    figures are missing.
    """

    references: dict[str, str] = field(default_factory=dict)
    lacking: list[str] = field(default_factory=list)
    timings: dict[str, list[Timing]] = field(default_factory=lambda: defaultdict(list))

    def add(self, name: str, reference: str, timing: Timing) -> None:
        self.references[name] = reference
        self.timings[name].append(timing)

    def figures(self) -> dict[str, Figure]:
        return {
            name: host.summarize(name, self.references[name], timings)
            for name, timings in self.timings.items()
        }


def linked(root: Path, into: Path) -> Path:
    """Returns a folder of links that contains the package of a checkout as if it were installed.

    A root that contains the package itself is returned unchanged. Raises ValueError for any other
    folder.
    """
    if (root / "outblas" / "__init__.py").exists():
        return root
    try:
        settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
        folders = settings["tool"]["setuptools"]["package-dir"]
    except (OSError, ValueError, KeyError):
        folders = {}
    package = root / "src" / "outblas"
    if not folders or not (package / "__init__.py").exists():
        raise ValueError(
            f"{shown(root)} is neither a checkout of outblas nor a folder that holds the package"
        )
    made = into / "outblas"
    made.mkdir(parents=True)
    places = {path.name: path for path in package.iterdir() if path.name != "__pycache__"}
    places |= {name.rpartition(".")[2]: root / at for name, at in folders.items() if name}
    for name, place in places.items():
        (made / name).symlink_to(place.resolve())
    if (starter := root / "src" / "_outblas_command.py").exists():
        (into / starter.name).symlink_to(starter.resolve())
    return into


def this_root() -> Path:
    """Returns the checkout that this module belongs to, or the folder that contains the package."""
    here = Path(__file__).resolve().parents[2]
    return here.parent if (here.parent / "pyproject.toml").exists() else here


@contextmanager
def trees(against: Path | None) -> Iterator[list[Tree]]:
    """Yields this tree, and the other one if given; both are then imported in the same way.

    Raises ValueError where `against` contains no outblas.
    """
    if against is None:
        yield [Tree("this tree")]
        return
    with tempfile.TemporaryDirectory() as folder:
        first, second = Path(folder, "this"), Path(folder, "other")
        yield [
            Tree("this tree", linked(this_root(), first)),
            Tree(str(against), linked(against.resolve(), second)),
        ]


def measure(
    measured: Sequence[Tree],
    seconds: float,
    *,
    rounds: int | None = None,
    progress: Callable[[str], None] = lambda doing: None,
) -> list[Samples]:
    """Measures each tree once per round, in turns, for about `seconds`, or for a number of rounds.

    The first round warms up disks and byte code, and is not counted. Raises ProbeError where this
    tree, the first one, cannot be measured; another one may lack some of the figures.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        runners = []
        for i, tree in enumerate(measured):
            progress(f"warm-up of {tree.name}")
            runners.append(_Runner(tree, Path(folder, str(i))))
            runners[-1].warm_up(may_lack=i > 0)
        done, longest = 0, 0.0
        while done < (rounds or LEAST_ROUNDS) or (
            rounds is None and time.monotonic() - began + longest < seconds
        ):
            round_began = time.monotonic()
            for runner in runners if done % 2 == 0 else runners[::-1]:
                progress(f"round {done + 1}, {runner.tree.name}")
                runner.run_round()
            done, longest = done + 1, max(longest, time.monotonic() - round_began)
        return [runner.samples for runner in runners]


class _Runner:
    """Runs the processes that measure one tree, with a separate cache directory."""

    def __init__(self, tree: Tree, folder: Path) -> None:
        folder.mkdir()
        self.tree = tree
        self.samples = Samples()
        # The kinds of figures that the probe measures, and its arguments.
        self._kinds: dict[str, tuple[str, ...]] = {
            "calls": (str(WARM_ROUNDS),),
            "lookup": (str(folder / "tuning.sqlite"),),
            "models": (),
        }
        # Byte code must be kept, or every start would compile its imports.
        left_out = ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "TRITON_INTERPRET")
        self._environment = {
            name: value
            for name, value in os.environ.items()
            if name not in left_out and not name.startswith("OUTBLAS_")
        } | {"OUTBLAS_CACHE_DIR": str(folder), "CUDA_VISIBLE_DEVICES": ""}
        if tree.path is not None:
            self._environment["PYTHONPATH"] = str(tree.path)

    def warm_up(self, *, may_lack: bool) -> None:
        """Leaves out the kinds of figures that an older tree cannot provide, if it may lack any."""
        for command in COMMANDS:
            self._start(*_command(command))
        for kind, given in list(self._kinds.items()):
            try:
                if kind == "lookup":
                    self._probe("fill", *given)
                self._probe(kind, *given)
            except ProbeError as error:
                if not may_lack:
                    raise
                self.samples.lacking.append(str(error))
                del self._kinds[kind]

    def run_round(self) -> None:
        bare = self._start("-c", "pass")
        torch = self._start("-c", "import torch")
        self.samples.add(IMPORT_TORCH, PASS, Timing(torch, bare))
        for command in COMMANDS:
            us = self._start(*_command(command))
            self.samples.add(" ".join(("outblas", *command)), IMPORT_TORCH, Timing(us, torch))
        for kind, given in self._kinds.items():
            for name, (reference, *times) in self._probe(kind, *given).items():
                self.samples.add(name, reference, Timing(*times))

    def _start(self, *arguments: str) -> float:
        """Returns the µs of CPU time of a Python process from its start to its end."""
        before = _children_us()
        self._python(*arguments)
        return _children_us() - before

    def _probe(self, kind: str, *given: str) -> dict[str, Any]:
        """Returns the figures that the probe prints. Raises ProbeError if it measured another
        tree.
        """
        found = json.loads(self._python(str(PROBE), kind, *given))
        if self.tree.path is not None:
            inside = self.tree.path / "outblas"
            strays = [file for file in found["files"] if not Path(file).is_relative_to(inside)]
            if strays:
                raise ProbeError(
                    f"{self.tree.name} imports {shown(strays[0])}, which belongs to another tree"
                )
        figures: dict[str, Any] = found["figures"]
        return figures

    def _python(self, *arguments: str) -> str:
        """Returns the output of a process. `-P`: it imports nothing from the probe's folder or the
        current one.
        """
        command = [sys.executable, "-P", *arguments]
        try:
            done = subprocess.run(
                command,
                env=self._environment,
                capture_output=True,
                text=True,
                timeout=PROCESS_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ProbeError(
                f"{self.tree.name}: {arguments[-1]!r} did not end within {PROCESS_SECONDS} s"
            ) from None
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
            raise ProbeError(f"{self.tree.name}: {' '.join(arguments[-2:])!r} fails: {last}")
        return done.stdout


# Starts the command line like the installed script; older trees have no `_outblas_command`.
_START = """
try:
    from _outblas_command import main
except ImportError:
    from outblas.cli import app as main
main()
"""


def _command(arguments: Sequence[str]) -> tuple[str, ...]:
    return "-c", _START, *arguments


def _children_us() -> float:
    """Returns the CPU time of all processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1e6 * (used.ru_utime + used.ru_stime)


def environment() -> dict[str, Any]:
    """Returns what the ratios depend on, and what may have disturbed them, as JSON values."""
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("torch", "outblas")},
        "native": importlib.util.find_spec("outblas_native") is not None,
    }


def _cpu() -> str:
    """Returns the model of the CPU as Linux names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
