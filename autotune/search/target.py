"""The kernels that are tuned, by name and module. Workers import the module themselves."""

import functools
import hashlib
import importlib
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from outblas import device
from outblas.base import registry
from outblas.call import hooks

_NAME = re.compile(r"[a-z0-9_.]+", re.ASCII)


@dataclass(frozen=True)
class TuneTarget:
    """A kernel to tune: its name, and the module that defines it.

    The module must define what the modules of the ladders define: `Config`,
    `unsupported(problem, config)`, `plan(problem, config)`, `precompile(problem, config, arch)`
    and `space(problem, machine)`. Workers import it by its name. One with `GROUPED = True` computes
    products of groups: its problems are `outblas.call.grouped.GroupedProblem`s, and what `plan`
    returns is called with A, B, the result and `offs`.

    Attributes:
        name: The name of the kernel, of a-z, 0-9, _ and dots.
        module: The name of the module, as `importlib.import_module` takes it.

    Example:
        >>> from outblas.autotune import TuneTarget
        >>> target = TuneTarget("portable", "outblas.kernels.portable")
        >>> target.load().Config().block_m
        128
        >>> len(target.fingerprint)
        16
    """

    name: str
    module: str

    def load(self) -> ModuleType:
        """Import the module of the kernel.

        Returns:
            The module.

        Raises:
            ImportError: The module, or the DSL of a kernel of outblas, is not installed; the
                message says what to install.
        """
        if self == registered(self.name):
            return registry.load(self.name)
        if self == HOPPER_GROUPED:
            hooks.hopper_grouped.get()  # which says what to install
            return importlib.import_module(f"{__package__}.grouped_kernel")
        return importlib.import_module(self.module)

    @property
    def fingerprint(self) -> str:
        """The digest of the kernel's source, which trials carry."""
        return fingerprint(self.module)


# The kernel of grouped products, which is in no ladder. Its module stands for its sources.
HOPPER_GROUPED = TuneTarget("hopper.grouped", "outblas.hopper.gemm.group_host")


def registered(name: str) -> TuneTarget | None:
    """Returns the kernel of the registry with this name; None where there is none."""
    names = {rung for ladder in registry.LADDERS.values() for rung in ladder}
    return TuneTarget(name, registry.module_name(name)) if name in names else None


def of(kernel: str | TuneTarget) -> TuneTarget:
    """Returns a kernel by its name; returns a TuneTarget as it is. Raises TypeError or ValueError
    for anything that is not a kernel.
    """
    if isinstance(kernel, TuneTarget):
        if not _NAME.fullmatch(kernel.name):
            raise ValueError(f"kernel is {kernel.name!r}, expected a name of a-z, 0-9, _ and .")
        return kernel
    if kernel == HOPPER_GROUPED.name:
        return HOPPER_GROUPED
    registry.find(kernel)
    return TuneTarget(kernel, registry.module_name(kernel))


@functools.cache
def fingerprint(module: str) -> str:
    """Returns a hash of a kernel's source: of its package, and of the device code that packages
    share.

    Raises ImportError where the module does not exist.
    """
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ImportError(f"{module} is not installed")
    digest = hashlib.sha256()
    for name, file in _sources(module, Path(spec.origin)):
        digest.update(name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _sources(module: str, origin: Path) -> list[tuple[str, Path]]:
    """Returns the source files of a kernel, each with its name in the fingerprint.

    A kernel of this package consists of its whole ladder and of the device code that ladders share,
    including all folders below them; any other kernel consists of its own file.
    """
    if not module.startswith("outblas."):
        return [(origin.name, origin)]
    ladder = ".".join(module.split(".")[:2])
    spec = importlib.util.find_spec(ladder)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    roots = [*map(Path, spec.submodule_search_locations), *map(Path, device.__path__)]
    return [
        (f"{root.name}/{file.relative_to(root)}", file)
        for root in roots
        for file in sorted(root.rglob("*.py"))
    ]
