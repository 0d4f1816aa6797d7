"""Search strategies: what they propose, what is measured of it, and what a bad one is told.

The kernel is tests/support/faulty_kernel.py, whose configs differ by a number, or portable in the
interpreter.
"""

import inspect
import pickle
import re
import sys
import textwrap
import typing
from collections import Counter
from concurrent.futures import Future
from dataclasses import fields, replace

import pytest
from support import commands
from support.fake_bench import Clock, FakeWorker, number
from support.faulty_kernel import Config, notes
from support.sweeps import H100, OPTIONS, SUBJECT, WORKLOAD, run

from outblas.autotune import Grid, ModelRanked, Random, Strategy, StrategyError, SweepOptions, sweep
from outblas.autotune.measure import finals, prefetch
from outblas.autotune.search import gpu
from outblas.autotune.search import strategy as strategies
from outblas.autotune.search.plan import MOST_STALE_BATCHES, batches, plan
from outblas.autotune.search.prune import problem, prune
from outblas.autotune.search.strategy import Search, strategy_of
from outblas.autotune.search.target import TuneTarget, of
from outblas.autotune.store.records import Trial, Workload, now
from outblas.autotune.store.store import Store
from outblas.autotune.sweeps import tuner
from outblas.autotune.sweeps.options import SweepKeywords
from outblas.autotune.sweeps.tuner import Job
from outblas.core.configs import from_text, to_text

pytestmark = pytest.mark.usefixtures("faulty_log")


class Proposing(Strategy):
    """Proposes what a function of the search says."""

    def __init__(self, propose):
        self._propose = propose

    def propose(self, search):
        return self._propose(search)


def numbers(candidates):
    return [candidate.config.number for candidate in candidates]


def measured_order(strategy, store, **options):
    """The numbers of the configs that a sweep measures, in its order, and its outcome."""
    bench = FakeWorker()
    job = Job((SUBJECT,), WORKLOAD, strategy=strategy, **options)
    outcome = tuner.tune(job, H100, bench, None, store)
    return bench.configs("screen"), outcome


@pytest.fixture
def store(path, monkeypatch):
    monkeypatch.setenv("FAULTY_CONFIGS", "6")
    with Store(path) as store:
        yield store


def search_of(kernels, workload, on=H100, trials=None):
    space = prune([of(name) for name in kernels], workload, on)
    return Search(workload, on, space.candidates, trials=trials)


def order_before_strategies(candidates, trials):
    """What a sweep tried before it had strategies, in the words of its code: by the prediction,
    so many of each kernel, and its own config in any case.
    """
    places, chosen = Counter(), []
    for candidate in sorted(candidates, key=lambda candidate: candidate.predicted_us):
        places[candidate.target.name] += 1
        if trials is None or places[candidate.target.name] <= trials or candidate.own:
            chosen.append(candidate)
    return chosen


@pytest.mark.long
@pytest.mark.parametrize("shape", [(4096, 4096, 4096), (16, 4096, 4096), (257, 129, 65)])
@pytest.mark.parametrize("trials", [None, 1, 5, 64])
@pytest.mark.parametrize("model", ["h100", "a100"])
def test_the_default_tries_what_was_tried_before_in_that_order(shape, trials, model):
    workload, on = Workload(*shape), gpu.imagined(model)
    kernels = ["portable", "hopper.hilbert"] if model == "h100" else ["portable"]
    targets = [of(name) for name in kernels]
    candidates = prune(targets, workload, on).candidates
    expected = order_before_strategies(candidates, trials)
    found = plan(targets, workload, on, trials=trials)
    assert list(found.ranked) == expected
    assert found.valid == len(candidates)
    assert found == plan(targets, workload, on, trials=trials, strategy=ModelRanked())


def test_the_default_measures_the_kernels_own_config_first(store):
    order, outcome = measured_order(ModelRanked(), store)
    assert order == [0, 1, 2, 3, 4, 5]  # equal predictions: as they are generated
    assert numbers(outcome.plan.ranked) == order
    assert outcome.plan.ranked[0].own


