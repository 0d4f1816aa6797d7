"""Guarded buffers find every change outside of what a kernel may write."""

import itertools
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import broken

from outblas.verify.guards import Guarded

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@st.composite
def guarded_views(draw: Any) -> Guarded:
    """A buffer of up to three dimensions in any order of strides, with gaps, and for inputs stride
    0.
    """
    shape = draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))
    strides, reach = [0] * len(shape), 1
    for dim in draw(st.permutations(range(len(shape)))):
        strides[dim] = reach + draw(st.integers(0, 3))
        reach = strides[dim] * max(1, shape[dim])
    output = draw(st.booleans())
    if not output and draw(st.booleans()):
        strides[0] = 0
    offset, dtype = draw(st.integers(0, 9)), draw(st.sampled_from(DTYPES))
    return Guarded(
        "x",
        shape,
        strides,
        dtype,
        offset=offset,
        guard=draw(st.sampled_from([16, 256])),
        output=output,
    )


def positions_inside(buffer: Guarded) -> set[int]:
    """Where in its storage the elements of the view lie."""
    return {
        buffer.start + sum(i * stride for i, stride in zip(index, buffer.strides, strict=True))
        for index in itertools.product(*map(range, buffer.shape))
    }


def place_of(buffer: Guarded, position: int) -> str:
    """How a report calls a position of the storage."""
    if position < buffer.start:
        return "before it"
    if position in positions_inside(buffer):
        return "inside it"
    return "after it" if position >= buffer.end else "in its gaps"


def flip_a_bit(buffer: Guarded, data: st.DataObject) -> int:
    """Changes any bit of the storage but a sign, and returns its element's position: often one
    beside the ends of the view or of the storage.
    """
    bits = broken.bits_of(buffer.storage)
    last = len(bits) - 1
    edges = [0, buffer.start - 1, buffer.start, buffer.end - 1, buffer.end, last]
    position = data.draw(st.sampled_from(edges) | st.integers(0, last))
    bits[position] ^= 1 << data.draw(st.integers(0, 8 * bits.itemsize - 2))
    return position


def armed(buffer: Guarded) -> Guarded:
    """The buffer, written and then armed."""
    buffer.cells.fill_(1.5)
    buffer.arm()
    return buffer


@given(guarded_views())
@settings(max_examples=60, deadline=None)
def test_what_is_written_before_it_is_armed_is_no_violation(buffer: Guarded) -> None:
    buffer = armed(buffer)

    assert buffer.violation(writable=True) is None
    assert buffer.violation(writable=False) is None


@given(guarded_views(), st.data())
@settings(max_examples=200, deadline=None)
def test_any_changed_bit_outside_of_what_may_be_written_is_found(
    buffer: Guarded, data: st.DataObject
) -> None:
    buffer = armed(buffer)
    position = flip_a_bit(buffer, data)

    of_output, of_input = buffer.violation(writable=True), buffer.violation(writable=False)

    assert (of_output is None) == (position in positions_inside(buffer))
    found = f"x: elements overwritten 1 {place_of(buffer, position)}; first at offset "
    assert of_input.startswith(f"{found}{position - buffer.start}")


@given(guarded_views(), st.data())
@settings(max_examples=60, deadline=None)
def test_a_reset_puts_back_what_was_armed(buffer: Guarded, data: st.DataObject) -> None:
    buffer = armed(buffer)
    flip_a_bit(buffer, data)

    buffer.reset()

    assert buffer.violation(writable=False) is None
