"""What a sweep is about and what it finds, as plain frozen records: nothing here imports torch or a
DSL.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
import json
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ...core.shapes import LAYOUTS, Shape, to_text
from ...core.steps import GATED, Steps

# The names of precisions: of the operands, and whether fp32 products may be rounded to tf32.
PRECISIONS = ("bfloat16", "float16", "float32", "tf32")
# Whether calls may find their weights in L2: warm ones take the same weights again and again, cold
# ones rotate over copies that L2 cannot hold together.
WEIGHTS = ("warm", "cold")

Status = Literal[
    "ok",  # right, and timed
    "wrong",  # the exact oracle objects
    "refused",  # the kernel does not take the workload with this config
    "failed",  # compiling or launching raised
    "compile timeout",
    "compile crash",
    "hang",  # not done in time; the worker was killed
    "crash",  # the worker died, of a signal for instance
    "device lost",  # an illegal access or another error after which the context is of no use
    "out of memory",
]
STATUSES: tuple[Status, ...] = get_args(Status)
# What may say more about the moment than about the config: a machine short of memory, a driver that
# was reset, a compiler that was killed. A later "ok" or "wrong" takes its place.
CIRCUMSTANTIAL = frozenset[Status](
    ["failed", "compile timeout", "compile crash", "hang", "crash", "device lost", "out of memory"]
)


@dataclass(frozen=True, order=True)
class Workload:
    """One kind of product to tune for: C[M, N] = A[M, K] B[K, N], operands packed and aligned to 16
    bytes.

    `dtype` is one of `PRECISIONS`, `out_dtype` the dtype of C, `layout` one of `shapes.LAYOUTS`,
    `weights` one of `WEIGHTS`: where B is when a call begins. `epilogue` says what follows the
    product, as `Steps.parse` reads it: `bias+gelu+residual`, "" for nothing. An activation that is
    gated makes one column of the output of two of B's N.
    """

    M: int
    N: int
    K: int
    dtype: str = "bfloat16"
    out_dtype: str = ""
    layout: str = "nt"
    weights: str = "warm"
    epilogue: str = ""

    def __post_init__(self) -> None:
        for name, size in (("M", self.M), ("N", self.N), ("K", self.K)):
            if type(size) is not int or size < 1:
                raise ValueError(f"{name} is {size!r}, expected an integer of at least 1")
        if self.dtype not in PRECISIONS:
            raise ValueError(f"dtype is {self.dtype!r}, expected one of {', '.join(PRECISIONS)}")
        own = "float32" if self.dtype == "tf32" else self.dtype
        object.__setattr__(self, "out_dtype", self.out_dtype or own)
        if self.out_dtype not in (own, "float32"):
            raise ValueError(f"out_dtype is {self.out_dtype!r}, expected {own} or float32")
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout is {self.layout!r}, expected one of {', '.join(LAYOUTS)}")
        if self.weights not in WEIGHTS:
            raise ValueError(f"weights is {self.weights!r}, expected one of {', '.join(WEIGHTS)}")
        if type(self.epilogue) is not str:
            raise ValueError(f"epilogue is {self.epilogue!r}, expected a text")
        if self.epilogue:
            self._check_epilogue(own)

    def _check_epilogue(self, own: str) -> None:
        """Writes the epilogue as its steps are written; `own` is the dtype of the operands."""
        steps = Steps.parse(self.epilogue)
        object.__setattr__(self, "epilogue", str(steps))
        if self.out_dtype != own:
            raise ValueError(
                f"out_dtype is {self.out_dtype!r}, expected {own} with epilogue {self.epilogue}"
            )
        if steps.activation in GATED and self.N % 2:
            raise ValueError(f"N is {self.N}, expected an even number with {steps.activation}")

    @property
    def shape(self) -> Shape:
        return self.M, self.N, self.K

    @property
    def operand_dtype(self) -> str:
        """dtype of A and B as torch names it."""
        return "float32" if self.dtype == "tf32" else self.dtype

    @property
    def steps(self) -> Steps:
        """What follows the product."""
        return Steps.parse(self.epilogue)

    @property
    def is_plain(self) -> bool:
        """Whether nothing follows the product, and its weights may be in L2."""
        return self.weights == "warm" and not self.epilogue

    @property
    def plain(self) -> Workload:
        """The product of these operands with warm weights and nothing after it."""
        return self if self.is_plain else dataclasses.replace(self, weights="warm", epilogue="")

    @property
    def conditions(self) -> str:
        """What sets it apart from a plain product: "", `cold`, `bias+gelu`, `cold bias+gelu`."""
        cold = "" if self.weights == "warm" else self.weights
        return f"{cold} {self.epilogue}".strip()

    @property
    def kind(self) -> tuple[str, ...]:
        """What shapes must share to learn from each other: dtype, out_dtype, layout, weights,
        epilogue.
        """
        return self.dtype, self.out_dtype, self.layout, self.weights, self.epilogue

    def __str__(self) -> str:
        """`4096 bfloat16 nt`, `16x4096x4096 bfloat16 nt cold bias+gelu`."""
        out = "" if self.out_dtype == self.operand_dtype else f" to {self.out_dtype}"
        text = f"{to_text(self.shape)} {self.dtype}{out} {self.layout} {self.conditions}"
        return text.rstrip()


@dataclass(frozen=True)
class Gpu:
    """The GPU and the software that a figure depends on. `arch`: 90 is sm_90; None and 0 where
    there is none.
    """

    name: str
    arch: int
    sms: int
    power_limit_w: float | None = None
    driver: str | None = None
    cuda: str | None = None
    torch: str | None = None
    triton: str | None = None
    dsl: str | None = None

    @property
    def key(self) -> str:
        """Equal for equal facts, across processes and machines."""
        return _key(self, type(self.power_limit_w).__name__)

    @property
    def model(self) -> tuple[str, int]:
        """What makes two boards one model."""
        return self.name, self.sms


@functools.lru_cache(maxsize=64)
def _key(gpu: Gpu, type_of_power_limit: str) -> str:
    """Of the facts as JSON has them, where 700 is not 700.0, though the two are equal."""
    facts = json.dumps(dataclasses.asdict(gpu), sort_keys=True)
    return hashlib.sha256(facts.encode()).hexdigest()[:16]


# Of a trial: its GPU, workload, kernel, source and config.
Facts = tuple[Gpu, Workload, str, str, str]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What came of one config at one workload on one GPU.

    `config` is the whole text of `configs.to_text`; `source` the fingerprint of the kernel's
    source; `reason` says why a trial is not "ok". Figures are of the screen: `us` a call, `ratio`
    cuBLAS's time (with an epilogue that of torch's own calls) over it, with the lowest and the
    highest round; None unless "ok". `predicted_us` is the analytic model's, `compile_s` None where
    it was compiled before. `when` is ISO 8601, UTC.
    """

    gpu: Gpu
    workload: Workload
    kernel: str
    source: str
    config: str
    status: Status
    reason: str = ""
    us: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    clock_mhz: float | None = None
    predicted_us: float | None = None
    compile_s: float | None = None
    when: str = ""

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def identity(self) -> tuple[str, Workload, str, str, str]:
        """No two trials of a store share it."""
        return self.gpu.key, self.workload, self.kernel, self.source, self.config


