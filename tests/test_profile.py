"""`outblas profile`: the command, what ncu is asked and may refuse, and what is shown of a recording.

What ncu said is that of test_counters.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_counters import RECORDING, recorded
from typer.testing import CliRunner, Result

from outblas import registry
from outblas.cli import app
from outblas.hopper import cycles
from outblas.inspect import counters, instructions, lines, ncu
from outblas.inspect.profiled import Request
from outblas.report import compare, phases, profiles

PAGE = Path(__file__).parent / "data" / "ncu_source_h100.csv"

# What stands for ncu: it logs its arguments, then acts. `status` and `request` are those of the process to watch.
FAKE = """#!{python}
import json, os, subprocess, sys, time
from pathlib import Path
if sys.argv[1:] == ["--version"]:
    sys.exit(print("NVIDIA (R) Nsight Compute Command Line Profiler\\nVersion 2025.3.1.0 (build 36398880)"))
with open({log!r}, "a") as log:
    log.write(json.dumps([*sys.argv[1:], os.environ["LC_ALL"]]) + "\\n")
if sys.argv[1] == "--import":
    sys.exit(print(Path(sys.argv[2]).read_text(), end=""))
status, request = Path(sys.argv[-2]), json.loads(sys.argv[-1])
{act}
"""
REPLAY = """
lines = Path({recording!r}).read_text().splitlines(keepends=True)
print("".join(lines[:5] + (lines[5:8] if request["shape"][0] == 4096 else lines[8:])), end="")
status.write_text('{{"done": true}}')
"""
# With a second run, whose report is the page that `--import` prints.
REPORT = """
if "-o" not in sys.argv:
{replay}
else:
    status.write_text('{{"done": true}}')
    Path(sys.argv[sys.argv.index("-o") + 1] + ".ncu-rep").write_text(Path({page!r}).read_text())
"""
DONE, STARTED = "status.write_text('{\"done\": true}')", "status.write_text('{\"started\": true}')"


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["profile", *arguments])


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Puts a program called ncu first on PATH that does what the argument says; returns its log of calls."""

    def install(act: str) -> Path:
        log = tmp_path / "calls"
        program = tmp_path / "bin" / "ncu"
        program.parent.mkdir()
        program.write_text(FAKE.format(python=sys.executable, log=str(log), act=act))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
        return log

    return install


@pytest.fixture
def replay(fake: Callable[[str], Path]) -> Path:
    return fake(REPLAY.format(recording=str(RECORDING)))


