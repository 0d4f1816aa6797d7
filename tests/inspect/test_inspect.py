"""`outblas inspect`: machines, occupancy, rooflines, the reading of PTX and SASS, gates that fail
when they should.
"""

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support import commands

from outblas.core import machines, registry
from outblas.core.artifact import cta_threads
from outblas.inspect import GateError, inspect, machine_code, read, roofline, sass
from outblas.inspect.occupancy import occupancy

KEYS = [
    "kernel",
    "arch",
    "config",
    "registers",
    "spill_stores",
    "spill_loads",
    "stack",
    "smem_bytes",
    "stages",
    "threads",
    "ctas_per_sm",
    "warps_per_sm",
    "instructions",
    "ptx",
    "warnings",
    "bank_conflicts",
    "intensity",
    "bound",
    "ffma_share",
    "ffma_reuse",
]
KIB = 1024


@pytest.mark.parametrize(
    ("name", "dtype", "data_sheet"),
    [
        ("T4", "float16", 65),
        ("T4", "float32", 8.1),
        ("A100", "bfloat16", 312),
        ("A100", "tf32", 156),
        ("A100", "float32", 19.5),
        ("H100", "bfloat16", 989.4),
        ("H100", "tf32", 494.7),
        ("H100", "fp8", 1978.9),
        ("GH200", "float16", 990),
        ("H200", "bfloat16", 989.5),
    ],
)
def test_peaks_are_those_of_the_data_sheets(name: str, dtype: str, data_sheet: float) -> None:
    assert machines.find(name).peak_tflops(dtype) == pytest.approx(data_sheet, rel=0.006)


def test_peak_and_utilisation_at_another_clock() -> None:
    h100 = machines.find("h100")
    assert h100.peak_tflops("float32", 1980) == pytest.approx(67, rel=0.01)
    assert h100.peak_tflops("bfloat16", 1500) == pytest.approx(811.0, rel=1e-3)
    with pytest.raises(ValueError, match="dtype is 'bfloat16', expected for T4: float16, float32"):
        machines.find("T4").peak_tflops("bfloat16")


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("Tesla T4", "T4"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA A100-SXM4-40GB", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
    ],
)
def test_machine_of_a_device(device: str, name: str | None) -> None:
    found = machines.of_device(device)
    assert (found.name if found else None) == name


def test_machines() -> None:
    assert all(key == machine.name and machine.source for key, machine in machines.MACHINES.items())
    assert [machines.reference(arch).name for arch in (75, 80, 90)] == ["T4", "A100", "H100"]
    with pytest.raises(
        ValueError, match="machine is 'V100', expected one of: T4, A100, H100, GH200, H200"
    ):
        machines.find("V100")
    with pytest.raises(ValueError, match="arch is 89, expected one of: 75, 80, 90"):
        machines.reference(89)


@pytest.mark.parametrize(
    ("machine", "registers", "smem_bytes", "threads", "expected"),
    [
        (
            "H100",
            165,
            0,
            128,
            (3, 12, "registers"),
        ),  # 165 x 32 -> 5376 a warp, 3 to a quarter of the SM
        ("T4", 116, 18944, 256, (2, 16, "registers")),
        ("H100", 168, 230 * KIB, 384, (0, 0, "shared memory")),  # beyond 227 KiB
        ("H100", 168, 196 * KIB, 384, (1, 12, "registers")),
        ("H100", 32, 113 * KIB, 128, (2, 8, "shared memory")),  # 2 x (113 + 1) KiB fill 228 exactly
        ("H100", 32, 113 * KIB + 1, 128, (1, 4, "shared memory")),
        ("A100", 32, 0, 1024, (2, 64, "registers")),
        ("A100", 16, 0, 32, (16, 16, "threads")),  # warps are allotted in fours
        ("A100", 16, 0, 64, (16, 32, "threads")),
        ("T4", 32, 32 * KIB, 128, (2, 8, "shared memory")),  # nothing is reserved on sm_75
        ("T4", 16, 0, 64, (8, 16, "threads")),
        ("H100", 256, 0, 128, (0, 0, "registers")),
        ("H100", 32, 0, 1056, (0, 0, "threads")),
    ],
)
def test_occupancy(
    machine: str, registers: int, smem_bytes: int, threads: int, expected: tuple[int, int, str]
) -> None:
    found = occupancy(machines.find(machine), registers, smem_bytes, threads)
    assert (found.ctas_per_sm, found.warps_per_sm, found.limiter) == expected
    assert found.share == expected[1] / machines.find(machine).warps_per_sm


