"""Barrier contracts of the Hopper ladder's pipelines: a kernel whose roles break them does not
compile, where it would hang on the GPU.
"""

import re
from typing import Any

import pytest
from support.hopper_problems import FIRST_AND_LAST, load

from outblas.hopper import cluster_multicast, lean_barriers
from outblas.hopper.parts import pipeline
from outblas.hopper.parts.config import HopperConfig


@pytest.mark.parametrize(
    ("kind", "consumers", "cluster", "full", "empty"),
    [
        (pipeline.Pipeline, 1, 1, 1, 0),
        (pipeline.TokenPipeline, 1, 1, 129, 129),
        (pipeline.TokenPipeline, 2, 1, 257, 257),
        (lean_barriers.LeanPipeline, 2, 1, 1, 2),
        (cluster_multicast.ClusterPipeline, 2, 2, 1, 4),
        (cluster_multicast.ClusterPipeline, 3, 4, 1, 12),
    ],
)
def test_arrival_counts_follow_from_the_roles(
    kind: Any, consumers: int, cluster: int, full: int, empty: int
) -> None:
    made = kind(None, None, 3, 49152, consumers, cluster, False)

    assert made.arrival_counts() == {"full": full, "empty": empty}


@pytest.mark.compile
@pytest.mark.own_compile
@pytest.mark.parametrize(
    ("method", "broken", "message"),
    [
        pytest.param(
            "consumer_release",
            lambda self, index: None,
            "empty[s] gets no arrivals per phase, but its contract expects 2",
            id="consumers release nothing",
        ),
        pytest.param(
            "arrival_counts",
            lambda self: {"full": 1, "empty": 3},
            "empty[s] gets {'consumers': 2} arrivals per phase, but its contract expects 3",
            id="a consumer too many is awaited",
        ),
        pytest.param(
            "arrive_and_expect_tx",
            lambda self, state: None,
            "full[s] gets no arrivals per phase, but its contract expects 1",
            id="the producer announces nothing",
        ),
    ],
)
def test_a_pipeline_that_breaks_its_contract_fails_the_compile(
    method: str, broken: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lean_barriers.LeanPipeline, method, broken)

    with pytest.raises(Exception, match=re.escape(message)):
        load("lean_barriers").artifact()


@pytest.mark.compile
@pytest.mark.own_compile
@pytest.mark.parametrize("rung", FIRST_AND_LAST)
def test_bytes_that_do_not_match_the_config_fail_the_compile(
    rung: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The producer would announce what never lands, and every CTA would wait for it."""
    landed = load(rung).Config().stage_bytes
    monkeypatch.setattr(HopperConfig, "stage_bytes", property(lambda self: landed + 128))

    message = f"{landed} bytes arrive in a stage, but the config announces {landed + 128}"
    with pytest.raises(Exception, match=message):
        load(rung).artifact()
