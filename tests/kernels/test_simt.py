"""The CUDA-core ladder without a GPU: maps, configs, machine code, what accesses to memory cost;
and what rungs of both Gluon ladders share.
"""

import ast
import itertools
import pickle
import textwrap
import threading
from collections import Counter
from dataclasses import fields
from typing import Any

import pytest
import torch
from support.rungs import NAMES, bodies, fitted, own, problem, rung, valid_configs

import outblas
from outblas.core import registry
from outblas.core.configs import from_text
from outblas.core.problem import Problem
from outblas.device import access, grid, simt
from outblas.device.mapping import Mapping, by_rows, copies, outputs
from outblas.inspect import inspect
from outblas.kernels import simt_access
from outblas.kernels.simt_config import PRESETS, SimtConfig, invalid_reason
from outblas.kernels.simt_maps import maps

STAGED = NAMES[NAMES.index("simt.shared") :]
GLUON = [*NAMES, *(kernel.name for kernel in registry.ladder("turing"))]
TENSOR_CORE = (
    "HMMA",
    "QMMA",
    "HGMMA",
    "QGMMA",
    "IMMA",
    "IGMMA",
    "DMMA",
    "BMMA",
    "LDSM",
    "STSM",
    "mma",
    "wgmma",
    "ldmatrix",
)


def holders(mapping: Mapping) -> Counter[tuple[int, int]]:
    """How often each element is held."""
    bits = len(mapping.registers), len(mapping.lanes), len(mapping.warps)
    return Counter(
        mapping.element(*numbers) for numbers in itertools.product(*(range(2**n) for n in bits))
    )


@pytest.mark.parametrize("config", valid_configs(25), ids=str)
def test_maps_hold_every_element_and_outputs_once(config: SimtConfig) -> None:
    held = maps(config, problem("nt", (256, 256, 256)))
    tile = set(itertools.product(range(config.block_m), range(config.block_n)))
    assert holders(held.outputs) == Counter(tile)
    assert holders(by_rows(held.outputs)) == Counter(tile)
    assert len(held.outputs.lanes) == 5
    assert 2 ** len(held.outputs.warps) == config.num_warps
    if config.block_k > 1:
        assert set(holders(held.a)) == set(
            itertools.product(range(config.block_m), range(config.block_k))
        )
        assert set(holders(held.b)) == set(
            itertools.product(range(config.block_k), range(config.block_n))
        )


def test_a_warp_owns_its_tile_and_a_thread_its_pieces() -> None:
    mapping = outputs((128, 128), (64, 64), (8, 16), (8, 4), False)
    warp = {mapping.element(register, lane, 3) for register in range(128) for lane in range(32)}
    assert warp == set(itertools.product(range(64, 128), range(64, 128)))
    thread = {mapping.element(register, 1) for register in range(128)}
    assert thread == set(
        itertools.product(range(8), [16 * i + 4 + j for i in range(4) for j in range(4)])
    )
    assert [mapping.element(register, 0) for register in (0, 1, 7, 8)] == [
        (0, 0),
        (1, 0),
        (7, 0),
        (0, 1),
    ]


def test_neighbouring_lanes_alternate_where_they_interleave() -> None:
    mapping = outputs((128, 128), (64, 64), (8, 16), (4, 4), True)
    assert [mapping.element(0, lane) for lane in (1, 2, 4)] == [(0, 4), (4, 0), (0, 8)]


