"""Chooses the kernels of a list of products for a model of GPU, and compiles them in several
processes without a GPU: into one file, a pack, or into the cache.
"""

import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from outblas.base import cache, configs, machines, pack, registry
from outblas.base.facts import Facts
from outblas.base.machines import Machine
from outblas.base.ownership import Untrusted, shown
from outblas.call import default_kernel, launcher
from outblas.call.default_kernel import PRODUCTION
from outblas.call.launcher import PORTABLE
from outblas.call.problem import Problem
from outblas.call.products import Products, parse_line
from outblas.device.triton_variant import TritonVariant
from outblas.packing import examples, triton_kernels
from outblas.packing.products import parse_file

if TYPE_CHECKING:
    from outblas.autotune.lookup import TuningIndex
    from outblas.autotune.store.records import Gpu

Say = Callable[[str], None]

MOST_ROWS = 1 << 20  # numbers of rows of all products together; each is planned
MOST_ELEMENTS = 1 << 40  # of a matrix, or of the matrices of a batch
QUANTIZE, EXPERTS = "quantize", "moe_mlp"
NO_STORE = Path("/nonexistent/tuning.sqlite")


@dataclass(frozen=True)
class Built:
    """What a pack got.

    Attributes:
        kernels: How many kernels it has.
        left_out: How many products have a kernel that packs do not hold, by its name. Triton
            compiles them when they are called.
    """

    kernels: int
    left_out: dict[str, int]


def build(
    products: Sequence[Products],
    path: Path,
    *,
    gpu: str = "H100",
    store: Path | None = None,
    jobs: int | None = None,
    say: Say = lambda text: None,
) -> Built:
    """Builds a pack of all kernels that products need on a model of GPU. Needs no GPU.

    The shipped tables choose the configs, as in a process without results of its own, and before
    them the results in `store`, if one is given. The pack has both. The choices of the kernel's own
    rule, which OUTBLAS_TUNE=off takes, are packed too.

    Raises ValueError for a GPU that is not of sm_90, or of which the store has nothing, StoreError,
    OSError where the cache or the file cannot be written, and ImportError without the CuTe DSL.
    """
    from outblas.autotune import packed_tables

    machine = machines.find(gpu)
    if machine.arch != 90:
        raise ValueError(f"--gpu is {gpu}, of sm_{machine.arch}, expected one of sm_90")
    tables = packed_tables.gathered(_imagined(machine), store)
    wanted, left_out = _variants(products, machine, say, index_of(tables, machine))
    objects = [(facts, cache.packed_object(facts)) for facts in compiled(wanted, jobs, say)]
    about = {
        "outblas": metadata.version("outblas"),
        "gpu": machines.device_name(machine),
        "products": [str(each) for each in products],
    }
    pack.write(path, about, objects, tables)
    return Built(len(objects), dict(left_out))


def precompile(products: str | os.PathLike[str] | Sequence[str], *, jobs: int | None = None) -> int:
    """Compile the kernels of a list of products into the cache, several at a time.

    Calls of these products then find their kernels on disk. Processes that start together on one
    empty cache compile each kernel once between them. Products that another kernel than
    `hopper.gemm` or `hopper.grouped` computes are skipped: Triton compiles them when they are
    called. What was tuned on this GPU is used, and without a GPU the shipped tables for an H100.

    A script that calls it needs `if __name__ == "__main__":`, because it starts processes.

    Args:
        products: The path of a file as `outblas pack build --shapes` reads it, or its lines, such
            as "1-512x4096x4096 bfloat16 nt bias".
        jobs: How many processes compile; by default one per core.

    Returns:
        The number of kernels, those that were there already included.

    Raises:
        TypeError: `products` is neither a path nor a sequence of lines.
        ValueError: A line says something else, `jobs` is not positive, or the GPU is not of sm_90.
        OSError: The file cannot be read, or the cache cannot be written.
        ImportError: The CuTe DSL is not installed.

    Example:
        >>> import outblas
        >>> outblas.precompile([])
        0
    """
    is_number = isinstance(jobs, int) and not isinstance(jobs, bool)
    if jobs is not None and (not is_number or jobs < 1):
        raise ValueError(f"jobs is {jobs!r}, expected a positive number")
    listed, machine = _parsed(products), _machine()
    index = None  # the shipped tables
    if torch.cuda.is_available():
        from outblas.autotune import lookup

        index = lookup.tuning_index(torch.cuda.current_device())
    wanted, _ = _variants(listed, machine, lambda text: None, index)
    kept = [variant for variant in wanted if not isinstance(variant, TritonVariant)]
    return len(compiled(kept, jobs, lambda text: None))


