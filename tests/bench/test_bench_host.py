"""`outblas bench-host`: statistics and comparisons with made-up figures, turns with trees that are
played, and the real probe once.
"""

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from support import commands

from outblas.bench import host, host_probe, host_turns
from outblas.bench.host import Figure, Record, Timing
from outblas.bench.host_turns import ProbeError, Tree
from outblas.runtime import launcher

pytestmark = pytest.mark.long

ENVIRONMENT = {"cpu": "a CPU", "python": "3.11.7", "torch": "2.13.0", "load": 0.1}


def figure(
    ratio: float = 2.0, spread: float = 0.02, name: str = "matmul", **changes: Any
) -> Figure:
    """A figure whose ratio lies within `spread` of its median."""
    low, high = ratio * (1 - spread), ratio * (1 + spread)
    return replace(
        Figure(
            name=name,
            reference="torch.matmul",
            us=3.0 * ratio,
            least_us=2.9 * ratio,
            reference_us=3.0,
            ratio=ratio,
            low=low,
            high=high,
            sure_low=low,
            sure_high=high,
            samples=6,
        ),
        **changes,
    )


def record(*figures: Figure, **changes: Any) -> Record:
    return Record(ENVIRONMENT | changes, {each.name: each for each in figures})


# ---- statistics
def test_a_figure_is_the_median_of_the_ratios_of_samples() -> None:
    samples = [Timing(4.0, 2.0), Timing(30.0, 10.0), Timing(5.0, 1.0)]

    found = host.summarize("matmul", "torch.matmul", samples)

    assert (found.ratio, found.sure_low, found.sure_high) == (3.0, 2.0, 5.0)
    assert (found.us, found.least_us, found.reference_us) == (5.0, 4.0, 2.0)
    assert 2.0 < found.low < 3.0 < found.high < 5.0
    assert found.samples == 3


def test_one_sample_makes_no_figure() -> None:
    with pytest.raises(ValueError, match="1 rounds"):
        host.summarize("matmul", "torch.matmul", [Timing(1.0, 1.0)])


# ---- comparisons
@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (figure(2.0), "as recorded"),
        (figure(2.3), "rose"),
        (figure(1.7), "fell"),
        (figure(2.3, spread=0.2), "as recorded"),  # uncertain: it may be what it was
        (figure(2.08, spread=0.001), "as recorded"),  # certain, and too little
        (figure(2.3, reference="another function"), "new"),
    ],
)
def test_a_verdict_goes_by_the_recorded_spread(now: Figure, expected: str) -> None:
    assert host.verdict(now, figure(2.0)) == expected


def test_a_wide_recorded_spread_bears_more() -> None:
    assert host.verdict(figure(2.3), figure(2.0, spread=0.2)) == "as recorded"


def test_figures_beside_a_record_have_its_ratios() -> None:
    now = record(figure(2.3), figure(5.0, name="addmm"), figure(9.0, name="import torch"))
    recorded = record(figure(2.0), figure(3.0, name="import torch"))

    rows = host.beside_record(now, recorded, foreign=("import torch",))

    assert [(row.name, row.verdict) for row in rows] == [
        ("matmul", "rose"),
        ("addmm", "new"),
        ("import torch", "not judged"),
    ]
    assert (rows[0].other, rows[1].other) == (2.0, None)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"python": "3.11.9", "torch": "2.13.1", "load": 9.0}, None),
        (
            {"cpu": "another CPU"},
            "cpu is another CPU here, but was a CPU when the figures were recorded",
        ),
        ({"python": "3.14.0"}, "python is 3.14 here"),
        ({"torch": "2.15.0"}, "torch is 2.15 here"),
    ],
)
def test_runs_compare_on_one_cpu_python_and_torch(
    changes: dict[str, Any], reason: str | None
) -> None:
    said = host.incomparable(record(**changes), record())

    assert (said is None) == (reason is None)
    assert (reason or "") in (said or "")


