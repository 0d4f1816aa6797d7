"""The protocol of leases in a model of drivers, machines and what befalls them, and the faults that
the model must find.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from support import lease_model
from support.lease_model import Faults, ProtocolFault

from outblas.autotune.store import leases, queries
from outblas.autotune.store.leases import Claim, Holder, Observer

CALM = Faults(brief_stops=3, worker_kills=2)  # nobody dies
ROUGH = (
    Faults(kills=2, worker_kills=1),
    Faults(stops=3),
    Faults(interrupts=2, kills=1),
    Faults(outages=1, brief_stops=1),
    Faults(kills=1, stops=2, stops_for_good=1, interrupts=1, worker_kills=1, outages=1),
)


@pytest.mark.parametrize("seed", range(25))
def test_each_config_is_measured_once_where_nobody_dies(seed: int) -> None:
    lease_model.run(seed, CALM)


@pytest.mark.parametrize("faults", ROUGH, ids=str)
def test_whoever_dies_costs_no_config(faults: Faults) -> None:
    lease_model.run_many(range(8), faults)


# Rules of the protocol that are left out, each of which the model must miss.


@dataclass(frozen=True)
class LeftOut:
    """A rule that is left out: what stands in place of `target.name`, and what must befall the
    drivers for it to matter.
    """

    target: Any
    name: str
    instead: Any
    faults: Faults


def always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def grant_whoever_asks(self: Holder, identity: Any, *, again: bool = False) -> Any:
    def claim(connection: Any) -> Claim:
        self._take(connection, identity, 0)
        return Claim(granted=True)

    return claim


def release_anyones(self: Holder, identity: Any) -> Any:
    return lambda connection: queries._delete(connection, "leases", identity)


def live_while_the_number_is_taken(owner: leases.Owner, me: leases.Owner) -> str:
    state, _ = leases._process(owner.pid)
    return "alive" if state else "dead"


def do_nothing(connection: Any) -> None:
    pass


LEFT_OUT = {
    "no lease": LeftOut(Holder, "claiming", grant_whoever_asks, CALM),
    "no beat": LeftOut(Holder, "beating", always(do_nothing), CALM),
    "a leap of the observer's clock counts": LeftOut(leases, "LOOK_SECONDS", 1e9, CALM),
    "a lease that is short for its beats": LeftOut(leases, "LEASE_SECONDS", 3.0, CALM),
    "silent owners live for ever": LeftOut(
        Observer, "is_stale", always(False), Faults(stops_for_good=1)
    ),
    "every silent owner is dead": LeftOut(Observer, "is_stale", always(True), CALM),
    "dead processes live for ever": LeftOut(leases, "life", always("alive"), Faults(kills=2)),
    "a process number is an owner": LeftOut(
        leases, "life", live_while_the_number_is_taken, Faults(kills=2)
    ),
    "a lease outlives its trial": LeftOut(queries, "_delete", always(None), CALM),
    "an interrupt keeps its lease": LeftOut(
        Holder, "releasing", always(do_nothing), Faults(interrupts=3)
    ),
    "others' leases are released": LeftOut(Holder, "releasing", release_anyones, Faults(stops=5)),
    "a death speaks against the config": LeftOut(
        Holder, "_went_down", always(True), Faults(kills=4)
    ),
    "a killed worker speaks against the config": LeftOut(lease_model, "KILLED", "crash", CALM),
}


@pytest.mark.parametrize("rule", LEFT_OUT.values(), ids=LEFT_OUT)
def test_the_model_finds_what_is_left_out(rule: LeftOut, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule.target, rule.name, rule.instead)
    if rule.name == "life":  # which a holder has from its making
        monkeypatch.setattr(
            lease_model,
            "Holder",
            lambda owner, observer: Holder(owner, observer, life=rule.instead),
        )
    monkeypatch.setattr(lease_model, "END", 3_000.0)

    with pytest.raises(ProtocolFault):
        lease_model.run_many(range(300), rule.faults)
