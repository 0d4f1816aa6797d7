"""The order in which providers are timed, so that neither drift nor neighbours favour one of
them.
"""

from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def rounds(names: Sequence[T], count: int) -> Iterator[list[T]]:
    """Yields the orders of `count` rounds, a Williams design.

    Over n rounds (2n for odd n) every provider takes every position and follows every other
    provider equally often. The heat and the cache contents that one leaves behind thus reach all
    others equally; a plain rotation would keep every provider's predecessor.
    """
    n = len(names)
    zigzag = [i // 2 if i % 2 == 0 else n - 1 - i // 2 for i in range(n)]  # 0, n-1, 1, n-2, ...
    for turn in range(count):
        order = [names[(place + turn) % n] for place in zigzag]
        yield order[::-1] if n % 2 and turn // n % 2 else order


def whole_rounds(providers: int, at_least: int) -> int:
    """Returns the smallest number of rounds, at least `at_least`, that completes the design: each
    order and its reverse, equally often.
    """
    period = 2 * providers if providers % 2 else max(2, providers)
    return -(-at_least // period) * period


def turns(base: T, others: Sequence[T], passes: int) -> list[T]:
    """Returns the sustained turns: the base before and after every other provider, with the others'
    order rotated from pass to pass.
    """
    order = [base]
    for i in range(passes):
        shift = i % len(others) if others else 0
        for other in [*others[shift:], *others[:shift]]:
            order += [other, base]
        if not others:
            order.append(base)
    return order
