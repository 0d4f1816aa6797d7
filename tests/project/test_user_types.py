"""A user's program passes `mypy --strict` against outblas, whose folder holds the ladders too and
is marked as typed, as in the wheel.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.long,
    pytest.mark.xdist_group("mypy"),
]  # which keeps what it knows of torch

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "data" / "typed_program.py"


# Parts of torch that give no type to an operand, a layer or a model; analysing all of torch takes
# mypy two thirds of its time.
SKIPPED = (
    "torch._decomp",
    "torch._dynamo",
    "torch._export",
    "torch._functorch",
    "torch._higher_order_ops",
    "torch._inductor",
    "torch._numpy",
    "torch._prims",
    "torch._refs",
    "torch._subclasses",
    "torch.ao",
    "torch.backends",
    "torch.cuda",
    "torch.distributed",
    "torch.export",
    "torch.fx",
    "torch.jit",
    "torch.onnx",
    "torch.optim",
    "torch.profiler",
    "torch.sparse",
    "torch.testing",
    "torch.utils",
    "torch.xpu",
    "numpy",
    "sympy",
)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(SKIPPED, id="what operands and layers are made of"),
        pytest.param((), id="all of torch", marks=pytest.mark.slow),
    ],
)
def settings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """mypy's settings of a user, who has none but for the modules to skip."""
    path = tmp_path_factory.mktemp("settings") / "mypy.ini"
    skipped = "".join(f"[mypy-{name}.*]\nfollow_imports = skip\n" for name in request.param)
    path.write_text(f"[mypy]\n{skipped}")
    return path


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where mypy keeps what it knows of torch between two checks."""
    return tmp_path_factory.mktemp("mypy")


def check(program: Path, settings: Path, cache: Path) -> tuple[int, str]:
    """The exit code of `mypy --strict` for a program, and what it prints."""
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", settings]
    # As of an installed package: errors inside are not the user's, who imports what is exported.
    command += ["--cache-dir", cache, "--follow-imports", "silent", program]
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        env={"MYPYPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin"},
        cwd=cache,
    )
    return done.returncode, done.stdout + done.stderr


def test_the_package_is_marked_as_typed() -> None:
    assert (ROOT / "src" / "outblas" / "py.typed").is_file()


def test_a_program_with_every_public_call_is_free_of_errors(settings: Path, cache: Path) -> None:
    code, said = check(PROGRAM, settings, cache)

    assert code == 0, said


MISTAKES = {
    "outblas.matmul(a, b, activation=1)": "arg-type",
    'outblas.matmul(a, b, activation="tanh")': "arg-type",
    'outblas.linear(a, b.T, tune="yes")': "arg-type",
    'outblas.matmul(a, b, batch_invariant="yes")': "arg-type",
    'outblas.Linear(8, 8, activation="tanh")': "arg-type",
    'outblas.tune(a, b, weights="hot")': "arg-type",
    'SweepOptions(engine="spark")': "arg-type",
    "outblas.no_such_call(a)": "attr-defined",
    "outblas.autotune.no_such_call(a)": "attr-defined",
    "wrong: int = outblas.matmul(a, b)": "assignment",
    "no_layer: int = outblas.Linear(8, 8).weight": "assignment",
    "no_model: int = torch.nn.Sequential(outblas.Linear(8, 8))": "assignment",
    "no_contexts: int = outblas.batch_invariant()": "assignment",
}


def test_mistakes_in_a_program_are_found(settings: Path, cache: Path, tmp_path: Path) -> None:
    program = tmp_path / "mistaken.py"
    text = PROGRAM.read_text(encoding="utf-8")
    program.write_text("\n".join([text, *MISTAKES, ""]), encoding="utf-8")

    code, said = check(program, settings, cache)

    assert code == 1, said
    for at, error in enumerate(MISTAKES.values(), text.count("\n") + 2):
        assert re.search(rf"mistaken\.py:{at}: error: .*\[{error}\]", said), said