def test_a_grid_is_in_the_order_of_the_space():
    workload = Workload(4096, 4096, 4096)
    target = of("portable")
    search = search_of(["portable"], workload)
    (batch,) = batches(Grid(), search)
    space = target.load().space(problem(workload), gpu.machine(H100))
    generated = [to_text(config) for config in space.configs()]
    places = [generated.index(candidate.text) for candidate in batch]
    assert places == sorted(places)
    assert len(batch) == len(search.candidates) > 50
    assert list(batch) != search.ranked()


def test_a_random_order_depends_on_seed_and_workload_alone():
    one, other = Workload(4096, 4096, 4096), Workload(2048, 4096, 4096)

    def order(seed, workload, reverse=False):
        search = search_of(["portable"], workload)
        if reverse:
            candidates = [replace(c, predicted_us=1.0) for c in reversed(search.candidates)]
            search = Search(workload, H100, candidates)
        (batch,) = batches(Random(seed), search)
        return [candidate.text for candidate in batch]

    assert order(1, one) == order(1, one)
    assert order(1, one) == order(1, one, reverse=True)
    assert order(1, one) != order(2, one)
    assert sorted(order(1, one)) == sorted(order(2, one))
    shared = set(order(1, one)) & set(order(1, other))
    assert [c for c in order(1, one) if c in shared] != [c for c in order(1, other) if c in shared]


def test_trials_cut_what_a_strategy_proposes(store):
    order, outcome = measured_order(Random(5), store, trials=2)
    (batch,) = batches(Random(5), Search(WORKLOAD, H100, search_of_faulty(), trials=2))
    assert set(order) == set(numbers(batch))
    assert order[0] == 0  # its own
    assert len(order) in (2, 3)
    assert outcome.plan.left_out == 6 - len(order)
    assert outcome.finished


def search_of_faulty():
    return prune([SUBJECT], WORKLOAD, H100).candidates


def test_a_strategy_hears_of_results_and_goes_by_them(store):
    seen = []

    class Downhill(Strategy):
        def propose(self, search):
            yield [search.candidates[4]]
            while (best := search.best()) is not None:
                seen.append((best.config.number, sorted(numbers(search.measured))))
                below = best.config.number - 1
                lower = [c for c in search.candidates if c.config.number == below]
                if not lower or lower[0] in search.measured:
                    return
                yield lower

    order, outcome = measured_order(Downhill(), store)
    assert order == [0, 4]
    assert seen == [(0, [0, 4])]
    assert outcome.finished
    assert [number(trial) for trial in outcome.trials] == [0, 4]
    assert (outcome.plan.valid, outcome.plan.left_out) == (6, 4)


def test_batches_follow_each_other(store):
    def propose(search):
        yield search.candidates[3:5]
        assert set(numbers(search.measured)) == {0, 3, 4}
        assert search.seconds_left is None
        yield search.candidates[4:6]

    order, outcome = measured_order(Proposing(propose), store)
    assert order == [0, 3, 4, 5]
    assert numbers(outcome.plan.ranked) == [0, 3, 4, 5]
    assert outcome.winner.valid == 6
    assert outcome.winner.screened == 4


def test_a_batch_is_compiled_when_the_last_one_is_measured(store):
    compiled = []

    class Compilers:
        workers = 2

        def submit(self, target, workload, config, arch):
            compiled.append(from_text(Config, config).number)
            future = Future()
            future.set_result(1.0)
            return future

    def propose(search):
        yield search.candidates[1:3]
        before.extend(compiled)
        yield search.candidates[3:]

    before = []
    job = Job((SUBJECT,), WORKLOAD, strategy=Proposing(propose))
    outcome = tuner.tune(job, H100, FakeWorker(), Compilers(), store)
    assert before == [0, 1, 2]
    assert compiled == [0, 1, 2, 3, 4, 5]
    assert outcome.finished
    assert {trial.compile_s for trial in outcome.trials} == {1.0}


