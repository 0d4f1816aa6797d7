"""A job's view of a store: it hides the trials that the job must measure again."""

from __future__ import annotations

from outblas.autotune.store.claims import Claim
from outblas.autotune.store.records import Gpu, Identity, Status, Trial, Workload
from outblas.autotune.store.store import Store

# The statuses of trials that `retry_failed` does not measure again.
SETTLED: tuple[Status, ...] = ("ok", "wrong", "refused")


class JobView:
    """The trials of a store as one job sees them.

    Without `resume` the job sees only its own trials. With `retry_failed` it sees all trials except
    those that had failed before it started. Its results replace hidden ones. Only one thread may
    use a view.
    """

    def __init__(self, store: Store, workload: Workload, *, resume: bool, retry_failed: bool):
        self.store, self._workload, self._resume = store, workload, resume
        self._own: dict[Identity, Trial] = {}
        failed = store.trials(workload=workload) if resume and retry_failed else []
        self._hidden = {trial.identity: trial for trial in failed if trial.status not in SETTLED}

    def trials(self, gpu: Gpu) -> list[Trial]:
        """Returns the trials of the job's workload on a GPU."""
        stored = self.store.trials(workload=self._workload, gpu=gpu.key) if self._resume else []
        return [trial for trial in stored if self._hidden.get(trial.identity) != trial]

    def claim(self, identity: Identity) -> Claim:
        """Does what `Store.claim` does, for the trials that this job sees."""
        if identity in self._own:
            return Claim(trial=self._own[identity])
        hidden = self._hidden.get(identity)
        return self.store.claim(*identity, again=not self._resume, besides=hidden)

    def add(self, trial: Trial) -> bool:
        """Stores a trial and ends its claim; returns whether it is new to the store."""
        replace = not self._resume or trial.identity in self._hidden
        added = self.store.add(trial, replace=replace)
        self._own[trial.identity] = trial
        self._hidden.pop(trial.identity, None)
        return added