@dataclass(frozen=True, kw_only=True)
class Finalist:
    """A config in the finals: medians over rounds in which the finalists and cuBLAS took turns."""

    kernel: str
    config: str
    us: float
    ratio: float
    ratio_low: float
    ratio_high: float


@dataclass(frozen=True, kw_only=True)
class BestConfig:
    """The best config of one kernel at one workload on one GPU.

    `ratio`: `cublas_us`, cuBLAS's time or with an epilogue that of torch's own calls, over its own,
    median of `rounds` interleaved rounds, with the 10th and
    90th percentile.
    `lead`: the time of `runner_up` (a config of the same kernel; "" if it was alone) over its
    own, `lead_low` and `lead_high` enclose the true median with 95% confidence, `confidence` bounds
    from below (0: not at all) that with which it is the fastest of its kernel's finalists.
    `separated`: no other can be as fast, or none by more than the finals resolve. `screened` of
    `valid` configs (of all kernels) were measured before the finals. `finalists`: of all kernels,
    fastest first.
    """

    gpu: Gpu
    workload: Workload
    kernel: str
    source: str
    config: str
    us: float
    cublas_us: float
    ratio: float
    ratio_low: float
    ratio_high: float
    rounds: int
    runner_up: str = ""
    lead: float | None = None
    lead_low: float | None = None
    lead_high: float | None = None
    confidence: float | None = None
    separated: bool = False
    screened: int = 0
    valid: int = 0
    finalists: tuple[Finalist, ...] = ()
    when: str = ""


Winner = BestConfig  # the former name, which programs may still use


@dataclass(frozen=True, kw_only=True)
class TunedConfig:
    """What a lookup needs of a best config."""

    gpu: Gpu
    workload: Workload
    kernel: str
    config: str
    us: float
    ratio: float
    when: str


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def latest_date() -> str:
    """A date beyond this one is of a clock that was wrong, and says nothing of what is older or
    newer.
    """
    tomorrow = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=1)
    return tomorrow.isoformat(timespec="seconds")


def age(when: str, latest: str) -> str:
    """To sort dates by, the newest last: a date beyond `latest_date` comes before all others."""
    return "" if when > latest else when


def to_record(value: Trial | BestConfig) -> dict[str, Any]:
    """For JSON."""
    return dataclasses.asdict(value)
