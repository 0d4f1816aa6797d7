"""Our product as a choice of Inductor's."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.inductor import inductor_settings

import outblas
from outblas.inductor import outblas_mm

Tensor = torch.Tensor

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore::outblas.FallbackWarning", "ignore::DeprecationWarning"),
]


@pytest.fixture
def offered() -> Iterator[list[Callable[..., Any]]]:
    """Inductor's list of products from outside, empty before the test and restored after it. It
    takes no compiled code from its caches.
    """
    torch._dynamo.reset()
    with inductor_settings(external_matmul=[], max_autotune_gemm=True, force_disable_caches=True):
        yield torch._inductor.config.external_matmul


@pytest.fixture
def ours_is_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor is shown no product but ours."""
    from torch._inductor.select_algorithm import AlgorithmSelectorCache

    select = AlgorithmSelectorCache.__call__

    def select_ours(self: Any, name: str, choices: list[Any], *given: Any, **how: Any) -> Any:
        ours = [choice for choice in choices if choice.name.startswith("outblas_mm")]
        return select(self, name, ours, *given, **how)

    monkeypatch.setattr(AlgorithmSelectorCache, "__call__", select_ours)


@pytest.fixture
def keywords(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The names of the keywords of each call of `outblas.matmul` that Inductor makes."""
    found: list[list[str]] = []
    product = outblas.api.matmul

    def recording(*given: Tensor, **how: Any) -> Tensor:
        found.append(list(how))
        return product(*given, **how)

    monkeypatch.setattr(outblas.api, "matmul", recording)
    return found


def test_our_product_is_offered_once(offered: list[Callable[..., Any]]) -> None:
    outblas.inductor_choice()
    outblas.inductor_choice()

    assert offered == [outblas_mm]


@pytest.mark.usefixtures("offered", "ours_is_the_fastest")
def test_a_compiled_product_is_ours_where_ours_is_the_fastest(keywords: list[list[str]]) -> None:
    a, b = torch.randint(-8, 9, (64, 48)).float(), torch.randint(-8, 9, (48, 32)).float()
    outblas.inductor_choice()
    compiled = torch.compile(torch.mm)

    got = compiled(a, b)

    assert torch.equal(got, a @ b)
    assert keywords[-1] == ["out"]
