"""Workloads of grouped products: the experts of language models, the sizes of their groups, and the
conversion of workloads to and from text. Nothing here imports torch.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product
from types import MappingProxyType
from typing import Literal, get_args

from outblas.base.shapes import Shape

Distribution = Literal["balanced", "zipf"]
DISTRIBUTIONS: tuple[Distribution, ...] = get_args(Distribution)
# Which dimension is divided: the rows of A and of the result, as in a forward pass, or the terms of
# the sums, as in the gradient of the weights.
Form = Literal["rows", "terms"]
FORMS: tuple[Form, ...] = get_args(Form)
# Of A and of each matrix of B, n row-major, t transposed. The divided dimension is never the
# contiguous one.
ROWS_LAYOUTS = ("nt", "nn")
TERMS_LAYOUT = "tn"
SEED = 0  # of the order in which experts are popular

# Experts, and N and K of their products at full width: gate and up projection in one product, down
# projection. Taken from the models' published configurations.
EXPERTS = MappingProxyType(
    {
        "mixtral-8x7b": (8, ((28672, 4096), (4096, 14336))),
        "qwen3-30b-a3b": (128, ((1536, 2048), (2048, 768))),
        "deepseek-v3": (256, ((4096, 7168), (7168, 2048))),
    }
)
ROWS = (256, 4096, 65536)  # of all experts together

# The experts, rows of all of them, N and K for which DeepGEMM publishes figures of groups of rows
# that follow one another: experts of DeepSeek-V3, as many as one GPU of its servers has.
DEEPGEMM = tuple((experts, 32768, N, K) for experts in (4, 8) for N, K in EXPERTS["deepseek-v3"][1])

_FAMILY = "moe"
_LISTED = "deepgemm"
_EXPECTED = (
    f"EXPERTSxROWSxNxK, {_LISTED} or {_FAMILY}:MODEL with MODEL one of {', '.join(EXPERTS)}, "
    f"followed by any of :{', :'.join((*DISTRIBUTIONS, *FORMS))}"
)


@dataclass(frozen=True, order=True)
class Grouping:
    """How groups divide products: their number, how large they are, and which dimension."""

    experts: int
    distribution: Distribution = "balanced"
    form: Form = "rows"

    @staticmethod
    def parse(text: str) -> "Grouping":
        """Parses `8`, `8:zipf`, `8:terms` and `8:zipf:terms`. Raises ValueError."""
        number, *words = text.split(":")
        for distribution, form in product(DISTRIBUTIONS, FORMS):
            if number.isdecimal() and int(number) > 0:
                found = Grouping(int(number), distribution, form)
                if str(found) == ":".join([str(int(number)), *words]):
                    return found
        raise ValueError(
            f"grouping is {text!r}, expected a number of groups, with :zipf and :terms where they "
            "apply"
        )

    def __str__(self) -> str:
        zipf = ":zipf" if self.distribution == "zipf" else ""
        terms = ":terms" if self.form == "terms" else ""
        return f"{self.experts}{zipf}{terms}"


@dataclass(frozen=True, order=True)
class GroupedWorkload:
    """The products of `rows` rows that `experts` groups share.

    N, K: of the weights of an expert: a row of K elements becomes one of N.
    distribution: "balanced", where all groups are as large; "zipf", where the i-th most popular
        group has a share of rows in proportion to 1/i.
    form: "rows", where each group multiplies its rows with its weights, (rows, K) x (experts, K,
        N); "terms", the gradient of the weights: (K, rows) x (rows, N), a sum for each group.
    """

    experts: int
    rows: int
    N: int
    K: int
    distribution: Distribution = "balanced"
    form: Form = "rows"

    def __post_init__(self) -> None:
        for name in ("experts", "rows", "N", "K"):
            size = getattr(self, name)
            if type(size) is not int or size < 1:
                raise ValueError(f"{name} is {size!r}, expected an integer of at least 1")
        for name, allowed in (("distribution", DISTRIBUTIONS), ("form", FORMS)):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}, expected one of {', '.join(allowed)}"
                )

    @property
    def shape(self) -> Shape:
        """The sizes (M, N, K) of the products of all groups, as in `core.grouped`."""
        return (self.rows, self.N, self.K) if self.form == "rows" else (self.K, self.N, self.rows)

    @classmethod
    def of(
        cls, experts: int, shape: Shape, distribution: Distribution, form: Form
    ) -> "GroupedWorkload":
        """Returns the workload whose products have this `shape`."""
        M, N, K = shape
        rows, depth = (M, K) if form == "rows" else (K, M)
        return cls(experts, rows, N, depth, distribution, form)

    @property
    def grouping(self) -> Grouping:
        """How its groups divide the products of `shape`."""
        return Grouping(self.experts, self.distribution, self.form)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of rows of each group."""
        return self.sizes_in(1)

    def sizes_in(self, block: int) -> tuple[int, ...]:
        """Returns the number of rows of each group, where groups share whole blocks of so many
        rows, of which the last one may be shorter.
        """
        shares = [1.0] * self.experts
        if self.distribution == "zipf":
            shares = [1 / (i + 1) for i in range(self.experts)]
            random.Random(SEED).shuffle(shares)
        blocks = _shared(-(-self.rows // block), shares)
        ends = (min(block * end, self.rows) for end in accumulate(blocks))
        return tuple(end - begin for begin, end in pairwise((0, *ends)))

    @property
    def ends(self) -> tuple[int, ...]:
        """Where each group ends: the values of `offs`."""
        return tuple(accumulate(self.sizes))

    def backward(self) -> tuple[tuple[str, "GroupedWorkload"], ...]:
        """Returns the two products of a backward pass with their names: `dA`, the gradient of the
        rows, and `dB`, that of the weights.
        """
        return (
            ("dA", replace(self, N=self.K, K=self.N, form="rows")),
            ("dB", replace(self, form="terms")),
        )

    def __str__(self) -> str:
        """`8x4096x28672x4096`, `8x4096x28672x4096:zipf:terms`."""
        sizes = "x".join(map(str, (self.experts, self.rows, self.N, self.K)))
        return sizes + str(self.grouping).removeprefix(str(self.experts))


def model_of(workload: GroupedWorkload) -> str:
    """Returns the model whose experts have these sizes, and which of their products it is, such as
    "mixtral-8x7b gate and up"; "" where none has.
    """
    for model, (experts, layers) in EXPERTS.items():
        for name, sizes in zip(("gate and up", "down"), layers, strict=True):
            if (experts, sizes) == (workload.experts, (workload.N, workload.K)):
                return f"{model} {name}"
    return ""


def _shared(rows: int, shares: list[float]) -> tuple[int, ...]:
    """Divides rows in proportion to shares; the largest remainders get what rounding leaves."""
    total = sum(shares)
    exact = [rows * share / total for share in shares]
    sizes = [int(each) for each in exact]
    by_remainder = sorted(range(len(shares)), key=lambda i: sizes[i] - exact[i])
    for i in by_remainder[: rows - sum(sizes)]:
        sizes[i] += 1
    return tuple(sizes)


def parse(text: str, option: str = "--shapes") -> list[GroupedWorkload]:
    """Parses `8x4096x28672x4096:zipf,moe:qwen3-30b-a3b` into workloads, without duplicates.

    `deepgemm` stands for those of `DEEPGEMM`, and may be followed by the same words as sizes.
    `moe:MODEL` stands for both products of a model's experts, with 256, 4096 and 65536 rows,
    balanced and Zipf; `moe` for those of all models. What follows a name chooses among them: a
    number of rows, `balanced` or `zipf`; `terms` makes them gradients of weights.

    Raises ValueError, which names the option.
    """
    parts = [part.strip().lower() for part in text.split(",") if part.strip()]
    if not parts:
        raise ValueError(f"{option} is {text!r}, expected {_EXPECTED}, comma-separated")
    found = [workload for part in parts for workload in _parsed(part, option)]
    return list(dict.fromkeys(found))


def names_groups(text: str) -> bool:
    """Returns whether a text has the form of workloads of groups, and not that of shapes."""
    first = text.partition(",")[0].strip().lower().partition(":")[0]
    return first == _FAMILY or first.count("x") == 3


def _parsed(part: str, option: str) -> Iterator[GroupedWorkload]:
    name, *words = part.split(":")
    if name != _FAMILY:
        listed = DEEPGEMM if name == _LISTED else (_sizes(name, part, option),)
        chosen = _Words.parse(words, ("balanced",), (), part, option)
        for sizes, distribution in product(listed, chosen.distributions):
            yield GroupedWorkload(*sizes, distribution, chosen.form)
        return
    models = tuple(EXPERTS)
    if words and words[0] in EXPERTS:
        models = (words.pop(0),)
    chosen = _Words.parse(words, DISTRIBUTIONS, ROWS, part, option)
    for model in models:
        experts, layers = EXPERTS[model]
        for (N, K), rows, distribution in product(layers, chosen.rows, chosen.distributions):
            yield GroupedWorkload(experts, rows, N, K, distribution, chosen.form)


def _sizes(text: str, part: str, option: str) -> tuple[int, int, int, int]:
    """Parses experts, rows, N and K."""
    sizes = text.split("x")
    if len(sizes) != 4 or not all(size.isdecimal() for size in sizes):
        raise ValueError(f"{option} is {part!r}, expected {_EXPECTED}")
    experts, rows, N, K = map(int, sizes)
    if min(experts, rows, N, K) < 1:
        raise ValueError(f"{option} has {part}, expected sizes of at least 1")
    return experts, rows, N, K


@dataclass(frozen=True)
class _Words:
    """What follows a name or sizes."""

    distributions: tuple[Distribution, ...]
    form: Form
    rows: tuple[int, ...]

    @classmethod
    def parse(
        cls,
        words: list[str],
        distributions: tuple[Distribution, ...],
        rows: tuple[int, ...],
        part: str,
        option: str,
    ) -> "_Words":
        """Raises ValueError for an unknown word, or a number where the sizes say the rows."""
        form: Form = "rows"
        asked: list[int] = []
        for word in words:
            if word in DISTRIBUTIONS:
                distributions = (DISTRIBUTIONS[DISTRIBUTIONS.index(word)],)
            elif word in FORMS:
                form = FORMS[FORMS.index(word)]
            elif rows and word.isdecimal() and int(word) > 0:
                asked.append(int(word))
            else:
                raise ValueError(f"{option} is {part!r}, expected {_EXPECTED}")
        return cls(distributions, form, tuple(asked) or rows)