def test_occupancy_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="threads is 0, expected at least 1"):
        occupancy(machines.find("T4"), 32, 0, 0)


WGMMA = """
.L_x_2:
        /*0100*/              @!P0 BRA `(.L_x_9) ;
        /*0110*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, !UPT ;
        /*0120*/                   HGMMA.64x128x16.F32.BF16 R24, R4, gdesc[UR12], R24, gsb0 ;
        /*0130*/               @P1 BRA `(.L_x_2) ;
        /*0140*/                   LDS.128 R4, [R2] ;
.L_x_9:
        /*0150*/                   EXIT ;
"""
FFMA = """
        /*0000*/                   LDS.U.128 R0, [R9] ;
.L_3:
        /*0010*/                   LDS.64 R4, [R8] ;
        /*0020*/                   LDSM.16.MT88.4 R12, [R10+UR4] ;
        /*0030*/                   FFMA R5, R4, R6.reuse, R5 ;
        /*0040*/              @!PT FFMA.FTZ R5, R4, R6, R5 ;
        /*0050*/                   STL.64 [R1+0x8], R2 ;
        /*0060*/              @!P2 LDL.LU R3, [R1] ;
        /*0070*/               @P0 BRA `(.L_3) ;
"""


def test_sass_of_wgmma() -> None:
    code = sass.parse(WGMMA)
    wgmma = "HGMMA.64x128x16.F32.BF16"
    assert [i.name for i in code] == ["BRA", wgmma, wgmma, "BRA", "LDS.128", "EXIT"]
    assert [i.target for i in code] == [5, None, None, 0, None, None]
    loop = sass.hot_loop(code)
    assert loop == code[:4]
    assert [sass.flops(i) for i in loop] == [0, 2 * 64 * 128 * 16, 2 * 64 * 128 * 16, 0]
    in_shared, in_registers = (64 + 128) * 16 * 2, 128 * 16 * 2  # where A is
    assert [sass.shared_bytes(i) for i in loop] == [0, in_shared, in_registers, 0]
    assert sass.unit(code) == "float16"


def test_sass_of_ffma() -> None:
    code = sass.parse(FFMA)
    loop = sass.hot_loop(code)
    assert len(loop) == 7
    assert sum(map(sass.flops, loop)) == 2 * 2 * 32
    assert [sass.shared_bytes(i) for i in loop[:2]] == [8 * 32, 4 * 128]
    assert sass.unit(code) == "float32"
    assert (sass.ffma_share(loop), sass.ffma_reuse(loop)) == (2 / 7, 1 / 2)
    assert (sass.ffma_share(loop[:2]), sass.ffma_reuse(loop[:2])) == (0, None)
    reused = sass.parse(FFMA.replace("IADD", "FADD").replace("R4, R6, R5", "R4.reuse, R6, R5"))
    assert sass.ffma_reuse(sass.hot_loop(reused)) == 1, "whichever operand is kept"
    assert [sass.width(i.name) for i in code if i.name.startswith(("STL", "LDL"))] == [8, 4]


