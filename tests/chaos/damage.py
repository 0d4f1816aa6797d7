"""Damaged stores: each is read, written and salvaged in a process of its own, which may neither
raise nor hang.
"""

import shutil
import signal
from pathlib import Path

from . import damages
from .episode import Episode, Setting
from .examine import sample
from .world import World, draw

NAME = "damage"
UNIT = "stores"
TARGET = 500
EPISODE = 25  # stores
JOBS = 2  # episodes side by side
TRIALS, WINNERS = 240, 12
LIMIT = 30.0  # seconds that a store may take
LEAST_SALVAGED = 0.9  # of the records that a plain reader gets
COMMANDS = (["ls"], ["verify"], ["show", "16x4096x4096"], ["export"], ["import"])


def episode(setting: Setting) -> Episode:
    numbers, found = setting.random, Episode()
    sources = {killed: _stocked(setting, killed) for killed in (False, True)}
    for number in range(min(EPISODE, setting.units)):
        kind, late = sample(numbers)
        killed, seed = numbers.random() < 0.4 or "log" in kind, str(numbers.random())
        place = setting.folder / str(number)
        shutil.copytree(sources[killed], place)
        _examine(setting, found, place / "tuning.sqlite", kind, seed, late)
        found.units += 1
        shutil.rmtree(place)
        if number % 8 == 0:
            shutil.copytree(sources[killed], place)
            _run_command(
                setting, found, place / "tuning.sqlite", kind, seed, numbers.choice(COMMANDS)
            )
            shutil.rmtree(place)
    if setting.index % 2 == 0 and found.units == EPISODE:
        _resume(setting, found)
    return found


def _stocked(setting: Setting, killed: bool) -> Path:
    """The folder of a store that was closed, or whose writer was killed."""
    folder = setting.folder / f"stock-{killed}"
    folder.mkdir()
    given = {
        "path": str(folder / "tuning.sqlite"),
        "trials": TRIALS,
        "winners": WINNERS,
        "killed": killed,
    }
    child = setting.nursery.start("stock", given, folder=folder)
    status = child.wait(120)
    if status != (-signal.SIGKILL if killed else 0):
        raise RuntimeError(f"no store can be made: {child.said()}")
    return folder


def _examine(
    setting: Setting, found: Episode, path: Path, kind: str, seed: str, late: bool
) -> None:
    given = {
        "path": str(path),
        "kind": kind,
        "seed": seed,
        "trials": TRIALS,
        "winners": WINNERS,
        "late": late,
    }
    child = setting.nursery.start("examine", given, folder=path.parent)
    what = f"{kind}, while it is open" if late else kind
    found.counts[what] += 1
    if child.wait(LIMIT) is None:
        child.send(signal.SIGKILL)
        child.wait(10)
        found.fail("hangs", what)
        return
    answer = child.answer()
    if child.poll() != 0 or not answer:
        found.fail("dies", f"{what}: status {child.poll()}: {child.said()[-300:]}")
        return
    for promise, detail in answer["faults"]:
        found.fail(promise, f"{what}: {detail}")
    _check_salvage(found, kind, what, answer)


def _check_salvage(found: Episode, kind: str, what: str, answer: dict[str, int]) -> None:
    """What a plain reader can read the store has kept, unless it left the file alone."""
    if answer["refused"]:
        found.counts["refused, and left alone"] += 1
        return
    found.counts["records readable"] += answer["readable"]
    found.counts["records kept"] += answer["there"]
    if kind in damages.HARMLESS and answer["there"] < answer["of"]:
        found.fail(
            "harmless change loses records",
            f"{what}: {answer['there']} of {answer['of']} are there",
        )
    elif answer["salvaged"] < LEAST_SALVAGED * answer["readable"]:
        found.fail("readable records not salvaged", f"{what}: {_share(answer)}")


def _share(answer: dict[str, int]) -> str:
    """In tenths, so that equal cases are counted together."""
    return f"about {10 * round(10 * answer['salvaged'] / answer['readable'])}% of what can be read"


def _run_command(
    setting: Setting, found: Episode, path: Path, kind: str, seed: str, command: list[str]
) -> None:
    """`outblas cache` on a damaged store: a message and an exit status, never a traceback."""
    damages.apply(kind, seed, path)
    file = path.with_name("file.json")
    arguments = [
        "cache",
        *command,
        *([str(file)] if command[0] in ("export", "import") else []),
        "--store",
        str(path),
    ]
    if command[0] == "import":
        file.write_text("{}")
    child = setting.nursery.start("command", {"arguments": arguments}, folder=path.parent)
    found.counts[f"cache {command[0]}"] += 1
    if child.wait(LIMIT) is None:
        child.send(signal.SIGKILL)
        child.wait(10)
        found.fail("command hangs", f"cache {command[0]}: {kind}")
    elif child.poll() not in (0, 1, 2) or "Traceback" in child.said():
        found.fail(
            "command raises", f"cache {command[0]}: {kind}: {child.said().splitlines()[-1:]}"
        )


def _resume(setting: Setting, found: Episode) -> None:
    """A real sweep, its store damaged, and the sweep again: it ends well, and each config has its
    trial.
    """
    folder = setting.folder / "resume"
    folder.mkdir()
    numbers = setting.random
    world = World(setting, draw(numbers, 4, ["raise"], slowest=30), folder=folder)
    world.undisturbed(found, compiled=False)
    kind = numbers.choice(list(damages.DAMAGES))
    before = world.store.read_bytes()[:100]
    damages.apply(kind, str(numbers.random()), world.store)
    found.counts["resumed sweeps"] += 1
    if damages.header_changed(before, world.store):
        return  # it may be refused
    world.acknowledged.unlink()  # what was stored before is damaged now
    driver = world.drive(compiled=False)
    status = driver.wait(LIMIT * 3)
    if status != 0:
        driver.send(signal.SIGKILL)
        found.fail("sweep does not resume", f"{kind}: status {status}: {driver.said()[-300:]}")
        return
    missing = world.configs.keys() - {trial.config for trial in world.trials()}
    if missing:
        found.fail(
            "resumed sweep lacks trials", f"{kind}: {len(missing)} of {len(world.configs)} configs"
        )
