"""A pack is built without a GPU, and a process that may compile nothing runs from it."""

import hashlib
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support import commands, shared_compiles, stored
from support.known import H100
from support.paths import ROOT
from support.served_by_pack import SERVED

from outblas.autotune import packed_tables
from outblas.autotune.store.records import Workload
from outblas.autotune.store.store import Store
from outblas.autotune.store.tables import TABLES
from outblas.base import machines, pack, registry
from outblas.base.facts import digest
from outblas.call.artifact import example
from outblas.call.products import Products, parse_line
from outblas.device.triton_variant import TritonVariant
from outblas.packing import build, triton_kernels

pytestmark = pytest.mark.compile

# Rows that TMA cannot load, of which Triton computes products; fp8 operands, which a kernel of
# Triton quantizes. Other products are planned in test_model_packs.py.
LINES = ("2x64x33 nn", "16x512x512 fp8-e4m3 1x128:128x128")
GROUPED = ("64x512x512 groups:4",)
PRODUCTS = [parse_line(line) for line in LINES]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, shared_store: shared_compiles.Store) -> Path:
    """A pack of `LINES` and `GROUPED`, by the command, once for all processes of a run."""
    folder = tmp_path_factory.mktemp("pack")
    shapes, path = folder / "products.txt", folder / "built.outblas"

    def build_it() -> bytes:
        shapes.write_text("\n".join((*LINES, *GROUPED)), encoding="utf-8")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OUTBLAS_CACHE_DIR", str(folder / "cache"))
            commands.invoke("pack", "build", "--shapes", shapes, "-o", path, "--jobs", 1, code=0)
        return path.read_bytes()

    path.write_bytes(shared_store.kept(("a pack", LINES, GROUPED), build_it))
    return path


@pytest.fixture
def opened(built: Path) -> pack.Pack:
    return pack.read(built)


def test_a_pack_has_what_every_product_launches(opened: pack.Pack) -> None:
    """Of each number of rows, by the choice that a call makes, and by that of OUTBLAS_TUNE=off."""
    machine, module = machines.find("H100"), registry.load("hopper.gemm")
    index = build.index_of({name: opened.table(name) for name in opened.tables}, machine)
    missing = []

    for products in PRODUCTS:
        for problem in build._problems(products, machine):
            for choice in (
                build.chosen(index, machine, problem),
                build.ruled(machine, problem),
            ):
                kernel, config = choice
                if kernel != "hopper.gemm":
                    (variant,) = triton_kernels.of_problem(problem, machine, kernel, config)
                    assert digest(variant.cache_key_fields) in opened.objects
                    continue
                given = build.configs.from_text(module.Config, config) if config else None
                for variant in module.pack_variants(problem, given, machine):
                    if digest(variant.cache_key_fields) not in opened.objects:
                        missing.append((str(products), problem.M, choice))

    assert missing == []