@pytest.mark.parametrize(
    ("name", "flops", "unit"),
    [
        ("HMMA.16816.F32.BF16", 2 * 16 * 8 * 16, "float16"),
        ("HMMA.1688.F32", 2 * 16 * 8 * 8, "float16"),
        ("HMMA.1684.F32.TF32", 2 * 16 * 8 * 4, "tf32"),
        ("HGMMA.64x64x8.F32.TF32", 2 * 64 * 64 * 8, "tf32"),
        ("QGMMA.64x256x32.F32.E4M3.E4M3", 2 * 64 * 256 * 32, "fp8"),
        ("HFMA2.MMA", 0, "float32"),  # how constants are made
    ],
)
def test_flops_and_unit(name: str, flops: int, unit: str) -> None:
    instruction = sass.Instruction(0, name, "R0, R2, R4, R6")
    assert (sass.flops(instruction), sass.unit([instruction])) == (flops, unit)


def test_roofline_by_hand() -> None:
    found = roofline.intensity((4096, 4096, 4096), (128, 256, 64), 2, 2, sass.parse(WGMMA))
    assert found.dram == pytest.approx(4096 / 3)
    assert found.l2 == pytest.approx(2 * 128 * 256 / ((128 + 256) * 2))
    assert found.shared == pytest.approx(2 * 2 * 64 * 128 * 16 / ((64 + 128 + 128) * 32))
    h100 = machines.find("H100")
    bound = roofline.bound(h100, found, "float16")
    assert bound.ceilings["dram"] == pytest.approx(4096 / 3 * 3.352)
    assert bound.ceilings["l2"] == pytest.approx(found.l2 * 5120 * 1830e6 / 1e12)
    assert bound.ceilings["shared"] == pytest.approx(found.shared * 132 * 128 * 1830e6 / 1e12)
    assert bound.ceilings["l2"] < bound.tflops, "merged requests pass it: no bound"
    assert (bound.by, bound.tflops) == ("compute", h100.peak_tflops("float16"))
    faster = roofline.bound(h100, found, "float16", clock_mhz=1980)
    assert faster.ceilings["dram"] == bound.ceilings["dram"]
    assert faster.ceilings["compute"] == pytest.approx(h100.peak_tflops("float16", 1980))


def test_roofline_of_thin_matrices_and_of_code_without_shared_memory() -> None:
    none = sass.parse("        /*0000*/                   FFMA R0, R1, R2, R0 ;")
    found = roofline.intensity((16, 4096, 4096), (16, 64, 64), 2, 4, none)
    assert found.shared is None
    assert found.dram == pytest.approx(
        2 * 16 * 4096**2 / (2 * (16 * 4096 + 4096**2) + 4 * 16 * 4096)
    )
    bound = roofline.bound(machines.find("A100"), found, "float32")
    assert set(bound.ceilings) == {"compute", "dram", "l2"}
    assert (bound.by, bound.tflops) == ("compute", machines.find("A100").peak_tflops("float32"))


PTX = """
.version 8.8
.target sm_90a
.extern .shared .align 1024 .b8 smem[];
.visible .entry kernel(
    .param .u64 kernel_param_0
)
.reqntid 128, 2, 1
{
    .reg .pred %p<4>;
    mov.u32 %r1, %tid.x; // mov.u32 in a comment
    @%p1 bra $L__BB0_2;
    @!%p2 st.global.v4.b32 [ %rd1 + 0 ], { %r1, %r2, %r3, %r4 };
$L__BB0_2:
    { .reg .pred p; setp.ne.b32 p, %r3, 0;
    wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16
    {%f1, %f2,
     %f3}, %rd3, %rd4, p, 1, 1, 0, 0; }
LAB_WAIT: mbarrier.try_wait.parity.shared::cta.b64 P1, [%r1], %r2;
    ret;
}
"""


def test_ptx_opcodes() -> None:
    assert machine_code.ptx_instructions(PTX) == {
        "mov.u32": 1,
        "bra": 1,
        "st.global.v4.b32": 1,
        "setp.ne.b32": 1,
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16": 1,
        "mbarrier.try_wait.parity.shared::cta.b64": 1,
        "ret": 1,
    }
    assert cta_threads(PTX) == 256
    with pytest.raises(ValueError, match=r"ptx declares no \.reqntid"):
        cta_threads(".version 8.8")


