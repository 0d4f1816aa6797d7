"""A small run of the fuzz, and that it sees faults: `make fuzz` is the large one."""

import json

import pytest
import torch
from fuzz import calls, compare, runner, spec
from fuzz.known import call, tensor

import outblas

CALLS, SEED = 500, 20
A, B, C = tensor(3, 4), tensor(4, 5), tensor(3, 5)

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("as_in_the_fuzz"),
]


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(n * CALLS, marks=pytest.mark.slow) for n in (1, 2))]
)
def test_random_calls_are_those_of_torch(first: int) -> None:
    found = runner.run(SEED, first, first + CALLS, "cpu", light=True)

    unlisted = [row for row in found["rows"] if row["known"] is None]
    counted = {name for (_, name), n in found["outcomes"] if n}
    assert unlisted == []
    assert {"same", "both raise", "listed"} <= counted


def test_a_description_makes_the_same_call_again() -> None:
    for index in range(200):
        made = spec.make(SEED, index)
        assert made == spec.make(SEED, index)
        assert made == json.loads(json.dumps(made))


FAULTS = {  # what a wrong product might do, and the difference that says so
    "values": (lambda a, b: torch.matmul(a, b) * 1.01, {}),
    "shape": (lambda a, b: torch.matmul(a, b)[:, :-1], {}),
    "dtype": (lambda a, b: torch.matmul(a, b).double(), {}),
    "strides": (lambda a, b: torch.matmul(a, b).t().contiguous().t(), {}),
    "requires_grad": (
        lambda a, b: torch.matmul(a, b).detach(),
        {"of": ["a"], "layout": "contiguous", "seed": 1},
    ),
    "only outblas raises": (lambda a, b: torch.matmul(b, a), {}),
    "memory": (lambda a, b: torch.matmul(a, b.mul_(1.5)), {}),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_is_seen(kind, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty, gradients = FAULTS[kind]
    made = call("matmul", {"a": A, "b": B}) | ({"gradients": gradients} if gradients else {})
    assert runner.once(made)[2] == []
    monkeypatch.setattr(outblas, "matmul", faulty)
    assert kind in {row["kind"] for row in runner.once(made)[2] if row["known"] is None}


def test_what_is_written_beside_out_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(a, b, out):
        out._base.zero_()
        return torch.matmul(a, b, out=out)

    monkeypatch.setattr(outblas, "matmul", faulty)
    out = tensor(3, 5, layout="steps", fill="nan", seed=5)
    rows = runner.once(call("matmul", {"a": A, "b": B, "out": out}))[2]
    assert "memory around out is modified" in {row["detail"] for row in rows}


def test_bounds_hold_for_torch_itself_and_not_for_half_the_precision() -> None:
    """Of an epilogue in bfloat16: the exact result rounded once passes, one rounded twice as
    coarsely does not.
    """
    tensors = {
        name: t | {"dtype": "bfloat16"} for name, t in {"a": A, "b": B, "bias": tensor(5)}.items()
    }
    made = call("matmul", tensors, activation="gelu")
    (exact,), _ = calls.truth(made, magnitude=False)
    theirs = calls.make(made, calls.by_torch)
    for wrong, passes in ((0, True), (0.05, False)):
        ours = calls.Outcome(results=[(exact * (1 + wrong)).bfloat16()])
        assert (
            compare.of_results(made, ours.results[0], theirs.results[0], 0, compare.Truths(made))
            == []
        ) is passes