def test_copies_go_along_rows_and_repeat_where_threads_are_left() -> None:
    assert [copies((128, 8), 4, 4).element(0, lane) for lane in (1, 2, 31)] == [
        (0, 4),
        (1, 0),
        (15, 4),
    ]
    assert copies((64, 8), 4, 8).registers == ((0, 1),)  # 256 threads share 512 elements
    few = copies((2, 8), 4, 1)
    assert holders(few) == Counter(dict.fromkeys(itertools.product(range(2), range(8)), 2))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("block_m=96", "block_m is 96, expected a power of two from 1 to 1024"),
        (
            "warp_m=256",
            "piece_m, thread_m, warp_m, block_m are 8, 8, 256, 128, expected each to divide the "
            "next",
        ),
        ("thread_n=8", "a warp of 64x64 outputs has 64 threads of 8x8, expected 32"),
        ("pad=3", "pad is 3, expected 0, 1, 2, 4, 8 or 16 words"),
        ("pad=1", "pad is 1, expected a multiple of 4 where A is transposed"),
        ("vector=8", "vector is 8, expected 1, 2 or 4"),
        ("store_at=16", "store_at is 16, expected a term of the k-block, 0 to 15"),
        ("group_m=0", "group_m is 0, expected 1 to 1024"),
        ("ctas=0", "ctas is 0, expected 1 to 32"),
        ("ctas=4", "ctas is 4: 128 registers a thread, too few for 128 sums"),
        ("ctas=32", "ctas is 32: 4096 threads, an SM has at most 2048"),
        ("block_m=512,block_n=512", "the tile takes 2048 threads, expected at most 1024"),
        (
            "thread_m=16,thread_n=16,warp_m=128",
            "thread_m x thread_n is 256 sums a thread, expected at most 128",
        ),
        ("block_k=128", "block_m x block_k is 128 elements a thread, expected at most 64"),
    ],
)
def test_what_a_config_is_refused_for(text: str, reason: str) -> None:
    assert str(invalid_reason(from_text(registry.load("simt.warptile").Config, text))).startswith(
        reason
    )


def test_shared_memory_is_limited_and_is_what_the_formula_says() -> None:
    for name in STAGED:
        artifact = registry.load(name).artifact()
        buffers = 2 if name == "simt.pipelined" else 1
        least = buffers * own(name).k_block_bytes
        assert (
            least - 64 * buffers <= artifact.smem_bytes <= least + 1024
        )  # the last row needs no padding
    reason = invalid_reason(own("simt.warptile"), 16000)
    assert reason == "needs 16896 bytes of shared memory, the device has 16000"


@pytest.mark.parametrize("arch", [75, 80, pytest.param(90, marks=pytest.mark.compile)])
@pytest.mark.parametrize("name", NAMES)
def test_no_rung_touches_a_tensor_core_or_spills(name: str, arch: int) -> None:
    found, config = inspect(name, arch=arch), own(name)
    found.require(lacks=TENSOR_CORE)
    assert found.count("FFMA") >= config.accumulators * config.block_k


@pytest.mark.long
@pytest.mark.parametrize(
    ("dtype", "layout"), [("float32", "nt"), ("bfloat16", "nn"), ("float16", "tn")]
)
@pytest.mark.parametrize("name", NAMES)
def test_machine_code_of_other_dtypes_and_layouts(name: str, dtype: str, layout: str) -> None:
    inspect(name, dtype=dtype, layout=layout).require(lacks=TENSOR_CORE)


@pytest.mark.compile
@pytest.mark.parametrize("name", PRESETS)
def test_presets_compile(name: str) -> None:
    kernel, text = PRESETS[name]
    inspect(kernel, config=text).require(lacks=TENSOR_CORE)


@pytest.mark.compile
def test_the_idea_of_a_rung_is_in_its_machine_code() -> None:
    found = {name.removeprefix("simt."): inspect(name) for name in NAMES}
    for name in ("naive", "coalesced"):
        found[name].require(lacks=("LDS", "STS", "BAR"))
    for name in STAGED:
        found[name[5:]].require(has=("LDS",))
        assert found[name[5:]].count("BAR") >= 2
    found["register"].require(lacks=("LDG.E.128",))
    for name in ("vectorized", "warptile", "pipelined"):
        assert found[name].count("LDG.E.128") > 0
        assert found[name].count("STG.E.128") == own(f"simt.{name}").accumulators // 4
    # One barrier for each of the two k-blocks of an iteration, and one before the loop; the parent
    # has two for its one.
    assert found["pipelined"].count("BAR") == 3
    assert found["warptile"].count("BAR") == 2
    reuse = {name: code.ffma_reuse for name, code in found.items()}
    assert reuse["pipelined"] > reuse["warptile"] + 0.05


