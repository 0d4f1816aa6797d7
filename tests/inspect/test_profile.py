"""`outblas profile`: the command, what ncu is asked and may refuse, and what is shown of a
recording.

What ncu said is that of test_counters.py.
"""

import contextlib
import dataclasses
import json
import os
import select
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.ncu_recording import RECORDING, recorded
from support.paths import DATA
from support.profiles import invoke

from outblas.core import registry
from outblas.hopper.core import phase_profile
from outblas.inspect import counters, instructions, lines, ncu
from outblas.inspect.profiled import Request
from outblas.report import lookup, phases, profiles

PAGE = DATA / "ncu_source_h100.csv"

# What stands for ncu: it logs its arguments, then acts. `status` and `request` are those of the
# process to watch.
FAKE = f"""#!{sys.executable}
import json, os, subprocess, sys, time
from pathlib import Path
if sys.argv[1:] == ["--version"]:
    print("NVIDIA (R) Nsight Compute Command Line Profiler")
    sys.exit(print("Version 2025.3.1.0 (build 36398880)"))
here = Path(__file__).parent
with open(here / "calls", "a") as log:
    log.write(json.dumps([*sys.argv[1:], os.environ["LC_ALL"]]) + "\\n")
if sys.argv[1] == "--import":
    sys.exit(print(Path(sys.argv[2]).read_text(), end=""))
status, request = Path(sys.argv[-2]), json.loads(sys.argv[-1])
"""
# A second run makes a report if there is a page, which `--import` prints.
REPLAY = """
status.write_text('{"done": true}')
if "-o" not in sys.argv:
    lines = (here / "recording").read_text().splitlines(keepends=True)
    print("".join(lines[:5] + (lines[5:8] if request["shape"][0] == 4096 else lines[8:])), end="")
elif (here / "page").exists():
    Path(sys.argv[sys.argv.index("-o") + 1] + ".ncu-rep").write_text((here / "page").read_text())
"""


def printed(*arguments: str) -> str:
    return invoke(*arguments, code=0).stdout


def results(*arguments: str) -> Any:
    return json.loads(printed(*arguments, "--json"))["results"]


def stops(code: int, message: str, *arguments: str) -> None:
    result = invoke(*arguments, code=code)
    assert message in result.stderr
    assert "µs" not in result.stdout


def cells(output: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in output.splitlines()
        if "│" in line
    ]