def test_warnings_of_the_assembler() -> None:
    serialized = "Potential Performance Loss: wgmma.mma_async instructions are serialized in 'k'"
    log = f"""ptxas info    : (C7511) {serialized}
ptxas-blackwell info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored
ptxas /tmp/k.ptx, line 96; warning : Value of threads per SM is out of range
ptxas warning : Registers are spilled to local memory in function 'warning_info'
ptxas info    : Compiling entry function 'warning_of_k' for 'sm_90a'
ptxas info    : Used 58 registers, used 1 barriers
"""
    assert machine_code.warnings(log) == [
        f"(C7511) {serialized}",
        "(C7508) Potential Performance Loss: 'setmaxnreg' ignored",
        "Value of threads per SM is out of range",
        "Registers are spilled to local memory in function 'warning_info'",
    ]


def said(log: str) -> tuple[int, ...]:
    """Registers, bytes of stack, of spill stores and of spill loads, as ptxas -v says them."""
    used = re.search(r"Used (\d+) registers", log)
    frame = re.search(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log
    )
    assert used, log
    assert frame, log
    return tuple(map(int, (used[1], *frame.groups())))


@pytest.mark.compile
@pytest.mark.parametrize("arch", [75, 80, 90])
# Of the Hopper ladder the ends: tests/hopper/test_hopper.py compiles and reads every rung.
@pytest.mark.parametrize(
    "name", [k.name for k in registry.ladder() if k not in registry.ladder("hopper")[1:-1]]
)
def test_the_log_is_that_of_the_machine_code(name: str, arch: int) -> None:
    kernel = registry.find(name)
    if not kernel.min_arch <= arch <= (kernel.max_arch or arch):
        pytest.skip(f"{name} does not run on sm_{arch}")
    dtype, layout = registry.dtype_of(name), registry.layout_of(name)
    artifact = registry.load(name).artifact(arch=arch, dtype=getattr(torch, dtype), layout=layout)
    found = read(artifact)
    assert said(artifact.log) == (
        found.registers,
        found.stack,
        found.spill_stores,
        found.spill_loads,
    )
    assert artifact.arch == ("sm_90a" if arch == 90 else f"sm_{arch}")
    assert list(found.record()) == KEYS
    assert list(found.bound) == [machine.name for machine in machines.of_arch(arch)]
    found.require(no_warnings=not old_ptxas(name), stack=0, lacks=("LDL", "STL"))


def old_ptxas(name: str) -> bool:
    """Triton 3.6's assembler serialises the portable kernel's wgmma (C7515); CuTe DSL brings its
    own.
    """
    import triton

    return registry.find(name).dsl != "cute" and triton.__version__ < "3.9"


@pytest.mark.compile
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("arch", [75, 80, 90])
def test_portable_multiplies_where_it_should(arch: int, dtype: str) -> None:
    found = inspect("portable", arch=arch, dtype=dtype, layout="nn")
    mma = {75: "FFMA", 80: "HMMA.16816.F32", 90: "HGMMA"}[arch] if dtype == "float16" else "FFMA"
    found.require(
        has=(mma,),
        lacks=() if mma != "FFMA" else ("HMMA", "HGMMA"),
        no_warnings=not old_ptxas("portable"),
    )
    assert found.unit == ("float32" if mma == "FFMA" else "float16")


@pytest.mark.compile
@pytest.mark.parametrize("arch", [75, 80, 90])
def test_a_gluon_kernel(arch: int) -> None:
    from support import gluon_tile

    artifact = gluon_tile.artifact(gluon_tile.TileConfig(), arch)
    assert (artifact.threads, artifact.smem_bytes) == (128, 2 * 64 * 16 * 4)
    found = read(artifact).require(
        has=("FFMA", "LDS", "fma.rn.f32"), lacks=("HMMA", "HGMMA"), max_registers=128
    )
    assert found.bank_conflicts == {"store A": 0}
    assert found.limiter == "registers"
    assert 0.5 < found.ffma_share < 1
    assert found.ffma_reuse is not None
    assert 0 < found.ffma_reuse <= 1
    assert inspect("hopper.tma_wgmma").ffma_reuse is None
    assert found.intensity["shared"] == pytest.approx(4 / 3)  # 8 x 4 products of 12 words read


