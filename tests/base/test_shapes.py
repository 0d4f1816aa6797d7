"""Shapes as text, by name, and those of a backward pass."""

import pytest
import torch

from outblas.base import shapes

LAYOUTS = ("nt", "nn", "tn", "tt")


def test_deepgemms_shapes_have_many_tokens_or_few() -> None:
    found = shapes.parse("deepgemm")

    assert {M: sum(shape[0] == M for shape in found) for M in (64, 128, 4096)} == {
        64: 6,
        128: 6,
        4096: 5,
    }
    assert len(found) == 17


@pytest.mark.parametrize(("shape", "text"), [((4, 4, 4), "4"), ((8, 16, 24), "8x16x24")])
def test_a_cube_is_written_by_one_size(shape: tuple[int, int, int], text: str) -> None:
    assert shapes.to_text(shape) == text


@pytest.mark.parametrize("text", ["16x16", "decode:gpt-2", "4096x", "-4"])
def test_what_is_no_shape_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"--shapes is .*expected N, MxNxK or one of suite"):
        shapes.parse(text)


# ---- layers of models
@pytest.mark.parametrize(("name", "rows"), [("decode", 7), ("prefill", 3)])
def test_every_layer_of_every_model_has_every_count_of_rows(name: str, rows: int) -> None:
    layers = {layer for model in shapes.LAYERS.values() for layer in model}

    assert len(shapes.parse(name)) == rows * len(layers)


# ---- backward
def stored(rows: int, columns: int, letter: str) -> torch.Tensor:
    """A matrix of random numbers that lies as its letter says."""
    t = torch.randn((rows, columns) if letter == "n" else (columns, rows), dtype=torch.float64)
    return t if letter == "n" else t.t()


def letter_of(t: torch.Tensor) -> str:
    return "n" if t.is_contiguous() else "t"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_products_of_a_backward_pass_are_those_of_autograd(layout: str) -> None:
    """A gradient that lies as its operand does is a product of these shapes and layouts."""
    M, N, K = 5, 6, 7
    a = stored(M, K, layout[0]).requires_grad_()
    b = stored(K, N, layout[1]).requires_grad_()
    of_out = torch.randn(M, N, dtype=torch.float64)
    (a @ b).backward(of_out)
    # As the formulas of mm have them: of what is stored by columns, the transposed gradient.
    da = (of_out, b.t()) if layout[0] == "n" else (b, of_out.t())
    db = (a.t(), of_out) if layout[1] == "n" else (of_out.t(), a)

    found = shapes.backward((M, N, K), layout)

    for (name, shape, letters), (left, right), gradient in zip(
        found, (da, db), (a.grad, b.grad), strict=True
    ):
        product = (left @ right).detach()
        as_stored = gradient if layout["ab".index(name[1].lower())] == "n" else gradient.t()
        torch.testing.assert_close(product, as_stored)
        assert shape == (left.shape[0], right.shape[1], left.shape[1])
        assert letters == letter_of(left) + letter_of(right)
