"""Memory instructions in ncu's source page, and the operands that their source lines name.

`data/ncu_source_h100.csv` has rows of what ncu 2025.3.1 printed on an H100 at 2048³ in fp32, less columns that are not
read: cuBLAS, a kernel that loads A in rows of 32 bytes and B in lines, and one that copies both asynchronously.
"""

from __future__ import annotations

import csv
import io
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from outblas.inspect import instructions, lines, machine_code, sass
from outblas.inspect.instructions import Access, Code, Counts, parse
from outblas.inspect.lines import Location
from outblas.inspect.profiled import Request

PAGE = Path(__file__).parent / "data" / "ncu_source_h100.csv"


def page_of(kernel: str, code: list[str], executed: int = 4) -> str:
    """A source page in which every instruction runs `executed` times, as a load of 16 lines and 32 sectors would."""
    header = [instructions._SASS, instructions._BITS, *instructions.COLUMNS.values()]
    rows = [[text, "", executed, 32 * executed, 16 * executed, 32 * executed, 0, 0] for text in code]
    out = io.StringIO()
    csv.writer(out, quoting=csv.QUOTE_ALL).writerows([["Kernel Name", kernel, ""], header, *rows])
    return out.getvalue()


def test_the_page_of_three_launches() -> None:
    cublas, loads, copies = parse(f"==PROF== Connected\n{PAGE.read_text()}")
    assert cublas.kernel == "void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>(T1::Params)"
    assert (loads.kernel, copies.kernel) == ("kernel2", "kernel")
    assert [len(code.mnemonics) for code in (cublas, loads, copies)] == [18, 19, 13]
    assert loads.mnemonics[:2] == ("LDC", "LDG.E.128")
    assert loads.mnemonics[-1] == "NOP"
    first, last = loads.accesses[0], loads.accesses[-1]
    assert first == Access(
        1, "LDG.E.128 R12, desc[UR10][R2.64]", "global", "load", 16, Counts(1024, 32768 * 16, 16384, 16384, 0, 0)
    )
    assert (last.space, last.operation, last.counts.ratios()["transactions_per_request"]) == ("global", "store", 8)
    conflicting = copies.accesses[0]
    assert (conflicting.space, conflicting.operation, conflicting.bytes) == ("global", "copy", 4)
    assert (conflicting.counts.wavefronts, conflicting.counts.ideal, conflicting.counts.excess) == (11264, 1024, 10240)


def test_instructions_that_no_thread_ran_are_left_out() -> None:
    cublas = parse(PAGE.read_text())[0]
    assert "LDG.E.64" in cublas.mnemonics, "never executed"
    assert "LDG.E" in cublas.mnemonics, "executed, and every thread predicated off"
    assert [
        each.sass.split()[-4:] for each in cublas.accesses if " LD" in f" {each.sass}" and each.space == "shared"
    ] == []
    assert [each.operation for each in cublas.accesses] == ["copy", "copy", "store", "store", "store", "store"]
    assert cublas.accesses[-1].sass == "@P1 STG.E [R146+0x80], R65"


def test_generic_addresses_are_global_where_lines_were_looked_up() -> None:
    """As in epilogues of cuBLAS's fp32 kernels."""
    text = page_of("kernel", ["ST.E.64 [R2], R4", "LD.E R0, [R2]"])
    (code,) = parse(text)
    assert [(each.space, each.operation, each.bytes) for each in code.accesses] == [
        ("global", "store", 8), ("global", "load", 4),
    ]  # fmt: skip
    (code,) = parse(text.replace('"64"', '"0"'))
    assert {each.space for each in code.accesses} == {"shared"}


def test_totals_by_space_and_operation() -> None:
    loads = parse(PAGE.read_text())[1].totals()
    assert list(loads) == [
        (None, "global", "load"), (None, "global", "store"), (None, "shared", "load"), (None, "shared", "store"),
    ]  # fmt: skip
    of_loads = loads[None, "global", "load"]
    assert of_loads.executed == 4 * (1024 + 262144)
    assert of_loads.asked == 16 * 4 * (32768 + 8355840)
    assert of_loads.transactions == 2 * (16384 + 4177920) + 2 * (4096 + 1044480)
    assert of_loads.efficiency == pytest.approx(0.4), "of B all, of A a quarter of each line"
    assert loads[None, "shared", "store"].wavefronts == 3 * 1024 - 1024 + 4096 + 262144 + 1048576


