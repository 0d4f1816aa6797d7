"""How reports write figures that are missing, and how sure a winner is."""

NONE = "–"


def confidence(value: float | None, *, separated: bool) -> str:
    """How sure it is that a winner is the fastest of its finalists: "at least 98.1%".

    The value is a bound from below, and 0 is no bound at all: such a winner shares the first place.
    """
    if value is None:
        return NONE
    if value > 0.999:
        words = "over 99.9%"
    elif value > 0:
        words = f"at least {value:.1%}"
    else:
        return "tie" if separated else "tie, not separated"
    return words if separated else f"{words}, not separated"
