"""Fixtures of the tests of `outblas profile`: what stands for ncu, on a machine with an H100."""

from pathlib import Path

import pytest

from support import fake_ncu


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program called ncu, first on PATH, for tests to write."""
    return fake_ncu.install(tmp_path, monkeypatch)


@pytest.fixture
def replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The log of calls of an ncu that replays a copy of the recording, which lies beside it."""
    return fake_ncu.install_replay(tmp_path, monkeypatch)


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """The source page that the fake ncu makes: that of 4096³ by cublas and portable."""
    return fake_ncu.write_source_page(tmp_path)