def test_records_say_only_what_an_access_has() -> None:
    _, loads, copies = parse(PAGE.read_text())
    record = loads.accesses[0].record()
    assert list(record) == [
        "sass", "operand", "space", "operation", "bytes", "executed", "transactions_per_request",
        "sectors_per_request", "wavefronts", "ideal", "excess",
    ]  # fmt: skip
    assert (record["transactions_per_request"], record["sectors_per_request"], record["wavefronts"]) == (16, 16, None)
    shared = next(each for each in loads.accesses if each.space == "shared").record()
    assert (shared["transactions_per_request"], shared["wavefronts"], shared["excess"]) == (None, 1024, 0)
    copy = copies.accesses[0].record()
    assert (copy["transactions_per_request"], copy["ideal"], copy["excess"]) == (4, 1024, 10240)
    kind, counts = next(iter(copies.totals().items()))
    total = instructions.total_record(*kind, counts)
    assert (total["operation"], total["efficiency"]) == ("copy", counts.asked / (128 * counts.transactions))
    assert total["excess"] == total["wavefronts"] - total["ideal"] > 0


@pytest.mark.parametrize(
    ("transactions", "each", "efficiency"),
    [(32, 4, 1 / 32), (1, 4, 1.0), (4, 16, 1.0), (0, 4, None)],
)
def test_efficiency_of_one_request(transactions: int, each: int, efficiency: float | None) -> None:
    assert Counts(1, 32 * each, transactions, 32, 0, 0).efficiency == efficiency


def test_a_page_that_lacks_a_column() -> None:
    with pytest.raises(ValueError, match="the source page lacks L1 Tag Requests Global"):
        parse(PAGE.read_text().replace("L1 Tag Requests Global", "L1 Tags"))


def test_output_without_launches() -> None:
    assert parse("==ERROR== no such report\n") == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("    ra = gl.load(a_ptr + k, mask=a_ptr < end)", "A"),
        ("    async_load(sB, b_ptr)  # beside a_ptr", "B"),
        ("    c = gl.load(c_ptr)", "C"),
        ("gl.store(out_ptr, acc)", "out"),
        ("copy(a_ptr, b_ptr)", None),
        ("gl.load(data_ptr + a_ptrs)", None),
        ("", None),
    ],
)
def test_the_operand_that_a_line_names(line: str, expected: str | None) -> None:
    assert lines.operand(line) == expected


PTX = """
    .loc 1 5 10
    ld.param.b64 %rd1, [a];
    // begin inline asm
    .loc 1 5 10
    mov.u32 %r1, 0x0;
    .loc 1 6 10
    ld.global.b32 { %r1 }, [ %rd1 + 0 ];

    // end inline asm
    // begin inline asm
    ld.global.b32 { %r2 }, [ %rd1 + 4 ];
    // end inline asm
    .loc 2 43 12, function_name $L__info_string0, inlined_at 1 0 5 // tile.py:43:12
    ld.shared.b32 %r3, [%r9];
    .loc 2 43 12, function_name $L__info_string0, inlined_at 1 9 5 // tile.py:43:12
    st.shared.b32 [%r9], %r1;
    .loc 1 0 5
    ret;
    .file 1 "/k/rung.py"
    .file 2 "/k/tile.py"
"""
LISTING = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
\t//## File ".nv_debug_ptx_txt", line 8
        /*0010*/              @!P0 LDG.E R6, desc[UR4][R2.64] ;
.L_x_0:
\t//## File ".nv_debug_ptx_txt", line 12
        /*0020*/                   LDG.E R7, desc[UR4][R2.64+0x4] ;
\t//## File ".nv_debug_ptx_txt", line 15
        /*0030*/                   LDS R4, [R4] ;
        /*0040*/                   LDS R5, [R5] ;
\t//## File ".nv_debug_ptx_txt", line 17
        /*0050*/                   STS [R4], R6 ;
\t//## File ".nv_debug_ptx_txt", line 19
        /*0060*/                   EXIT ;
\t//## File ".nv_debug_ptx_txt", line 99
        /*0070*/                   NOP ;
