"""What `outblas doctor` says of versions: each outside of the tested ones is named."""

import json
import platform

import pytest
import torch
from support import commands

from outblas.core import compat, requirements


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch):
    """Has `doctor` find another version of a package, or of Python; None: the package is absent."""

    def pretend(name: str, version: str | None) -> None:
        if name == "Python":
            monkeypatch.setattr(platform, "python_version", lambda: version)
            return
        installed = requirements.installed
        monkeypatch.setattr(
            requirements, "installed", lambda asked: version if asked == name else installed(asked)
        )

    return pretend


def problems() -> list[str]:
    """The problems that `outblas doctor --json` reports."""
    result = commands.invoke("doctor", "--json")
    found = json.loads(result.stdout)["problems"]
    assert result.exit_code == (1 if found else 0)
    return found


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("torch", "2.10.0"),
        ("torch", "2.16.0"),
        ("triton", "3.5.1"),
        ("triton", "3.10.0"),
        ("nvidia-cutlass-dsl", "4.7.1"),
        ("nvidia-cutlass-dsl", "4.9.0"),
        ("apache-tvm-ffi", "0.1.11"),
        ("apache-tvm-ffi", "0.2.0"),
    ],
)
def test_a_package_outside_the_tested_range_is_named_with_a_command(
    install, name: str, version: str
) -> None:
    install(name, version)

    found = problems()

    assert any(
        each.startswith(f"{name}: outside the tested range: pip install '{name}") for each in found
    ), found


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("torch", "2.11.0"),
        ("torch", "2.15.0+cu130"),
        ("triton", "3.6.0"),
        ("triton", "3.9.0"),
        ("nvidia-cutlass-dsl", "4.8.1"),
        ("apache-tvm-ffi", "0.1.15.post2"),
    ],
)
def test_a_package_in_the_tested_range_is_no_problem(install, name: str, version: str) -> None:
    install(name, version)

    assert not [each for each in problems() if each.startswith(f"{name}:")]


@pytest.mark.parametrize("version", ["3.10.13", "3.15.0", "4.0.0"])
def test_a_python_outside_the_tested_versions_is_named(install, version: str) -> None:
    install("Python", version)

    assert "Python: outside the tested range: use Python 3.11 to 3.14" in problems()


@pytest.mark.parametrize("version", ["3.11.7", "3.14.10"])
def test_a_python_of_the_tested_versions_is_no_problem(install, version: str) -> None:
    install("Python", version)

    assert not [each for each in problems() if each.startswith("Python:")]


def test_a_package_that_is_absent_is_named_with_a_command(install) -> None:
    install("apache-tvm-ffi", None)

    assert any(each.startswith("apache-tvm-ffi: not installed: pip install") for each in problems())


@pytest.mark.parametrize(
    ("cuda", "libraries"),
    [
        ("13.0", {"cu12": "4.8.1", "cu13": None}),
        ("13.0", {"cu12": "4.8.1", "cu13": "4.8.0"}),
        ("12.8", {"cu12": None, "cu13": "4.8.1"}),
    ],
)
def test_libraries_of_the_dsl_that_torchs_cuda_lacks_are_named_with_a_command(
    install, monkeypatch: pytest.MonkeyPatch, cuda: str, libraries: dict[str, str | None]
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    install("nvidia-cutlass-dsl", "4.8.1")
    for name, version in libraries.items():
        install(f"nvidia-cutlass-dsl-libs-{name}", version)

    (problem,) = (line for line in problems() if line.startswith("nvidia-cutlass-dsl: "))

    assert f"no libraries of version 4.8.1 for CUDA {cuda[:2]}" in problem
    assert problem.endswith("pip install 'nvidia-cutlass-dsl[cu13]>=4.8.1,<4.9'")


@pytest.mark.parametrize("cuda", [None, "12.8", "13.0"])
def test_libraries_of_the_dsl_for_both_cuda_versions_fit_any_torch(
    install, monkeypatch: pytest.MonkeyPatch, cuda: str | None
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    for name in ("nvidia-cutlass-dsl", *(f"nvidia-cutlass-dsl-libs-cu{n}" for n in (12, 13))):
        install(name, "4.8.1")

    assert not [line for line in problems() if line.startswith("nvidia-cutlass-dsl:")]


def test_what_pip_installs_brings_the_libraries_for_cuda_13() -> None:
    """torch's wheels on PyPI are built for it; those for CUDA 12 come with the DSL itself."""
    assert "[cu13]" in requirements.install_command("nvidia-cutlass-dsl")


def test_a_private_name_that_a_version_lacks_is_shown_with_what_happens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    missing = compat.PrivateName("torch:_C._gone", "a test", "it is slower", False)
    monkeypatch.setitem(compat.taken, missing.name, missing)

    shown = commands.invoke("doctor").output

    assert "The installed versions lack torch:_C._gone: it is slower" in " ".join(shown.split())