def test_a_second_sweep_makes_the_same_proposals_and_measures_none_again(store):
    first, _ = measured_order(Random(7), store, trials=3)
    again, outcome = measured_order(Random(7), store, trials=3)
    assert first
    assert again == []
    assert outcome.new == 0
    more, outcome = measured_order(Grid(), store)
    assert sorted(first + more) == [0, 1, 2, 3, 4, 5]
    assert outcome.new == len(more)


def test_failures_are_results_too(store):
    statuses, best = {}, []

    def propose(search):
        yield search.candidates[:3]
        statuses.update({c.config.number: t.status for c, t in search.measured.items()})
        best.append(search.best().config.number)

    bench = FakeWorker(("screen", 0), status="crash")
    job = Job((SUBJECT,), WORKLOAD, strategy=Proposing(propose))
    outcome = tuner.tune(job, H100, bench, None, store)
    assert statuses == {0: "crash", 1: "ok", 2: "ok"}
    assert best == [1]
    assert outcome.finished


def test_an_earlier_winner_takes_part_whatever_is_proposed(store):
    """The winner of a sweep replaces the last one: a few random configs may not do so unseen."""
    _, whole = measured_order(Grid(), store)
    assert number(whole.winner) == 0
    store.record_best(replace(whole.winner, config=to_text(Config(number=1))))
    bench = FakeWorker()
    propose = Proposing(lambda search: [search.candidates[5:6]])
    job = Job((SUBJECT,), WORKLOAD, strategy=propose, resume=False, top_k=1)
    outcome = tuner.tune(job, H100, bench, None, store)
    assert bench.configs("screen") == [0, 5]
    assert set(bench.configs("race")) == {0, 1}
    assert number(outcome.winner) == 0


@pytest.mark.parametrize("nothing", [[], [[]], iter(())])
def test_who_proposes_nothing_has_the_kernels_own_configs_measured(store, nothing):
    order, outcome = measured_order(Proposing(lambda search: nothing), store)
    assert order == [0]
    assert outcome.finished
    assert number(outcome.winner) == 0
    assert outcome.plan.left_out == 5


def test_a_config_that_is_proposed_twice_is_measured_once(store):
    def propose(search):
        for start in (2, 0, 2, 1):
            yield [*search.candidates[start:], *search.candidates[start:]]

    order, outcome = measured_order(Proposing(propose), store)
    assert order == [0, 2, 3, 4, 5, 1]
    assert outcome.finished


def test_proposals_beyond_the_trials_of_one_kernel_keep_nobody_from_another(monkeypatch):
    """More batches in a row than may be stale have configs that are new, and one too many."""
    monkeypatch.setenv("FAULTY_CONFIGS", str(MOST_STALE_BATCHES + 50))
    other = TuneTarget("other", "support.faulty_kernel")
    candidates = prune([SUBJECT, other], WORKLOAD, H100).candidates

    def propose(search):
        for target in (SUBJECT, other):
            yield from ([each] for each in search.candidates if each.target == target)

    search = Search(WORKLOAD, H100, candidates, trials=2)
    found = list(batches(Proposing(propose), search))
    assert [(each.target.name, each.config.number) for batch in found for each in batch] == [
        ("other", 0),  # its own config, which comes with the first batch
        ("faulty", 0),
        ("faulty", 1),
        ("other", 1),
        ("other", 2),
    ]


def foreign(search):
    return replace(search.candidates[0], text="number=99")


def endless(search):
    while True:
        yield search.candidates[:2]


def raising(search):
    yield search.candidates[:3]
    raise KeyError("tile")


def own_error(search):
    raise StrategyError("the moon is wrong")


