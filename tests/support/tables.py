"""Winners to export, and shipped tables made of them."""

import datetime
import functools
import json
import string
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from outblas.autotune.store import signed_json, validation
from outblas.autotune.store.records import (
    PRECISIONS,
    WEIGHTS,
    BestConfig,
    Finalist,
    Gpu,
    Workload,
)
from outblas.core.shapes import LAYOUTS
from support import stored
from support.stored import H100

WORKLOAD = Workload(4096, 512, 64, "float16", "float32", "nn")


TRIAL, FAILED = stored.trial(workload=WORKLOAD), stored.failed(1, workload=WORKLOAD)
FIGURES = ("us", "ratio", "ratio_low", "ratio_high")
winner = functools.partial(stored.winner, workload=WORKLOAD, config="tile_m=128")


def first_version() -> dict[str, Any]:
    """What the first version of exports had of two trials and a winner, in one object."""
    tried, won = [
        [validation.fields_of(record) for record in records]
        for records in ([TRIAL, FAILED], [winner()])
    ]
    content = {
        "format": "outblas-tuning",
        "version": 1,
        "sha256": "",
        "gpus": {H100.key: {**vars(H100)}},
    }
    content |= {"trials": json.loads(json.dumps(tried)), "winners": json.loads(json.dumps(won))}
    return json.loads(signed(content))


def signed(content: dict[str, Any]) -> str:
    content["sha256"] = signed_json.checksum(content)
    return json.dumps(content)


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
names = st.text(string.ascii_letters + string.digits + "_", min_size=1, max_size=8)
configs = st.lists(st.tuples(names, names), max_size=4).map(
    lambda items: ",".join(map("=".join, items))
)
kernels = st.text(string.ascii_lowercase + string.digits + "_.", min_size=1, max_size=12)
positive = st.floats(min_value=1e-9, max_value=1e15)
numbers = st.none() | st.floats(min_value=0, max_value=1e15)
counts = st.integers(min_value=0, max_value=1 << 48)
dates = st.datetimes(datetime.datetime(2000, 1, 1)).map(lambda date: f"{date.isoformat()}+00:00")
gpus = st.builds(Gpu, texts.filter(bool), counts, counts, numbers, *[st.none() | texts] * 5)
sizes = [st.integers(min_value=1, max_value=1 << 48)] * 3
kinds = st.sampled_from(PRECISIONS), st.sampled_from(("", "float32")), st.sampled_from(LAYOUTS)
weights = st.sampled_from(WEIGHTS)
fused = st.builds(
    Workload,
    *sizes,
    st.sampled_from(PRECISIONS),
    layout=kinds[2],
    weights=weights,
    epilogue=st.sampled_from(("bias", "gelu", "residual", "bias+relu+residual")),
)
workloads = st.builds(Workload, *sizes, *kinds, weights) | fused
places = {
    "gpu": gpus,
    "workload": workloads,
    "kernel": kernels,
    "source": texts,
    "config": configs,
    "when": dates,
}
figures = dict.fromkeys(FIGURES, positive)
winners = st.builds(
    BestConfig,
    **places,
    **figures,
    cublas_us=positive,
    rounds=st.integers(min_value=1, max_value=1000),
    runner_up=configs,
    **dict.fromkeys(("lead", "lead_low", "lead_high"), st.none() | positive),
    confidence=st.none() | st.floats(min_value=0, max_value=1),
    separated=st.booleans(),
    screened=counts,
    valid=counts,
    finalists=st.lists(
        st.builds(Finalist, kernel=kernels, config=configs, **figures), max_size=3
    ).map(tuple),
)
examples = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


def inside(content: Any, place: tuple[Any, ...]) -> Any:
    for step in place:
        content = content[step]
    return content


def put(content: dict[str, Any], place: tuple[Any, ...], value: Any) -> None:
    inside(content, place[:-1])[place[-1]] = value
