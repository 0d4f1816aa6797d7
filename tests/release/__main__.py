"""Builds the wheel and the sdist in a temporary folder, and checks what would be released.

python -m tests.release                   the tree as it is
python -m tests.release --tag v1.2.3      a tree that is about to get this tag, with its day
python -m tests.release --only versions   one of the checks
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

from trove_classifiers import classifiers

from . import archives, readme, versions

ROOT = Path(__file__).resolve().parents[2]
# Of a file in both wheels, so that they can be compared.
EPOCH = "1700000000"


class Failed(Exception):
    """A command failed; the message is what it printed."""


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """What a command prints. Raises Failed where it fails."""
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**os.environ, "SOURCE_DATE_EPOCH": EPOCH, "NO_COLOR": "1"},
        check=False,
    )
    if done.returncode:
        raise Failed(f"{' '.join(map(str, command))}:\n{done.stdout}{done.stderr}".rstrip())
    return done.stdout


class Release:
    """The archives that are built, and the checks, which return what is wrong."""

    def __init__(self, folder: Path, *, tag: str = "") -> None:
        self._folder, self._tag = folder, tag
        self.version = versions.of_project(ROOT)

    @cached_property
    def wheel(self) -> Path:
        """The wheel that is built from the tree."""
        return self._built(ROOT, "--wheel")

    @cached_property
    def sdist(self) -> Path:
        return self._built(ROOT, "--sdist")

    def _built(self, source: Path, kind: str) -> Path:
        into = self._folder / f"dist{len(list(self._folder.iterdir()))}"
        run(*_uv("build", "-q", kind, "--out-dir", into), source)
        return next(path for path in into.iterdir() if path.suffix in (".whl", ".gz"))

    def versions(self) -> list[str]:
        found = versions.faults(ROOT, final=bool(self._tag))
        if self._tag and self._tag != f"v{self.version}":
            found.append(f"--tag is {self._tag}, expected v{self.version}")
        return found

    def contents(self) -> list[str]:
        size = self.wheel.stat().st_size / 2**20
        large = [f"the wheel has {size:.1f} MiB, expected at most {archives.MAX_WHEEL_MIB}"]
        return (
            archives.wheel_faults(archives.of_wheel(self.wheel), ROOT, self.version)
            + archives.sdist_faults(archives.of_sdist(self.sdist))
            + (large if size > archives.MAX_WHEEL_MIB else [])
        )

    def metadata(self) -> list[str]:
        run(sys.executable, "-m", "twine", "check", "--strict", self.wheel, self.sdist)
        return archives.metadata_faults(
            archives.metadata(self.wheel), self.version, set(classifiers)
        )

    def readme(self) -> list[str]:
        return readme.faults(str(archives.metadata(self.wheel).get_payload()))

    def same_wheel(self) -> list[str]:
        """The sdist, unpacked elsewhere, builds the wheel of the tree."""
        return archives.differences(
            archives.of_wheel(self.wheel), archives.of_wheel(self._built(self.sdist, "--wheel"))
        )

    def installed(self) -> list[str]:
        """The wheel, installed alone in an empty environment, says what it has and finds no
        problem.
        """
        env = self._folder / "env"
        run(*_uv("venv", "-q"), env)
        python = env / "bin" / "python"
        pinned = ("-c", ROOT / "constraints.txt", "torch")
        run(_uv()[0], "pip", "install", "-q", "--python", python, *pinned, self.wheel)
        outblas = env / "bin" / "outblas"
        version = run(outblas, "--version", cwd=self._folder).strip()
        run(outblas, "doctor", cwd=self._folder)
        run(python, ROOT / ".ci" / "wheel_check.py", cwd=self._folder)
        wrong = [f"outblas --version says {version!r}"]
        return [] if version == f"outblas {self.version}" else wrong

    def docs(self) -> list[str]:
        run("make", "--no-print-directory", "docs", "DOCS=-t offline -q")
        return []


def _uv(*arguments: str | Path) -> tuple[str | Path, ...]:
    """A command of uv that works with this Python."""
    uv = Path(sys.executable).with_name("uv")
    return (uv, *arguments, "--python", sys.executable) if arguments else (uv,)


CHECKS: dict[str, Callable[[Release], list[str]]] = {
    "versions": Release.versions,
    "contents": Release.contents,
    "metadata": Release.metadata,
    "readme": Release.readme,
    "same-wheel": Release.same_wheel,
    "installed": Release.installed,
    "docs": Release.docs,
}


def main(given: list[str] | None = None) -> int:
    """Returns 0 if every check passes, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.release",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tag", default="", help="the tag that the tree is about to get")
    parser.add_argument("--only", action="append", choices=CHECKS, help="a check, by name")
    asked = parser.parse_args(given)
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        release = Release(Path(folder), tag=asked.tag)
        for name in asked.only or CHECKS:
            began = time.monotonic()
            try:
                found = CHECKS[name](release)
            except Failed as error:
                found = [str(error)]
            failed |= bool(found)
            verdict = "FAILED" if found else "ok"
            print(f"{name:12} {verdict:6} {time.monotonic() - began:6.1f} s", flush=True)
            for fault in found:
                print(f"  {fault}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
