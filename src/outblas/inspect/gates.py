"""Gates on machine code: every figure that violates a limit is named together with the expected
value.
"""

from collections.abc import Callable, Mapping, Sequence


class GateError(AssertionError):
    """An error for machine code that is not what it should be.

    The attribute `failed` has a line for each figure that is wrong.

    Example:
        >>> from outblas.inspect import GateError, inspect
        >>> try:
        ...     inspect("simt.naive", arch=80).require(has=["HMMA"])
        ... except GateError as error:
        ...     print(error.failed)
        ('HMMA: 0, expected at least 1',)
    """

    def __init__(self, subject: str, failed: Sequence[str]):
        super().__init__(f"{subject}:" + "".join(f"\n  {line}" for line in failed))
        self.failed = tuple(failed)


def failures(
    *,
    most: Mapping[str, tuple[int, int]],
    least: Mapping[str, tuple[int, int]],
    has: Sequence[str] | Mapping[str, int],
    lacks: Sequence[str],
    warnings: Sequence[str],
    count: Callable[[str], int],
) -> list[str]:
    """Returns the gates that fail. `most` and `least` map a figure's name to its value and its
    limit.
    """
    failed = [
        f"{name}: {found}, expected at most {limit}"
        for name, (found, limit) in most.items()
        if found > limit
    ]
    failed += [
        f"{name}: {found}, expected at least {limit}"
        for name, (found, limit) in least.items()
        if found < limit
    ]
    if isinstance(has, Mapping):
        failed += [
            f"{op}: {count(op)}, expected {wanted}"
            for op, wanted in has.items()
            if count(op) != wanted
        ]
    else:
        failed += [f"{op}: 0, expected at least 1" for op in has if count(op) == 0]
    failed += [f"{op}: {count(op)}, expected 0" for op in lacks if count(op)]
    failed += [f"the assembler warned: {warning}" for warning in warnings]
    return failed