def calls(log: Path) -> list[list[str]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


@pytest.fixture
def h100(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch tells what it would tell of an H100. No GPU is touched: the fake ncu starts nothing."""
    told = {
        "is_available": True,
        "current_device": 0,
        "get_device_capability": (9, 0),
        "get_device_name": "H100",
        "get_device_properties": SimpleNamespace(
            name="H100", multi_processor_count=132, major=9, minor=0
        ),
    }
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name, value in told.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)


@pytest.fixture
def fake(h100: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program called ncu, first on PATH, for tests to write."""
    program = tmp_path / "ncu"
    program.touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return program


@pytest.fixture
def replay(fake: Path) -> Path:
    """The log of calls of an ncu that replays the copy of the recording beside it."""
    shutil.copy(RECORDING, fake.with_name("recording"))
    fake.write_text(FAKE + REPLAY)
    return fake.with_name("calls")


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """What the source page of 4096³ by cublas and portable would be, with the rows of two other
    kernels.
    """
    sections = PAGE.read_text().split('"Kernel Name",')[1:3]
    names = (launch.kernel for launch in recorded("4096")[:2])
    bodies = (section.partition("\n")[2] for section in sections)
    made = tmp_path / "page"
    made.write_text(
        "".join(
            f'"Kernel Name","{name}",\n{body}' for name, body in zip(names, bodies, strict=True)
        )
    )
    return made


def test_the_configuration_that_runs_is_said_where_it_is_known() -> None:
    def resolved(kernel: str, config: str = "") -> str:
        return Request(kernel, (64, 64, 64), "bfloat16", "nt", config).resolved()

    assert [resolved(by_shape) for by_shape in ("cublas", "portable", "hopper.gemm")] == [
        "",
        "",
        "",
    ]
    assert "tile_m=64,tile_n=256" in resolved("hopper.gemm", "tile_m=64")
    assert "tile_m=128,tile_n=256" in resolved("hopper.hilbert")


def test_the_command_that_ncu_gets(replay: Path) -> None:
    assert printed(
        "hopper.tma_wgmma",
        "--layout",
        "tn",
        "--dtype",
        "float16",
        "--config",
        "tile_m=128, jitter=1",
    )
    (call,) = calls(replay)
    assert call[:14] == [
        "--csv",
        "--page",
        "raw",
        "--nvtx",
        "--clock-control",
        "none",
        "--profile-from-start",
        "off",
        "--metrics",
        ",".join(counters.metrics(90)),
        sys.executable,
        "-P",
        "-m",
        "outblas.inspect.profiled",
    ]
    request = Request(
        "hopper.tma_wgmma", (4096, 4096, 4096), "float16", "tn", "tile_m=128,jitter=1"
    )
    assert Request.from_text(call[15]) == request
    assert call[16] == "C"


def test_of_a_product_with_an_addend(replay: Path, tmp_path: Path) -> None:
    """alpha A B + beta C: asked for, said in the record, and no profile of A B for reports."""
    saved = tmp_path / "profile.json"
    assert "alpha A B + beta C" in printed("hopper.tma_wgmma", "--addend", "--save", str(saved))
    (call,) = calls(replay)
    assert Request.from_text(call[15]).addend
    assert [entry["addend"] for entry in json.loads(saved.read_text())["results"]] == [True, True]
    found = profiles.load([saved])
    asked = (found, "hopper.tma_wgmma", (4096, 4096, 4096), "bfloat16", "H100")
    assert lookup.profiled(*asked) is None
    assert lookup.profiled(*asked, addend=True) == found[1]


def test_tables(replay: Path) -> None:
    output = printed("hopper.tma_wgmma")
    rows = {name: rest for name, *rest in cells(output)}
    expected = {
        "time in ncu, one cold run (µs)": ["179.0", "448.4"],
        "tensor pipe active": ["94.7%", "35.1%"],
        "FLOP / DRAM byte": ["766.4", "584.0"],
        "… A, B, C moved once": ["1,365.3", "1,365.3"],
        "… by the CTA's tile": ["–", "–"],
        "DRAM (GB/s)": ["1,002", "525"],
        "fp32 FMAs / M·N·K": ["0.000", "0.000"],
        "global load requests": ["–", "–"],
        "not selected, of the cycles between issues": ["0.4%", "0.2%"],
        "shared wavefronts: stores": ["660,937 (21.5% conflicts)", "0"],
        "shared wavefronts: wgmma": ["–", "–"],
        "cublas": ["nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "2×66×1", "384×1×1", "179.0"],
    }
    assert {name: rows[name] for name in expected} == expected
    reasons = [name for name in rows if name.replace(" ", "_") in counters.STALLS]
    assert reasons[:3] == ["long scoreboard", "barrier", "wait"]
    assert "not selected" in reasons
    assert "membar" not in reasons, "it stalls nobody"
    assert "Memory by instructions" not in output
    assert "caches flushed" in output
    assert "outblas bench" in output


def test_json_of_two_shapes(replay: Path, tmp_path: Path) -> None:
    saved = tmp_path / "profile.json"
    report = json.loads(
        printed("portable", "--shapes", "4096,16x4096x4096", "--json", "--save", str(saved))
    )
    assert report == json.loads(saved.read_text())
    assert report["environment"]["gpu"] == "H100"
    assert report["environment"]["ncu"] == "2025.3.1.0"
    found = report["results"]
    assert [(each["provider"], each["shape"][0], len(each["launches"])) for each in found] == [
        ("cublas", 4096, 1),
        ("portable", 4096, 1),
        ("cublas", 16, 2),
        ("portable", 16, 1),
    ]
    assert "instructions" not in found[0]
    square, split = found[1:3]
    assert square["launches"][0]["kernel"] == "outblas_portable_256x128x64_bf16"
    assert square["shared"]["ld"] == {"wavefronts": 262_144, "excess": 0}
    assert square["tensor_active"] == pytest.approx(0.8303)
    assert square["compulsory_flop_per_dram_byte"] == pytest.approx(4096 / 3)
    assert square["tile_flop_per_l2_byte"] is None, "it chooses by shape"
    assert split["us"] == pytest.approx(15.936 + 4.448)
    assert split["launches"][1]["grid"] == [128, 1, 1]
    assert len(calls(replay)) == 2


def test_intensity_by_the_tile(replay: Path) -> None:
    cublas, ours = results("portable", "--config", "block_m=128,block_n=64", "--dtype", "float32")
    assert ours["tile_flop_per_l2_byte"] == pytest.approx(2 * 128 * 64 / ((128 + 64) * 4))
    assert ours["compulsory_flop_per_dram_byte"] == pytest.approx(4096 / 6)
    assert cublas["tile_flop_per_l2_byte"] is None


def test_instructions(replay: Path, page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = Mock(return_value=SimpleNamespace(cubin=b"cubin", ptx="ptx"))
    monkeypatch.setattr(instructions, "artifact", artifact)
    monkeypatch.setattr(lines, "operands", lambda *_: [None, "A", "A", "B", "B", *[None] * 14])
    monkeypatch.setattr(instructions, "ffma_reuse", lambda *_: 0.75)
    cublas, ours = results("portable", "--instructions")
    artifact.assert_called_once_with(Request("portable", (4096, 4096, 4096), "bfloat16", "nt"), 90)
    assert (cublas["ffma_reuse"], ours["ffma_reuse"]) == (None, 0.75)
    assert {each["operand"] for each in cublas["instructions"]} == {None}
    assert [each["sass"].split()[0] for each in ours["instructions"][:5]] == ["LDG.E.128"] * 4 + [
        "STS"
    ]
    load = instructions.parse(page.read_text())[1].accesses[0]
    assert ours["instructions"][0] == {"launch": 0, **load.record(), "operand": "A"}
    assert [(each.get("operand"), each["space"], each["operation"]) for each in ours["memory"]] == [
        ("A", "global", "load"),
        ("B", "global", "load"),
        (None, "global", "load"),
        (None, "global", "store"),
        (None, "shared", "load"),
        (None, "shared", "store"),
    ]
    assert [each["efficiency"] for each in ours["memory"][:2]] == [0.25, 1]
    assert "wavefronts" not in ours["memory"][0]
    _, second, third = calls(replay)
    assert second[:9] == [
        "--clock-control",
        "none",
        "--profile-from-start",
        "off",
        "--section",
        "SourceCounters",
        "--metrics",
        "memory_l1_wavefronts_shared,memory_l1_wavefronts_shared_ideal",
        "-o",
    ]
    assert second[10:14] == [sys.executable, "-P", "-m", "outblas.inspect.profiled"]
    assert third == ["--import", f"{second[9]}.ncu-rep", "--csv", "--page", "source", "C"]


def test_instructions_in_a_table(replay: Path, page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instructions, "artifact", lambda *_: None)
    rows = cells(printed("portable", "--instructions"))
    assert [
        "cublas",
        "–",
        "global copy",
        "2,048",
        "4.00",
        "4.00",
        "25.0%",
        "22,528",
        "2,048",
        "20,480",
    ] in rows
    assert [
        "portable",
        "–",
        "global store",
        "2,048",
        "8.00",
        "16.00",
        "50.0%",
        "–",
        "–",
        "–",
    ] in rows
    assert [
        "portable",
        "–",
        "shared load",
        "262,144",
        "–",
        "–",
        "–",
        "1,048,576",
        "1,048,576",
        "0",
    ] in rows


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("outblas_portable", "other", "and then the instructions of ['nvjet_sm90"),
        ("L1 Wavefronts Shared Ideal", "Ideal", "the source page lacks L1 Wavefronts Shared Ideal"),
        ('"Kernel Name"', '"Name"', "counted nothing"),
    ],
)
def test_instructions_that_cannot_be_read(
    replay: Path, page: Path, old: str, new: str, message: str
) -> None:
    page.write_text(page.read_text().replace(old, new))
    stops(3, message, "portable", "--instructions")


def test_a_second_run_without_a_report(replay: Path) -> None:
    stops(3, "ncu ended with exit code 0 and counted nothing", "portable", "--instructions")
    assert len(calls(replay)) == 2, "a report that is missing is not imported"


def answer(**what: Any) -> str:
    """What an act does for the profiled process."""
    return f"status.write_text({json.dumps(what)!r})\n"


UNPROFILED = "print('==WARNING== No kernels were profiled.')\n"


@pytest.mark.parametrize(
    ("act", "code", "message"),
    [
        (
            answer(failed="RuntimeError")
            + UNPROFILED
            + "sys.exit('==ERROR== ERR_NVGPUCTRPERM - No permission.')",
            3,
            "cannot measure here: ncu may not read the GPU's performance counters "
            "(ERR_NVGPUCTRPERM)",
        ),
        (
            answer(done=True)
            + UNPROFILED
            + "sys.exit('==ERROR== Profiling is not supported on device 0.')",
            3,
            "this ncu does not know this GPU or its driver: Profiling is not supported on device 0",
        ),
        (answer(done=True) + UNPROFILED, 3, "ncu profiled no kernels"),
        (
            "print('==ERROR== Failed to find metric lts__t_sectors.sum'); sys.exit(1)",
            3,
            "ncu refused: Failed to find",
        ),
        ("sys.exit('out of luck')", 3, "ncu ended with exit code 1 and counted nothing: out"),
        ("", 3, "ncu ended with exit code 0 and counted nothing: it said nothing"),
        (answer(unavailable="needs cutlass"), 3, "cannot measure here: needs cutlass"),
        (
            answer(started=True) + "print('==PROF== Connected')",
            1,
            "profiling failed: the profiled process ended",
        ),
        (answer(failed="OutOfMemoryError: 1 TiB"), 1, "profiling failed: OutOfMemoryError: 1 T"),
        (answer(refused="K is 7, expected 8") + "sys.exit(2)", 2, "K is 7, expected 8"),
    ],
)
def test_refusals(fake: Path, act: str, code: int, message: str) -> None:
    fake.write_text(FAKE + act)
    stops(code, message, "portable")
    assert fake.with_name("calls").exists()


def test_a_provider_without_launches(replay: Path) -> None:
    replay.with_name("recording").write_text(
        "".join(RECORDING.read_text().splitlines(keepends=True)[:6])
    )
    assert [each["provider"] for each in results("cublas")] == ["cublas"]
    stops(3, "counted nothing", "portable")


def test_output_that_cannot_be_read(replay: Path) -> None:
    replay.with_name("recording").write_text(RECORDING.read_text().replace('"ns"', '"fortnight"'))
    stops(3, "the unit of gpu__time_duration.sum is 'fortnight'", "portable")


def test_a_run_that_takes_too_long_is_ended(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ncu, "TIMEOUT_SECONDS", 3.0)
    sleep = "[sys.executable, '-S', '-c', 'import time; time.sleep(10**6)']"
    fake.write_text(
        f"{FAKE}(here / 'pid').write_text(str(subprocess.Popen({sleep}).pid)); time.sleep(10**6)"
    )

    stops(3, "ncu was not done after 3 s", "portable")

    with contextlib.suppress(ProcessLookupError):  # it was reaped already
        watched = os.pidfd_open(int(fake.with_name("pid").read_text()))
        ended, _, _ = select.select([watched], [], [], 20)
        os.close(watched)
        assert ended, "the watched process lives on"


def test_without_ncu(h100: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    if Path("/usr/local/cuda/bin/ncu").exists():
        assert ncu.find() == "/usr/local/cuda/bin/ncu"
    else:
        stops(3, "is not on PATH, nor in", "portable")
    program = tmp_path / "cuda" / "bin" / "ncu"
    program.parent.mkdir(parents=True)
    program.touch(mode=0o755)
    assert ncu.find() == str(program)


def test_without_a_gpu(replay: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    stops(3, "cannot measure here: there is no NVIDIA GPU", "portable")
    assert not replay.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing",), "kernel is 'nothing', expected one of: cublas, "),
        (("portable", "--shapes", "4x4"), "--shapes is '4x4'"),
        (("portable", "--shapes", "4,0x4x4"), "--shapes has 0x4x4, expected sizes of at least 1"),
        (
            ("hopper.tma_wgmma", "--dtype", "float32"),
            "--dtype is 'float32', expected for hopper.tma_wgmma: ",
        ),
        (("cublas", "--dtype", "int8"), "--dtype is 'int8', expected for cublas: "),
        (("portable", "--layout", "xy"), "--layout is 'xy', expected one of"),
        (("cublas", "--config", "tile_m=64"), "--config is 'tile_m=64', expected none for cublas"),
        (("hopper.tma_wgmma", "--config", "tiles=3"), "config has 'tiles=3', expected"),
        (("portable", "--save", "/nowhere/at/all.json"), "--save is '/nowhere/at/all.json'"),
        (
            ("portable", "--phases"),
            "--phases is given for 'portable', expected a kernel of the hopper ladder",
        ),
        (("cublas", "--phases"), "--phases is given for 'cublas'"),
        (
            ("hopper.large_tile", "--phases", "--instructions"),
            "--phases and --instructions are both given",
        ),
        (("hopper.large_tile", "--phases", "--addend"), "--phases and --addend are both given"),
    ],
)
def test_usage_errors(replay: Path, arguments: tuple[str, ...], message: str) -> None:
    stops(2, message, *arguments)
    assert not replay.exists(), "ncu has been started"


def test_a_kernel_for_another_gpu(replay: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    stops(2, "kernel 'hopper.tma_wgmma' needs sm_90, and H100 is sm_80", "hopper.tma_wgmma")
    assert not replay.exists()


def test_phases_in_a_table_and_in_json(
    replay: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is shown of counted cycles; the kernels count theirs in the GPU tests."""
    module = registry.load("hopper.large_tile")
    role = phase_profile.Role(
        "all", wait=0.0, load=1478.4, tensor=688.0, store=11182.0, total=149790.0
    )
    counted = Mock(return_value=(role,))
    monkeypatch.setattr(module, "phases", counted)
    monkeypatch.setattr("outblas.bench.operands.normal", lambda *_: ("a", "b", "out"))
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(
        "outblas.cli.profile._environment", lambda **_: {"gpu": "NVIDIA H100 80GB HBM3"}
    )
    saved = tmp_path / "phases.json"
    output = printed("hopper.large_tile", "--phases", "--config", "mma_n=64", "--save", str(saved))
    row = ("hopper.large_tile[mma_n=64]", "all", "–", "1,478", "688", "11,182", "149,790")
    assert list(row) in cells(output)
    counted.assert_called_once_with("a", "b", "out", module.Config(mma_n=64))
    (entry,) = json.loads(saved.read_text())["results"]
    assert entry["phases"] == [dataclasses.asdict(role)]
    assert "mma_n=64" in entry["resolved"]
    assert phases.rows(phases.load([saved])) == [row]
    assert not replay.exists()


@pytest.mark.parametrize(
    ("error", "code", "answer"),
    [
        ("ValueError('K is 7,\\n expected 8')", 2, {"refused": "K is 7, expected 8"}),
        ("ImportError('no cutlass')", 3, {"unavailable": "no cutlass"}),
        ("RuntimeError('illegal address')", 1, {"failed": "RuntimeError: illegal address"}),
    ],
)
def test_what_the_profiled_process_answers(
    tmp_path: Path, error: str, code: int, answer: dict[str, str]
) -> None:
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