def _parsed(products: object) -> list[Products]:
    if isinstance(products, str | os.PathLike):
        return parse_file(Path(products))
    if not isinstance(products, Sequence) or not all(isinstance(line, str) for line in products):
        raise TypeError(f"products is {type(products).__name__}, expected a path or lines of text")
    return [parse_line(line) for line in products]


def _machine() -> Machine:
    """Returns the GPU of this process, or an H100 without one. A GPU that no table lists counts as
    an H100 with its own SMs. Raises ValueError for a GPU that `hopper.gemm` does not run on.
    """
    if not torch.cuda.is_available():
        return machines.find("H100")
    name = torch.cuda.get_device_name()
    arch = torch.cuda.get_device_capability()
    if arch != (9, 0):
        raise ValueError(f"the GPU is {shown(name)}, of sm_{arch[0]}{arch[1]}, expected sm_90")
    listed = machines.of_device(name)
    if listed is not None:
        return listed
    sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    return replace(machines.find("H100"), sms=sms)


def _variants(
    products: Sequence[Products], machine: Machine, say: Say, index: "TuningIndex | None" = None
) -> tuple[list[Any], Counter[str]]:
    """Returns the keys of all compiles, and how many products other kernels compute."""
    _check_sizes(products)
    index = _index(machine) if index is None else index
    found: dict[Any, None] = {}
    left_out: Counter[str] = Counter()
    for each in products:
        variants = _of_groups if each.groups is not None else _of_products
        found |= dict.fromkeys(variants(each, machine, index, left_out))
        say(f"{each}: {len(found)} kernels so far")
    return list(found), left_out


def _check_sizes(products: Sequence[Products]) -> None:
    """Raises ValueError for products that nobody could plan, before any is planned."""
    for each in products:
        M, N, K = max(last for _, last in each.rows), each.N, each.K
        count = max(1, each.batch, 0 if each.groups is None else each.groups.count)
        elements = count * max(M * N, M * K, N * K)
        if elements > MOST_ELEMENTS:
            raise ValueError(
                f"{each} has matrices of {elements} elements, expected at most {MOST_ELEMENTS}"
            )
    rows = sum(last - first + 1 for each in products for first, last in each.rows)
    if rows > MOST_ROWS:
        raise ValueError(
            f"the products have {rows} numbers of rows, expected at most {MOST_ROWS} in a pack"
        )


def _of_products(
    products: Products, machine: Machine, index: "TuningIndex", left_out: Counter[str]
) -> Iterator[Any]:
    """Yields the keys of the compiles of products without groups; counts what is left out."""
    module = registry.load(PRODUCTION)
    for problem in _problems(products, machine):
        best = chosen(index, machine, problem)
        for kernel, config in dict.fromkeys((best, ruled(machine, problem))):
            if kernel == PRODUCTION:
                given = configs.from_text(module.Config, config) if config else None
                yield from module.pack_variants(problem, given, machine)
            else:
                given = problem, machine, kernel, config
                yield from _by_triton(left_out, kernel, triton_kernels.of_problem, *given)
        scaling = products.scaling
        if scaling is not None and scaling.in_fp8 and problem.out_dtype == torch.float32:
            pow2 = scaling.in_powers_of_two
            yield from _by_triton(left_out, QUANTIZE, triton_kernels.of_result, problem, pow2)
    yield from _by_triton(left_out, QUANTIZE, triton_kernels.of_operands, products)


def _by_triton(
    left_out: Counter[str], kernel: str, variants: Callable[..., Iterable[Any]], *given: Any
) -> Iterable[Any]:
    """Returns the kernels of Triton that a function finds; counts a kernel where Triton is not
    installed.
    """
    try:
        return list(variants(*given))
    except ImportError:
        left_out[kernel] += 1
        return ()