@pytest.mark.compile
@pytest.mark.parametrize("arch", [75, 80, 90])
def test_spills_fail_the_gate(arch: int) -> None:
    from support import gluon_tile

    artifact = gluon_tile.artifact(gluon_tile.TileConfig(max_registers=32), arch)
    found = read(artifact)
    assert said(artifact.log) == (32, found.stack, found.spill_stores, found.spill_loads)
    assert found.spill_stores > 1000
    spilled = found.spill_stores + found.spill_loads
    with pytest.raises(
        GateError,
        match=f"tile_kernel for sm_{arch}.*\n  spilled bytes: {spilled}, expected at most 0",
    ):
        found.require()
    found.require(spills=None)


@pytest.mark.compile
def test_bank_conflicts() -> None:
    from triton.experimental.gluon import language as gl

    from outblas.device.triton_artifact import bank_conflicts

    rows = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    assert (
        bank_conflicts(rows, gl.SwizzledSharedLayout(1, 1, 1, [0, 1]), (64, 32), torch.float32) == 3
    )
    # Eight lanes store two half rows: of the 32 banks, 16 are written twice. With whole rows, none
    # is.
    assert (
        bank_conflicts(rows, gl.SwizzledSharedLayout(1, 1, 1, [1, 0]), (64, 32), torch.float32) == 1
    )
    whole = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    assert (
        bank_conflicts(whole, gl.SwizzledSharedLayout(1, 1, 1, [1, 0]), (64, 32), torch.float32)
        == 0
    )
    padded = gl.PaddedSharedLayout.with_identity_for([[32, 4]], [64, 32], [1, 0])
    with pytest.raises(ValueError, match="shared is a PaddedSharedLayout"):
        bank_conflicts(rows, padded, (64, 32), torch.float32)