@pytest.mark.parametrize(
    ("factor", "expected"), [(1.0, "tied"), (1.02, "tied"), (1.1, "slower"), (0.9, "faster")]
)
def test_trees_in_turns_are_compared_sample_by_sample(factor: float, expected: str) -> None:
    """The machine is three times slower in some rounds, for both trees."""
    others = [Timing(6.0 * slow, 3.0) for slow in (1, 3, 1, 3, 1, 3)]
    ours = [replace(each, us=each.us * factor) for each in others]

    (row,) = host.beside_tree({"matmul": ours}, {"matmul": others})

    assert row.verdict == expected
    assert row.other == pytest.approx(factor)


def test_a_difference_that_comes_and_goes_is_a_tie() -> None:
    others = [Timing(6.0, 3.0)] * 6
    ours = [Timing(6.0 * each, 3.0) for each in (1.5, 0.9, 1.5, 1.5, 0.9, 1.5)]

    (row,) = host.beside_tree({"matmul": ours}, {"matmul": others})

    assert row.verdict == "tied"


# ---- records
def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    path, written = tmp_path / "host.json", record(figure(), figure(name="addmm"))
    path.write_text(json.dumps(host.to_json(written)))

    assert host.read(path) == written


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("{", "is not JSON"),
        ("[]", "is not a file"),
        ('{"environment": {}, "figures": [{"name": "matmul"}]}', "is not a file.*reference"),
        ('{"environment": {}, "figures": [3]}', "is not a file"),
    ],
)
def test_a_damaged_record_is_refused_by_name(
    text: str | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "host.json"
    if text is not None:
        path.write_text(text)

    with pytest.raises(ValueError, match=rf"host\.json {message}"):
        host.read(path)


def test_a_figure_of_another_type_is_refused(tmp_path: Path) -> None:
    found = host.to_json(record(figure()))
    found["figures"][0]["ratio"] = "2.0"
    (tmp_path / "host.json").write_text(json.dumps(found))

    with pytest.raises(ValueError, match=r"ratio is '2\.0'"):
        host.read(tmp_path / "host.json")


# ---- turns, with a torch and an outblas that are played
def play(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Tree]:
    """Two trees whose processes end at once, and a probe that logs who ran."""
    found = []
    for name in ("one", "two"):
        root = folder / name
        (root / "outblas" / "cli").mkdir(parents=True)
        (root / "outblas" / "__init__.py").write_text(f"name = {name!r}")
        (root / "outblas" / "cli" / "__init__.py").write_text("app = lambda prog_name: None")
        (root / "torch.py").touch()
        found.append(Tree(name, root))
    probe = folder / "probe.py"
    probe.write_text(
        "import json, sys, outblas\n"
        f"open({str(folder / 'log')!r}, 'a').write(f'{{outblas.name}} {{sys.argv[1]}}\\n')\n"
        "figures = {} if sys.argv[1] != 'calls' else {'matmul': ['torch.matmul', 6.0, 3.0]}\n"
        "print(json.dumps({'files': [outblas.__file__], 'figures': figures}))\n"
    )
    monkeypatch.setattr(host_turns, "PROBE", probe)
    return found


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Tree]:
    """Two trees whose processes end at once, and a probe that logs who ran."""
    return play(tmp_path, monkeypatch)


@dataclass(frozen=True)
class Turns:
    """What came of two trees in turns, and the trees whose calls were measured, in order."""

    samples: list[host_turns.Samples]
    ran: list[str]


@pytest.fixture(scope="module")
def turns(tmp_path_factory: pytest.TempPathFactory) -> Turns:
    """Two trees that were measured without time, which is three rounds."""
    folder = tmp_path_factory.mktemp("turns")
    with pytest.MonkeyPatch.context() as patch:
        samples = host_turns.measure(play(folder, patch), 0)
    lines = map(str.split, (folder / "log").read_text().splitlines())
    return Turns(samples, [tree for tree, kind in lines if kind == "calls"])


def test_trees_take_turns_after_a_warm_up(turns: Turns) -> None:
    assert turns.ran == ["one", "two", "one", "two", "two", "one", "one", "two"]


def test_without_time_there_are_the_least_rounds(turns: Turns) -> None:
    assert [len(samples.timings["matmul"]) for samples in turns.samples] == [3, 3]
    assert host_turns.LEAST_ROUNDS == 3


