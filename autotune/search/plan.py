"""From the valid configs of a workload to those that are measured: the proposals of a strategy,
checked.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from outblas.autotune.search.candidates import Candidate
from outblas.autotune.search.prune import Plan, prune
from outblas.autotune.search.strategy import ModelRanked, Search, Strategy, StrategyError
from outblas.autotune.search.target import TuneTarget
from outblas.autotune.store.records import Gpu, Workload

# A strategy that draws at random may sometimes propose nothing new; after this many such batches in
# a row it would never end.
MOST_STALE_BATCHES = 100


def plan(
    targets: Sequence[TuneTarget],
    workload: Workload,
    gpu: Gpu,
    *,
    trials: int | None = None,
    strategy: Strategy | None = None,
) -> Plan:
    """Plan what a sweep of kernels would measure for a workload, without measuring anything.

    The plan has the first batch of the strategy. The default strategy has one batch only; one that
    reacts to results may try more. The config that a kernel would choose itself is always part of
    it. No GPU is needed.

    Args:
        targets: The kernels that compete.
        workload: The product to tune for.
        gpu: The GPU to plan for, which need not be in this machine.
        trials: How many configs of each kernel to measure; None for all valid ones.
        strategy: What orders the configs; None for `ModelRanked`.

    Returns:
        The plan: the number of generated configs, those that were pruned with the reason, and the
        candidates in the order in which they would be measured (`ranked`).

    Raises:
        ValueError: A kernel cannot take the dtype or the GPU.
        ImportError: The DSL of a kernel is not installed.
        StrategyError: The strategy proposed what is no candidate.

    Example:
        >>> from outblas.autotune import Gpu, TuneTarget, Workload, plan
        >>> found = plan(
        ...     [TuneTarget("portable", "outblas.kernels.portable")],
        ...     Workload(512, 512, 512),
        ...     Gpu("NVIDIA H100 80GB HBM3", 90, 132),
        ...     trials=4,
        ... )
        >>> len(found.ranked) <= 5 < found.valid < found.generated
        True
    """
    space = prune(targets, workload, gpu)
    search = Search(workload, gpu, space.candidates, trials=trials)
    return replace(space, ranked=next(batches(strategy or ModelRanked(), search), ()))


def batches(
    strategy: Strategy, search: Search, seeds: Sequence[Candidate] = ()
) -> Iterator[tuple[Candidate, ...]]:
    """Yields the batches that a strategy proposes, without repeated proposals and without those
    beyond the number of trials, until nothing more could be proposed. The kernels' default configs
    and the seeds are in the first batch.

    Raises StrategyError, as `Strategy` describes.
    """
    first = [candidate for candidate in search.candidates if candidate.own]
    first += [candidate for candidate in seeds if not candidate.own]
    kernels = {candidate.target.name for candidate in search.candidates}
    trials, stale = search.trials, 0
    seen, proposed = set[Candidate](), Counter[str]()  # configs, and their number by kernel
    for batch in _requested(strategy, search) if search.candidates else ():
        accepted, seen_before = [], len(seen)
        for candidate in batch:
            if candidate not in seen:
                seen.add(candidate)
                proposed[candidate.target.name] += 1
                if trials is None or candidate.own or proposed[candidate.target.name] <= trials:
                    accepted.append(candidate)
        stale = stale + 1 if len(seen) == seen_before else 0
        if first:
            missing = [candidate for candidate in first if candidate not in accepted]
            seen.update(missing)
            accepted, first = [*missing, *accepted], []
        if accepted:
            yield tuple(accepted)
        if len(seen) == len(search.candidates) or (
            trials is not None and all(proposed[kernel] >= trials for kernel in kernels)
        ):
            return
        if stale >= MOST_STALE_BATCHES:
            raise _error(strategy, search, f"proposed nothing new {stale} times in a row")
    if first:
        yield tuple(first)


def _requested(strategy: Strategy, search: Search) -> Iterator[list[Candidate]]:
    """Yields what a strategy proposes, checked; its exceptions become a StrategyError."""
    allowed = frozenset(search.candidates)
    try:
        for batch in strategy.propose(search):
            if isinstance(batch, str | Candidate) or not isinstance(batch, Iterable):
                raise _error(
                    strategy, search, f"proposed {_shown(batch)}, expected a list of candidates"
                )
            listed: list[Any] = list(batch)
            for candidate in listed:
                if not isinstance(candidate, Candidate) or candidate not in allowed:
                    shown = _shown(candidate)
                    raise _error(
                        strategy, search, f"proposed {shown}, expected one of search.candidates"
                    )
            yield listed
    except StrategyError:
        raise
    except Exception as error:
        raise _error(strategy, search, f"raised {error!r}") from error


def _error(strategy: Strategy, search: Search, what: str) -> StrategyError:
    return StrategyError(f"strategy {type(strategy).__qualname__} {what}, at {search.workload}")


def _shown(proposed: object) -> str:
    """Formats what a strategy proposed, short enough for a message."""
    return proposed.label if isinstance(proposed, Candidate) else repr(proposed)[:200]