@pytest.fixture
def two_runs(fake: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """Replays the recording, then a source page that the argument makes of the launches cublas and portable."""

    def install(page: str) -> Path:
        (tmp_path / "page.csv").write_text(page)
        again = textwrap.indent(REPLAY.format(recording=str(RECORDING)), "    ")
        return fake(REPORT.format(replay=again, page=str(tmp_path / "page.csv")))

    return install


def page() -> str:
    """What the source page of 4096³ by cublas and portable would be, with the rows of two other kernels."""
    sections = PAGE.read_text().split('"Kernel Name",')[1:3]
    names = (launch.kernel for launch in recorded("4096")[:2])
    bodies = (section.partition("\n")[2] for section in sections)
    return "".join(f'"Kernel Name","{name}",\n{body}' for name, body in zip(names, bodies, strict=True))


@pytest.fixture
def h100(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch tells what it would tell of an H100. No GPU is touched: the fake ncu starts nothing."""
    properties = SimpleNamespace(name="H100", multi_processor_count=132, major=9, minor=0)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "H100")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)


def test_the_configuration_that_runs_is_said_where_it_is_known() -> None:
    def resolved(kernel: str, config: str = "") -> str:
        return Request(kernel, (64, 64, 64), "bfloat16", "nt", config).resolved()

    assert [resolved(by_shape) for by_shape in ("cublas", "portable", "hopper.gemm")] == ["", "", ""]
    assert "tile_m=64,tile_n=256" in resolved("hopper.gemm", "tile_m=64")
    assert "tile_m=128,tile_n=256" in resolved("hopper.hilbert")


def test_the_command_that_ncu_gets(h100: None, replay: Path) -> None:
    assert invoke("hopper.tma_wgmma", "--layout", "tn", "--dtype", "float16", "--config", "tile_m=128, jitter=1").stdout
    (call,) = map(json.loads, replay.read_text().splitlines())
    assert call[:8] == ["--csv", "--page", "raw", "--nvtx", "--clock-control", "none", "--profile-from-start", "off"]
    assert call[8:10] == ["--metrics", ",".join(counters.metrics(90))]
    assert call[10:14] == [sys.executable, "-P", "-m", "outblas.inspect.profiled"]
    request = Request("hopper.tma_wgmma", (4096, 4096, 4096), "float16", "tn", "tile_m=128,jitter=1")
    assert Request.from_text(call[15]) == request
    assert request.providers == ("cublas", "hopper.tma_wgmma")
    assert call[16] == "C"


def test_of_a_product_with_an_addend(h100: None, replay: Path, tmp_path: Path) -> None:
    """alpha A B + beta C: asked for, said in the record, and no profile of A B for reports."""
    saved = tmp_path / "profile.json"
    result = invoke("hopper.tma_wgmma", "--addend", "--save", str(saved))
    assert result.exit_code == 0, result.stderr
    (call,) = map(json.loads, replay.read_text().splitlines())
    assert Request.from_text(call[15]).addend
    assert "alpha A B + beta C" in result.stdout
    assert [entry["addend"] for entry in json.loads(saved.read_text())["results"]] == [True, True]
    found = profiles.load([saved])
    asked = (found, "hopper.tma_wgmma", (4096, 4096, 4096), "bfloat16", "H100")
    assert compare.profiled(*asked) is None
    assert compare.profiled(*asked, addend=True) == found[1]


def test_tables(h100: None, replay: Path) -> None:
    result = invoke("hopper.tma_wgmma")
    assert result.exit_code == 0, result.stderr
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.stdout.splitlines()]
    rows = {cells[0]: cells[1:] for cells in lines if cells}
    assert rows["time in ncu, one cold run (µs)"] == ["179.0", "448.4"]
    assert rows["tensor pipe active"] == ["94.7%", "35.1%"]
    assert rows["FLOP / DRAM byte"] == ["766.4", "584.0"]
    assert rows["… A, B, C moved once"] == ["1,365.3", "1,365.3"]
    assert rows["… by the CTA's tile"] == ["–", "–"]
    assert rows["DRAM (GB/s)"][0] == "1,002"
    assert rows["fp32 FMAs / M·N·K"] == ["0.000", "0.000"]
    assert rows["global load requests"] == ["–", "–"]
    assert rows["not selected, of the cycles between issues"][0] == "0.4%"
    assert "Memory by instructions" not in result.stdout
    assert rows["shared wavefronts: stores"] == ["660,937 (21.5% conflicts)", "0"]
    assert rows["shared wavefronts: wgmma"] == ["–", "–"]
    assert rows["cublas"] == ["nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "2×66×1", "384×1×1", "179.0"]
    reasons = [name for name in rows if name.replace(" ", "_") in counters.STALLS]
    assert reasons[:3] == ["long scoreboard", "barrier", "wait"]
    assert "not selected" in reasons
    assert "membar" not in reasons, "it stalls nobody"
    assert "caches flushed" in result.stdout
    assert "outblas bench" in result.stdout


def test_json_of_two_shapes(h100: None, replay: Path, tmp_path: Path) -> None:
    saved = tmp_path / "profile.json"
    result = invoke("portable", "--shapes", "4096,16x4096x4096", "--json", "--save", str(saved))
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report == json.loads(saved.read_text())
    assert report["environment"]["gpu"] == "H100"
    assert report["environment"]["ncu"] == "2025.3.1.0"
    results = report["results"]
    assert [(r["provider"], r["shape"][0]) for r in results] == [
        ("cublas", 4096), ("portable", 4096), ("cublas", 16), ("portable", 16),
    ]  # fmt: skip
    assert [len(r["launches"]) for r in results] == [1, 1, 2, 1]
    assert results[2]["us"] == pytest.approx(15.936 + 4.448)
    assert results[2]["launches"][1]["grid"] == [128, 1, 1]
    assert results[1]["launches"][0]["kernel"] == "outblas_portable_256x128x64_bf16"
    assert results[1]["tensor_active"] == pytest.approx(0.8303)
    assert results[1]["shared"]["ld"] == {"wavefronts": 262_144, "excess": 0}
    assert "instructions" not in results[0]
    assert results[1]["compulsory_flop_per_dram_byte"] == pytest.approx(4096 / 3)
    assert results[1]["tile_flop_per_l2_byte"] is None, "it chooses by shape"
    assert len(replay.read_text().splitlines()) == 2


def test_intensity_by_the_tile(h100: None, replay: Path) -> None:
    result = invoke("portable", "--config", "block_m=128,block_n=64", "--dtype", "float32", "--json")
    cublas, ours = json.loads(result.stdout)["results"]
    assert ours["tile_flop_per_l2_byte"] == pytest.approx(2 * 128 * 64 / ((128 + 64) * 4))
    assert ours["compulsory_flop_per_dram_byte"] == pytest.approx(4096 / 6)
    assert cublas["tile_flop_per_l2_byte"] is None


def test_instructions(h100: None, two_runs: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    log = two_runs(page())
    asked = []
    artifact = SimpleNamespace(cubin=b"cubin", ptx="ptx")
    monkeypatch.setattr(
        instructions, "artifact", lambda request, arch: asked.append((request.kernel, arch)) or artifact
    )
    operands = [None, "A", "A", "B", "B", *[None] * 14]
    monkeypatch.setattr(
        lines, "operands", lambda cubin, ptx, names: operands if len(names) == 19 else [None] * len(names)
    )
    monkeypatch.setattr(instructions, "ffma_reuse", lambda cubin, names: 0.75 if len(names) == 19 else None)
    result = invoke("portable", "--instructions", "--json")
    assert result.exit_code == 0, result.stderr
    assert asked == [("portable", 90)]
    cublas, ours = json.loads(result.stdout)["results"]
    assert (cublas["ffma_reuse"], ours["ffma_reuse"]) == (None, 0.75)
    assert [each["sass"].split()[0] for each in ours["instructions"][:5]] == ["LDG.E.128"] * 4 + ["STS"]
    assert ours["instructions"][0] == {
        "launch": 0, "sass": "LDG.E.128 R12, desc[UR10][R2.64]", "operand": "A", "space": "global",
        "operation": "load", "bytes": 16, "executed": 1024, "transactions_per_request": 16, "sectors_per_request": 16,
        "wavefronts": None, "ideal": None, "excess": None,
    }  # fmt: skip
    assert [(each.get("operand"), each["space"], each["operation"]) for each in ours["memory"]] == [
        ("A", "global", "load"), ("B", "global", "load"), (None, "global", "load"), (None, "global", "store"),
        (None, "shared", "load"), (None, "shared", "store"),
    ]  # fmt: skip
    assert ours["memory"][0]["efficiency"] == 0.25
    assert "wavefronts" not in ours["memory"][0]
    assert ours["memory"][1]["efficiency"] == 1
    assert {each["operand"] for each in cublas["instructions"]} == {None}
    first, second, third = map(json.loads, log.read_text().splitlines())
    assert "--metrics" in first
    assert second[:9] == [
        "--clock-control", "none", "--profile-from-start", "off", "--section", "SourceCounters",
        "--metrics", "memory_l1_wavefronts_shared,memory_l1_wavefronts_shared_ideal", "-o",
    ]  # fmt: skip
    assert second[10:14] == [sys.executable, "-P", "-m", "outblas.inspect.profiled"]
    assert third == ["--import", f"{second[9]}.ncu-rep", "--csv", "--page", "source", "C"]


def test_instructions_in_a_table(h100: None, two_runs: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    two_runs(page())
    monkeypatch.setattr(instructions, "artifact", lambda request, arch: None)
    result = invoke("portable", "--instructions")
    assert result.exit_code == 0, result.stderr
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.stdout.splitlines() if "│" in line]
    assert ["cublas", "–", "global copy", "2,048", "4.00", "4.00", "25.0%", "22,528", "2,048", "20,480"] in rows
    assert ["portable", "–", "global store", "2,048", "8.00", "16.00", "50.0%", "–", "–", "–"] in rows
    assert ["portable", "–", "shared load", "262,144", "–", "–", "–", "1,048,576", "1,048,576", "0"] in rows


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("outblas_portable", "other"), "and then the instructions of ['nvjet_sm90"),
        (("L1 Wavefronts Shared Ideal", "Ideal"), "the source page lacks L1 Wavefronts Shared Ideal"),
        (('"Kernel Name"', '"Name"'), "counted nothing"),
    ],
)
def test_instructions_that_cannot_be_read(
    h100: None, two_runs: Callable[[str], Path], change: tuple[str, str], message: str
) -> None:
    two_runs(page().replace(*change))
    result = invoke("portable", "--instructions")
    assert result.exit_code == 3
    assert message in result.stderr


def test_a_second_run_without_a_report(h100: None, replay: Path) -> None:
    result = invoke("portable", "--instructions")
    assert result.exit_code == 3
    assert "ncu ended with exit code 0 and counted nothing" in result.stderr
    assert len(replay.read_text().splitlines()) == 2, "a report that is missing is not imported"


def test_cublas_alone(h100: None, replay: Path) -> None:
    result = invoke("cublas", "--json")
    assert [r["provider"] for r in json.loads(result.stdout)["results"]] == ["cublas"]


@pytest.mark.parametrize(
    ("act", "code", "message"),
    [
        (
            "print('==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance "
            "Counters on the target device 0.\\n==WARNING== No kernels were profiled.')\n"
            'status.write_text(\'{"failed": "RuntimeError: CUDA error"}\'); sys.exit(1)',
            3,
            "cannot measure here: ncu may not read the GPU's performance counters (ERR_NVGPUCTRPERM)",
        ),
        (
            f"{DONE}; print('==ERROR== Profiling is not supported on device 0. To find out supported GPUs refer "
            "--list-chips option.\\n==WARNING== No kernels were profiled.', file=sys.stderr)",
            3,
            "this ncu does not know this GPU or its driver: Profiling is not supported on device 0",
        ),
        (f"{DONE}; print('==WARNING== No kernels were profiled.')", 3, "ncu profiled no kernels"),
        ("print('==ERROR== Failed to find metric lts__t_sectors.sum'); sys.exit(1)", 3, "ncu refused: Failed to find"),
        (
            "print('out of luck', file=sys.stderr); sys.exit(9)",
            3,
            "ncu ended with exit code 9 and counted nothing: out",
        ),
        ("sys.exit(0)", 3, "ncu ended with exit code 0 and counted nothing: it said nothing"),
        ('status.write_text(\'{"unavailable": "needs cutlass"}\')', 3, "cannot measure here: needs cutlass"),
        (f"{STARTED}; print('==PROF== Connected'); sys.exit(11)", 1, "profiling failed: the profiled process ended"),
        ('status.write_text(\'{"failed": "OutOfMemoryError: 1 TiB"}\')', 1, "profiling failed: OutOfMemoryError: 1 T"),
        ('status.write_text(\'{"refused": "K is 7, expected 8"}\'); sys.exit(2)', 2, "K is 7, expected 8"),
    ],
)
def test_refusals(h100: None, fake: Callable[[str], Path], act: str, code: int, message: str) -> None:
    log = fake(act)
    result = invoke("portable")
    assert log.exists()
    assert result.exit_code == code
    assert message in result.stderr
    assert result.stdout == "" or "µs" not in result.stdout


def test_a_provider_without_launches(h100: None, fake: Callable[[str], Path]) -> None:
    replayed = REPLAY.format(recording=str(RECORDING)).replace("lines[5:8]", "lines[5:6]")
    fake(replayed)
    assert invoke("cublas").exit_code == 0
    result = invoke("portable")
    assert result.exit_code == 3
    assert "counted nothing" in result.stderr


def test_output_that_cannot_be_read(h100: None, fake: Callable[[str], Path], tmp_path: Path) -> None:
    changed = tmp_path / "changed.csv"
    changed.write_text(RECORDING.read_text().replace('"ns"', '"fortnight"'))
    fake(REPLAY.format(recording=str(changed)))
    result = invoke("portable")
    assert result.exit_code == 3
    assert "the unit of gpu__time_duration.sum is 'fortnight'" in result.stderr


def test_a_run_that_takes_too_long_is_ended(
    h100: None, fake: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ncu, "TIMEOUT_SECONDS", 3.0)
    watched = tmp_path / "pid"
    sleep = "[sys.executable, '-S', '-c', 'import time; time.sleep(100)']"
    fake(f"Path({str(watched)!r}).write_text(str(subprocess.Popen({sleep}).pid)); time.sleep(100)")
    begin = time.monotonic()
    result = invoke("portable")
    assert result.exit_code == 3
    assert "ncu was not done after 3 s" in result.stderr
    assert time.monotonic() - begin < 50
    time.sleep(0.5)
    state = Path(f"/proc/{int(watched.read_text())}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z", "the watched process lives on"


def test_without_ncu(h100: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    which = ncu.shutil.which
    monkeypatch.setattr(ncu.shutil, "which", lambda name, path=None: which(name, path=path or str(tmp_path)))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    if Path("/usr/local/cuda/bin/ncu").exists():
        assert ncu.find() == "/usr/local/cuda/bin/ncu"
    else:
        result = invoke("portable")
        assert result.exit_code == 3
        assert "is not on PATH, nor in" in result.stderr
    program = tmp_path / "cuda" / "bin" / "ncu"
    program.parent.mkdir(parents=True)
    program.touch(mode=0o755)
    assert ncu.find() == str(program)


@pytest.mark.no_gpu
def test_without_a_gpu(replay: Path) -> None:
    result = invoke("portable")
    assert result.exit_code == 3
    assert "cannot measure here: there is no NVIDIA GPU" in result.stderr
    assert not replay.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing",), "kernel is 'nothing', expected one of: cublas, "),
        (("portable", "--shapes", "4x4"), "--shapes is '4x4'"),
        (("portable", "--shapes", "4,0x4x4"), "--shapes has 0x4x4, expected sizes of at least 1"),
        (("hopper.tma_wgmma", "--dtype", "float32"), "--dtype is 'float32', expected for hopper.tma_wgmma: "),
        (("cublas", "--dtype", "int8"), "--dtype is 'int8', expected for cublas: "),
        (("portable", "--layout", "xy"), "--layout is 'xy', expected one of"),
        (("cublas", "--config", "tile_m=64"), "--config is 'tile_m=64', expected none for cublas"),
        (("hopper.tma_wgmma", "--config", "tiles=3"), "config has 'tiles=3', expected"),
        (("portable", "--save", "/nowhere/at/all.json"), "--save is '/nowhere/at/all.json'"),
        (("portable", "--phases"), "--phases is given for 'portable', expected a kernel of the hopper ladder"),
        (("cublas", "--phases"), "--phases is given for 'cublas'"),
        (("hopper.large_tile", "--phases", "--instructions"), "--phases and --instructions are both given"),
        (("hopper.large_tile", "--phases", "--addend"), "--phases and --addend are both given"),
    ],
)
def test_usage_errors(h100: None, replay: Path, arguments: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(app, ["profile", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert message in result.stderr
    assert not replay.exists(), "ncu has been started"


def test_phases_in_a_table_and_in_json(
    h100: None, replay: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is shown of counted cycles; the kernels count theirs in the GPU tests."""
    module = registry.load("hopper.large_tile")
    role = cycles.Role("all", wait=0.0, load=1478.4, tensor=688.0, store=11182.0, total=149790.0)
    asked = []
    monkeypatch.setattr(module, "phases", lambda a, b, out, config: asked.append(config) or (role,))
    monkeypatch.setattr("outblas.bench.operands.normal", lambda *_: (None, None, None))
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr("outblas.cli.profile._environment", lambda **_: {"gpu": "NVIDIA H100 80GB HBM3"})
    saved = tmp_path / "phases.json"
    arguments = ("profile", "hopper.large_tile", "--phases", "--config", "mma_n=64", "--save", str(saved))
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.stderr
    assert [cell in result.stdout for cell in ("hopper.large_tile[mma_n=64]", "1,478", "11,182")] == [True] * 3
    assert asked == [module.Config(mma_n=64)]
    (entry,) = json.loads(saved.read_text())["results"]
    assert entry["phases"] == [dataclasses.asdict(role)]
    assert "mma_n=64" in entry["resolved"]
    assert phases.rows(phases.load([saved])) == [
        ("hopper.large_tile[mma_n=64]", "all", "–", "1,478", "688", "11,182", "149,790")
    ]
    assert not replay.exists(), "ncu has been started"


def test_a_kernel_for_another_gpu(h100: None, replay: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    result = CliRunner().invoke(app, ["profile", "hopper.tma_wgmma"], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "kernel 'hopper.tma_wgmma' needs sm_90, and H100 is sm_80" in result.stderr
    assert not replay.exists()


@pytest.mark.parametrize(
    ("error", "code", "answer"),
    [
        ("ValueError('K is 7,\\n expected 8')", 2, {"refused": "K is 7, expected 8"}),
        ("ImportError('no cutlass')", 3, {"unavailable": "no cutlass"}),
        ("RuntimeError('illegal address')", 1, {"failed": "RuntimeError: illegal address"}),
    ],
)
def test_what_the_profiled_process_answers(tmp_path: Path, error: str, code: int, answer: dict[str, str]) -> None:
    """Its own output stays out of ncu's."""
    status = tmp_path / "status.json"
    request = Request("portable", (8, 8, 7), "bfloat16", "nt").to_text()
    program = (
        "import sys\nfrom outblas.inspect import profiled\n"
        f"def calls(request):\n    print(request, flush=True)\n    raise {error}\n"
        f"profiled._calls = calls\nsys.exit(profiled.main({str(status)!r}, {request!r}))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (code, "")
    assert "shape=(8, 8, 7)" in result.stderr
    assert json.loads(status.read_text()) == answer
