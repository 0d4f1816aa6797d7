"""The subjects and results of a sweep, as plain frozen records. Nothing here imports torch or a
DSL.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
from dataclasses import dataclass
from typing import Literal, get_args

from outblas.base.grouped_shapes import ROWS_LAYOUTS, TERMS_LAYOUT, GroupedWorkload, Grouping
from outblas.base.shapes import LAYOUTS, Shape, to_text
from outblas.call.steps import GATED, Steps

# The names of precisions: the dtype of the operands, and whether fp32 products may be rounded to
# tf32.
PRECISIONS = ("bfloat16", "float16", "float32", "tf32")
# Whether calls may find their weights in L2: warm calls use the same weights again and again, cold
# calls rotate over copies that do not fit L2 together.
Weights = Literal["warm", "cold"]
WEIGHTS: tuple[Weights, ...] = get_args(Weights)

Status = Literal[
    "ok",  # correct, and timed
    "wrong",  # the exact oracle found an error
    "refused",  # the kernel does not support the workload with this config
    "failed",  # compiling or launching raised
    "compile timeout",
    "compile crash",
    "hang",  # not finished in time; the worker was killed
    "crash",  # the worker died, for instance by a signal
    "device lost",  # an illegal access or another error after which the context is unusable
    "out of memory",
]
# Statuses that may be caused by circumstances and not by the config: a machine short of memory, a
# driver that was reset, a compiler that was killed. A later "ok" or "wrong" replaces them.
CIRCUMSTANTIAL = frozenset[Status](
    ["failed", "compile timeout", "compile crash", "hang", "crash", "device lost", "out of memory"]
)


@dataclass(frozen=True, order=True)
class Workload:
    """A kind of product to tune for: C[M, N] = A[M, K] B[K, N], with packed operands.

    Attributes:
        M: Rows of A and C.
        N: Columns of B and C. A gated activation makes N/2 columns of the output.
        K: Columns of A and rows of B.
        dtype: The precision of the operands: "bfloat16", "float16", "float32" (IEEE products) or
            "tf32" (float32 operands, products rounded to TF32).
        out_dtype: The dtype of C: that of the operands, which is what "" stands for, or "float32".
        layout: How A and B are stored, a letter each: "n" by rows, "t" by columns. "nt" is the
            layout of a linear layer: B is a transposed weight.
        weights: "warm" where B may be in the L2 cache when a call begins, "cold" where it is not.
        epilogue: What follows the product, such as "bias+gelu+residual"; "" for nothing.
        grouping: How groups divide the product: "8:zipf" for the rows of 8 experts, skewed,
            "8:terms" for the gradients of their weights; "" for one product. M, N and K are those
            of the products of all groups, as in `outblas.grouped_mm`.

    Raises:
        ValueError: A field has a value that is none of its choices.

    Example:
        >>> from outblas.autotune import Workload
        >>> workload = Workload(16, 4096, 4096, weights="cold", epilogue="bias+gelu")
        >>> str(workload)
        '16x4096x4096 bfloat16 nt cold bias+gelu'
        >>> workload.plain == Workload(16, 4096, 4096)
        True
    """

    M: int
    N: int
    K: int
    dtype: str = "bfloat16"
    out_dtype: str = ""
    layout: str = "nt"
    weights: Weights = "warm"
    epilogue: str = ""
    grouping: str = ""

    def __post_init__(self) -> None:
        for name, size in (("M", self.M), ("N", self.N), ("K", self.K)):
            if type(size) is not int or size < 1:
                raise ValueError(f"{name} is {size!r}, expected an integer of at least 1")
        if self.dtype not in PRECISIONS:
            raise ValueError(f"dtype is {self.dtype!r}, expected one of {', '.join(PRECISIONS)}")
        operand_dtype = self.operand_dtype
        object.__setattr__(self, "out_dtype", self.out_dtype or operand_dtype)
        if self.out_dtype not in (operand_dtype, "float32"):
            raise ValueError(
                f"out_dtype is {self.out_dtype!r}, expected {operand_dtype} or float32"
            )
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout is {self.layout!r}, expected one of {', '.join(LAYOUTS)}")
        if self.weights not in WEIGHTS:
            raise ValueError(f"weights is {self.weights!r}, expected one of {', '.join(WEIGHTS)}")
        if type(self.epilogue) is not str:
            raise ValueError(f"epilogue is {self.epilogue!r}, expected a text")
        if self.epilogue:
            self._check_epilogue()
        if type(self.grouping) is not str:
            raise ValueError(f"grouping is {self.grouping!r}, expected a text")
        if self.grouping:
            self._check_grouping()

    def _check_epilogue(self) -> None:
        """Normalises the text of the epilogue."""
        steps = Steps.parse(self.epilogue)
        object.__setattr__(self, "epilogue", str(steps))
        if self.out_dtype != self.operand_dtype:
            raise ValueError(
                f"out_dtype is {self.out_dtype!r}, expected {self.operand_dtype} with epilogue "
                f"{self.epilogue}"
            )
        if steps.activation in GATED and self.N % 2:
            raise ValueError(f"N is {self.N}, expected an even number with {steps.activation}")

    def _check_grouping(self) -> None:
        """Normalises the text of the grouping."""
        grouping = Grouping.parse(self.grouping)
        object.__setattr__(self, "grouping", str(grouping))
        layouts = ROWS_LAYOUTS if grouping.form == "rows" else (TERMS_LAYOUT,)
        if self.layout not in layouts:
            raise ValueError(
                f"layout is {self.layout!r}, expected {' or '.join(layouts)} with grouping "
                f"{self.grouping}"
            )
        if self.dtype == "tf32":
            raise ValueError(f"dtype is 'tf32', expected another with grouping {self.grouping}")
        if self.epilogue:
            raise ValueError(f"epilogue is {self.epilogue!r}, expected none with grouping")

    @property
    def grouped(self) -> GroupedWorkload | None:
        """The workload as one of `outblas.grouped_mm`; None for one product."""
        if not self.grouping:
            return None
        grouping = Grouping.parse(self.grouping)
        return GroupedWorkload.of(
            grouping.experts, self.shape, grouping.distribution, grouping.form
        )

    @property
    def shape(self) -> Shape:
        """The sizes (M, N, K)."""
        return self.M, self.N, self.K

    @property
    def operand_dtype(self) -> str:
        """The dtype of A and B by its name in torch."""
        return "float32" if self.dtype == "tf32" else self.dtype

    @property
    def steps(self) -> Steps:
        """The epilogue, parsed."""
        return Steps.parse(self.epilogue)

    @property
    def is_plain(self) -> bool:
        """Whether it is one product that nothing follows, and its weights may be in L2."""
        return self.weights == "warm" and not self.epilogue and not self.grouping

    @property
    def plain(self) -> Workload:
        """The product of these operands with warm weights and nothing after it; that of groups
        stays one of groups.
        """
        return self if self.is_plain else dataclasses.replace(self, weights="warm", epilogue="")

    @property
    def conditions(self) -> str:
        """What sets it apart from a plain product, such as "cold bias+gelu"; "" for nothing."""
        cold = "" if self.weights == "warm" else self.weights
        groups = self.grouping and f"groups {self.grouping}"
        return " ".join(part for part in (cold, self.epilogue, groups) if part)

    @property
    def kind(self) -> tuple[str, ...]:
        """The facts that two workloads must share for one to be a guess for the other: all but
        the shape.
        """
        return self.dtype, self.out_dtype, self.layout, self.weights, self.epilogue, self.grouping

    def __str__(self) -> str:
        """`4096 bfloat16 nt`, `16x4096x4096 bfloat16 nt cold bias+gelu`."""
        out = "" if self.out_dtype == self.operand_dtype else f" to {self.out_dtype}"
        text = f"{to_text(self.shape)} {self.dtype}{out} {self.layout} {self.conditions}"
        return text.rstrip()


@dataclass(frozen=True)
class Gpu:
    """The GPU and the software that a measured time depends on.

    Attributes:
        name: The name of the GPU, as torch.cuda has it.
        arch: The compute capability as 10 * major + minor: 90 is sm_90. 0 for the CPU.
        sms: The number of its SMs. 0 for the CPU.
        power_limit_w: Its power limit in watts; None where that is not known.
        driver: The version of the driver.
        cuda: The version of CUDA that torch was built for.
        torch: The version of torch.
        triton: The version of Triton.
        dsl: The version of the CuTe DSL (nvidia-cutlass-dsl).

    Example:
        >>> from outblas.autotune import Gpu
        >>> Gpu("NVIDIA H100 80GB HBM3", arch=90, sms=132).model
        ('NVIDIA H100 80GB HBM3', 132)
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
        """A digest that is equal for equal fields, in any process and on any machine."""
        facts = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(facts.encode()).hexdigest()[:16]

    @property
    def model(self) -> tuple[str, int]:
        """The name and the number of SMs, which two boards of one model share."""
        return self.name, self.sms


