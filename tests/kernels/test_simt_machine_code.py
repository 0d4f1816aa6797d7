"""What the CUDA-core ladder compiles to, without a GPU.

`inspect` disassembles, which is kept for all tests of a run; where PTX and the assembler's log say
enough, `support.assembled` looks at those.
"""

import threading
from typing import Any

import pytest
import torch
from support import assembled
from support.covering import covering
from support.rungs import NAMES, bodies, fitted, own, valid_configs
from support.shared_compiles import Store

import outblas
from outblas.core import registry
from outblas.core.configs import from_text
from outblas.inspect import inspect
from outblas.inspect.inspection import Inspection
from outblas.kernels.simt_config import PRESETS, SimtConfig

STAGED = NAMES[NAMES.index("simt.shared") :]
SASS_OF_TENSOR_CORES = ("HMMA", "QMMA", "HGMMA", "QGMMA", "IMMA", "IGMMA", "DMMA", "BMMA")
TENSOR_CORE = (*SASS_OF_TENSOR_CORES, "LDSM", "STSM", *assembled.TENSOR_CORE)


@pytest.fixture(autouse=True)
def _shared(shared_store: Store) -> None:
    """Tests without the mark `compile` share what was assembled and disassembled, too."""
    shared_store.share()


# ---- every rung
@pytest.mark.parametrize("arch", [75, 80, pytest.param(90, marks=pytest.mark.compile)])
@pytest.mark.parametrize("name", NAMES)
def test_no_rung_touches_a_tensor_core_or_spills(name: str, arch: int) -> None:
    inspect(name, arch=arch).require(lacks=TENSOR_CORE)


@pytest.mark.parametrize("arch", [75, 80, pytest.param(90, marks=pytest.mark.compile)])
@pytest.mark.parametrize("name", NAMES)
def test_every_product_of_a_k_block_is_an_ffma(name: str, arch: int) -> None:
    config = own(name)

    assert inspect(name, arch=arch).count("FFMA") >= config.accumulators * config.block_k


OPERANDS = {
    "float32-nt": (torch.float32, "nt"),
    "bfloat16-nn": (torch.bfloat16, "nn"),
    "float16-tn": (torch.float16, "tn"),
}


@pytest.mark.long
@pytest.mark.parametrize(("name", "operands"), covering({name: name for name in NAMES}, OPERANDS))
def test_other_dtypes_and_layouts_touch_no_tensor_core_nor_spill(
    name: str, operands: tuple[torch.dtype, str]
) -> None:
    dtype, layout = operands

    artifact = registry.load(name).artifact(dtype=dtype, layout=layout)

    assembled.require(artifact, lacks=assembled.TENSOR_CORE)


@pytest.mark.compile
@pytest.mark.parametrize(("name", "text"), PRESETS.values(), ids=PRESETS)
def test_presets_touch_no_tensor_core_nor_spill(name: str, text: str) -> None:
    artifact = registry.load(name).artifact(from_text(registry.load(name).Config, text))

    assembled.require(artifact, lacks=assembled.TENSOR_CORE)


@pytest.mark.parametrize("name", STAGED)
def test_shared_memory_is_what_the_formula_says(name: str) -> None:
    stages = 2 if name == "simt.pipelined" else 1
    whole = stages * own(name).k_block_bytes

    taken = registry.load(name).artifact().smem_bytes

    assert whole - 64 * stages <= taken <= whole + 1024, "the last row needs no padding"


# ---- the idea of a rung
@pytest.fixture
def code() -> dict[str, Inspection]:
    """What each rung compiles to by default, made when it is asked for."""

    class Codes(dict[str, Inspection]):
        def __missing__(self, name: str) -> Inspection:
            return inspect(f"simt.{name}")

    return Codes()


@pytest.mark.compile
class TestTheIdeaOfARung:
    @pytest.mark.parametrize("name", ["naive", "coalesced"])
    def test_the_first_rungs_share_nothing(self, name: str, code: dict[str, Inspection]) -> None:
        code[name].require(lacks=("LDS", "STS", "BAR"))

    @pytest.mark.parametrize("name", [name.removeprefix("simt.") for name in STAGED])
    def test_later_rungs_read_shared_memory_between_barriers(
        self, name: str, code: dict[str, Inspection]
    ) -> None:
        code[name].require(has=("LDS",))
        assert code[name].count("BAR") >= 2

    def test_register_tiles_are_loaded_without_vectors(self, code: dict[str, Inspection]) -> None:
        code["register"].require(lacks=("LDG.E.128",))

    @pytest.mark.parametrize("name", ["vectorized", "warptile", "pipelined"])
    def test_vectors_load_and_store_16_bytes(self, name: str, code: dict[str, Inspection]) -> None:
        code[name].require(has=("LDG.E.128",))
        assert code[name].count("STG.E.128") == own(f"simt.{name}").accumulators // 4

    def test_a_pipeline_takes_half_the_barriers(self, code: dict[str, Inspection]) -> None:
        """One for each of the two k-blocks of an iteration, and one before the loop; the parent has
        two for its one.
        """
        assert code["warptile"].count("BAR") == 2
        assert code["pipelined"].count("BAR") == 3

    def test_a_pipeline_reuses_more_operands(self, code: dict[str, Inspection]) -> None:
        pipelined, warptile = code["pipelined"].ffma_reuse, code["warptile"].ffma_reuse

        assert pipelined is not None
        assert warptile is not None
        assert pipelined > warptile + 0.05


@pytest.mark.compile
@pytest.mark.parametrize("name", ["simt.shared", "simt.register", "simt.vectorized"])
def test_registers_are_those_of_the_ctas_asked_for(name: str) -> None:
    inspect(name).require(min_ctas=2)


@pytest.mark.compile
def test_a_kernel_is_inspected_as_its_documents_measure_it() -> None:
    found = inspect("simt.vectorized")

    assert (found.dtype, found.layout) == ("float32", "nn")
    assert "simt_vectorized_128x128x8_fp32" in found.name


# ---- any config
def builds(configs: list[SimtConfig]) -> list[Any]:
    """Each config as that of a rung of every body that takes it."""
    return [(name, fitted(name, config)) for config in configs for name in bodies(config)]


CONFIGS = valid_configs(4, seed=1)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        *builds(CONFIGS[:2]),
        *(pytest.param(*build, marks=pytest.mark.slow) for build in builds(CONFIGS[2:])),
    ],
    ids=str,
)
def test_any_valid_config_compiles(name: str, config: SimtConfig) -> None:
    assert registry.load(name).artifact(config).cubin


@pytest.mark.compile
@pytest.mark.oldest_triton
def test_compiling_beside_the_interpreter() -> None:
    """It patches triton.language for every thread."""
    a, stop = torch.randn(96, 96), threading.Event()

    def interpret() -> None:
        while not stop.is_set():
            outblas.matmul(a, a, kernel="portable")

    beside = threading.Thread(target=interpret)
    beside.start()
    try:
        for rows in (3, 5):  # groups that no other test compiles
            assert registry.load("simt.shared").artifact(own("simt.shared", group_m=rows)).cubin
    finally:
        stop.set()
        beside.join()
