"""Configs as text: what is written is read again, and what names no value of a field is refused."""

from dataclasses import dataclass

import pytest

from outblas.base import configs, registry

KERNELS = [kernel.name for kernel in registry.ladder()]


@dataclass(frozen=True)
class Tiles:
    """A config of three kinds of fields."""

    tile_m: int = 64
    stages: int = 4
    swap_ab: bool = False


@pytest.mark.parametrize("config", [Tiles(), Tiles(stages=5, swap_ab=True)], ids=str)
def test_a_text_is_read_as_the_config_that_it_was_made_of(config: Tiles) -> None:
    text = configs.to_text(config)

    assert text == f"tile_m=64,stages={config.stages},swap_ab={config.swap_ab}"
    assert configs.from_text(Tiles, text) == config


@pytest.mark.parametrize("name", KERNELS)
def test_the_default_config_of_a_kernel_is_read_from_its_text(name: str) -> None:
    kind = registry.load(name).Config

    assert configs.from_text(kind, configs.to_text(kind())) == kind()


def test_a_text_sets_the_fields_that_it_names_and_a_short_one_names_what_differs() -> None:
    config = configs.from_text(Tiles, "stages=5,swap_ab=1")

    assert config == Tiles(stages=5, swap_ab=True)
    assert configs.brief(config) == "stages=5,swap_ab=True"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stages=x", "stages is 'x', expected an integer"),
        ("swap_ab=2", "swap_ab is '2'"),
        ("stages", "config has 'stages', expected name=value"),
        ("depth=4", "config has 'depth=4'"),
    ],
)
def test_what_is_no_value_of_a_field_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configs.from_text(Tiles, text)
