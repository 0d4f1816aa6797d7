"""Stands for autotune/serve.py and does what each call says: sends these frames, cut there, and
then ends so.
"""

import os
import pickle
import signal
import socket
import sys
import time
import types
from pathlib import Path

lean = types.ModuleType("lean")  # the package without what its __init__ imports
lean.__path__ = [str(Path(__file__).parents[2] / "autotune" / "measure")]
sys.modules["lean"] = lean
from lean.serve import READY, Frame, Reader  # noqa: E402


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.sendall(bytes(Frame(READY, 0)))
    reader = Reader()
    while piece := connection.recv(1 << 16):
        for call in reader.feed(piece):
            _, (frames, cut, end) = pickle.loads(call.body)
            sent = b"".join(
                bytes(Frame(kind, max(0, call.number + late), body)) for kind, late, body in frames
            )
            connection.sendall(sent[:cut])
            finish(connection, end)


def finish(connection, end) -> None:
    match end:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(3)
        case "hang":
            time.sleep(1000)
        case "close":
            connection.close()
            time.sleep(1000)
        case "garbage":
            connection.sendall(b"\xff" * 100)
            time.sleep(1000)


if __name__ == "__main__":
    main()