def test_a_fresh_process_compiles_nothing(
    built: Path, opened: pack.Pack, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It has no cache, and may not compile."""
    monkeypatch.setenv("OUTBLAS_PACK", str(built))
    monkeypatch.setenv("OUTBLAS_COMPILE", "never")
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path / "none"))

    done = subprocess.run(
        [sys.executable, "-c", SERVED, *LINES, *GROUPED],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(opened.objects)
    assert not (tmp_path / "none").exists()


# ---- the command
def test_a_pack_is_shown_as_json(built: Path, opened: pack.Pack) -> None:
    shown = json.loads(commands.invoke("pack", "show", built, "--json", code=0).stdout)

    assert {row["name"]: row["sha256"] for row in shown["tables"]} == {
        f"shipped/{path.name}": hashlib.sha256(path.read_bytes()).hexdigest()
        for path in TABLES.glob("*.json")
    }
    assert shown["objects"] == len(opened.objects)


def test_a_pack_of_other_sources_is_named(built: Path, opened: pack.Pack, tmp_path: Path) -> None:
    other, toolchain = tmp_path / "other", opened.toolchain | {"source": "older"}
    objects = [
        ({"kernel": each.kernel, **toolchain}, opened.code(name) or b"")
        for name, each in opened.objects.items()
    ]
    pack.write(other, opened.about, objects)

    done = commands.invoke("pack", "verify", other, code=1)

    assert "built with source older" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected --shapes or --model, one of them"),
        (["--model", "gpt-9"], "--model is 'gpt-9', expected llama-3-8b"),
        (["--model", "llama-3-8b", "--rows", "9-1"], "--rows is '9-1', expected numbers"),
        (["--model", "llama-3-8b", "--store", "/nonexistent/x"], "--store is '/nonexistent/x'"),
        (["--model", "llama-3-8b", "--gpu", "A100"], "--gpu is A100, of sm_80, expected one of"),
    ],
)
def test_bad_options_of_a_build_are_refused(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    commands.refuses(message, "pack", "build", "-o", tmp_path / "x", *arguments)

    assert list(tmp_path.iterdir()) == []


# ---- what a build would compile
@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a build would compile; nothing is compiled."""
    found: list[Any] = []

    def compiled(variants: list[Any], *_: Any) -> list[Any]:
        found.extend(variants)
        return []

    monkeypatch.setattr(build, "compiled", compiled)
    return found


def test_results_of_a_store_choose_kernels_and_are_packed(
    wanted: list[Any], tmp_path: Path
) -> None:
    module, machine = registry.load("hopper.gemm"), machines.find("H100")
    own = module.Config(tile_n=192, group_m=5)
    store, path = tmp_path / "own.sqlite", tmp_path / "own.outblas"
    with Store(store) as opened:
        workload = Workload(4096, 4096, 4096)
        config = build.configs.to_text(own)
        opened.record_best(
            stored.winner(gpu=H100, workload=workload, kernel="hopper.gemm", config=config)
        )

    build.build([Products(((4096, 4096),), 4096, 4096)], path, store=store)

    problem = example(torch.bfloat16, None, "nt", (4096, 4096, 4096))
    assert set(module.pack_variants(problem, own, machine)) <= set(wanted)
    packed = pack.read(path)
    assert sorted(packed.tables)[0] == packed_tables.OWN_RESULTS
    assert config in packed.table(packed_tables.OWN_RESULTS).decode()


def test_a_product_that_the_kernel_does_not_support_is_one_of_portable(
    wanted: list[Any], tmp_path: Path
) -> None:
    """Gated pairs come in eights of columns where the rows of B are contiguous."""
    products = [parse_line("64x12x64 nn swiglu batch-invariant")]

    done = build.build(products, tmp_path / "x.outblas")

    assert done.left_out == {}
    assert [each.name for each in wanted] == ["portable.matmul_kernel"]


@pytest.mark.parametrize(
    ("line", "kernels"),
    [
        ("16x512x512 fp8-e4m3 1x128:128x128", {"quantize.tile_kernel": 1}),
        ("1-512x512x512 fp8-e4m3 1x128:128x128", {"quantize.tile_kernel": 5}),
        ("16x512x512 fp8-e4m3 rowwise", {"quantize.row_kernel": 1}),
        (
            "16x512x512 fp8-e4m3 tensorwise",
            {"quantize.largest_kernel": 1, "quantize.tile_kernel": 1},
        ),
        # A result of 200 columns is quantized by a kernel of its own.
        ("16x200x512 fp8-e4m3 1x128:128x128 to-e4m3", {"quantize.tile_kernel": 2}),
        ("16x512x512 fp8-e4m3 1x128:128x128 groups:4:masked", {"quantize.tile_kernel": 1}),
        ("512x512x512 fp8-e4m3 1x128 groups:4:terms", {}),
        (
            "64x256x512 swiglu groups:4 top:2",
            {
                "moe.count_kernel": 1,
                "moe.rank_kernel": 1,
                "moe.dispatch_kernel": 1,
                "moe.combine_kernel": 2,
            },
        ),
        ("63x256x512 swiglu groups:4 top:2", {}),  # no number of tokens has so many rows
        ("16x512x512", {}),
    ],
)
def test_kernels_of_triton_around_products_are_packed(
    line: str, kernels: dict[str, int], wanted: list[Any], tmp_path: Path
) -> None:
    done = build.build([parse_line(line)], tmp_path / "x.outblas")

    found = Counter(each.name for each in wanted if isinstance(each, TritonVariant))
    assert found == kernels
    assert done.left_out == {}