BAD = {
    "unknown config": (
        lambda search: [[foreign(search)]],
        r"proposed faulty\[number=99\], expected one of search.candidates",
    ),
    "a config": (lambda search: [[search.candidates[0].config]], r"proposed Config\(number=0"),
    "text": (lambda search: ["number=1"], "proposed 'number=1', expected a list of candidates"),
    "no list": (lambda search: search.candidates, "expected a list of candidates"),
    "none in a list": (lambda search: [None], "proposed None, expected a list of candidates"),
    "no batches": (lambda search: None, "returned None, expected batches of candidates"),
    "endless": (endless, f"proposed nothing new {MOST_STALE_BATCHES} times in a row"),
    "raises": (raising, r"raised KeyError\('tile'\)"),
    "raises at once": (lambda search: 1 / 0, r"raised ZeroDivisionError\('division by zero'\)"),
    "its own error": (own_error, "the moon is wrong"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_strategy_is_told_what_is_wrong(case, store):
    propose, message = BAD[case]
    with pytest.raises(StrategyError, match=message) as error:
        measured_order(Proposing(propose), store)
    if case != "its own error":
        assert str(error.value).startswith("strategy Proposing ")
        assert str(error.value).endswith(f", at {WORKLOAD}")
    if case == "raises":
        assert isinstance(error.value.__cause__, KeyError)
        assert {number(trial) for trial in store.trials()} == {0, 1, 2}


def test_a_bad_strategy_ends_a_sweep_and_keeps_what_was_measured(path, monkeypatch):
    monkeypatch.setenv("FAULTY_CONFIGS", "6")
    with pytest.raises(StrategyError, match="raised KeyError"):
        run(path, strategy=Proposing(raising))
    with Store(path, read_only=True) as store:
        assert {number(trial) for trial in store.trials()} == {0, 1, 2}


def test_a_budget_ends_the_proposals(store, monkeypatch: pytest.MonkeyPatch):
    clock, asked = Clock(), []
    for module in (tuner, strategies, prefetch, finals):
        monkeypatch.setattr(module, "time", clock)

    def propose(search):
        for candidate in search.candidates:
            asked.append(search.seconds_left)
            yield [candidate]

    bench = FakeWorker(seconds=0.2, sleep=clock.sleep)
    job = Job((SUBJECT,), WORKLOAD, strategy=Proposing(propose), seconds=1.0, top_k=1)

    outcome = tuner.tune(job, H100, bench, None, store)

    assert not outcome.finished
    assert len(outcome.plan.ranked) == len(outcome.trials) + 1
    assert asked == pytest.approx([0.75, 0.15, 0.0])
    assert outcome.winner is not None


def test_results_of_a_search():
    search = search_of(["portable"], Workload(64, 64, 64))
    first, second, third = search.candidates[:3]
    assert search.best() is None
    for candidate, status, us in ((first, "ok", 9.0), (second, "ok", 8.0), (third, "wrong", None)):
        search.record(
            Trial(
                gpu=H100,
                workload=search.workload,
                kernel="portable",
                source="",
                config=candidate.text,
                status=status,
                us=us,
                when=now(),
            )
        )
    assert search.best() == second
    assert [trial.status for trial in search.measured.values()] == ["ok", "ok", "wrong"]
    assert search.find("portable", first.text) == first
    assert search.find("portable", "no=config") is None
    with pytest.raises(TypeError):
        search.measured[first] = None


def test_names():
    assert isinstance(strategy_of("grid"), Grid)
    assert isinstance(strategy_of("ranked"), ModelRanked)
    assert strategy_of("random") == strategy_of(Random) == Random(0)
    assert strategy_of("random:12") == Random(12) == strategy_of(Random(12))
    assert isinstance(strategy_of("outblas.autotune:Grid"), Grid)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("luck", ValueError, "strategy is 'luck', expected one of grid, ranked, random, "),
        ("", ValueError, "strategy is ''"),
        ("random:x y", ValueError, "strategy is 'random:x y'"),
        ("json:Nothing", ValueError, "expected a class of json, which has no Nothing"),
        ("json:dumps", TypeError, "strategy is 'json:dumps', expected a subclass of outblas"),
        ("no_such_module:X", ImportError, "strategy is 'no_such_module:X', which cannot be imp"),
        ("test_strategy:Proposing", TypeError, "expected a class that can be made without argum"),
        (Strategy, TypeError, "expected a class that can be made without arguments"),
        (int, TypeError, "expected a subclass of outblas.autotune.Strategy"),
        (7, TypeError, "strategy is 7, expected a subclass"),
    ],
)
def test_bad_names(given, error, message, path):
    with pytest.raises(error, match=re.escape(message)):
        strategy_of(given)
    with pytest.raises(error, match=re.escape(message)):
        sweep(SUBJECT, 16, store=path, strategy=given, **OPTIONS)
    assert notes() == []