@pytest.mark.compile
def test_gates_name_every_failure() -> None:
    """A Hopper tile beyond the register budget: spills, and wgmma that the assembler serialises."""
    found = inspect("hopper.tma_wgmma", config="tile_m=128,tile_n=256")
    with pytest.raises(GateError) as caught:
        found.require(
            max_registers=200,
            stack=0,
            min_ctas=3,
            has={"HGMMA.64x256x16": 3},
            lacks=("STL", "wgmma.mma_async"),
        )
    named = [line.split(":")[0] for line in caught.value.failed]
    assert named[:5] == [
        "spilled bytes",
        "registers",
        "stack bytes",
        "CTAs an SM",
        "HGMMA.64x256x16",
    ]
    assert named[5:] == ["STL", "wgmma.mma_async", "the assembler warned"]
    assert "registers: 255, expected at most 200" in str(caught.value)
    assert "(C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized" in str(
        caught.value
    )
    with pytest.raises(GateError, match="HMMA: 0, expected at least 1"):
        found.require(spills=None, no_warnings=False, has=("HMMA",))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kernel": "nothing"}, "kernel is 'nothing'"),
        ({"arch": 80}, "arch is 80, expected for hopper.tma_wgmma: 90"),
        ({"kernel": "portable", "arch": 89}, "arch is 89, expected for portable: 75, 80, 90"),
        (
            {"dtype": "float32"},
            "dtype is 'float32', expected for hopper.tma_wgmma: bfloat16, float16",
        ),
        (
            {"out_dtype": "float16"},
            "out_dtype is 'float16', expected for hopper.tma_wgmma: bfloat16, float32",
        ),
        ({"layout": "xy"}, "layout is 'xy', expected one of nt, nn, tn, tt"),
        ({"shape": (4096, 0, 4096)}, "shape is"),
        ({"shape": (64, 64, 63)}, "TMA needs one stride of 1"),
        ({"config": "tile_m=80"}, "config: tile_m is 80, expected 64, 128, 192, 256 or 320"),
        ({"config": "stage=4"}, "config has 'stage=4'"),
        (
            {"kernel": "portable", "arch": 75, "config": "num_stages=4"},
            "needs 131136 bytes of shared memory",
        ),
        (
            {"kernel": "portable", "config": "block_m=100"},
            "config: block_m is 100, expected a power of two",
        ),
    ],
)
def test_bad_arguments_compile_nothing(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        inspect(**{"kernel": "hopper.tma_wgmma", **arguments})


invoke = functools.partial(commands.invoke, "inspect")


@pytest.mark.compile
def test_command_prints_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = [
        registry.find(name)
        for name in ("portable", "turing.ldmatrix", "turing.cp_async", "hopper.tma_wgmma")
    ]
    monkeypatch.setattr(registry, "ladder", lambda: kernels)
    saved = tmp_path / "inspect.json"
    result = invoke("--arch", "90", "--json", "--save", saved, code=0)
    records = json.loads(result.stdout)
    assert records == json.loads(saved.read_text())
    assert [record["kernel"] for record in records] == [
        k.name for k in kernels if (k.max_arch or 90) >= 90
    ]
    assert all(list(record) == KEYS for record in records)
    hopper = next(record for record in records if record["kernel"] == "hopper.tma_wgmma")
    assert hopper["arch"] == "sm_90a"
    assert hopper["instructions"]["HGMMA.64x64x16.F32.BF16"] == 4
    assert hopper["ptx"]["wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16"] == 4
    assert list(hopper["bound"]) == ["H100", "GH200", "H200"]
    assert set(hopper["bound"]["H100"]) == {"tflops", "by", "ceilings"}


@pytest.mark.compile
def test_command_prints_ffma_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("--arch", "80", "--layout", "nn", "--shapes", "1024x512x256")
    result = invoke("portable", *arguments, "--dtype", "float32")
    assert re.search(r"\d\d\.\d%, \d\d\.\d%\s+.*\.reuse", result.stdout, re.DOTALL), result.stdout
    assert re.search(r"\d+ FFMA ", result.stdout)
    assert "FFMA" not in invoke("portable", *arguments).stdout


@pytest.mark.compile
def test_command_prints_tables() -> None:
    options = (
        "--arch",
        "75,80",
        "--dtype",
        "float16",
        "--layout",
        "nn",
        "--shapes",
        "1024x512x256",
    )
    result = invoke("portable", *options, code=0)
    for text in (
        "sm_75",
        "sm_80",
        "HMMA.16816.F32",
        "FFMA",
        "LDGSTS",
        "T4",
        "A100",
        "num_stages=3",
    ):
        assert text in result.stdout


@pytest.mark.compile
def test_command_prints_code() -> None:
    result = invoke("hopper.tma_wgmma", "--sass", "--config", "tile_n=128")
    assert "HGMMA.64x128x16.F32.BF16 R" in result.stdout
    assert "wgmma" not in result.stdout.replace("tma_wgmma", "")
    assert "wgmma.mma_async.sync.aligned.m64n64k16" in invoke("hopper.tma_wgmma", "--ptx").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing",), "kernel is 'nothing'"),
        (("hopper.tma_wgmma", "--arch", "75"), "arch is 75"),
        (("--arch", "sm_900x"), "--arch is 'sm_900x'"),
        (("--dtype", "int8"), "--dtype is 'int8'"),
        (("--shapes", "64,128"), "--shapes is '64,128'"),
        (("hopper.tma_wgmma", "--config", "tile_m=80"), "tile_m is 80"),
        (("portable", "--sass"), "expected one kernel, one --arch"),
        (("hopper.tma_wgmma", "--ptx", "--json"), "--json"),
        (("--save", "/nowhere/file.json"), "--save is"),
    ],
)
def test_usage_errors(arguments: tuple[str, ...], message: str) -> None:
    commands.refuses(message, "inspect", *arguments)
