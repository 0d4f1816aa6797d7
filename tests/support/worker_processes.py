"""Worker processes for tests of what starts, calls and ends them; none imports torch."""

from typing import Any

from outblas.autotune.measure.processes import WorkerProcess

SECONDS = 20.0  # for what takes milliseconds


def started(**arguments: Any) -> WorkerProcess:
    """A worker that is ready for calls. Raises WorkerStartError."""
    worker = WorkerProcess(**arguments)
    worker.await_ready(SECONDS)
    return worker
