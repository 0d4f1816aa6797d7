"""Memory instructions in ncu's source page, and the operands that their source lines name.

`data/ncu_source_h100.csv` has rows, with 24 columns, of what ncu 2025.3.1 printed on an H100 at
2048³ in fp32: cuBLAS, a kernel that loads A in rows of 32 bytes and B in lines, and one that copies
both asynchronously. Of these columns the reader needs eight; others are what ncu derives from them,
by which the reader is checked.
"""

import csv
import functools
import io
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from support.paths import DATA

from outblas.core.artifact import Artifact
from outblas.inspect import instructions, machine_code, sass
from outblas.inspect.instructions import Access, Code, Counts, parse
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


class TestThePage:
    """Three launches, as ncu printed them."""

    def test_has_the_kernels_and_their_instructions(self) -> None:
        cublas = "void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>(T1::Params)"

        found = parse(f"==PROF== Connected\n{PAGE.read_text()}")

        assert [(code.kernel, len(code.mnemonics)) for code in found] == [
            (cublas, 18),
            ("kernel2", 19),
            ("kernel", 13),
        ]

    def test_has_all_instructions_of_a_kernel(self) -> None:
        mnemonics = launches()[1].mnemonics

        assert (mnemonics[:2], mnemonics[-1]) == (("LDC", "LDG.E.128"), "NOP")

    def test_has_loads_with_their_counts(self) -> None:
        counts = Counts(1024, 32768 * 16, 16384, 16384, 0, 0)

        assert launches()[1].accesses[0] == Access(
            1, "LDG.E.128 R12, desc[UR10][R2.64]", "global", "load", 16, counts
        )

    def test_has_stores(self) -> None:
        last = launches()[1].accesses[-1]

        assert (last.space, last.operation) == ("global", "store")
        assert last.counts.ratios()["transactions_per_request"] == 8

    def test_has_asynchronous_copies(self) -> None:
        copy = launches()[2].accesses[0]

        assert (copy.space, copy.operation, copy.bytes) == ("global", "copy", 4)


@pytest.mark.parametrize(
    "mnemonic",
    [
        pytest.param("LDG.E.64", id="never executed"),
        pytest.param("LDG.E", id="executed, and every thread predicated off"),
    ],
)
def test_an_instruction_that_no_thread_ran_is_no_access(mnemonic: str) -> None:
    cublas = launches()[0]

    assert mnemonic in cublas.mnemonics
    assert all(f"{mnemonic} " not in access.sass for access in cublas.accesses)


def test_what_some_threads_ran_is_an_access() -> None:
    accesses = launches()[0].accesses

    assert [each.operation for each in accesses] == ["copy"] * 2 + ["store"] * 4
    assert accesses[-1].sass == "@P1 STG.E [R146+0x80], R65"


class TestGenericAddresses:
    """As in epilogues of cuBLAS's fp32 kernels."""

    PAGE = page_of(["ST.E.64 [R2], R4", "LD.E R0, [R2]"])

    def test_are_global_where_lines_were_looked_up(self) -> None:
        (code,) = parse(self.PAGE)

        assert [(each.space, each.operation, each.bytes) for each in code.accesses] == [
            ("global", "store", 8),
            ("global", "load", 4),
        ]

    def test_are_shared_where_none_were(self) -> None:
        (code,) = parse(self.PAGE.replace('"64"', '"0"'))

        assert {each.space for each in code.accesses} == {"shared"}


class TestTotals:
    """Those of a kernel that loads A in rows of 32 bytes and B in lines."""

    def test_of_global_loads_add_up(self) -> None:
        found = launches()[1].totals()[None, "global", "load"]

        assert found.executed == 4 * (1024 + 262144)
        assert found.requested == 16 * 4 * (32768 + 8355840)
        assert found.transactions == 2 * (16384 + 4177920) + 2 * (4096 + 1044480)

    def test_of_global_loads_are_efficient_as_of_b_all_is_used_and_of_a_a_quarter(self) -> None:
        found = launches()[1].totals()[None, "global", "load"]

        assert found.efficiency == pytest.approx(0.4)

    def test_of_shared_stores_add_up(self) -> None:
        found = launches()[1].totals()[None, "shared", "store"]

        assert found.wavefronts == 3 * 1024 - 1024 + 4096 + 262144 + 1048576


