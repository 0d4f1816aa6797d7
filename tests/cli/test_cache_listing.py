"""What `outblas cache` shows of names that others chose, of many results and of configs."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from support.cache_command import invoke, parsed, shown
from support.stored import H100, H200, failed, sql, trial, winner

from outblas.autotune.store import transfer
from outblas.autotune.store.records import Workload
from outblas.autotune.store.store import Store
from outblas.cli import common
from outblas.core import config_source, configs, registry

pytest_plugins = ("support.cached",)
pytestmark = pytest.mark.usefixtures("home")


# Names that others chose.

ESCAPES = (
    "\x1b[31mred\x1b]0;title\x07 \x9b2J \u202egnp.exe\u2066 \u200b \r\b [bold]b[/bold] \\[red]"
)
RAW = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069]")


@pytest.fixture
def foreign(home: Path) -> None:
    """Results of a GPU and with reasons that no GPU and no compiler would have, imported."""
    gpu = dataclasses.replace(H200, name=f"GPU {ESCAPES}", driver=ESCAPES)
    file = home / "foreign.json"
    tried = [trial(0, gpu=gpu), failed(1, gpu=gpu, reason=ESCAPES)]
    transfer.export(tried, [winner(gpu=gpu, source=ESCAPES)], file)
    invoke("import", file)


@pytest.mark.usefixtures("foreign")
@pytest.mark.parametrize(
    "line", ["ls", "show 4096", "show hopper.hilbert", "verify", "export --ship"]
)
def test_no_control_character_reaches_the_terminal(line: str) -> None:
    result = invoke(*line.split())

    assert not RAW.search(result.stdout.replace("\t", "")), result.stdout
    assert not RAW.search(result.stderr), result.stderr


@pytest.mark.usefixtures("foreign")
@pytest.mark.parametrize("line", ["ls", "show 4096", "show hopper.hilbert"])
def test_control_characters_are_shown_escaped(line: str) -> None:
    said = shown(*line.split()).replace("\n", "")

    assert r"\x1b[31mred\x1b]0;title\x07" in said
    assert r"\x9b2J" in said
    assert r"\u202egnp.exe\u2066" in said
    assert "[bold]b[/bold]" in said
    assert r"\[red]" in said


@pytest.mark.usefixtures("foreign")
def test_control_characters_in_json_are_escapes() -> None:
    text = shown("ls", "--json")

    assert not RAW.search(text)
    assert {row["gpu"] for row in json.loads(text)["rows"]} >= {f"GPU {ESCAPES}"}


@pytest.mark.usefixtures("foreign")
def test_json_of_trials_has_names_as_they_are() -> None:
    assert parsed("show", "4096")[-1]["gpu"]["driver"] in (ESCAPES, H100.driver)


def test_control_characters_in_problems_are_shown_escaped(path: Path) -> None:
    sql(path, "UPDATE trials SET layout = 'x' || char(27) || '[31m' WHERE id = 1")

    text = shown("verify", code=1)

    assert not RAW.search(text)
    assert r"\x1b[31m" in text


def test_control_characters_in_paths_are_shown_escaped(home: Path) -> None:
    odd = home / "odd\x1b[31m\u202e.json"
    odd.write_text("{}")

    text = shown("verify", odd, code=1)

    assert not RAW.search(text)
    assert r"odd\x1b[31m\u202e.json" in text


def test_control_characters_in_refusals_are_shown_escaped(home: Path) -> None:
    odd = home / "odd\x1b[31m\u202e.json"
    odd.write_text("{}")

    assert not RAW.search(invoke("import", odd, code=2).stderr)
    assert not RAW.search(invoke("ls", "--store", home / "no\x1b[31m.sqlite", code=2).stderr)


def test_notes_and_tables_escape_what_they_are_given(capsys: pytest.CaptureFixture[str]) -> None:
    common.note(ESCAPES)
    common.table(ESCAPES, [ESCAPES], [[ESCAPES]])
    common.say(f"{ESCAPES}\nsecond line")

    text = capsys.readouterr().out
    assert not RAW.search(text)
    assert "\nsecond line" in text


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("µs × 4–8 ✓ 日本 é\u00a0 \t\n", "µs × 4–8 ✓ 日本 é\u00a0 \\t\\n"),
        ("\udcff\U000e0001", r"\udcff\U000e0001"),
    ],
    ids=["what is printable", "what is not"],
)
def test_what_is_not_printable_is_escaped(text: str, printed: str) -> None:
    assert common.printable(text) == printed


# Many results.


@pytest.fixture
def many(home: Path, path: Path) -> None:
    """300 more trials, of 150 sweeps."""
    shapes = [Workload(16 + i, 16, 16) for i in range(150)]
    with Store(path) as store:
        store.merge([trial(j, workload=shape) for shape in shapes for j in range(2)], [])


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("show hopper.hilbert", "100 of 303 trials; --limit shows more"),
        ("show hopper.hilbert --limit 1000", "303 of 303 trials"),
        ("ls", "100 of 152 rows; --limit shows more"),
        ("ls --limit 1000", "152 rows"),
    ],
)
def test_the_first_are_shown_unless_more_are_asked_for(line: str, said: str) -> None:
    assert said in shown(*line.split())


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize(("options", "count"), [((), 303), (("--limit", 7), 7)])
def test_json_has_all_trials_unless_fewer_are_asked_for(
    options: tuple[object, ...], count: int
) -> None:
    assert len(parsed("show", "hopper.hilbert", *options)) == count


@pytest.mark.usefixtures("many")
def test_json_has_all_sweeps() -> None:
    assert len(parsed("ls")["rows"]) == 152


# Configs.


@pytest.mark.parametrize(("line", "config"), [("ls", "sms=2"), ("show 4096", "sms=1")])
def test_a_listing_loads_no_kernel(line: str, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """DSLs take seconds to import."""
    monkeypatch.setattr(registry, "load", lambda name: pytest.fail(f"{name} is loaded"))

    assert config in shown(*line.split())


@pytest.mark.parametrize("kernel", [kernel.name for kernel in registry.ladder()])
def test_a_config_is_shown_without_its_defaults_which_are_read_from_the_source(
    kernel: str,
) -> None:
    try:
        module = registry.load(kernel)
    except ImportError as error:
        pytest.skip(str(error))
    own = configs.to_text(module.Config())
    name, value = configs.items(own)[0]
    changed = own.replace(f"{name}={value}", f"{name}=7", 1)

    assert config_source.brief(kernel, own) == ""
    assert config_source.brief(kernel, changed) == f"{name}=7"


def test_a_config_of_another_version_is_shown_as_a_whole() -> None:
    own = configs.to_text(registry.load("portable").Config())

    assert config_source.brief("portable", f"{own},unheard_of=1") == f"{own},unheard_of=1"


def test_a_config_of_an_unknown_kernel_is_shown_as_a_whole() -> None:
    assert config_source.brief("no.kernel", "tile_m=64") == "tile_m=64"
