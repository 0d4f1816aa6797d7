"""Configs as text: fields that were renamed keep their old names readable."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest

from outblas.core import config_source, configs, registry
from outblas.hopper import gemm, hilbert
from outblas.hopper.core.config import HopperConfig


@dataclass(frozen=True)
class Renamed:
    """A config of which two fields have had other names."""

    ALIASES: ClassVar[Mapping[str, str]] = {"slots": "stages", "swap": "swap_ab"}

    tile_m: int = 64
    stages: int = 4
    swap_ab: bool = False


@dataclass(frozen=True)
class Derived(Renamed):
    """Has the old names of its base."""

    stages: int = 2


# Texts.


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("slots=5,swap=True", Renamed(stages=5, swap_ab=True)),
        ("swap=1", Renamed(swap_ab=True)),
        ("stages=5,slots=5", Renamed(stages=5)),
    ],
    ids=["two old names", "one old name", "both names, the same value"],
)
def test_old_names_are_read_as_the_new_ones(text: str, config: Renamed) -> None:
    assert configs.from_text(Renamed, text) == config


def test_a_derived_class_reads_the_old_names_of_its_base() -> None:
    assert configs.from_text(Derived, "swap=1") == Derived(stages=2, swap_ab=True)


def test_a_text_has_new_names_alone() -> None:
    config = configs.from_text(Renamed, "slots=5")

    assert configs.to_text(config) == "tile_m=64,stages=5,swap_ab=False"
    assert configs.brief(config) == "stages=5"


def test_a_text_is_read_as_the_config_that_it_was_made_of() -> None:
    config = Renamed(stages=5, swap_ab=True)

    assert configs.from_text(Renamed, configs.to_text(config)) == config


@pytest.mark.parametrize("text", ["slots=4,stages=5", "stages=5,tile_m=64,slots=4"])
def test_two_values_of_one_field_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"(?=.*'slots=4')(?=.*'stages=5').*one field"):
        configs.from_text(Renamed, text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("slots=x", "stages is 'x', expected an integer"),
        ("slots", "config has 'slots', expected name=value"),
        ("depth=4", "config has 'depth=4'"),
    ],
    ids=["another type", "no value", "unknown name"],
)
def test_what_is_no_value_of_a_field_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configs.from_text(Renamed, text)


@pytest.mark.parametrize(
    ("text", "current"),
    [("", ""), ("tile_m=64,slots=5,x=1", "tile_m=64,stages=5,x=1")],
    ids=["empty", "an old name between others"],
)
def test_names_are_replaced_without_the_class(text: str, current: str) -> None:
    """Values, their order and unknown names stay."""
    assert configs.with_current_names(text, Renamed.ALIASES) == current


def test_names_stay_where_none_was_renamed() -> None:
    assert configs.with_current_names("swap=True", {}) == "swap=True"


# Modules that are read and not imported: a tuning store is opened without a DSL.

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


raise AssertionError("this module is imported")
"""


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a kernel whose module is `renamed_config`, with the text of MODULE."""
    (tmp_path / "renamed_config.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "module_name", lambda kernel: "renamed_config")
    return "any"


@pytest.mark.usefixtures("kernel")
def test_defaults_and_old_names_are_read_from_a_module_s_source() -> None:
    found = config_source.source("renamed_config", "Config")

    assert found.defaults == {"tile_m": "64", "stages": "2", "swap_ab": "False"}
    assert found.aliases == Renamed.ALIASES


@pytest.mark.parametrize(
    ("text", "current"),
    [
        ("slots=5,swap=True", "stages=5,swap_ab=True"),
        ("slots=5,stages=6", "slots=5,stages=6"),
    ],
    ids=["old names", "two values of one field"],
)
def test_a_text_of_a_kernel_gets_current_names(kernel: str, text: str, current: str) -> None:
    assert config_source.current_text(kernel, text) == current


@pytest.mark.parametrize(
    ("text", "brief"),
    [("tile_m=64,slots=5,swap=False", "stages=5"), ("tile_m=64,slots=2", "")],
    ids=["one that differs", "defaults alone"],
)
def test_a_text_of_a_kernel_is_shortened_by_its_defaults(
    kernel: str, text: str, brief: str
) -> None:
    assert config_source.brief(kernel, text) == brief


def test_a_text_of_an_unknown_kernel_stays() -> None:
    assert config_source.current_text("no.kernel", "slots=5") == "slots=5"


# The configs of the ladders.

KERNELS = [kernel.name for kernel in registry.ladder()]


def fields_of(kind: type) -> set[str]:
    return {name for name, _ in configs.items(configs.to_text(kind()))}


@pytest.mark.parametrize("name", KERNELS)
def test_old_names_lead_to_fields_that_there_are(name: str) -> None:
    kind = registry.load(name).Config

    renamed = configs.aliases(kind)

    assert not renamed.keys() & fields_of(kind)
    assert set(renamed.values()) <= fields_of(kind)


@pytest.mark.parametrize("name", KERNELS)
def test_the_source_tells_the_fields_and_old_names_of_a_config(name: str) -> None:
    kind = registry.load(name).Config

    source = config_source.source(registry.module_name(name), "Config")

    assert source.aliases == dict(configs.aliases(kind))
    assert source.defaults.keys() == fields_of(kind)


HOPPER_CONFIGS = pytest.mark.parametrize(
    "kind",
    [HopperConfig, hilbert.Config, gemm.Config],
    ids=["HopperConfig", "hopper.hilbert", "hopper.gemm"],
)


@HOPPER_CONFIGS
def test_a_config_is_made_by_old_names_of_fields(kind: type[HopperConfig]) -> None:
    config = kind(slots=7, store_buffers=2)  # type: ignore[call-arg]

    assert config == kind(stages=7, epilogue_stages=2)


@HOPPER_CONFIGS
def test_a_config_is_read_by_old_names_of_fields(kind: type[HopperConfig]) -> None:
    assert kind(stages=7).slots == 7  # type: ignore[attr-defined]


@HOPPER_CONFIGS
def test_fields_of_a_config_are_replaced_by_old_names(kind: type[HopperConfig]) -> None:
    config = kind(stages=7)

    assert replace(config, slots=3) == replace(config, stages=3)  # type: ignore[call-arg]


@HOPPER_CONFIGS
def test_names_that_no_field_ever_had_are_refused(kind: type[HopperConfig]) -> None:
    config = kind()

    with pytest.raises(AttributeError, match="has no attribute 'slot'"):
        _ = config.slot  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="slot"):
        kind(slot=7)  # type: ignore[call-arg]
