"""Variants of kernels, as a snapshot of machine code names them, and the calls they stand for."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.recorded_code import PLAIN

from outblas.core.artifact import example
from outblas.core.problem import Problem
from outblas.inspect import snapshot
from outblas.inspect.variant import KernelVariant, from_record, problem


@pytest.mark.parametrize("layout", ["nt", "nn", "tn", "tt"])
@pytest.mark.parametrize("out_dtype", ["", "float32"])
def test_a_plain_variant_is_the_product_that_inspect_compiles(layout: str, out_dtype: str) -> None:
    variant = KernelVariant(
        kernel="hopper.gemm", arch=90, layout=layout, out_dtype=out_dtype, shape=(64, 72, 80)
    )

    found = problem(variant)

    wanted = torch.float32 if out_dtype else None
    assert found == example(torch.bfloat16, wanted, layout, (64, 72, 80))


class TestAVariantWithEverything:
    """A batch, an output by columns, odd addresses, and all steps of an epilogue."""

    @pytest.fixture
    def found(self) -> Problem:
        """The call that the variant stands for."""
        return problem(
            KernelVariant(
                kernel="hopper.gemm",
                arch=90,
                shape=(64, 48, 32),
                batch=(3,),
                out="columns",
                alignment=(2, 16, 8),
                activation="swiglu",
                bias="row",
                residual="column",
                aux="columns",
            )
        )

    def test_has_its_extents(self, found: Problem) -> None:
        """A gated product has two columns of B for each of C."""
        extents = (found.M, found.N, found.columns, found.K, found.batch)

        assert extents == (64, 48, 96, 32, (3,))

    def test_has_its_output_and_its_addresses(self, found: Problem) -> None:
        assert found.out == (64 * 48, 1, 64)
        assert found.alignment == (2, 16, 8)

    def test_has_its_activation(self, found: Problem) -> None:
        assert (found.epilogue.function, found.epilogue.gated) == ("silu", True)

    @pytest.mark.parametrize(
        ("tensor", "strides"),
        [("bias", (0, 0, 1)), ("residual", (0, 1, 0)), ("aux", (64 * 96, 1, 64))],
    )
    def test_has_its_tensors(self, found: Problem, tensor: str, strides: tuple[int, ...]) -> None:
        assert getattr(found.epilogue, tensor).strides == strides


def gemm_variant(**changed: Any) -> Problem:
    """The call of a variant of hopper.gemm."""
    return problem(KernelVariant(kernel="hopper.gemm", arch=90, shape=(64, 48, 32), **changed))


def test_two_terms_of_fp8_are_one_of_16_bits() -> None:
    fp8 = gemm_variant(formats="e4m3 e5m2")

    assert (fp8.K, fp8.formats) == (16, "e4m3 e5m2")


def test_scales_of_fp8_lie_along_rows_and_columns() -> None:
    epilogue = gemm_variant(formats="e4m3 e5m2", scale_a="column", scale_b="row").epilogue

    assert epilogue.scale_a is not None
    assert epilogue.scale_b is not None
    assert (epilogue.scale_a.strides, epilogue.scale_b.strides) == ((1, 0), (0, 1))


def test_an_addend_scales_too() -> None:
    added = gemm_variant(addend="columns")

    assert (added.c, added.scaled) == ((1, 64), True)


def test_a_variant_may_scale_without_an_addend() -> None:
    scaled = gemm_variant(scaled=True)

    assert (scaled.c, scaled.scaled) == (None, True)


# ---- records
RECORD = {"kernel": "simt.naive", "arch": 80, "dtype": "float32", "layout": "nn", "batch": [3, 5]}


def test_a_record_is_read_as_what_differs_from_a_plain_call() -> None:
    assert from_record(RECORD) == replace(PLAIN, batch=(3, 5))


def test_a_variant_is_recorded_as_what_differs_from_a_plain_call() -> None:
    assert replace(PLAIN, batch=(3, 5)).record() == RECORD


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"kernel": "simt.new"},
            "kernel is 'simt.new' (did you mean 'simt.naive'?), expected one of",
        ),
        ({"arch": 86}, "arch is 86, expected 75 or 80 or 90 for"),
        ({"tile": 64}, "has the field 'tile', expected one of: kernel, arch"),
        ({"tf32": 1}, "has tf32 1, expected bool"),
        ({"shape": [64, 64]}, "shape is (64, 64) and alignment (), expected three numbers"),
        ({"shape": [64, 64, 0]}, "expected a list of numbers, each at least 1"),
        ({"layout": "xy"}, "layout is 'xy'"),
        ({"bias": "diagonal"}, "bias is 'diagonal', expected one of: row, column, rows, columns"),
        ({"activation": "selu"}, "activation is 'selu'"),
        ({"aux": "row"}, "aux is 'row', expected one of: rows, columns"),
    ],
)
def test_unknown_variants_are_refused_by_the_file(
    changed: dict[str, object], message: str, tmp_path: Path
) -> None:
    compiled = {"kernel": "simt.naive", "arch": 80} | changed
    file = tmp_path / "snapshot.json"
    file.write_text(
        json.dumps({"format": 1, "compilers": {}, "variants": {"mine": {"compile": compiled}}})
    )

    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        snapshot.load(file)

    assert str(caught.value).startswith(f"{file}: variant 'mine' ")
