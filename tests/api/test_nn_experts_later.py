"""`patch` and experts of transformers that change afterwards, or of which copies are made."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from outblas import patch, unpatch
from outblas.patching.replaced import compute

pytest.importorskip("transformers")

from support.transformers_experts import (
    Calls,
    experts_of,
    made_by_decorator,
    mixtral,
    recorded_calls,
    routed,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::outblas.FallbackWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return recorded_calls(monkeypatch)


class Cubed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x**3


# ---- changes
@pytest.mark.parametrize("change", ["parametrized", "a hook"])
def test_experts_that_change_later_are_computed_by_their_class(change: str, calls: Calls) -> None:
    module: Any = made_by_decorator(nn.SiLU())
    given = routed()
    patch(module)
    expected = module(*given)
    del calls[:]
    if change == "parametrized":
        nn.utils.parametrize.register_parametrization(module, "down_proj", nn.Identity())
    else:
        module.act_fn.register_forward_hook(lambda *_: None)

    found = module(*given)

    assert not calls
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("act", [nn.GELU(), Cubed()])
def test_an_activation_that_is_replaced_later_is_computed(act: nn.Module, calls: Calls) -> None:
    module: Any = made_by_decorator(nn.SiLU())
    given = routed()
    patch(module)

    module.act_fn = act

    expected = compute(module, *given)
    torch.testing.assert_close(module(*given), expected)
    assert not calls
    assert patch(module).remarks["(root)"] == (
        "its activation is not the silu that patch found: Specialists computes as without patch"
    )


def test_experts_that_are_parametrized_later_are_reported_with_the_reason() -> None:
    module = made_by_decorator(nn.SiLU())
    first = patch(module)
    nn.utils.parametrize.register_parametrization(module, "down_proj", nn.Identity())

    again = patch(module)

    assert again.experts == first.experts
    assert again.remarks["(root)"].startswith("it has no parameter down_proj: Parametrized")


# ---- copies
def test_a_copy_of_a_patched_model_has_experts_of_its_own() -> None:
    model = mixtral()
    patch(model)

    other = copy.deepcopy(model)
    with torch.no_grad():
        experts_of(other).down_proj.zero_()

    x, index, weights = torch.randn(5, 32), *routed()[1:]
    assert (experts_of(other)(x, index, weights) == 0).all()
    assert (experts_of(model)(x, index, weights) != 0).any()


def test_a_replica_computes_with_its_own_tensors(calls: Calls) -> None:
    """As `nn.DataParallel` makes them: without parameters, and with tensors in their place."""
    module: Any = made_by_decorator(nn.SiLU())
    given = routed()
    patch(module)

    for replica in (first := replica_of(module), replica_of(first)):
        del calls[:]
        torch.testing.assert_close(replica(*given), compute(replica, *given))
        assert len(calls) == 1
        assert (replica(*given) != module(*given)).any()

    unpatch(module)
    assert not any("outblas" in name for name in vars(module))


def replica_of(module: Any) -> Any:
    """Returns a replica whose matrices are twice as large."""
    replica = module._replicate_for_data_parallel()
    for name in ("gate_up_proj", "down_proj"):
        setattr(replica, name, (2 * getattr(module, name)).detach())
    return replica