def test_starts_of_commands_stand_beside_torch_s_import(turns: Turns) -> None:
    figures = turns.samples[0].figures()

    assert figures["outblas cache ls"].reference == "python -c 'import torch'"
    assert figures["outblas cache ls"].us > 0
    assert figures["python -c 'import torch'"].reference == "python -c pass"
    assert figures["matmul"].ratio == 2.0


def test_as_many_rounds_are_measured_as_are_asked_for(played: list[Tree]) -> None:
    (samples,) = host_turns.measure(played[:1], 0, rounds=1)

    assert len(samples.timings["matmul"]) == 1


def test_a_tree_that_imports_another_is_refused(played: list[Tree], tmp_path: Path) -> None:
    """As an editable installation would have it."""
    (tmp_path / "one" / "outblas" / "__init__.py").write_text(
        "name = 'one'; __file__ = '/elsewhere/outblas/__init__.py'"
    )

    with pytest.raises(ProbeError, match=r"one imports /elsewhere/outblas/__init__\.py"):
        host_turns.measure(played[:1], 0)


BROKEN = """
import sys
name = 'one'
if sys.argv[1:2] == ['lookup']: raise RuntimeError('no way')
"""


def test_a_process_that_fails_is_named(played: list[Tree], tmp_path: Path) -> None:
    (tmp_path / "one" / "outblas" / "__init__.py").write_text(BROKEN)

    with pytest.raises(ProbeError, match=r"one: 'lookup .*' fails: RuntimeError: no way"):
        host_turns.measure(played[:1], 0)


def test_another_tree_may_lack_figures(played: list[Tree], tmp_path: Path) -> None:
    """It may be older than what is measured."""
    (tmp_path / "one" / "outblas" / "__init__.py").write_text(BROKEN)

    _, other = host_turns.measure(played[::-1], 0, rounds=1)

    (lacking,) = other.lacking
    assert "fails: RuntimeError: no way" in lacking
    assert len(other.timings["matmul"]) == 1


def test_a_process_that_hangs_is_ended(
    played: list[Tree], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_turns, "PROCESS_SECONDS", 1)
    (tmp_path / "one" / "outblas" / "__init__.py").write_text("import time; time.sleep(10**6)")

    with pytest.raises(ProbeError, match="did not end within 1 s"):
        host_turns.measure(played, 0)


# ---- trees
def test_a_checkout_is_linked_as_it_is_installed(tmp_path: Path) -> None:
    path = host_turns.linked(host_turns.this_root(), tmp_path / "links")

    package = path / "outblas"
    assert (package / "api.py").samefile(Path(host.__file__).parents[1] / "api.py")
    assert (package / "hopper" / "gemm" / "kernel.py").exists()
    assert (package / "autotune" / "lookup.py").exists()


def test_a_folder_that_holds_the_package_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "outblas").mkdir()
    (tmp_path / "outblas" / "__init__.py").touch()

    assert host_turns.linked(tmp_path, tmp_path / "links") == tmp_path


def test_a_folder_without_outblas_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither a checkout of outblas nor a folder"):
        host_turns.linked(tmp_path, tmp_path / "links")


# ---- the command
@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[list[float]]:
    """Times of our calls in µs, beside 3 µs of torch's; a second list is of another tree."""
    times = [[6.0, 6.1, 6.2]]

    def measure(trees: list[Tree], *_: Any, **__: Any) -> list[host_turns.Samples]:
        found = []
        for _tree, each in zip(trees, times, strict=True):
            samples = host_turns.Samples()
            for us in each:
                samples.add("matmul", "torch.matmul", Timing(us, 3.0))
            found.append(samples)
        return found

    monkeypatch.setattr(host_turns, "measure", measure)
    monkeypatch.setattr(host_turns, "environment", lambda: dict(ENVIRONMENT))
    return times


def bench_host(*arguments: object) -> Result:
    return commands.invoke("bench-host", *arguments)


def recorded(folder: Path, *figures: Figure, **changes: Any) -> Path:
    path = folder / "host.json"
    path.write_text(json.dumps(host.to_json(record(*figures, **changes))))
    return path