def test_neighbouring_ffmas_share_an_operand() -> None:
    text, constraints, count = simt.snake(4, 8)
    assert count == 8
    assert constraints.split(",") == ["=f"] * 8 + ["f"] * 24
    order = [
        [int(part.strip(" $;")) for part in line.removeprefix("fma.rn.f32").split(",")]
        for line in text.split("\n")
    ]
    assert sorted(line[0] for line in order) == list(range(8))
    assert all(line == [line[0] + 8 * i for i in range(4)] for line in order)
    rows_and_columns = [(line[0] % 4, line[0] // 4) for line in order]
    assert all(m == p or n == q for (m, n), (p, q) in itertools.pairwise(rows_and_columns))


def test_what_a_rung_refuses() -> None:
    module = registry.load("simt.pipelined")
    assert "needs CUDA tensors" in str(module.unsupported(problem()))
    with pytest.raises(ValueError, match="dtype is int8, expected float32 or bfloat16"):
        module.artifact(dtype=torch.int8)
    with pytest.raises(
        ValueError, match=r"config is a PortableConfig, expected the Config of simt.pipelined"
    ):
        module.artifact(registry.load("portable").Config())
    for kernel, changes, reason in (
        ("simt.pipelined", {"warp_m": 128, "thread_m": 16}, "thread_m x thread_n is 256"),
        (
            "simt.pipelined",
            {"prefetch": False},
            "prefetch is False, expected True: simt.pipelined has no other",
        ),
        ("simt.warptile", {"store_at": 3}, "store_at is 3, expected 0: simt.warptile has no other"),
        ("simt.naive", {"block_k": 16}, "block_k is 16, expected 1: simt.naive has no other"),
        ("simt.naive", {"block_m": 32.0}, r"block_m is 32.0 \(float\), expected int"),
        ("simt.shared", {"prefetch": 1}, r"prefetch is 1 \(int\), expected bool"),
    ):
        with pytest.raises(ValueError, match=f"config: {reason}"):
            registry.load(kernel).artifact(own(kernel, **changes))


@pytest.mark.parametrize("name", GLUON)
def test_configs_travel_between_processes(name: str) -> None:
    config, base = own(name), rung(name).base
    assert pickle.loads(pickle.dumps(config)) == config
    home = base.__module__ if name in ("simt.naive", "turing.wmma") else registry.module_name(name)
    assert type(config).__module__ == home
    assert {field.name for field in fields(config)} == {field.name for field in fields(base)}


def specialized(name: str, given: Problem) -> tuple[dict[str, Any], dict[str, Any]]:
    """Constants of a rung's kernel and the types of its arguments."""
    constants = rung(name).constants(own(name), given, 90)
    return constants, dict(rung(name).specialization(own(name), given, constants, 90).signature)


@pytest.mark.parametrize("name", GLUON)
def test_wide_products_step_in_64_bits(name):
    """K-blocks lie more than 2³¹ elements apart, strides do not; loops end where K is near 2³¹."""
    dtype = rung(name).dtype
    for layout, shape in (("tn", (2**28, 8, 65)), ("nn", (8, 2**28, 65))):
        constants, types = specialized(name, problem(layout, shape, dtype))
        strides = types["strides"]
        assert constants["TILE"].wide
        assert types["size"].K == "i64"
        assert (strides.a.col if layout == "tn" else strides.b.row) == "i64"
    assert grid.needs_int64(problem("nt", (1, 1, 2**31 - 8 * own(name).block_k), dtype), own(name))


def test_narrow_products_step_in_32_bits() -> None:
    _, types = specialized("simt.shared", problem())
    size, strides = types["size"], types["strides"]
    assert (size.M, strides.a.row, strides.b.row) == ("i32", "i32", "i32")


def test_strides_that_are_known_take_no_argument():
    _, types = specialized("simt.shared", problem())
    assert types["c"] == "constexpr"
    assert types["strides"].a == ("constexpr", "constexpr", "i32", "constexpr")
    assert set(types["strides"].c) == {"constexpr"}


@pytest.mark.parametrize("name", GLUON)
def test_a_body_reads_every_parameter_it_takes(name):
    body = rung(name).body
    (function,) = ast.parse(textwrap.dedent(body.src)).body
    read = {
        node.id
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    assert set(body.arg_names) <= read
    assert len(body.arg_names) <= 15


def test_groups_of_tiles_are_counted_in_32_bits() -> None:
    config = own("simt.shared", group_m=1024)
    assert grid.group_m(config, problem(shape=(16, 2**26, 16))) == 1
    assert grid.group_m(config, problem(shape=(64, 2**26, 16))) == 2
    assert grid.group_m(config, problem(shape=(16, 2**20, 16))) == 1024


def test_predictions_of_narrow_and_unaligned_accesses() -> None:
    """Rows of an odd number of words are read word by word; 16-bit outputs leave 4 at a time; plain
    loads singly.
    """
    strip = by_access("simt.strip")
    assert strip["A load"].instructions == strip["A load"].wavefronts
    half = problem(dtype=torch.float16)
    assert simt_access.in_global(own("simt.register"), half)["out store"].bytes == 8
    wide = own("simt.naive", thread_n=4, piece_n=4, warp_n=4)
    assert simt_access.in_global(wide, problem())["B load"].bytes == 4


@pytest.mark.compile
def test_compiling_beside_the_interpreter() -> None:
    """It patches triton.language for every thread."""
    a, stop = torch.randn(96, 96), threading.Event()

    def interpret() -> None:
        while not stop.is_set():
            outblas.matmul(a, a, kernel="portable")

    beside = threading.Thread(target=interpret)
    beside.start()
    try:
        for rows in (3, 5, 6):  # groups that no other test compiles
            assert registry.load("simt.shared").artifact(own("simt.shared", group_m=rows)).cubin
    finally:
        stop.set()
        beside.join()


@pytest.mark.parametrize("config", valid_configs(4, seed=1), ids=str)
def test_any_valid_config_compiles(config: SimtConfig) -> None:
    for name in bodies(config):
        assert registry.load(name).artifact(fitted(name, config)).cubin


def test_vectors_only_where_operands_are_aligned() -> None:
    config = own("simt.vectorized")
    assert maps(config, problem()).a.registers[:2] == ((0, 1), (0, 2))
    assert maps(config, problem(shape=(128, 128, 126))).a.registers[:2] != ((0, 1), (0, 2))
    transposed = maps(config, problem("tt"))
    assert transposed.a.registers[:2] == transposed.b.registers[:2] == ((1, 0), (2, 0))


def by_access(kernel: str, **changes: Any) -> dict[str, access.Shared]:
    return simt_access.in_shared(own(kernel, **changes), problem())


def test_interleaved_lanes_read_in_half_the_passes() -> None:
    for interleave, passes in ((False, 4), (True, 2)):
        reads = by_access("simt.pipelined", interleave=interleave)
        assert reads["B load"].wavefronts == passes * reads["B load"].instructions
        assert reads["A load"].wavefronts == 2 * reads["A load"].instructions


def test_the_artifact_says_what_conflicts_cost() -> None:
    found = registry.load("simt.vectorized").artifact(own("simt.vectorized", pad=0, piece_n=8))
    assert found.bank_conflicts == {"A store": 1, "B store": 0, "A load": 0, "B load": 4}
    assert found.passes == {"l1": 8 * (16 + 4), "shared": 8 * (4 * 2 + 4 + 16 * (2 + 8))}
    direct = registry.load("simt.naive").artifact()
    assert (direct.bank_conflicts, direct.passes) == (None, {"l1": 32 * (32 + 1)})


@pytest.mark.compile
def test_a_kernel_is_inspected_as_its_documents_measure_it() -> None:
    found = inspect("simt.vectorized")
    assert (found.dtype, found.layout) == ("float32", "nn")
    assert "simt_vectorized_128x128x8_fp32" in found.name


def test_registers_are_those_of_the_ctas_asked_for() -> None:
    assert own("simt.shared").max_registers == 32
    assert own("simt.warptile").max_registers == 255
    for name in ("simt.shared", "simt.register", "simt.vectorized"):
        inspect(name).require(min_ctas=2)
