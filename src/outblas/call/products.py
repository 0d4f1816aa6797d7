"""Products that differ in the number of rows only, and their text: a line of the files that packs
are built from.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from outblas.base.shapes import LAYOUTS
from outblas.call import product_groups, product_storage
from outblas.call import scaling as scalings
from outblas.call.product_groups import Groups
from outblas.call.product_storage import PACKED, Storage
from outblas.call.scaling import FP8_DTYPES, Scaling
from outblas.call.steps import GATED, NO_STEPS, Steps

DTYPES = ("bfloat16", "float16")
# Of float32 operands: IEEE products, and those for which torch's settings ask for tf32.
TF32 = "tf32"
WIDE = ("float32", TF32)
_BATCH = "batch:"
_LINE = (
    "M or FIRST-LAST, then xNxK, a dtype, a layout, and an epilogue or batch-invariant; with fp8 "
    f"also {scalings.WORDS}; with 16 bits also to-float32; for batches also "
    f"{_BATCH}NUMBER; for products of groups also "
    f"{product_groups.WORDS}; for matrices that are not packed also {product_storage.WORDS}"
)
_Field = Callable[[str], tuple[str, Any] | None]


@dataclass(frozen=True)
class Products:
    """Products that differ in the number of rows only.

    Attributes:
        rows: Ranges of M, first and last. Of groups M counts the rows of all of them, or those
            that each has places for; where they divide terms, it counts the terms.
        N, K: The other sizes. With a gated activation N counts the columns of B, two for each
            column of the result. Where groups divide terms, K counts the rows of each result.
        dtype: One of `DTYPES`, of `WIDE` or of `FP8_DTYPES`.
        layout: How A and B are stored.
        steps: The epilogue.
        batch_invariant: Whether the calls have batch_invariant=True.
        out_dtype: float32, for 16-bit operands whose result has it; "" for the operands' own, and
            with fp8 operands, whose scaling says it.
        batch: How many products of packed matrices a call has; 0 for one.
        scaling: How fp8 operands are scaled; None for others.
        groups: How groups divide the product; None for one without groups.
        storage: How its matrices lie in memory.
    """

    rows: tuple[tuple[int, int], ...]
    N: int
    K: int
    dtype: str = "bfloat16"
    layout: str = "nt"
    steps: Steps = NO_STEPS
    batch_invariant: bool = False
    out_dtype: str = ""
    batch: int = 0
    scaling: Scaling | None = None
    groups: Groups | None = None
    storage: Storage = PACKED

    @property
    def result(self) -> str:
        """The dtype of the result."""
        if self.scaling is not None:
            return self.scaling.result
        return "float32" if self.out_dtype or self.dtype in WIDE else self.dtype

    def each_M(self) -> Iterator[int]:
        """Yields every number of rows once, in order."""
        yield from sorted({M for first, last in self.rows for M in range(first, last + 1)})

    def __str__(self) -> str:
        rows = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in self.rows)
        parts = [f"{rows}x{self.N}x{self.K}", self.dtype, self.layout, str(self.steps)]
        parts += [f"to-{self.out_dtype}"] if self.out_dtype else []
        parts += [f"{_BATCH}{self.batch}"] if self.batch else []
        parts += [] if self.scaling is None else self.scaling.words
        parts += [] if self.groups is None else self.groups.words
        parts += self.storage.words
        parts += ["batch-invariant"] * self.batch_invariant
        return " ".join(part for part in parts if part)


def parse_rows(text: str, name: str = "rows") -> tuple[tuple[int, int], ...]:
    """Parses `1-512,1024`. Raises ValueError, which names the option."""
    found = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        ends = (first, last if dash else first)
        if not all(end.isdecimal() for end in ends) or not 1 <= int(ends[0]) <= int(ends[1]):
            raise ValueError(f"{name} is {text!r}, expected numbers and ranges such as 1-512,1024")
        found.append((int(ends[0]), int(ends[1])))
    return tuple(found)


def parse_line(line: str) -> Products:
    """Parses `1-512x4096x4096 bfloat16 nt bias+gelu`; all after the sizes may be left out. Raises
    ValueError.
    """
    words = line.split()
    if not words or words[0].startswith("#"):
        raise ValueError(f"the line is {line!r}, expected {_LINE}")
    sizes, *rest = words
    rows, *extents = sizes.lower().split("x")
    if len(extents) != 2 or not all(size.isdecimal() and int(size) for size in extents):
        raise ValueError(f"the line is {line!r}, expected {_LINE}")
    ranges_of_M = parse_rows(rows, f"the line {line!r}")
    try:
        return _described(ranges_of_M, int(extents[0]), int(extents[1]), rest)
    except ValueError as error:
        raise ValueError(f"the line is {line!r}, expected {_LINE}: {error}") from None


def _described(rows: tuple[tuple[int, int], ...], N: int, K: int, words: list[str]) -> Products:
    """Returns the products of these sizes that the words of a line describe. Raises ValueError."""
    given, of_scaling, of_groups, of_storage = _fields(words)
    dtype = given.setdefault("dtype", DTYPES[0])
    if dtype in DTYPES and of_scaling == {"result": "float32"}:
        given["out_dtype"] = of_scaling.pop("result")
    scaling = scalings.of_fields(dtype, of_scaling)
    groups, storage = product_groups.of_fields(of_groups), Storage(**of_storage)
    if groups and dtype in WIDE:
        raise ValueError(f"the dtype is {dtype}, expected 16 bits or fp8 with groups")
    if groups and "out_dtype" in given:
        raise ValueError(f"the result is {given['out_dtype']}, expected {dtype} with groups")
    layouts = _layouts(scaling is not None, groups)
    given.setdefault("layout", layouts[0])
    if given["layout"] not in layouts:
        raise ValueError(f"the layout is {given['layout']}, expected {' or '.join(layouts)}")
    if scaling is not None and groups is not None:
        product_groups.check_scaling(groups, scaling)
    if (scaling or groups) and "batch_invariant" in given:
        raise ValueError("batch-invariant is given, expected none with fp8 or groups")
    if "batch" in given:
        _check_batch(scaling, groups, of_storage)
    if of_storage and groups:
        raise ValueError(f"{', '.join(of_storage)} given, expected packed matrices with groups")
    products = Products(rows, N, K, **given, scaling=scaling, groups=groups, storage=storage)
    product_storage.check(storage, _least(products), fp8=scaling is not None)
    return products


def _check_batch(
    scaling: Scaling | None, groups: Groups | None, of_storage: dict[str, Any]
) -> None:
    """Raises ValueError for what the products of a batch do not have."""
    if scaling or groups:
        raise ValueError(f"{_BATCH}NUMBER is given, expected none with fp8 or groups")
    if of_storage:
        raise ValueError(f"{', '.join(of_storage)} given, expected packed matrices in a batch")


def _fields(words: list[str]) -> tuple[dict[str, Any], ...]:
    """Returns what words say of the products themselves, their scaling, groups and storage, each by
    name. Raises ValueError.
    """
    readers: tuple[_Field, ...] = (
        scalings.field,
        product_groups.field,
        product_storage.field,
        _field,
    )
    found: list[dict[str, Any]] = [{} for _ in readers]
    for word in words:
        for read, known in zip(readers, found, strict=True):
            said = read(word)  # the last one knows every word, or raises
            if said is None:
                continue
            name, value = said
            if name in known:
                raise ValueError(f"{name} is given twice, expected one {name}")
            known[name] = value
            break
    return (found[-1], *found[:-1])


def _least(products: Products) -> tuple[int, int, int]:
    """Returns the least lda, ldb and ldc of products."""
    rows = max(last for _, last in products.rows)
    a, b = products.layout[0], products.layout[1]
    return (
        products.K if a == "n" else rows,
        products.N if b == "n" else products.K,
        products.N // (2 if products.steps.activation in GATED else 1),
    )


def _layouts(is_fp8: bool, groups: Groups | None) -> tuple[str, ...]:
    """Returns how the operands of a product may be stored, the usual way first."""
    if is_fp8:  # fp8 operands are contiguous along K, or copied before
        return ("nt",)
    if groups is None:
        return ("nt", *(layout for layout in LAYOUTS if layout != "nt"))
    return ("tn",) if groups.form == "terms" else ("nt", "nn")


def _field(word: str) -> tuple[str, Any]:
    if word in (*DTYPES, *WIDE) or word in FP8_DTYPES:
        return "dtype", word
    if word in LAYOUTS:
        return "layout", word
    if word == "batch-invariant":
        return "batch_invariant", True
    number = word.removeprefix(_BATCH)
    if word.startswith(_BATCH) and number.isdecimal() and int(number) > 1:
        return "batch", int(number)
    return "steps", Steps.parse(word)


def ranges(rows: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Returns numbers as ranges: 1, 2, 3 and 8 are 1-3 and 8."""
    found: list[list[int]] = []
    for M in sorted(set(rows)):
        if found and found[-1][1] + 1 == M:
            found[-1][1] = M
        else:
            found.append([M, M])
    return tuple((first, last) for first, last in found)
