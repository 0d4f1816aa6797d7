"""Kernels of the Hopper ladder are compiled once and then loaded from the cache on disk."""

from pathlib import Path
from unittest.mock import Mock

import pytest
from support.hopper_problems import FIRST_AND_LAST, load, problem

from outblas.base import cache
from outblas.hopper.parts import build, compile, host


@pytest.mark.compile
@pytest.mark.parametrize("rung", FIRST_AND_LAST)
def test_an_invalid_config_compiles_nothing(rung: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.cute, "compile", lambda *_, **__: pytest.fail("compiled"))
    module = load(rung)

    with pytest.raises(ValueError, match="tile_m is 80, expected 64, 128, 192, 256 or 320"):
        module.artifact(module.Config(tile_m=80))


@pytest.mark.compile
class TestTheCacheOnDisk:
    """One compile serves every process and every shape, until a source changes."""

    @pytest.fixture
    def compiles(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mock:
        """Counts the compiles of rungs, whose cache is empty."""
        monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path / "cache"))
        compiles = Mock(wraps=host.compile_variant)
        monkeypatch.setattr(host, "compile_variant", compiles)
        return compiles

    def plan_in_a_new_process(self, monkeypatch: pytest.MonkeyPatch, *shape: int) -> None:
        monkeypatch.setattr(compile, "_loaded", {})
        load("tma_wgmma").plan(problem(*shape))

    def test_is_used_again_for_another_shape_and_not_after_an_edit(
        self, compiles: Mock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.plan_in_a_new_process(monkeypatch)
        self.plan_in_a_new_process(monkeypatch, 4096, 512, 72)
        assert compiles.call_count == 1
        assert len(list((cache.directory() / "objects").glob("*.o"))) == 1

        monkeypatch.setattr(compile, "source_fingerprint", lambda: "edited")
        self.plan_in_a_new_process(monkeypatch)
        assert compiles.call_count == 2
