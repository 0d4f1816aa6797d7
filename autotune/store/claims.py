"""Claims: which driver is measuring a config, so that drivers share the work.

A driver claims a config before it measures it. The claim ends with the trial, or without one when
the driver gives it back; then the config counts as not started.

A claim is a row with its owner, a process by its number and its start. On one machine it is free as
soon as that process has ended, however it ended. The claim of an owner that cannot be looked at (in
another container or on another machine, or a stopped process) is free after `UNSEEN_SECONDS`, which
is longer than any trial takes. A clock that is set costs at most a second measurement, of which
the first stays.

The death of an owner says nothing about the config that it measured, unless the whole machine went
down with it; such losses are counted in `machine_losses`.
"""

from __future__ import annotations

import datetime
import os
import secrets
import socket
import sys
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
        machine_losses: How many times the machine went down while the config was measured.
    """

    trial: Trial | None = None
    held: bool = False
    granted: bool = False
    taken_over: bool = False
    machine_losses: int = 0


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
        boot = namespace = ""
        if sys.platform == "linux":
            boot = _text("/proc/sys/kernel/random/boot_id").strip()
            namespace = _link("/proc/self/ns/pid")
        host = socket.gethostname().replace("\t", " ")
        return cls(host, boot, namespace, pid, _process(pid)[1], secrets.token_hex(4))

    def is_alive(self, me: Owner) -> bool | None:
        """Returns whether this owner's process lives; None where `me` cannot tell."""
        if self.went_down(me):
            return False
        here = me.host, me.boot, me.namespace
        if not all(here) or self[:3] != here:
            return None
        state, started = _process(self.pid)
        if not state:
            return None if _is_hidden(self.pid) else False
        if state in "ZX" or started != self.started:
            return False
        return None if state in "Tt" else True

    def went_down(self, me: Owner) -> bool:
        """Returns whether the machine was started again after this owner claimed something."""
        return bool(self.boot and me.boot) and self.host == me.host and self.boot != me.boot


def is_free(owner: Owner, me: Owner, when: str) -> bool:
    """Returns whether the claim that an owner made at this date is free again."""
    alive = owner.is_alive(me)
    if alive is not None:
        return not alive
    age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(when)
    return not 0 <= age.total_seconds() < UNSEEN_SECONDS


def _process(pid: int) -> tuple[str, str]:
    """Returns the state and the start of a process; ("", "") where none is seen."""
    fields = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return (fields[0], fields[19]) if len(fields) > 19 else ("", "")


def _is_hidden(pid: int) -> bool:
    """Returns whether a process exists although /proc, which may hide others', does not show it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
