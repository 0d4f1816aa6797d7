"""The harness of `make chaos`: it sees the faults that it looks for, and a tiny run of it finds
none.
"""

import json
import os
import random
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from chaos import __main__ as chaos
from chaos import damages, disks, examine, kernel, objects, processes, world
from chaos.episode import Episode, Setting
from chaos.kernel import Config

from outblas.autotune.store.records import Trial, Workload, to_record
from outblas.autotune.store.store import Store
from outblas.core.configs import to_text

pytestmark = pytest.mark.long

HERE = f"here {os.getpid()}"  # other processes run these tests at the same time
SOUND, GUILTY = Config(number=0), Config(number=1, fault="segfault")


@pytest.fixture
def setting(tmp_path: Path):
    """Without processes that start quickly: these tests start none."""
    return Setting(0, 1, random.Random(1), tmp_path, None, None)


def trial(config=SOUND, **changes):
    return replace(
        examine.trial(1),
        config=to_text(config),
        workload=Workload(16, 16, 16, "float32"),
        **changes,
    )


def failed(status, config=SOUND):
    none = dict.fromkeys(("us", "ratio", "ratio_low", "ratio_high", "clock_mhz"))
    return trial(config, **{"status": status, "reason": "because"} | none)


# ---- what was reported and has to be kept
def test_what_was_reported_and_is_kept_is_not_lost() -> None:
    assert world.lost([to_record(trial())], [trial()]) == []


def test_what_was_reported_and_is_gone_is_lost() -> None:
    assert world.lost([to_record(trial())], []) == [f"{to_text(SOUND)} (ok) is gone"]


def test_what_was_reported_and_is_altered_is_lost() -> None:
    lost = world.lost([to_record(trial())], [trial(us=1.0)])

    assert lost == [f"{to_text(SOUND)} has another us"]


@pytest.mark.parametrize(
    ("reported", "kept", "may_replace"),
    [
        (failed("crash"), trial(), True),
        (trial(), failed("crash"), False),
        (failed("wrong"), trial(), False),
    ],
    ids=["a crash by a sound result", "a sound result by a crash", "a wrong result by a sound one"],
)
def test_which_result_may_take_the_place_of_another(
    reported: Trial, kept: Trial, may_replace: bool
) -> None:
    lost = world.lost([to_record(reported)], [kept])

    assert (lost == []) == may_replace


def test_the_last_report_of_a_config_counts() -> None:
    reported = [to_record(trial()), to_record(trial(us=1.0))]

    assert world.lost(reported, [trial(us=1.0)]) == []


# ---- verdicts
@pytest.mark.parametrize(
    ("stored", "promises"),
    [
        ([trial(), failed("crash", GUILTY)], []),
        ([failed("crash"), failed("crash", GUILTY)], ["innocent branded"]),
        ([trial(), failed("hang", GUILTY)], ["wrong verdict"]),
        ([trial(), trial(GUILTY)], ["wrong verdict"]),
        ([trial()], ["config without a trial"]),
    ],
)
def test_verdicts_are_checked(setting, monkeypatch: pytest.MonkeyPatch, stored, promises) -> None:
    made, found = world.World(setting, [SOUND, GUILTY]), Episode()
    monkeypatch.setattr(made, "check_verify", lambda episode: None)
    with Store(made.store) as store:
        for each in stored:
            store.add(each)
    made.check_store(found)
    made.check_complete(found)
    assert [failure.promise for failure in found.failures] == promises


# ---- what a driver leaves behind
@pytest.fixture
def orphan() -> Iterator[subprocess.Popen[bytes]]:
    """A process with the mark HERE that would sleep for a minute."""
    environment = {**os.environ, processes.MARK: HERE}
    with subprocess.Popen(["sleep", "60"], env=environment) as process:
        yield process
        process.kill()


def test_a_process_is_found_by_its_mark(orphan: subprocess.Popen[bytes]) -> None:
    assert [process.pid for process in processes.marked(HERE)] == [orphan.pid]
    assert processes.marked("elsewhere") == []


def test_a_process_is_among_the_descendants_of_its_parent(orphan: subprocess.Popen[bytes]) -> None:
    assert orphan.pid in {process.pid for process in processes.descendants(os.getpid())}


def test_what_outlives_its_driver_is_told_and_ended(orphan: subprocess.Popen[bytes]) -> None:
    found = processes.orphans(HERE, 0.1)

    assert [process.pid for process in found] == [orphan.pid]
    assert orphan.wait(10) < 0


def test_where_nothing_outlives_its_driver_nothing_is_told() -> None:
    assert processes.orphans(HERE, 0.1) == []


# ---- damage
@pytest.mark.parametrize("kind", damages.ALL)
def test_damage_is_that_of_its_seed(kind, tmp_path: Path) -> None:
    found = []
    for name in ("one", "other"):
        path = tmp_path / name / "tuning.sqlite"
        examine.stock(str(path), trials=60, winners=3, killed=False)
        before = damages.snapshot(path.parent)
        damages.apply(kind, "7", path)
        found.append(before != damages.snapshot(path.parent))
    assert (
        found[0]
        == found[1]
        == ("log" not in kind or kind in ("log of another", "log and index swapped"))
    )