class TestARecord:
    """What `outblas profile --json` prints of an access: None where it has no such figure."""

    def test_of_a_load_from_global_memory_has_transactions(self) -> None:
        assert list(launches()[1].accesses[0].record().items()) == [
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

    def test_of_shared_memory_has_wavefronts(self) -> None:
        access = next(each for each in launches()[1].accesses if each.space == "shared")

        found = access.record()

        assert found["transactions_per_request"] is None
        assert (found["wavefronts"], found["excess"]) == (1024, 0)

    def test_of_an_asynchronous_copy_has_both(self) -> None:
        found = launches()[2].accesses[0].record()

        assert found["transactions_per_request"] == 4
        assert (found["ideal"], found["excess"]) == (1024, 10240)

    def test_of_a_total_has_its_efficiency_and_its_excess(self) -> None:
        kind, counts = next(iter(launches()[2].totals().items()))

        found = instructions.total_record(*kind, counts)

        assert found["operation"] == "copy"
        assert found["efficiency"] == counts.requested / (128 * counts.transactions)
        assert found["excess"] == found["wavefronts"] - found["ideal"] > 0


def printed_rows() -> list[list[dict[str, str]]]:
    """The rows of each launch as ncu printed them, by the names of their columns."""
    launches: list[list[dict[str, str]]] = []
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


@pytest.mark.parametrize(
    ("transactions", "efficiency"),
    [
        pytest.param(32, 1 / 32, id="a line for each thread"),
        pytest.param(1, 1, id="one line"),
        pytest.param(0, None, id="none was looked up"),
    ],
)
def test_efficiency_is_the_share_of_lines_that_was_asked_for(
    transactions: int, efficiency: float | None
) -> None:
    assert Counts(1, 32 * 4, transactions, 32, 0, 0).efficiency == efficiency


def test_a_page_that_lacks_a_column() -> None:
    with pytest.raises(ValueError, match="the source page lacks L1 Tag Requests Global"):
        parse(PAGE.read_text().replace("L1 Tag Requests Global", "L1 Tags"))


def test_output_without_launches() -> None:
    assert parse("==ERROR== no such report\n") == []


@pytest.fixture(scope="module")
def compiled_for(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Artifact]:
    """Compiles a Gluon kernel for an architecture, once. Triton's own cache may have its code with
    the lines of an earlier text of the same kernel, so that it has an empty one.
    """
    from support import gluon_tile

    folder = tmp_path_factory.mktemp("triton")

    @functools.cache
    def compiled(arch: int) -> Artifact:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_CACHE_DIR", str(folder))
            return gluon_tile.artifact(gluon_tile.TileConfig(), arch)

    return compiled


@pytest.mark.compile
@pytest.mark.parametrize("arch", [75, 90])
class TestACompiledKernel:
    """A page of the code that a Gluon kernel compiles to, and its artifact."""

    @pytest.fixture
    def artifact(self, arch: int, compiled_for: Callable[[int], Artifact]) -> Artifact:
        """The kernel."""
        return compiled_for(arch)

    @pytest.fixture
    def compiled(self, artifact: Artifact) -> list[sass.Instruction]:
        """Its instructions."""
        return list(sass.parse(machine_code.read_cubin(artifact.cubin).sass))

    @pytest.fixture
    def code(self, compiled: list[sass.Instruction]) -> list[str]:
        """Its lines of machine code."""
        return [f"{each.name} {each.operands}" for each in compiled]

    def launch_of(self, code: list[str]) -> Code:
        (launch,) = parse(page_of(code))
        return launch

    def test_loads_and_stores_the_operands_that_its_source_names(
        self, artifact: Artifact, code: list[str]
    ) -> None:
        totals = self.launch_of(code).with_artifact(artifact).totals()

        assert {kind for kind in totals if kind[1:] != ("shared", "load")} == {
            ("A", "global", "load"),
            ("B", "global", "load"),
            (None, "global", "store"),
            ("A", "shared", "store"),
            ("B", "shared", "store"),
        }

    def test_has_ratios_of_an_operand(self, artifact: Artifact, code: list[str]) -> None:
        totals = self.launch_of(code).with_artifact(artifact).totals()

        assert totals["A", "global", "load"].ratios() == {
            "transactions_per_request": 16,
            "sectors_per_request": 32,
        }

    def test_reuses_operands_of_ffma(
        self, artifact: Artifact, code: list[str], compiled: list[sass.Instruction]
    ) -> None:
        found = self.launch_of(code).with_artifact(artifact).ffma_reuse

        assert found == sass.ffma_reuse(sass.hot_loop(compiled)) is not None

    def test_has_the_same_operands_where_it_was_compiled_elsewhere(
        self, artifact: Artifact, code: list[str]
    ) -> None:
        launch = self.launch_of(code)
        elsewhere = re.sub(r'(\.file\s+\d+\s+")[^"]*/', r"\1/gone/support/", artifact.ptx)
        assert elsewhere != artifact.ptx

        found = launch.with_artifact(replace(artifact, ptx=elsewhere))

        assert found.accesses == launch.with_artifact(artifact).accesses

    def test_is_unknown_where_other_code_ran(self, artifact: Artifact, code: list[str]) -> None:
        found = self.launch_of([*code, "NOP"]).with_artifact(artifact)

        assert {each.operand for each in found.accesses} == {None}
        assert found.ffma_reuse is None


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
