"""Memory instructions in ncu's source page, and the operands that their source lines name.

`data/ncu_source_h100.csv` has rows, with 24 columns, of what ncu 2025.3.1 printed on an H100 at
2048³ in fp32: cuBLAS, a kernel that loads A in rows of 32 bytes and B in lines, and one that copies
both asynchronously. Of these columns the reader needs eight; others are what ncu derives from them,
by which the reader is checked.
"""

import csv
import io
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from support.paths import DATA

from outblas.inspect import instructions, lines, machine_code, sass
from outblas.inspect.instructions import Access, Code, Counts, parse
from outblas.inspect.lines import Location
from outblas.inspect.profiled import Request

PAGE = DATA / "ncu_source_h100.csv"


def launches() -> list[Code]:
    return parse(PAGE.read_text())


def page_of(code: list[str], without: tuple[str, ...] = ()) -> str:
    """A source page in which every instruction runs 4 times, as a load of 16 lines and 32 sectors
    would.
    """
    figures = zip(instructions.COLUMNS.items(), (4, 32 * 4, 16 * 4, 32 * 4, 0, 0), strict=True)
    kept = {column: figure for (name, column), figure in figures if name not in without}
    out = io.StringIO()
    rows = [["Kernel Name", "tile_kernel", ""], [instructions._SASS, instructions._BITS, *kept]]
    csv.writer(out, quoting=csv.QUOTE_ALL).writerows(
        [*rows, *([text, "", *kept.values()] for text in code)]
    )
    return out.getvalue()


def test_the_page_of_three_launches() -> None:
    found = parse(f"==PROF== Connected\n{PAGE.read_text()}")
    cublas = "void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>(T1::Params)"
    assert [(code.kernel, len(code.mnemonics)) for code in found] == [
        (cublas, 18),
        ("kernel2", 19),
        ("kernel", 13),
    ]
    _, loads, copies = found
    assert loads.mnemonics[:2] == ("LDC", "LDG.E.128")
    assert loads.mnemonics[-1] == "NOP"
    counts = Counts(1024, 32768 * 16, 16384, 16384, 0, 0)
    assert loads.accesses[0] == Access(
        1, "LDG.E.128 R12, desc[UR10][R2.64]", "global", "load", 16, counts
    )
    last = loads.accesses[-1]
    assert (last.space, last.operation, last.counts.ratios()["transactions_per_request"]) == (
        "global",
        "store",
        8,
    )
    copy = copies.accesses[0]
    assert (copy.space, copy.operation, copy.bytes) == ("global", "copy", 4)


def test_instructions_that_no_thread_ran_are_left_out() -> None:
    cublas = launches()[0]
    assert "LDG.E.64" in cublas.mnemonics, "never executed"
    assert "LDG.E" in cublas.mnemonics, "executed, and every thread predicated off"
    assert [each.operation for each in cublas.accesses] == ["copy"] * 2 + ["store"] * 4
    assert cublas.accesses[-1].sass == "@P1 STG.E [R146+0x80], R65"


def test_generic_addresses_are_global_where_lines_were_looked_up() -> None:
    """As in epilogues of cuBLAS's fp32 kernels."""
    text = page_of(["ST.E.64 [R2], R4", "LD.E R0, [R2]"])
    (code,) = parse(text)
    assert [(each.space, each.operation, each.bytes) for each in code.accesses] == [
        ("global", "store", 8),
        ("global", "load", 4),
    ]
    (code,) = parse(text.replace('"64"', '"0"'))
    assert {each.space for each in code.accesses} == {"shared"}


def test_totals_by_space_and_operation() -> None:
    loads = launches()[1].totals()
    of_loads = loads[None, "global", "load"]
    assert of_loads.executed == 4 * (1024 + 262144)
    assert of_loads.requested == 16 * 4 * (32768 + 8355840)
    assert of_loads.transactions == 2 * (16384 + 4177920) + 2 * (4096 + 1044480)
    assert of_loads.efficiency == pytest.approx(0.4), "of B all, of A a quarter of each line"
    assert loads[None, "shared", "store"].wavefronts == 3 * 1024 - 1024 + 4096 + 262144 + 1048576


