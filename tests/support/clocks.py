"""A clock that a test sets."""


class Clock:
    """Stands for `time` in modules that a test plays: only what sleeps takes any, and `now` may be
    set.
    """

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
