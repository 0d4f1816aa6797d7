"""Frames, in which a worker and its driver speak, and the script that a worker runs."""

import itertools
import subprocess
import sys

import pytest

from outblas.autotune.measure import serve, supervisor
from outblas.autotune.measure.serve import ACCEPTED, CALL, READY, RESULT, Frame, Reader

UNKNOWN_KIND_0 = b"\0" * 17
UNKNOWN_KIND_6 = b"\x06" + b"\0" * 16
TOO_LONG = b"\x04" + b"\xff" * 16


def test_frames_arrive_in_pieces_of_any_length() -> None:
    frames = [
        Frame(READY, 0),
        Frame(CALL, 1, b"call"),
        Frame(ACCEPTED, 1),
        Frame(RESULT, 1, b"x" * 40),
    ]
    stream = b"".join(map(bytes, frames))

    for cuts in itertools.combinations_with_replacement(range(len(stream) + 1), 2):
        first, second = cuts
        reader = Reader()
        pieces = stream[:first], stream[first:second], stream[second:]
        read = [frame for piece in pieces for frame in reader.feed(piece)]

        assert read == frames, f"cut at {cuts}"


damaged_frames = pytest.mark.parametrize(
    "damaged",
    [UNKNOWN_KIND_0, UNKNOWN_KIND_6, TOO_LONG],
    ids=["kind 0", "kind 6", "too long"],
)


@damaged_frames
def test_a_damaged_frame_is_refused(damaged: bytes) -> None:
    reader, sound = Reader(), Frame(RESULT, 1, b"x")

    read = reader.feed(bytes(sound) + damaged)

    assert read == [sound]
    assert reader.damaged


@damaged_frames
def test_nothing_is_read_after_a_damaged_frame(damaged: bytes) -> None:
    reader, sound = Reader(), Frame(RESULT, 1, b"x")
    reader.feed(damaged)

    assert reader.feed(bytes(sound)) == []


@pytest.mark.parametrize(
    "script", [serve.__file__, supervisor.__file__], ids=["serve", "supervisor"]
)
def test_the_script_of_a_process_imports_nothing_of_the_package(script: str) -> None:
    """It starts in milliseconds, and where the package itself cannot be imported."""
    code = f"import runpy, sys; runpy.run_path({script!r}); print('outblas' in sys.modules)"
    command = [sys.executable, "-I", "-S", "-c", code]

    said = subprocess.run(command, capture_output=True, text=True, check=True)

    assert said.stdout == "False\n"
