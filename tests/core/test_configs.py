"""Configs as text: fields that were renamed keep their old names readable."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from outblas.core import config_source, configs, registry
from outblas.hopper import gemm, hilbert
from outblas.hopper.core.config import HopperConfig


@dataclass(frozen=True)
class Renamed:
    ALIASES: ClassVar[Mapping[str, str]] = {"slots": "stages", "swap": "swap_ab"}

    tile_m: int = 64
    stages: int = 4
    swap_ab: bool = False


@dataclass(frozen=True)
class Derived(Renamed):
    stages: int = 2


MODULE = """
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Base:
    ALIASES: ClassVar[Mapping[str, str]] = {"slots": "stages", "swap": "swap_ab"}

    tile_m: int = 64
    stages: int = 4
    swap_ab: bool = False


@dataclass(frozen=True)
class Config(Base):
    stages: int = 2
"""


def test_old_names_are_read_as_the_new_ones():
    assert configs.from_text(Renamed, "slots=5,swap=True") == Renamed(stages=5, swap_ab=True)
    assert configs.from_text(Derived, "swap=1") == Derived(stages=2, swap_ab=True)
    assert configs.from_text(Renamed, "stages=5,slots=5") == Renamed(stages=5)


def test_texts_have_new_names_alone():
    config = configs.from_text(Renamed, "slots=5")
    assert configs.to_text(config) == "tile_m=64,stages=5,swap_ab=False"
    assert configs.brief(config) == "stages=5"
    assert configs.from_text(Renamed, configs.to_text(config)) == config


@pytest.mark.parametrize("text", ["slots=4,stages=5", "stages=5,tile_m=64,slots=4"])
def test_two_values_of_one_field_are_refused(text):
    with pytest.raises(ValueError, match=r"(?=.*'slots=4')(?=.*'stages=5').*one field"):
        configs.from_text(Renamed, text)


def test_an_old_name_has_the_type_of_its_field():
    with pytest.raises(ValueError, match="stages is 'x', expected an integer"):
        configs.from_text(Renamed, "slots=x")
    with pytest.raises(ValueError, match="config has 'slots', expected name=value"):
        configs.from_text(Renamed, "slots")
    with pytest.raises(ValueError, match="config has 'depth=4'"):
        configs.from_text(Renamed, "depth=4")


def test_names_are_replaced_without_the_class():
    """Values, their order and unknown names stay."""
    renamed = Renamed.ALIASES
    assert configs.with_current_names("", renamed) == ""
    assert configs.with_current_names("tile_m=64,slots=5,x=1", renamed) == "tile_m=64,stages=5,x=1"
    assert configs.with_current_names("swap=True", {}) == "swap=True"


def test_old_names_are_read_from_a_module_s_source(tmp_path, monkeypatch):
    """A tuning store is opened without a DSL: neither names nor defaults need an import."""
    (tmp_path / "renamed_config.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "module_name", lambda kernel: "renamed_config")
    found = config_source.source("renamed_config", "Config")
    assert found.defaults == {"tile_m": "64", "stages": "2", "swap_ab": "False"}
    assert found.aliases == Renamed.ALIASES
    assert config_source.current_text("any", "slots=5,swap=True") == "stages=5,swap_ab=True"
    assert config_source.current_text("any", "slots=5,stages=6") == "slots=5,stages=6"
    assert config_source.brief("any", "tile_m=64,slots=5,swap=False") == "stages=5"
    assert config_source.brief("any", "tile_m=64,slots=2") == ""
    assert "renamed_config" not in sys.modules


def test_a_text_of_an_unknown_kernel_stays():
    assert config_source.current_text("no.kernel", "slots=5") == "slots=5"


@pytest.mark.parametrize("kernel", [kernel.name for kernel in registry.ladder()])
def test_old_names_lead_to_fields_that_there_are(kernel):
    kind = registry.load(kernel).Config
    fields = {name for name, _ in configs.items(configs.to_text(kind()))}
    renamed = configs.aliases(kind)
    assert not renamed.keys() & fields
    assert set(renamed.values()) <= fields
    own = config_source.source(registry.module_name(kernel), "Config")
    assert own.aliases == dict(renamed)
    assert own.defaults.keys() == fields


@pytest.mark.parametrize("kind", [HopperConfig, hilbert.Config, gemm.Config])
def test_a_config_is_made_and_read_by_old_names_of_fields(kind: type[HopperConfig]) -> None:
    config = kind(slots=7, store_buffers=2)  # type: ignore[call-arg]
    assert config == kind(stages=7, epilogue_stages=2)
    assert config.slots == 7  # type: ignore[attr-defined]
    assert replace(config, slots=3) == replace(config, stages=3)  # type: ignore[call-arg]
    with pytest.raises(AttributeError, match="has no attribute 'slot'"):
        _ = config.slot  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="slot"):
        kind(slot=7)  # type: ignore[call-arg]