def test_records_say_only_what_an_access_has() -> None:
    _, loads, copies = launches()
    assert list(loads.accesses[0].record().items()) == [
        ("sass", "LDG.E.128 R12, desc[UR10][R2.64]"),
        ("operand", None),
        ("space", "global"),
        ("operation", "load"),
        ("bytes", 16),
        ("executed", 1024),
        ("transactions_per_request", 16),
        ("sectors_per_request", 16),
        ("wavefronts", None),
        ("ideal", None),
        ("excess", None),
    ]
    shared = next(each for each in loads.accesses if each.space == "shared").record()
    assert (shared["transactions_per_request"], shared["wavefronts"], shared["excess"]) == (
        None,
        1024,
        0,
    )
    copy = copies.accesses[0].record()
    assert (copy["transactions_per_request"], copy["ideal"], copy["excess"]) == (4, 1024, 10240)
    kind, counts = next(iter(copies.totals().items()))
    total = instructions.total_record(*kind, counts)
    assert (total["operation"], total["efficiency"]) == (
        "copy",
        counts.requested / (128 * counts.transactions),
    )
    assert total["excess"] == total["wavefronts"] - total["ideal"] > 0


def printed_rows():
    """The rows of each launch as ncu printed them, by the names of their columns."""
    launches = []
    for row in csv.reader(io.StringIO(PAGE.read_text())):
        if row[0] == "Kernel Name":
            launches.append([])
        elif row[0] == "Address":
            columns = row
        else:
            launches[-1].append(dict(zip(columns, row, strict=True)))
    return launches


@pytest.mark.parametrize("launch", range(3))
def test_spaces_operations_and_excess_are_those_that_ncu_prints(launch: int) -> None:
    rows = printed_rows()[launch]
    named = {
        ("global", "load"): ("Global", "Load"),
        ("global", "store"): ("Global", "Store"),
        ("global", "copy"): ("Global,Shared", "Load,Store"),
        ("shared", "load"): ("Shared", "Load"),
        ("shared", "store"): ("Shared", "Store"),
    }
    found = launches()[launch].accesses
    assert found
    for access in found:
        row = rows[access.index]
        kind = row["Address Space"], row["Access Operation"]
        assert kind == named[access.space, access.operation], access.sass
        if access.space == "shared" or access.operation == "copy":
            excessive = int(row["L1 Wavefronts Shared Excessive"])
            assert access.counts.excess == excessive, access.sass


def test_efficiency_of_one_request() -> None:
    efficiencies = [
        Counts(1, 32 * 4, transactions, 32, 0, 0).efficiency for transactions in (32, 1, 0)
    ]
    assert efficiencies == [1 / 32, 1, None]


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
    /*0000*/     LDC R1, c[0x0][0x28] ;
line 8
    /*0010*/  @!P0 LDG.E R6, desc[UR4][R2.64] ;
.L_x_0:
line 12
    /*0020*/     LDG.E R7, desc[UR4][R2.64+0x4] ;
line 15
    /*0030*/     LDS R4, [R4] ;
    /*0040*/     LDS R5, [R5] ;
line 17
    /*0050*/     STS [R4], R6 ;
line 19
    /*0060*/     EXIT ;
line 99
    /*0070*/     NOP ;
