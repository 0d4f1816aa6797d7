"""Which source line an instruction comes from, and the operand that the line names."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from outblas.inspect import lines, sass
from outblas.inspect.lines import Location


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


RUNG, TILE = Location("/k/rung.py", 5), Location("/k/tile.py", 43)


@pytest.mark.parametrize(
    "line", [pytest.param(7, id="inside inline assembly"), pytest.param(11, id="after it")]
)
def test_inline_assembly_comes_from_the_line_before_it(line: int) -> None:
    """LLVM counts lines on inside of it."""
    assert lines.places(PTX)[line] == (RUNG,)


def test_every_instruction_of_a_listing_comes_from_a_line_or_from_none() -> None:
    inlined = (TILE, Location("/k/rung.py", 9))

    found = lines.locations(LISTING, PTX)

    assert found == [(), (RUNG,), (RUNG,), (TILE,), (TILE,), inlined, (), ()]
    assert len(sass.parse(LISTING)) == len(found)


class TestOperands:
    """Those that the source lines of a listing's instructions name."""

    NAMES = tuple(instruction.name for instruction in sass.parse(LISTING))

    @pytest.fixture
    def ptx(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
        """PTX from a rung whose lines touch A and B, and whose listing is above."""
        rung = tmp_path / "rung.py"
        rung.write_text("\n" * 4 + "gl.load(a_ptr)\ngl.load(b_ptr)\n" + "\n" * 2 + "copy(b_ptr)\n")
        monkeypatch.setattr(lines, "with_ptx_lines", lambda cubin: LISTING)
        return PTX.replace("/k/rung.py", str(rung))

    def test_are_those_of_the_line_or_of_where_it_is_inlined(self, ptx: str) -> None:
        found = lines.operands(b"", ptx, self.NAMES)

        assert found == [None, "A", "A", None, None, "B", None, None]

    @pytest.mark.parametrize(
        "names",
        [
            pytest.param(NAMES[:-1], id="fewer instructions"),
            pytest.param((*NAMES[:-1], "BRA"), id="as many, one of them another"),
        ],
    )
    def test_are_unknown_where_other_code_ran(self, ptx: str, names: tuple[str, ...]) -> None:
        assert lines.operands(b"", ptx, names) == [None] * len(names)


class TestTheSourceOfALine:
    """Triton's cache goes by what a source says: the path may be of another checkout."""

    @pytest.fixture
    def loaded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
        """Two loaded modules of one name, by the folders of their files."""
        files = {
            ladder: str(tmp_path / "here" / ladder / "rung.py") for ladder in ("simt", "turing")
        }
        for ladder, file in files.items():
            module = ModuleType(f"{ladder}.rung")
            module.__file__ = file
            monkeypatch.setitem(sys.modules, module.__name__, module)
        return files

    def test_is_the_loaded_module_that_its_path_ends_like_most(
        self, loaded: dict[str, str], tmp_path: Path
    ) -> None:
        there = tmp_path / "there" / "turing" / "rung.py"
        there.parent.mkdir(parents=True)
        there.write_text("what the other checkout says by now\n")

        assert lines._loaded(str(there)) == loaded["turing"]

    def test_is_the_loaded_module_itself(self, loaded: dict[str, str]) -> None:
        assert lines._loaded(loaded["simt"]) == loaded["simt"]

    @pytest.mark.usefixtures("loaded")
    @pytest.mark.parametrize(
        "path", ["/gone/turing/unknown.py", "/gone/unknown/rung.py", "rung.py"]
    )
    def test_is_its_path_where_no_module_has_its_name_and_folder(self, path: str) -> None:
        assert lines._loaded(path) == path
