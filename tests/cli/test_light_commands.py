"""Commands import torch, compilers and charts only where they need them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "numpy", "triton", "cutlass", "matplotlib", "ray", "pynvml", "tvm_ffi")

# Runs commands in one process, as the installed script does, and prints which heavy modules there
# are after each. A command's own output goes nowhere.
RUN = """
import contextlib, io, json, sys
from _outblas_command import main

commands, heavy = json.loads(sys.argv[1]), json.loads(sys.argv[2])
for arguments in commands:
    sys.argv = ["outblas", *arguments]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main()
    print(json.dumps([arguments, [name for name in heavy if name in sys.modules]]))
"""

LIGHT = (
    ["--version"],
    ["--help"],
    ["bench", "--help"],
    ["tune", "--help"],
    ["report", "ladder", "--help"],
    ["list"],
    ["list", "hopper", "--long"],
    ["list", "--json"],
    ["cache", "ls"],
    ["cache", "verify"],
    ["cache", "prune", "--older-than", "30d", "--dry-run"],
    ["report", "sizes", "hopper.gemm"],
)


def imported_by(*commands: list[str], cache: Path, **environment: str) -> dict[str, list[str]]:
    """The heavy modules that a process has imported after each of these commands."""
    arguments = [json.dumps(commands), json.dumps(HEAVY)]
    done = subprocess.run(
        [sys.executable, "-c", RUN, *arguments],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OUTBLAS_CACHE_DIR": str(cache), **environment},
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(commands), done.stderr
    return {" ".join(command): modules for command, modules in found}


def test_help_lists_and_the_cache_import_nothing_heavy(tmp_path: Path) -> None:
    found = imported_by(*LIGHT, cache=tmp_path)

    assert found == {" ".join(command): [] for command in LIGHT}


def test_a_misspelt_command_imports_nothing_heavy(tmp_path: Path) -> None:
    found = imported_by(["bnch"], cache=tmp_path)

    assert found == {"bnch": []}


def test_completion_imports_nothing_heavy(tmp_path: Path) -> None:
    asked = {"_OUTBLAS_COMPLETE": "complete_bash", "COMP_WORDS": "outblas re", "COMP_CWORD": "1"}

    found = imported_by(["re"], cache=tmp_path, **asked)

    assert found == {"re": []}


@pytest.mark.long
def test_the_check_sees_what_a_command_imports(tmp_path: Path) -> None:
    found = imported_by(["report", "raster", "--shapes", "512"], cache=tmp_path)

    assert "torch" in found["report raster --shapes 512"]


@pytest.mark.long
@pytest.mark.parametrize("first", ["_outblas_command", "json"])
def test_every_public_name_is_there_however_the_package_was_started(first: str) -> None:
    program = (
        f"import {first}, outblas\n"
        "print(all(getattr(outblas, name).__doc__ for name in outblas.__all__))\n"
        "from outblas import matmul, scaled_mm, warmup\n"
        "print(matmul is outblas.matmul, hasattr(outblas, 'no_such_name'))\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert done.stdout.split() == ["True", "True", "False"]


@pytest.mark.long
def test_the_package_alone_imports_torch_and_registers_its_operators() -> None:
    program = (
        "import sys, outblas; print('torch' in sys.modules)\n"
        "import torch; print(torch.ops.outblas.gemm)"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert done.stdout.split() == ["True", "outblas.gemm"]
