"""Claims: which driver is measuring a config, so that drivers share the work.

A driver claims a config before it measures it. The claim ends with the trial, or without one when
the driver gives it back; then the config counts as not started.

A claim is a row with its owner, a process by its number and its start. On one machine it is free as
soon as that process has ended, however it ended; that says nothing about the config. The claim of
an owner that cannot be looked at, in another container or on another machine, is free after
`UNSEEN_SECONDS`, which is longer than any trial takes. A clock that is set costs at most a second
measurement, of which the first stays.
"""

from __future__ import annotations

import datetime
import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from outblas.autotune.store.records import Trial

UNSEEN_SECONDS = 600.0


@dataclass(frozen=True)
class Claim:
    """The answer to a driver that wants to measure a config: exactly one of the first three fields
    is set.

    Attributes:
        trial: The trial that there is already.
        held: Whether another live driver, or another thread of this one, is measuring it.
        granted: Whether the driver has the claim, until `add` or `release`.
        taken_over: Whether it was taken from an owner that died with it.
    """

    trial: Trial | None = None
    held: bool = False
    granted: bool = False
    taken_over: bool = False


class Owner(NamedTuple):
    """A store object in a process on a machine; "" stands for what the system does not tell."""

    host: str
    boot: str
    namespace: str
    pid: int
    started: str
    nonce: str

    def __str__(self) -> str:
        """The text that the store contains."""
        return "\t".join(map(str, self))

    @classmethod
    def parse(cls, text: str) -> Owner:
        """Parses the text of an owner."""
        host, boot, namespace, pid, started, nonce = text.split("\t")
        return cls(host, boot, namespace, int(pid), started, nonce)

    @classmethod
    def here(cls) -> Owner:
        """Returns a new owner in this process."""
        pid = os.getpid()
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            namespace = os.readlink("/proc/self/ns/pid")
        except OSError:
            boot = namespace = ""
        host = socket.gethostname().replace("\t", " ")
        return cls(host, boot, namespace, pid, _start(pid), secrets.token_hex(4))

    def is_alive(self, me: Owner) -> bool | None:
        """Returns whether this owner's process lives; None where `me` cannot tell."""
        if self.boot and me.boot and self.host == me.host and self.boot != me.boot:
            return False  # the machine was started again
        here = me.host, me.boot, me.namespace
        if not all(here) or self[:3] != here:
            return None
        return _start(self.pid) == self.started


def is_free(owner: Owner, me: Owner, when: str) -> bool:
    """Returns whether the claim that an owner made at this date is free again."""
    alive = owner.is_alive(me)
    if alive is not None:
        return not alive
    age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(when)
    return not 0 <= age.total_seconds() < UNSEEN_SECONDS


def _start(pid: int) -> str:
    """Returns when a process began, "" for one that has ended or is not seen."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
