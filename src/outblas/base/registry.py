"""The registry of kernels: one frozen record per rung, which can be read without importing a DSL.

Every rung file ends in `KERNEL = Kernel(...)` with literal arguments. The registry reads that
record from the source of the file, so `outblas list` works where triton or the CuTe DSL is absent.
The module itself is imported when its kernel is first used.
"""

import ast
import importlib
import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Literal, TypeVar, cast

# The kernels of every ladder, from the first rung to the last. `simt.naive` is module `naive` of
# its ladder's package.
LADDERS: dict[str, tuple[str, ...]] = {
    "simt": (
        "simt.naive",
        "simt.coalesced",
        "simt.shared",
        "simt.strip",
        "simt.register",
        "simt.vectorized",
        "simt.warptile",
        "simt.pipelined",
    ),
    "portable": ("portable",),
    "turing": (
        "turing.wmma",
        "turing.shared",
        "turing.double_buffer",
        "turing.vectorized",
        "turing.ldmatrix",
        "turing.cp_async",
    ),
    "hopper": (
        "hopper.tma_wgmma",
        "hopper.large_tile",
        "hopper.warp_specialized",
        "hopper.two_consumers",
        "hopper.persistent",
        "hopper.lean_barriers",
        "hopper.cluster_multicast",
        "hopper.store_tuning",
        "hopper.tma_store",
        "hopper.hilbert",
        "hopper.gemm",
    ),
}
_PACKAGES = {
    "simt": "outblas.kernels",
    "portable": "outblas.kernels",
    "turing": "outblas.turing",
    "hopper": "outblas.hopper",
}

# The operands on which the documents and the reports measure a ladder; all others use bfloat16 and
# nt.
_DTYPES = {"simt": "float32", "turing": "float16"}
_LAYOUTS = {"simt": "nn"}

Dsl = Literal["triton", "gluon", "cute"]
ConfigValue = int | bool | str
ConfigT = TypeVar("ConfigT")

# What the configs of each ladder derive from: a dataclass, in a module that imports no DSL.
_CONFIGS = {
    "simt": ("outblas.kernels.simt_config", "SimtConfig"),
    "portable": ("outblas.kernels.portable_config", "PortableConfig"),
    "turing": ("outblas.turing.config", "TuringConfig"),
    "hopper": ("outblas.hopper.parts.config", "HopperConfig"),
}

