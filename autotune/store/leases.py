"""Leases: which driver is measuring a config, so that drivers share the work and each config is
measured only once.

A driver takes the lease of a config before it measures it. It ends the lease with the trial, or
without one when it is interrupted. Leases are rows of the store, with their owner and a counter,
the heartbeat.

    measured     claim ──── measure ──── add
                 `add` stores the trial and ends the lease, in one transaction. Meanwhile a thread
                 of the owner's store adds 1 to the beat every BEAT_SECONDS.
    interrupted  claim ──── release
                 Afterwards the config counts as not started.
    killed       claim ────
                 The claim of another driver finds the owner dead, and takes the lease over.
    stopped      claim ──── (another takes the lease over) ──── add
                 The first trial stays, and both leases end.

An owner on this machine is dead when its process is gone, or when another process has its number.
Any other owner, and a stopped one, is dead when its beat has not changed for LEASE_SECONDS. Only
time during which the observer itself watched counts, on its monotonic clock. Dates are never
compared, so that setting a clock changes nothing.

The death of an owner says nothing about the config that it measured, unless the whole machine went
down too; such losses are counted in `machine_losses`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sqlite3
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from . import queries
from .queries import Operation, Row
from .records import Trial, now

# after this time without a beat, an owner that cannot be checked counts as dead
LEASE_SECONDS = 30.0
BEAT_SECONDS = 3.0  # between two beats
LOOK_SECONDS = 5.0  # the most time between two looks at a beat that counts as watched

Life = Literal["alive", "dead", "unknown"]
Key = tuple[object, ...]  # the values of a lease's identity


@dataclass(frozen=True)
class Claim:
    """The answer to a driver that wants to measure a config: exactly one of the first three fields
    is set.

    known: there is a trial already.
    held: another live driver, or another thread of this one, is measuring it.
    granted: the driver has the lease, until `add` or `release`.
    taken_over: the lease was taken from an owner that died with it.
    machine_losses: how many machines went down while they measured it.
    worker_deaths: how many workers of this sweep died with it; only a cluster counts them.
    """

    known: Trial | None = None
    held: bool = False
    granted: bool = False
    taken_over: bool = False
    machine_losses: int = 0
    worker_deaths: int = 0


@dataclass(frozen=True)
class Owner:
    """A store object in a process on a machine. "" stands for what the system does not tell."""

    host: str
    boot: str
    pid_namespace: str
    pid: int
    started: str
    nonce: str

    def __str__(self) -> str:
        """The text that the store contains."""
        parts = (self.host, self.boot, self.pid_namespace, str(self.pid), self.started, self.nonce)
        return " ".join(part or "-" for part in parts)

    @staticmethod
    def parse(text: object) -> Owner | None:
        """Parses the text of an owner; returns None for a text that no `Owner` wrote."""
        parts = ["" if part == "-" else part for part in str(text).split(" ")]
        if len(parts) != 6 or not parts[3].isdecimal():
            return None
        host, boot, namespace, pid, started, nonce = parts
        return Owner(host, boot, namespace, int(pid), started, nonce)

    @staticmethod
    def here() -> Owner:
        """Creates a new owner in this process."""
        host = "".join(socket.gethostname().split())
        _, started = _process(os.getpid())
        return Owner(host, _boot(), _pid_namespace(), os.getpid(), started, secrets.token_hex(8))


_open_here: set[str] = set()  # nonces of this process's owners whose stores are open


def _boot() -> str:
    """Returns an id of the machine's current boot; "" where the system does not tell it, or tells
    another value every time.
    """
    if sys.platform != "linux":
        return ""
    try:
        first, second = (
            Path("/proc/sys/kernel/random/boot_id").read_text().strip() for _ in range(2)
        )
    except OSError:
        return ""
    return first if first == second else ""


def _pid_namespace() -> str:
    """Returns an id of the namespace in which process numbers are valid."""
    if sys.platform != "linux":
        return ""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _process(pid: int) -> tuple[str, str]:
    """Returns the state and start time of a process, as Linux reports them; ("", "") where there is
    none or it is not visible.
    """
    if sys.platform != "linux":
        return "", ""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


def life(owner: Owner, me: Owner) -> Life:
    """Returns whether an owner lives, as far as this machine can tell without waiting for a
    beat.
    """
    here = (me.host, me.boot, me.pid_namespace)
    if not all(here) or (owner.host, owner.boot, owner.pid_namespace) != here:
        return "unknown"
    state, started = _process(owner.pid)
    if not state:
        return "unknown" if _is_hidden(owner.pid) else "dead"
    if state in "ZX" or started != owner.started:
        return "dead"
    if owner.pid == me.pid:
        return "alive" if owner.nonce in _open_here else "dead"
    # A stopped process measures nothing, and may never continue.
    return "unknown" if state in "Tt" else "alive"


def _is_hidden(pid: int) -> bool:
    """Returns whether a process exists although /proc does not show it: /proc may be mounted so
    that it hides processes of other users.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


@dataclass
class _Watched:
    """A beat that has not changed, the time of the last look, and the number of seconds for which
    it was watched.
    """

    owner: str
    beat: object
    looked: float
    seconds: float = 0.0