""".replace("line", '\t//## File ".nv_debug_ptx_txt", line')


def test_lines_of_ptx_and_of_a_listing() -> None:
    rung, tile = Location("/k/rung.py", 5), Location("/k/tile.py", 43)
    inlined = (tile, Location("/k/rung.py", 9))
    of_ptx = lines.places(PTX)
    assert of_ptx[7] == (rung,), "inside inline assembly, whose lines are counted on"
    assert of_ptx[11] == (rung,), "after it"
    found = lines.locations(LISTING, PTX)
    assert found == [(), (rung,), (rung,), (tile,), (tile,), inlined, (), ()]
    assert len(sass.parse(LISTING)) == len(found)


def test_operands_by_line_and_where_it_is_inlined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rung = tmp_path / "rung.py"
    rung.write_text("\n" * 4 + "gl.load(a_ptr)\ngl.load(b_ptr)\n" + "\n" * 2 + "copy(b_ptr)\n")
    monkeypatch.setattr(lines, "with_ptx_lines", lambda cubin: LISTING)
    names = [instruction.name for instruction in sass.parse(LISTING)]
    ptx = PTX.replace("/k/rung.py", str(rung))
    assert lines.operands(b"", ptx, names) == [None, "A", "A", None, None, "B", None, None]
    assert lines.operands(b"", ptx, names[:-1]) == [None] * 7, "other code"
    assert lines.operands(b"", ptx, [*names[:-1], "BRA"]) == [None] * 8, (
        "other code of the same length"
    )


def test_a_source_is_the_loaded_module_that_its_path_ends_like_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = {ladder: str(tmp_path / "here" / ladder / "rung.py") for ladder in ("simt", "turing")}
    for ladder, file in here.items():
        module = ModuleType(f"{ladder}.rung")
        module.__file__ = file
        monkeypatch.setitem(sys.modules, module.__name__, module)
    there = tmp_path / "there" / "turing" / "rung.py"
    there.parent.mkdir(parents=True)
    there.write_text("what the other checkout says by now\n")
    assert lines._loaded(str(there)) == here["turing"]
    assert lines._loaded(here["simt"]) == here["simt"]
    for unknown in ("/gone/turing/unknown.py", "/gone/unknown/rung.py", "rung.py"):
        assert lines._loaded(unknown) == unknown


@pytest.mark.compile
@pytest.mark.parametrize("arch", [75, 90])
def test_operands_of_a_compiled_kernel(
    arch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from support import gluon_tile

    # Triton's own cache may have this code with the lines of an earlier text of the same kernel.
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    artifact = gluon_tile.artifact(gluon_tile.TileConfig(), arch)
    compiled = sass.parse(machine_code.read_cubin(artifact.cubin).sass)
    code = [f"{each.name} {each.operands}" for each in compiled]
    (launch,) = parse(page_of(code))
    found = launch.with_artifact(artifact)
    assert {kind for kind in found.totals() if kind[1:] != ("shared", "load")} == {
        ("A", "global", "load"),
        ("B", "global", "load"),
        (None, "global", "store"),
        ("A", "shared", "store"),
        ("B", "shared", "store"),
    }
    assert found.totals()["A", "global", "load"].ratios() == {
        "transactions_per_request": 16,
        "sectors_per_request": 32,
    }
    assert found.ffma_reuse == sass.ffma_reuse(sass.hot_loop(compiled)) is not None
    moved = replace(
        artifact, ptx=re.sub(r'(\.file\s+\d+\s+")[^"]*/', r"\1/gone/support/", artifact.ptx)
    )
    assert moved.ptx != artifact.ptx
    assert launch.with_artifact(moved).accesses == found.accesses
    (other,) = parse(page_of([*code, "NOP"]))
    unknown = other.with_artifact(artifact)
    assert ({each.operand for each in unknown.accesses}, unknown.ffma_reuse) == ({None}, None)


REQUEST = Request("simt.naive", (4096, 4096, 4096), "float32", "nn", "group_m=4")


@pytest.mark.compile
def test_the_artifact_of_a_request_is_what_was_asked_for() -> None:
    found = instructions.artifact(REQUEST, 80)

    assert found is not None
    assert (found.arch, found.dtype, found.layout) == ("sm_80", "float32", "nn")
    assert "group_m=4" in found.config


def test_cublas_has_no_artifact() -> None:
    assert instructions.artifact(Request("cublas", (8, 8, 8), "float16", "nn"), 80) is None


def test_an_architecture_that_nothing_compiles_for_has_no_artifact() -> None:
    assert instructions.artifact(REQUEST, 70) is None


def test_code_without_accesses() -> None:
    assert Code("k", ("EXIT",), ()).totals() == {}


def test_a_kernel_without_shared_memory_lacks_its_columns() -> None:
    code = ["LDG.E R0, desc[UR4][R2.64]", "STG.E desc[UR4][R2.64], R0"]
    (launch,) = parse(page_of(code, without=("wavefronts", "ideal")))
    assert [(each.counts.executed, each.counts.wavefronts) for each in launch.accesses] == [
        (4, 0),
        (4, 0),
    ]