# The distribution to install for a module that kernels import.
_DISTRIBUTIONS = {"triton": "triton", "cutlass": "nvidia-cutlass-dsl", "tvm_ffi": "apache-tvm-ffi"}


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernel that can be called by name: one rung of a ladder.

    Attributes:
        name: What `kernel=` takes, such as "hopper.hilbert".
        ladder: The ladder that it belongs to: "simt", "turing", "hopper" or "portable".
        idea: What it adds to its parent, in one sentence.
        parent: The name of the rung below it; None for the first rung of a ladder.
        source: The seed document and kernel that it implements.
        dtypes: The dtypes of operands that it accepts, by their names in torch, by default those
            of 16 bits.
        min_arch: The lowest compute capability that it runs on, as 10 * major + minor: 90 is
            sm_90.
        max_arch: The highest compute capability that it runs on; None for no limit.
        dsl: The language that it is written in: "triton", "gluon" or "cute".
        config: The fields of its config whose defaults are not those of its parent.

    Example:
        >>> import outblas
        >>> kernel = outblas.ladder("turing")[4]
        >>> kernel.name, kernel.parent, kernel.min_arch
        ('turing.ldmatrix', 'turing.vectorized', 75)
    """

    name: str
    ladder: str
    idea: str
    parent: str | None
    source: str
    dtypes: tuple[str, ...] = ("bfloat16", "float16")
    min_arch: int
    max_arch: int | None
    dsl: Dsl
    config: Mapping[str, ConfigValue] = field(default_factory=dict, hash=False)


_NAMES = tuple(name for names in LADDERS.values() for name in names)


def module_name(name: str) -> str:
    """Returns the module that defines the kernel `name`, in the form that `importlib` takes."""
    ladder, _, rung = name.rpartition(".")
    return f"{_PACKAGES[ladder or name]}.{rung}"


@cache
def _read(name: str) -> Kernel:
    spec = importlib.util.find_spec(module_name(name))
    if spec is None or spec.origin is None:
        raise ImportError(f"the registry lists {name}, but {module_name(name)} is not installed")
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="KERNEL")], value=ast.Call(keywords=keywords)):
                return Kernel(**{str(k.arg): ast.literal_eval(k.value) for k in keywords})
    raise ImportError(f"{module_name(name)} defines no KERNEL = Kernel(...)")


def arch_reason(record: Kernel, arch: int, gpu: str) -> str | None:
    """Returns why a kernel cannot run on a GPU of this name and architecture; None if it can."""
    if arch >= record.min_arch and (record.max_arch is None or arch <= record.max_arch):
        return None
    needed = f"sm_{record.min_arch}"
    if record.max_arch is None:
        needed += " or newer"
    elif record.max_arch != record.min_arch:
        needed += f" to sm_{record.max_arch}"
    return f"needs {needed}, but {gpu} is sm_{arch}"


def ladder(name: str | None = None) -> tuple[Kernel, ...]:
    """List the kernels of a ladder from its first rung to its last, or those of all ladders.

    No kernel is imported or compiled.

    Args:
        name: "simt", "turing", "hopper" or "portable"; None for all.

    Returns:
        The records of the kernels.

    Raises:
        ValueError: There is no ladder of this name.

    Example:
        >>> import outblas
        >>> [kernel.name for kernel in outblas.ladder("turing")]
        ['turing.wmma', 'turing.shared', 'turing.double_buffer', ..., 'turing.cp_async']
        >>> [kernel.name for kernel in outblas.ladder() if "float32" in kernel.dtypes][-1]
        'portable'
    """
    if name is not None and name not in LADDERS:
        raise ValueError(f"name is {name!r}, expected a ladder: {', '.join(LADDERS)}")
    return tuple(_read(kernel) for kernel in (_NAMES if name is None else LADDERS[name]))


def find(name: str) -> Kernel:
    """Returns the record of the kernel `name`, e.g. "hopper.tma_wgmma". Raises TypeError or
    ValueError.
    """
    if not isinstance(name, str):
        raise TypeError(
            f"kernel is {type(name).__name__}, expected a name (str): {', '.join(_NAMES)}"
        )
    if name not in _NAMES:
        raise ValueError(unknown_name(name))
    return _read(name)


def defaults(name: str) -> dict[str, ConfigValue]:
    """Returns the defaults of a kernel's config, in the order of its fields. No DSL is imported.
    Raises the errors of `find`.
    """
    kernel = find(name)
    if kernel.parent is None:
        module, config = _CONFIGS[kernel.ladder]
        base = getattr(importlib.import_module(module), config)
        standard = {of.name: cast("ConfigValue", of.default) for of in fields(base)}
        return standard | dict(kernel.config)
    return defaults(kernel.parent) | dict(kernel.config)


def config_type(base: type[ConfigT], name: str) -> type[ConfigT]:
    """Returns the config class of a kernel: `base`, a frozen dataclass, with the defaults that
    `KERNEL` of the kernel and of those below it on its ladder state. Raises ValueError for a field
    that `base` does not have.
    """
    values = defaults(name)
    if unknown := values.keys() - {of.name for of in fields(cast("type", base))}:
        raise ValueError(f"{name} has config {sorted(unknown)}, expected fields of {base.__name__}")
    derived = make_dataclass(
        "Config",
        [(of, type(value), value) for of, value in values.items()],
        bases=(base,),
        frozen=True,
        namespace={"__doc__": base.__doc__},
    )
    # By which it is pickled. From Python 3.12 on, `make_dataclass` overwrites it with its caller's.
    derived.__module__ = module_name(name)
    return cast("type[ConfigT]", derived)


def unknown_name(name: str, names: Iterable[str] = _NAMES) -> str:
    """Returns the message for a name that is not one of `names`, with the closest match if there is
    one.
    """
    import difflib

    names = list(names)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    guess = f" (did you mean {close[0]!r}?)" if close else ""
    return f"kernel is {name!r}{guess}, expected one of: {', '.join(names)}"


def dtype_of(name: str) -> str:
    """Returns the operand dtype with which a kernel or a ladder is measured: that of its
    document.
    """
    return _DTYPES.get(name.partition(".")[0], "bfloat16")


def layout_of(name: str) -> str:
    """Returns the layout in which a kernel or a ladder is measured: that of its document."""
    return _LAYOUTS.get(name.partition(".")[0], "nt")


@cache
def load(name: str) -> ModuleType:
    """Imports the module of a kernel. Raises ImportError, which names the package to install, when
    its DSL is missing.
    """
    kernel = find(name)
    try:
        return importlib.import_module(module_name(name))
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        distribution = _DISTRIBUTIONS.get(missing, missing)
        if distribution not in _DISTRIBUTIONS.values():
            raise
        # Imported here because it is slow: it parses versions.
        from outblas.base import requirements

        hint = requirements.install_command(distribution)
        raise ImportError(
            f"kernel {kernel.name!r} needs {missing}, which is not installed: {hint}"
        ) from error