def test_an_object_of_no_bytes_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes of an episode damage what another one cuts off at the same time."""
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path))
    path = tmp_path / "objects" / f"{objects.cache.digest(objects._facts(0))}.o"
    path.parent.mkdir()

    for seed in range(40):
        for empty in (path, path.with_suffix(".json")):
            empty.touch()
        objects._damage(random.Random(seed), 0)

        assert not any(each.stat().st_size for each in path.parent.iterdir()), f"seed {seed}"


def examined(tmp_path: Path, kind="a table added"):
    path = tmp_path / "cache" / "tuning.sqlite"
    examine.stock(str(path), trials=40, winners=4, killed=False)
    return examine.Examination(path, 40, 4).run(kind, "7", late=False)


def test_a_store_that_is_sound_passes_its_examination(tmp_path: Path) -> None:
    found = examined(tmp_path)
    assert found == {
        "faults": [],
        "refused": False,
        "there": 44,
        "readable": 44,
        "salvaged": 44,
        "of": 44,
    }


@pytest.mark.parametrize(
    ("method", "faulty", "promise"),
    [
        (
            "trials",
            lambda real: [replace(each, us=each.us and each.us + 1) for each in real],
            "altered record returned",
        ),
        (
            "trials",
            lambda real: [replace(each, source="other") for each in real],
            "altered record returned",
        ),
        ("trials", lambda real: 1 / 0, "reading raises"),
        ("winners", lambda real: [], "new results lost"),
    ],
)
def test_a_store_that_is_not_fails(
    method: str, faulty, promise: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(Store, method)
    monkeypatch.setattr(Store, method, lambda self, **options: faulty(real(self, **options)))
    assert promise in {fault for fault, _ in examined(tmp_path)["faults"]}


class Ended:
    """A driver that has ended with this status and said nothing."""

    def __init__(self, status: int) -> None:
        self.status = status

    def poll(self) -> int:
        return self.status

    def said(self) -> str:
        return ""


@pytest.mark.parametrize(
    ("status", "promise"),
    [
        (0, "success though trials are not kept"),
        (1, "trials neither in the file nor exported"),
    ],
    ids=["success", "failure"],
)
def test_a_trial_that_is_on_no_disk_is_seen(setting: Setting, status: int, promise: str) -> None:
    made, found = world.World(setting, [SOUND]), Episode()
    made.acknowledged.write_text(json.dumps({"driver": "x", "trial": to_record(trial())}) + "\n")

    disks.judge(made, Ended(status), found)  # type: ignore[arg-type]

    assert [failure.promise for failure in found.failures] == [promise]


def test_an_altered_object_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(objects.cache, "fetch", lambda facts, **options: b"altered")
    monkeypatch.setattr(objects.cache, "SIZE_LIMIT", objects.cache.SIZE_LIMIT)
    objects.use_objects(str(tmp_path), 1.0, 0.2)

    found = Episode()
    objects.tell_counted(tmp_path, found)
    assert {(failure.promise, failure.detail) for failure in found.failures} == {
        ("altered object loaded", "with other bytes")
    }


# ---- what is drawn
def test_sound_faults_are_none_and_that_of_a_child() -> None:
    assert {fault for fault in kernel.STATUS if kernel.sound(fault)} == {"", "child"}


def test_configs_are_drawn_with_each_fault_once_and_a_sound_one_first() -> None:
    drawn = world.draw(random.Random(1), 5, ["raise", "gil"])

    assert Counter(config.fault for config in drawn) == {"": 5, "raise": 1, "gil": 1}
    assert not drawn[0].fault


# ---- the command
def test_a_fault_of_a_campaign_is_a_failure_with_a_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    class Broken:
        NAME, UNIT, TARGET, EPISODE = "broken", "things", 2, 1

        @staticmethod
        def episode(setting):
            raise RuntimeError("no luck today")

    total = chaos.Total(Broken)  # type: ignore[arg-type]
    options = chaos.arguments(["--seed", "3"])
    for index in range(2):
        chaos.episode(options, total, index, 1, tmp_path, None)
    chaos.report(options, [total], 1.0)
    said = capsys.readouterr().out
    assert "fault of the campaign" in said
    assert "--seed 3 --only broken:0" in said


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--only", "floods"], "expected of kills, damage, clocks, disks, sharing, objects"),
        (["--only", "kills:x"], "expected of kills, damage, clocks, disks, sharing, objects"),
        (["--scale", "0"], "--scale is 0.0, expected a number above 0"),
        (["--jobs", "0"], "--jobs is 0, expected at least 1"),
    ],
    ids=["unknown campaign", "no index", "no scale", "no jobs"],
)
def test_a_bad_option_is_an_error_of_usage(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        chaos.arguments(given)

    assert said in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "campaigns", ["damage,objects,disks:5", pytest.param("kills", marks=pytest.mark.slow)]
)
def test_a_tiny_run_finds_nothing(
    campaigns: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of each campaign that is over in seconds; `make chaos` runs all."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    status = chaos.run_all(chaos.arguments(["--scale", "0.004", "--only", campaigns]))

    said = capsys.readouterr().out
    assert status == 0, said
    assert "no failures" in said
    assert list(tmp_path.iterdir()) == []