@dataclass
class Observer:
    """What a store has observed about others' leases. Only time in which it looked counts: an
    observer that was stopped itself, or whose clock leaps, has observed nothing meanwhile.
    """

    clock: Callable[[], float] = time.monotonic
    _seen: dict[Key, _Watched] = field(default_factory=dict)

    def is_stale(self, key: Key, owner: str, beat: object) -> bool:
        """Returns whether the beat of a lease has not changed for LEASE_SECONDS."""
        at = self.clock()
        before = self._seen.get(key)
        if before is None or (before.owner, before.beat) != (owner, beat):
            self._seen[key] = _Watched(owner, beat, at)
            return False
        before.seconds += min(max(0.0, at - before.looked), LOOK_SECONDS)
        before.looked = at
        return before.seconds >= LEASE_SECONDS

    def forget(self, key: Key) -> None:
        """Forgets a lease after its owner has changed."""
        self._seen.pop(key, None)


@dataclass
class Holder:
    """One store's side of the protocol: its owner, the leases that it holds, and what it has
    observed about others' leases.

    Its methods make operations on the store's file; the store runs each in a separate transaction.
    """

    owner: Owner = field(default_factory=Owner.here)
    observer: Observer = field(default_factory=Observer)
    life: Callable[[Owner, Owner], Life] = life
    held: dict[Key, Row] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _open_here.add(self.owner.nonce)

    def retire(self) -> None:
        """Marks this owner as closed; leases that it left then count as those of a dead owner."""
        _open_here.discard(self.owner.nonce)
        self.held.clear()

    def claiming(self, identity: Row, *, again: bool = False) -> Operation[Claim]:
        """Makes the operation that takes the lease of a config, if it is available. With `again` it
        does so although there is a trial.
        """

        def claim(connection: sqlite3.Connection) -> Claim:
            known = None if again else queries.there(connection, "trials", identity)
            if isinstance(known, Trial):
                return Claim(known=known)
            losses, taken_over = 0, False
            for row in queries.select(connection, "leases", identity):
                losses = row["machine_losses"] if type(row["machine_losses"]) is int else 0
                if not row["owner"]:  # it was released
                    break
                if not self._is_dead(identity, row["owner"], row["beat"]):
                    return Claim(held=True)
                taken_over = True
                losses += self._went_down(row["owner"])
            self._take(connection, identity, losses)
            return Claim(granted=True, taken_over=taken_over, machine_losses=losses)

        return claim

    def releasing(self, identity: Row) -> Operation[None]:
        """Makes the operation that ends a lease as if the config had not been started. Leases of
        other owners stay.
        """

        def release(connection: sqlite3.Connection) -> None:
            where = _where(identity)
            owned = {**identity, "owner": str(self.owner)}
            connection.execute(
                f"DELETE FROM leases WHERE {where} AND owner = :owner AND machine_losses = 0", owned
            )
            connection.execute(
                f"UPDATE leases SET owner = '' WHERE {where} AND owner = :owner", owned
            )

        return release

    def releasing_all(self) -> Operation[None]:
        """Makes the operation that ends every lease of this owner in the same way."""

        def release(connection: sqlite3.Connection) -> None:
            owned = (str(self.owner),)
            connection.execute("DELETE FROM leases WHERE owner = ? AND machine_losses = 0", owned)
            connection.execute("UPDATE leases SET owner = '' WHERE owner = ?", owned)

        return release

    def beating(self) -> Operation[None]:
        """Makes the operation that advances the beat of this owner's leases."""

        def beat(connection: sqlite3.Connection) -> None:
            connection.execute(
                "UPDATE leases SET beat = beat + 1 WHERE owner = ?", (str(self.owner),)
            )

        return beat

    def _take(self, connection: sqlite3.Connection, identity: Row, losses: int) -> None:
        facts = {
            **identity,
            "when": now(),
            "owner": str(self.owner),
            "beat": first_beat(),
            "machine_losses": losses,
        }
        columns = ", ".join(f'"{name}"' for name in facts)
        values = ", ".join(f":{name}" for name in facts)
        connection.execute(f"INSERT OR REPLACE INTO leases ({columns}) VALUES ({values})", facts)
        self.observer.forget(key_of(identity))

    def _is_dead(self, identity: Row, text: str, beat: object) -> bool:
        owner = Owner.parse(text)
        found = "unknown" if owner is None else self.life(owner, self.owner)
        if found == "unknown":
            return self.observer.is_stale(key_of(identity), text, beat)
        return found == "dead"

    def _went_down(self, text: str) -> bool:
        """Returns whether a dead owner's machine has been restarted since, so that the owner may
        have died because the machine went down.
        """
        owner, me = Owner.parse(text), self.owner
        if owner is None or not (owner.host and owner.boot and me.boot):
            return False
        return owner.host == me.host and owner.boot != me.boot


class Heart:
    """The thread that beats while there are leases. It ends when `beat` returns False, because
    there are none left.
    """

    def __init__(self, beat: Callable[[], bool], seconds: float = BEAT_SECONDS) -> None:
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(beat, seconds), daemon=True, name="outblas leases"
        )
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self, beat: Callable[[], bool], seconds: float) -> None:
        while not self._stopped.wait(seconds):
            # An error delays a beat, which costs nothing; without the thread the lease would be
            # lost.
            with contextlib.suppress(Exception):
                if not beat():
                    return


def first_beat() -> int:
    """Returns the initial beat of a lease. It never equals a beat of an earlier lease of the same
    owner and config, which others may have watched.
    """
    return secrets.randbits(32)


def key_of(identity: Row) -> Key:
    return tuple(identity[name] for name in queries.KEYS["leases"])


def _where(identity: Row) -> str:
    return " AND ".join(f'"{name}" = :{name}' for name in identity)
