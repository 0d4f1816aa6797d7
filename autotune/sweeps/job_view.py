"""A job's view of a store: it hides the trials that the job must measure again."""

from __future__ import annotations

from outblas.autotune.store.claims import Claim
from outblas.autotune.store.records import BestConfig, Facts, Status, Trial, Workload
from outblas.autotune.store.store import Store

# The statuses of trials that `retry_failed` does not measure again.
SETTLED: tuple[Status, ...] = ("ok", "wrong", "refused")

Identity = tuple[str, Workload, str, str, str]  # as in `Trial.identity`


class JobView:
    """A store as one job sees it.

    Without `resume` the job sees only its own trials. With `retry_failed` it sees all trials except
    those that had failed before it started. Its results replace hidden ones. Only one thread may
    use a view.
    """

    def __init__(
        self,
        store: Store,
        workload: Workload,
        *,
        resume: bool = True,
        retry_failed: bool = False,
    ) -> None:
        self._store, self._workload, self._resume = store, workload, resume
        self._own: dict[Identity, Trial] = {}
        self._failed: dict[Identity, Trial] = {}
        if resume and retry_failed:
            before = store.trials(workload=workload)
            self._failed = {
                trial.identity: trial for trial in before if trial.status not in SETTLED
            }

    def trials(self, *, workload: Workload) -> list[Trial]:
        if not self._resume:
            return list(self._own.values())
        trials = self._store.trials(workload=workload)
        return [trial for trial in trials if not self._is_hidden(trial)]

    def winners(self, *, workload: Workload) -> list[BestConfig]:
        return self._store.winners(workload=workload)

    def claim(self, *facts: *Facts, again: bool = False) -> Claim:
        """Does what `Store.claim` does, for the trials that this job sees."""
        identity = _identity(facts)
        if identity in self._own:
            return Claim(trial=self._own[identity])
        claim = self._store.claim(*facts, again=again or not self._resume)
        if claim.trial is not None and self._is_hidden(claim.trial):
            claim = self._claim_hidden(*facts)
        return claim

    def _claim_hidden(self, *facts: *Facts) -> Claim:
        """Claims a config whose failure is hidden from this job.

        After the failure was read and before the claim was granted, another driver may have
        measured the config and given its claim back. The trial is therefore read again while the
        claim is held, when nobody else can replace it.
        """
        claim = self._store.claim(*facts, again=True)
        if not claim.granted:
            return claim
        identity = _identity(facts)
        for trial in self._store.trials(workload=self._workload):
            if trial.identity == identity and not self._is_hidden(trial):
                self._store.release(*facts)
                return Claim(trial=trial)
        return claim

    def release(self, *facts: *Facts) -> None:
        """Gives a claim back that was not used."""
        self._store.release(*facts)

    def add(self, trial: Trial, *, replace: bool = False) -> bool:
        """Stores a trial and ends its claim; returns whether it is new to the store."""
        added = self._store.add(
            trial, replace=replace or not self._resume or trial.identity in self._failed
        )
        self._own[trial.identity] = trial
        self._failed.pop(trial.identity, None)
        return added

    def record_best(self, winner: BestConfig) -> None:
        self._store.record_best(winner)

    def _is_hidden(self, trial: Trial) -> bool:
        return self._failed.get(trial.identity) == trial


def _identity(facts: Facts) -> Identity:
    gpu, workload, kernel, source, config = facts
    return gpu.key, workload, kernel, source, config