def test_a_ratio_as_recorded_passes(measured: Any, tmp_path: Path) -> None:
    done = bench_host("--check", "--recorded", recorded(tmp_path, figure(2.0, 0.05)))

    assert done.exit_code == 0, done.output
    assert "as recorded" in done.stdout
    assert "2.03 (2.01–2.06)" in done.stdout


def test_a_ratio_that_rose_fails_the_check(measured: Any, tmp_path: Path) -> None:
    done = bench_host("--check", "--recorded", recorded(tmp_path, figure(1.5)))

    assert done.exit_code == 1
    assert "matmul rose: 1.5 (1.47–1.53) recorded" in done.stderr


def test_a_ratio_that_rose_is_only_said_without_check(measured: Any, tmp_path: Path) -> None:
    done = bench_host("--recorded", recorded(tmp_path, figure(1.5)))

    assert done.exit_code == 0
    assert "matmul rose" in done.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "nothing to compare with"),
        ("{}", "is not a file that `outblas bench-host --save` wrote"),
    ],
)
def test_a_check_without_a_record_says_so_and_passes(
    measured: Any, text: str | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "host.json"
    if text is not None:
        path.write_text(text)

    done = bench_host("--check", "--recorded", path)

    assert done.exit_code == 0, done.output
    assert message in done.stderr


def test_a_record_of_another_cpu_is_said_and_passes(measured: Any, tmp_path: Path) -> None:
    path = recorded(tmp_path, figure(1.5), cpu="another CPU")

    done = bench_host("--check", "--recorded", path)

    assert done.exit_code == 0, done.output
    assert "cpu is a CPU here, but was another CPU when the figures were recorded" in done.stderr


def test_what_is_saved_can_be_compared_with(measured: Any, tmp_path: Path) -> None:
    path = tmp_path / "host.json"

    bench_host("--recorded", path, "--save", path)
    again = bench_host("--check", "--recorded", path, "--json")

    assert again.exit_code == 0, again.output
    assert [row["verdict"] for row in json.loads(again.stdout)["compared"]] == ["as recorded"]


def test_a_tree_that_is_slower_than_another_fails_the_check(measured: Any) -> None:
    measured.append([5.0, 5.0, 5.1])

    done = bench_host("--check", "--against", host_turns.this_root())

    assert done.exit_code == 1, done.output
    assert "matmul slower: 1.22 (1.2–1.22) this tree / the other" in done.stderr


def test_a_folder_to_compare_with_that_is_none_is_an_error_of_usage(tmp_path: Path) -> None:
    done = bench_host("--against", tmp_path)

    assert done.exit_code == 2
    assert "neither a checkout" in done.stderr


# ---- the real probe
def test_the_probe_times_calls_and_imports() -> None:
    command = [sys.executable, "-P", host_probe.__file__, "calls", "1"]

    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)

    figures = json.loads(done.stdout)["figures"]
    expected = {
        "import outblas",
        "matmul out=, warm",
        "matmul, first call of a shape",
        "Linear under autograd, warm",
        "torch.mm under enable, warm",
    }
    assert expected <= set(figures)
    assert all(us > 0 and reference_us > 0 for _, us, reference_us in figures.values()), figures


def test_the_probe_launches_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    import outblas

    monkeypatch.setattr(launcher, "no_kernel_reason", launcher.no_kernel_reason)
    monkeypatch.setattr(launcher, "best_launcher", launcher.best_launcher)
    out = torch.full((3, 5), 7.0)
    host_probe.launch_nothing()

    outblas.matmul(torch.ones(3, 4), torch.ones(4, 5), out=out)

    assert (out == 7).all()


def test_the_probe_finds_what_it_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_probe, "TRIALS", 30)
    monkeypatch.setattr(host_probe, "WINNERS", 25)
    path = str(tmp_path / "tuning.sqlite")
    host_probe.fill(path)

    found = host_probe.lookup(path, "1000000")

    assert found["lookup, first of a process"][2] == 1e6
    assert {"lookup, a shape seen before", "lookup, a shape not tuned"} < set(found)


def test_the_probe_times_what_sweeps_compute() -> None:
    found = host_probe.models("1000000")

    assert all(us > 0 for _, us, _ in found.values()), found
    assert {reference_us for *_, reference_us in found.values()} == {1e6}