# What tells a trial from every other: its GPU, workload, kernel, source and config.
Identity = tuple[Gpu, Workload, str, str, str]


def base_name(workload: Workload, *, on_gpu: bool) -> str:
    """Returns what the ratios of a workload compare with: "cuBLAS", or "torch" for an epilogue
    or groups, whose calls do the same work.

    Returns "" on a CPU. There torch multiplies natively while outblas's kernel runs in Triton's
    interpreter, so the ratio of their times means nothing, and no output shows it.
    """
    if not on_gpu:
        return ""
    return "torch" if workload.epilogue or workload.grouping else "cuBLAS"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The result of measuring one config at one workload on one GPU.

    Times are those of the screen, which measures each config once. They are None unless the status
    is "ok".

    Attributes:
        gpu: Where it was measured.
        workload: The product that was measured.
        kernel: The name of the kernel.
        source: The fingerprint of the kernel's source.
        config: The kernel's config as text, `name=value` for every field, joined by commas.
        status: "ok" (right, and timed), "wrong", "refused" (the kernel does not accept the
            workload with this config), "failed" (compiling or launching raised an error), "compile
            timeout", "compile crash", "hang", "crash", "device lost" or "out of memory".
        reason: Why it is not "ok".
        us: The time of a call in µs.
        ratio: The time of cuBLAS over `us`; with an epilogue, the time of torch's own calls.
        ratio_low: The lowest ratio of a round.
        ratio_high: The highest ratio of a round.
        clock_mhz: The clock of the SMs meanwhile, in MHz.
        predicted_us: The time that the analytic model predicted, in µs.
        compile_s: The seconds that compiling took; None where it was compiled before.
        when: The date in ISO 8601, UTC.

    Example:
        >>> from outblas.autotune import Gpu, Trial, Workload
        >>> trial = Trial(
        ...     gpu=Gpu("NVIDIA H100 80GB HBM3", 90, 132),
        ...     workload=Workload(4096, 4096, 4096),
        ...     kernel="hopper.gemm",
        ...     source="0123456789abcdef",
        ...     config="tile_m=128",
        ...     status="hang",
        ...     reason="not done after 20 s",
        ... )
        >>> trial.ok
        False
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
        """Whether the config gave the right result and was timed."""
        return self.status == "ok"

    @property
    def identity(self) -> Identity:
        """What tells it from every other trial of a store: its GPU, workload, kernel, source and
        config.
        """
        return self.gpu, self.workload, self.kernel, self.source, self.config