"""


def test_lines_of_ptx_and_of_a_listing() -> None:
    rung, tile = Location("/k/rung.py", 5), Location("/k/tile.py", 43)
    inlined = (tile, Location("/k/rung.py", 9))
    of_ptx = lines.places(PTX)
    assert of_ptx[7] == (rung,), "inside inline assembly, whose lines are counted on"
    assert of_ptx[11] == (rung,), "after it"
    found = lines.locations(LISTING, PTX)
    assert found == [(), (rung,), (rung,), (tile,), (tile,), inlined, (), ()]
    assert len(sass.parse(LISTING)) == len(found)


def test_operands_by_line_and_where_it_is_inlined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rung = tmp_path / "rung.py"
    rung.write_text("\n" * 4 + "gl.load(a_ptr)\ngl.load(b_ptr)\n" + "\n" * 2 + "copy(b_ptr)\n")
    monkeypatch.setattr(lines, "with_ptx_lines", lambda cubin: LISTING)
    names = [instruction.name for instruction in sass.parse(LISTING)]
    ptx = PTX.replace("/k/rung.py", str(rung))
    assert lines.operands(b"", ptx, names) == [None, "A", "A", None, None, "B", None, None]
    assert lines.operands(b"", ptx, names[:-1]) == [None] * 7, "other code"
    assert lines.operands(b"", ptx, [*names[:-1], "BRA"]) == [None] * 8, "other code of the same length"


def test_a_source_is_the_loaded_module_that_its_path_ends_like_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for ladder in ("simt", "turing"):
        module = ModuleType(f"{ladder}.rung")
        module.__file__ = str(tmp_path / "here" / ladder / "rung.py")
        monkeypatch.setitem(sys.modules, module.__name__, module)
    there = tmp_path / "there" / "turing" / "rung.py"
    there.parent.mkdir(parents=True)
    there.write_text("what the other checkout says by now\n")
    assert lines._loaded(str(there)) == str(tmp_path / "here" / "turing" / "rung.py")
    assert lines._loaded(str(tmp_path / "here" / "simt" / "rung.py")) == str(tmp_path / "here" / "simt" / "rung.py")
    for unknown in ("/gone/turing/unknown.py", "/gone/unknown/rung.py", "rung.py"):
        assert lines._loaded(unknown) == unknown


@pytest.mark.compile
@pytest.mark.parametrize("arch", [75, 90])
def test_operands_of_a_compiled_kernel(arch: int) -> None:
    import gluon_tile

    artifact = gluon_tile.artifact(gluon_tile.TileConfig(), arch)
    code = [f"{i.name} {i.operands}" for i in sass.parse(machine_code.read_cubin(artifact.cubin).sass)]
    (launch,) = parse(page_of("tile_kernel", code))
    found = launch.with_artifact(artifact)
    kinds = {(each.operand, each.space, each.operation) for each in found.accesses if each.space == "global"}
    assert kinds == {("A", "global", "load"), ("B", "global", "load"), (None, "global", "store")}
    stores = {each.operand for each in found.accesses if each.operation == "store" and each.space == "shared"}
    assert stores == {"A", "B"}
    assert found.totals()["A", "global", "load"].ratios() == {"transactions_per_request": 16, "sectors_per_request": 32}
    loop = sass.hot_loop(sass.parse(machine_code.read_cubin(artifact.cubin).sass))
    assert found.ffma_reuse == sass.ffma_reuse(loop) is not None
    moved = replace(artifact, ptx=re.sub(r'(\.file\s+\d+\s+")[^"]*/', r"\1/gone/tests/", artifact.ptx))
    assert moved.ptx != artifact.ptx
    assert launch.with_artifact(moved).accesses == found.accesses
    (other,) = parse(page_of("tile_kernel", [*code, "NOP"]))
    unknown = other.with_artifact(artifact)
    assert ({each.operand for each in unknown.accesses}, unknown.ffma_reuse) == ({None}, None)


@pytest.mark.compile
def test_the_artifact_of_a_request() -> None:
    request = Request("portable", (256, 256, 64), "float16", "nn", "block_m=64")
    found = instructions.artifact(request, 80)
    assert found is not None
    assert (found.arch, found.dtype, found.layout, found.tile[0]) == ("sm_80", "float16", "nn", 64)
    assert instructions.artifact(Request("cublas", (8, 8, 8), "float16", "nn"), 80) is None
    assert instructions.artifact(request, 70) is None, "no artifact for this architecture"


def test_code_without_accesses() -> None:
    assert Code("k", ("EXIT",), ()).totals() == {}


def test_a_kernel_without_shared_memory_lacks_its_columns() -> None:
    page = page_of("naive", ["LDG.E R0, desc[UR4][R2.64]", "STG.E desc[UR4][R2.64], R0"])
    for name in ("L1 Wavefronts Shared Ideal", "L1 Wavefronts Shared"):
        rows = list(csv.reader(io.StringIO(page)))
        column = rows[1].index(name)
        kept = [rows[0], *([cell for i, cell in enumerate(row) if i != column] for row in rows[1:])]
        out = io.StringIO()
        csv.writer(out, quoting=csv.QUOTE_ALL).writerows(kept)
        page = out.getvalue()
    (code,) = parse(page)
    assert [access.counts.executed for access in code.accesses] == [4, 4]
    assert [access.counts.wavefronts for access in code.accesses] == [0, 0]
