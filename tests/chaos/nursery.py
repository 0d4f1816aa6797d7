"""Starts many processes that use torch without the seconds that its import takes: each is a fork of
one that has it.

`Nursery` is the side of the campaign; `serve` runs in the process that forks. A started process
ends as any program does: its exit handlers run, an exception ends it with a traceback, a signal
kills it.
"""

import contextlib
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from . import processes

PACKAGE = __package__ or "tests.chaos"
ROOT = Path(__file__).resolve().parents[len(PACKAGE.split("."))]


class Child:
    """A started process. `output` is the file that has all that it says."""

    def __init__(self, nursery: "Nursery", pid: int, mark: str, output: Path) -> None:
        self.nursery, self.pid, self.mark, self.output = nursery, pid, mark, output
        self._status: int | None = None

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        if self._status is None:
            self._status = self.nursery.ask({"do": "poll", "pid": self.pid})["status"]
        return self._status

    def wait(self, seconds: float) -> int | None:
        """As `poll`, after so many seconds at most."""
        processes.soon(lambda: self.poll() is not None, seconds)
        return self.poll()

    def send(self, number: int) -> bool:
        """Sends a signal unless it has ended; its process id is its own until it is polled."""
        return self.poll() is None and processes.send(self.pid, number)

    def said(self) -> str:
        """The end of what it said."""
        with contextlib.suppress(OSError):
            return self.output.read_text(errors="replace")[-4000:].strip()
        return ""

    def answer(self) -> dict[str, Any]:
        """The JSON object in the last line that it said; empty where there is none."""
        for line in reversed(self.said().splitlines()):
            with contextlib.suppress(ValueError):
                found = json.loads(line)
                if isinstance(found, dict):
                    return found
        return {}


class Nursery:
    """A process that has imported outblas and torch, and forks drivers when asked to."""

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self._count = 0
        self._lock = threading.Lock()
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
        given = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **(environment or {})}
        code = f"import sys; from {PACKAGE}.nursery import serve; sys.exit(serve())"
        with open(folder / "nursery.log", "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=given,
                cwd=folder,
            )

    def __enter__(self) -> "Nursery":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def start(
        self,
        function: str,
        arguments: Mapping[str, Any],
        *,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        umask: int | None = None,
        file_limit: int | None = None,
    ) -> Child:
        """Runs a function of `drivers` in a process of its own; `file_limit` is the most bytes of a
        file it writes.
        """
        self._count += 1
        mark = f"{os.getpid()}-{time.monotonic_ns()}-{self._count}"
        output = self.folder / f"output-{self._count}"
        request = {
            "do": "start",
            "function": function,
            "arguments": dict(arguments),
            "environment": {**(environment or {}), processes.MARK: mark},
            "output": str(output),
            "folder": str(folder or self.folder),
            "umask": umask,
            "file_limit": file_limit,
        }
        return Child(self, self.ask(request)["pid"], mark, output)

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Raises RuntimeError where the nursery itself is dead."""
        with self._lock:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            try:
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
                self._process.stdin.flush()
                line = self._process.stdout.readline()
            except OSError as error:
                raise RuntimeError(f"the nursery is dead: {error}") from None
        if not line:
            raise RuntimeError(f"the nursery is dead, see {self.folder / 'nursery.log'}")
        found: dict[str, Any] = json.loads(line)
        return found


def serve() -> int:
    """Forks what it is told to until its input ends; in a fork, runs the function and returns its
    exit status.
    """
    drivers = importlib.import_module(f"{PACKAGE}.drivers")
    gc.freeze()  # so that a fork does not copy every page that a collection would touch
    for line in sys.stdin.buffer:
        request = json.loads(line)
        if request["do"] == "poll":
            _answer({"status": _status(request["pid"])})
            continue
        pid = os.fork()
        if pid == 0:
            _become(request)
            status = int(getattr(drivers, request["function"])(**request["arguments"]) or 0)
            if request["function"] in drivers.ALONE:
                sys.stdout.flush()
                os._exit(status)  # without the second that tearing down torch's modules takes
            return status
        _answer({"pid": pid})
    return 0


def _become(request: Mapping[str, Any]) -> None:
    """What makes a fork a program of its own: session, output, folder, environment, limits,
    signals.
    """
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for target, source in ((0, nothing), (1, output), (2, output)):
        os.dup2(source, target)
    os.chdir(request["folder"])
    os.environ.update(request["environment"])
    if request["umask"] is not None:
        os.umask(request["umask"])
    if request["file_limit"] is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_limit"],) * 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _status(pid: int) -> int | None:
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def _answer(value: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()