def _of_groups(
    products: Products, machine: Machine, index: "TuningIndex", left_out: Counter[str]
) -> Iterator[Any]:
    """Yields the keys of the compiles of products that groups divide; counts what is left out."""
    from outblas.hopper import grouped

    assert products.groups is not None, "the caller has looked"
    for problem in examples.grouped_problems(products, products.groups):
        if grouped.unsupported(problem) is not None:
            left_out[PORTABLE] += 1
            continue
        launched = grouped.pack_problem(problem)
        for config in dict.fromkeys((index.grouped_config(launched), "")):
            given = configs.from_text(grouped.Config, config) if config else None
            yield grouped.pack_variant(launched, given, machine)
    yield from _by_triton(left_out, QUANTIZE, triton_kernels.of_operands, products)
    yield from _by_triton(left_out, EXPERTS, triton_kernels.of_experts, products)


def index_of(tables: Mapping[str, bytes], machine: Machine) -> "TuningIndex":
    """Returns what a process that loads the tables of a pack knows of a model of GPU."""
    from outblas.autotune import packed_tables
    from outblas.autotune.lookup import TuningIndex

    gpu = _imagined(machine)
    return TuningIndex(gpu, store=NO_STORE, packed=packed_tables.entries(tables, gpu))


def _index(machine: Machine) -> "TuningIndex":
    """Returns what the shipped tables know of a model of GPU."""
    from outblas.autotune.lookup import TuningIndex

    return TuningIndex(_imagined(machine), store=NO_STORE)


def _imagined(machine: Machine) -> "Gpu":
    from outblas.autotune.search.gpu import imagined

    return imagined(machine.name)


def _problems(products: Products, machine: Machine) -> Iterator[Problem]:
    """Yields what the kernel computes of each call on a GPU."""
    module = registry.load(PRODUCTION)
    for problem in examples.problems(products):
        yield module.pack_problem(problem, machine)


def chosen(index: "TuningIndex", machine: Machine, problem: Problem) -> tuple[str, str]:
    """Returns the kernel and the config (as text; "" for its own) that a call takes on a GPU that
    need not be there, where it may not compile: tuned kernels that packs do not hold are passed
    over.
    """
    from outblas.autotune import automatic

    tuned_as = launcher.tuned_as(problem)
    workload = None if tuned_as is None else automatic.of_problem(tuned_as)
    if tuned_as is not None and workload is not None:
        for kernel, config in automatic.choices_of(index, tuned_as, workload):
            if _is_packed(kernel, config, problem, machine):
                return kernel, config
    return ruled(machine, problem)


def _is_packed(kernel: str, config: str, problem: Problem, machine: Machine) -> bool:
    """Returns whether a pack has a tuned kernel for a product. Of kernels of Triton, packs hold
    those that were tuned for float32 operands, which `hopper.gemm` does not multiply.
    """
    if kernel == PRODUCTION:
        module = registry.load(kernel)
        given = configs.from_text(module.Config, config) if config else None
        return module.unsupported(problem, given) is None
    if problem.dtype != torch.float32:
        return False
    try:
        return any(triton_kernels.of_problem(problem, machine, kernel, config))
    except (ValueError, ImportError):  # the kernel, or the config, does not support the product
        return False


def ruled(machine: Machine, problem: Problem) -> tuple[str, str]:
    """Returns what a call takes on a GPU where no tuning result is used."""
    by_rule = default_kernel.by_rule(problem, machine.arch, machine.sms)
    kernel = PRODUCTION if problem.formats else by_rule
    supported = registry.load(kernel).unsupported(problem, None) is None
    return kernel if supported else PORTABLE, ""


def compiled(wanted: Sequence[Any], jobs: int | None, say: Say) -> list[Facts]:
    """Compiles kernels onto disk, and returns the facts that they are found by. Starts processes
    for those that are not there.
    """
    found: list[Facts] = []
    missing = []
    for variant in wanted:
        facts: Facts = variant.cache_key_fields
        if _is_kept(facts):
            found.append(facts)
        else:
            missing.append(variant)
    if not missing:
        return found
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawned) as pool:
        tasks = [pool.submit(_keep, variant) for variant in missing]
        try:
            for task in as_completed(tasks):
                found.append(task.result())
                say(f"compiled {len(found)} of {len(wanted)}")
        except BaseException:  # what has not begun is not worth waiting for
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return found


def _is_kept(facts: Facts) -> bool:
    """Returns whether the code of a kernel is on disk, sound and to be trusted."""
    try:
        cache.packed_object(facts)
    except (OSError, cache.Damaged, Untrusted):
        return False
    return True


def _keep(variant: Any) -> Facts:
    if isinstance(variant, TritonVariant):
        return variant.keep()
    facts: Facts = registry.load(PRODUCTION).keep_variant(variant)
    return facts
