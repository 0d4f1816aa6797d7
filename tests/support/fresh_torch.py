"""Programs that start where torch is imported and nothing of outblas is: forks of one process that
has imported it, for each import takes more than a second of a core.

As a script, the module is that process: it reads one request a line, and answers each with the
program's exit status and what it said.
"""

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any


def run_beside_torch(code: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """As `python -c` runs the code, in this process's folder and environment."""
    given = ["-c", *arguments]
    request = {"code": code, "argv": given, "cwd": os.getcwd(), "environ": dict(os.environ)}
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    answer = json.loads(server.stdout.readline())
    return subprocess.CompletedProcess(given, answer["status"], answer["out"], answer["err"])


@functools.cache
def _server() -> "subprocess.Popen[str]":
    """The process that forks; it ends with this one."""
    command = [sys.executable, "-P", __file__]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(_end, server)
    return server


def _end(server: "subprocess.Popen[str]") -> None:
    server.kill()
    server.wait()


def serve() -> None:
    """Answers requests until there are no more."""
    import torch  # noqa: F401

    for line in sys.stdin:
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder, "out"), Path(folder, "err")
            child = os.fork()
            if child == 0:
                _become(json.loads(line), out, err)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            answer = {"status": status, "out": out.read_text(), "err": err.read_text()}
        print(json.dumps(answer), flush=True)


def _become(request: dict[str, Any], out: Path, err: Path) -> None:
    """Runs the program of a request in this fork, and ends it."""
    for target, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), target)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environ"])
    sys.argv = request["argv"]
    sys.path.insert(0, "")
    status = 0
    try:
        exec(compile(request["code"], "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    serve()