def test_strategies_travel():
    for strategy in (Grid(), ModelRanked(), Random(3)):
        assert type(pickle.loads(pickle.dumps(strategy))) is type(strategy)
    assert pickle.loads(pickle.dumps(Random(3))) == Random(3)


@pytest.mark.interpreter
def test_the_example_of_the_docstring_tunes_portable(path):
    """End to end, in the interpreter: the class of the docstring, as a user would write it."""
    example = re.search(r"\n\n((?:    +.*\n|\n)+)", inspect.getdoc(Strategy) + "\n")[1]
    source, _, call = textwrap.dedent(example).partition("found = ")
    assert call.strip() == 'sweep("portable", 4096, strategy=SameTile)'
    names = {}
    exec(source, names)
    found = sweep(
        "portable", 16, store=path, trials=9, top_k=1, strategy=names["SameTile"], **OPTIONS
    )
    (outcome,) = found.outcomes
    assert found.finished
    assert 8 <= len(outcome.trials) <= 10
    assert found.winners[0].kernel == "portable"


def test_options_as_a_record_and_as_keywords(path, monkeypatch):
    monkeypatch.setenv("FAULTY_CONFIGS", "6")
    options = SweepOptions(gpus="cpu", trials=1, top_k=2, strategy=Grid())
    facts = {"dtype": "float32", "layout": "nn", "store": path}
    assert len(sweep(SUBJECT, 16, options=options, **facts).outcomes[0].trials) == 1
    found = sweep(SUBJECT, 16, options=options, trials=4, **facts)
    assert len(found.outcomes[0].trials) == 4
    with pytest.raises(TypeError, match=r"sweep\(\) got an unexpected keyword argument 'trails'"):
        sweep(SUBJECT, 16, trails=4, **facts)  # type: ignore[call-arg]


def test_keywords_are_the_options():
    types = typing.get_type_hints(SweepOptions)
    assert [field.name for field in fields(SweepOptions)] == list(types)
    assert typing.get_type_hints(SweepKeywords) == types


def test_the_older_names():
    from outblas import autotune

    assert autotune.Subject is autotune.TuneTarget is TuneTarget
    (candidate, *_) = search_of_faulty()
    assert candidate.subject == candidate.target == SUBJECT
    assert Job((SUBJECT,), WORKLOAD).subjects == (SUBJECT,)


def test_a_strategy_on_the_command_line(monkeypatch, tmp_path):
    """A module in the current folder is found."""
    (tmp_path / "my_strategies.py").write_text(
        "from outblas.autotune import Strategy\n\n\n"
        "class Last(Strategy):\n"
        "    def propose(self, search):\n"
        "        yield search.ranked()[-2:]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    line = "--dry-run --gpu h100 --kernels portable --strategy my_strategies:Last"
    shown = commands.invoke("tune", *line.split()).stdout
    assert "The first 3 by Last" in shown
    assert "3 to be measured" in shown
    shown = commands.invoke("tune", *line.replace("my_strategies:Last", "random:4").split()).stdout
    assert "The first 10 by Random" in shown