@dataclass(frozen=True, kw_only=True)
class Finalist:
    """A config in the finals, in which the fastest configs and cuBLAS take turns.

    Attributes:
        kernel: The name of the kernel.
        config: Its config as text.
        us: The median time of a call in µs.
        ratio: The median, over rounds, of the time of cuBLAS over that of this config.
        ratio_low: The 10th percentile of that ratio.
        ratio_high: The 90th percentile of that ratio.

    Example:
        >>> from outblas.autotune import Finalist
        >>> best = Finalist(
        ...     kernel="portable", config="", us=21.0, ratio=1.04, ratio_low=1.02, ratio_high=1.05
        ... )
        >>> best.ratio > 1  # faster than cuBLAS
        True
    """

    kernel: str
    config: str
    us: float
    ratio: float
    ratio_low: float
    ratio_high: float


@dataclass(frozen=True, kw_only=True)
class BestConfig:
    """The winner of the finals: the best config of one kernel at one workload on one GPU.

    Attributes:
        gpu: Where it was measured.
        workload: The product that was measured.
        kernel: The name of the kernel.
        source: The fingerprint of the kernel's source.
        config: The config as text, `name=value` for every field, joined by commas.
        us: The median time of a call in µs.
        cublas_us: The median time of cuBLAS in µs; with an epilogue, of torch's own calls.
        ratio: The median, over rounds, of the time of cuBLAS over that of this config: above 1 it
            is faster than cuBLAS.
        ratio_low: The 10th percentile of that ratio.
        ratio_high: The 90th percentile of that ratio.
        rounds: The number of interleaved rounds.
        runner_up: The second best config of the same kernel as text; "" where there was none.
        lead: The median of the time of the runner-up over that of this config.
        lead_low: The lower end of the 95% confidence interval of the lead.
        lead_high: The upper end of that interval.
        confidence: A lower bound of the confidence, from 0 to 1, that this config is the fastest of
            its kernel's finalists.
        screened: How many configs, of all kernels, were measured before the finals.
        valid: How many configs, of all kernels, could have been measured.
        finalists: The finalists of all kernels, the fastest first.
        when: The date in ISO 8601, UTC.

    Example:
        >>> from outblas.autotune import BestConfig, Gpu, Workload
        >>> best = BestConfig(
        ...     gpu=Gpu("NVIDIA H100 80GB HBM3", 90, 132),
        ...     workload=Workload(4096, 4096, 4096),
        ...     kernel="hopper.gemm",
        ...     source="0123456789abcdef",
        ...     config="tile_m=128",
        ...     us=170.0,
        ...     cublas_us=180.2,
        ...     ratio=1.06,
        ...     ratio_low=1.05,
        ...     ratio_high=1.07,
        ...     rounds=30,
        ... )
        >>> f"{best.kernel}: {best.ratio:.2f} of cuBLAS"
        'hopper.gemm: 1.06 of cuBLAS'
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
    screened: int = 0
    valid: int = 0
    finalists: tuple[Finalist, ...] = ()
    when: str = ""

    @property
    def identity(self) -> Identity:
        """That of its config's trial."""
        return self.gpu, self.workload, self.kernel, self.source, self.config


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
