"""Why a config cannot be timed."""

from ..store.records import Status


class UnusableConfig(Exception):
    """A config cannot be timed, and why."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status: Status = status
