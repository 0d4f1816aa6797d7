"""The program of a worker process: it reads calls from a socket, one at a time, and answers each.

The driver starts this file as a script (see `processes`), so it imports only the standard library.
The modules that calls need are named on its command line, and imported before it reports that it is
ready.

The protocol consists of frames with a kind, the number of a call, and a pickled body:

    worker to driver   READY 0      it can take calls
    driver to worker   CALL n       a function and its arguments
    worker to driver   ACCEPTED n   the call has been read; a later death counts for the call
    worker to driver   RESULT n     what the function returned
                       ERROR n      the class name and the text of its exception, both plain strings

The driver sends call n + 1 only after the answer to call n. It ignores frames with another number
than that of its call.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import pickle
import signal
import socket
import struct
import sys
from dataclasses import dataclass

READY, CALL, ACCEPTED, RESULT, ERROR = range(1, 6)
_HEADER = struct.Struct("!BQQ")  # kind, number of the call, bytes of the body
_LONGEST = 1 << 30  # bytes of a body; a header with a larger number is damaged
_PIECE = 1 << 16


@dataclass(frozen=True)
class Frame:
    """One message."""

    kind: int
    number: int
    body: bytes = b""

    def __bytes__(self) -> bytes:
        return _HEADER.pack(self.kind, self.number, len(self.body)) + self.body


class Reader:
    """Makes frames of bytes that arrive in parts of any length. `damaged`: the last bytes are not a
    frame.
    """

    def __init__(self) -> None:
        self.damaged = False
        self._bytes = bytearray()

    def feed(self, piece: bytes) -> list[Frame]:
        """Returns the frames that these bytes complete; none after invalid bytes."""
        self._bytes += piece
        frames = []
        while (frame := self._next()) is not None:
            frames.append(frame)
        return frames

    def _next(self) -> Frame | None:
        if self.damaged or len(self._bytes) < _HEADER.size:
            return None
        kind, number, length = _HEADER.unpack_from(self._bytes)
        self.damaged = not READY <= kind <= ERROR or length > _LONGEST
        if self.damaged:
            return None
        end = _HEADER.size + length
        if len(self._bytes) < end:
            return None
        body = bytes(self._bytes[_HEADER.size : end])
        del self._bytes[:end]
        return Frame(kind, number, body)


def describe_error(error: BaseException) -> tuple[str, str]:
    """Returns the qualified name of an error's class, and its text, as plain strings, whatever the
    class's methods do.
    """
    try:
        name = f"{type(error).__module__}.{type(error).__qualname__}"
    except BaseException:
        name = "an error without a name"
    try:
        text = _plain(str(error))
    except BaseException:
        text = "an error that cannot be shown"
    return _plain(name), text


def brief(error: BaseException) -> str:
    """Returns the class of an error and the first line of its text, at most 1000 characters."""
    name, text = describe_error(error)
    return f"{name.rpartition('.')[2]}: {text.strip().partition(chr(10))[0]}"[:1000]


def _plain(text: str) -> str:
    """Returns the text as an exact str that any encoder accepts; subclasses of str and lone
    surrogates may fail to encode.
    """
    return text.encode("utf-8", "backslashreplace").decode()


def serve(connection: socket.socket) -> None:
    """Answers calls until the driver closes its end."""
    reader = Reader()
    connection.sendall(bytes(Frame(READY, 0)))
    while piece := connection.recv(_PIECE):
        for call in reader.feed(piece):
            connection.sendall(bytes(Frame(ACCEPTED, call.number)))
            connection.sendall(bytes(_answer(call)))


def _answer(call: Frame) -> Frame:
    try:
        function, arguments = pickle.loads(call.body)
        return Frame(RESULT, call.number, pickle.dumps(function(*arguments)))
    except BaseException as error:  # any error is an answer, and this process continues
        return Frame(ERROR, call.number, pickle.dumps(describe_error(error)))


def main() -> None:
    """Runs a worker. The command line has a socket's number, the module search path as JSON, and
    the modules to import.
    """
    # An interrupt from outside must not look like an error of a config.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    sys.path[:] = json.loads(sys.argv[2])
    modules = sys.argv[3:]
    del sys.argv[1:]

    gc.disable()  # imported objects stay; scanning them took a fifth of the CPU time of a start
    for module in modules:
        importlib.import_module(module)
    gc.freeze()
    gc.enable()
    with contextlib.suppress(OSError):  # the driver is gone
        serve(connection)
    os._exit(0)  # does not wait for threads that configs may have left


if __name__ == "__main__":
    main()
