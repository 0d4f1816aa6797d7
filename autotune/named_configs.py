"""What a kernel with a config that a text names is for a workload: whether it runs, how fast the
model predicts it to be, and what limits it.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from outblas.autotune.search import cost_model, prune, target
from outblas.autotune.search.cost_model import ConfigModel, ModelledCall
from outblas.autotune.search.gpu import machine as machine_of
from outblas.autotune.search.target import HOPPER_GROUPED
from outblas.autotune.store.records import Gpu, Workload
from outblas.base import registry
from outblas.base.configs import from_text, items
from outblas.base.machines import Machine
from outblas.base.space import Footprint, Space
from outblas.call import fallback
from outblas.call.default_kernel import PRODUCTION
from outblas.call.problem import Problem


@dataclass(frozen=True)
class ChosenConfig:
    """A kernel with its config as text ("": the kernel's default), and why it was chosen.

    `reason` is text, or becomes one by `str`: calls never read it, and a lookup does not write it.
    """

    kernel: str
    config: str
    reason: object

    @property
    def why(self) -> str:
        """Why it was chosen."""
        return str(self.reason)


class GpuModel:
    """The model of one GPU, which keeps what no shape changes: a lookup asks for many configs at
    every new shape. `machine` is None where it predicts nothing.
    """

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.machine = gpu, machine_of(gpu)
        # By the config, the dtypes and the space's `footprint_key`.
        self._models: dict[tuple[object, ...], ConfigModel] = {}

    def at(self, workload: Workload) -> "Predictions":
        """Returns the predictions for a workload."""
        return Predictions(self, workload)

    def config_model(self, space: Space[Any], config: Any, workload: Workload) -> ConfigModel:
        """Returns the model of a config for workloads of a space."""
        assert self.machine is not None
        dtypes = workload.dtype, workload.out_dtype
        if space.footprint_key is None:
            return ConfigModel(space.footprint(config), self.machine, *dtypes)
        key = config, dtypes, space.footprint_key(config)
        model = self._models.get(key)
        if model is None:
            model = ConfigModel(space.footprint(config), self.machine, *dtypes)
            self._models[key] = model
        return model


class Predictions:
    """The predictions of the model for one workload."""

    def __init__(self, model: GpuModel, workload: Workload) -> None:
        self._model, self._workload = model, workload
        self._call = None if model.machine is None else ModelledCall.of(workload, model.machine)
        self._us: dict[tuple[str, str], float | None] = {}

    def us(self, kernel: str, config: str) -> float | None:
        """Returns the µs that the model predicts for a config ("": the kernel's default); None
        where it predicts nothing, or the config does not run.
        """
        key = kernel, config
        if key not in self._us:
            self._us[key] = None if self._call is None else self._predict(kernel, config)
        return self._us[key]

    def _predict(self, kernel: str, text: str) -> float | None:
        assert self._call is not None
        try:
            space = space_of(kernel, self._workload, self._model.gpu)
        except (ValueError, ImportError):
            return None
        try:
            config = config_of(kernel, text) if text else space.own
        except (ValueError, ImportError) as error:
            fallback.warn_once(f"a tuned config of {kernel} is not used: {error}")
            return None
        if space.invalid_reason(config) is not None:
            return None
        return self._model.config_model(space, config, self._workload).us(self._call)


def unsupported_reason(kernel: str, config: str, workload: Workload, gpu: Gpu) -> str | None:
    """Returns why a kernel does not support a workload of packed operands with a config on a GPU;
    None if it does.
    """
    footprint = footprint_of(kernel, config, workload, gpu)
    return footprint if isinstance(footprint, str) else None


def footprint_of(kernel: str, config: str, workload: Workload, gpu: Gpu) -> Footprint | str:
    """Returns the resources that a config uses on a GPU, or why it cannot run there."""
    try:
        space = space_of(kernel, workload, gpu)
        chosen = config_of(kernel, config) if config else space.own
    except (ValueError, ImportError) as error:
        return str(error)
    reason: str | None = space.invalid_reason(chosen)
    return space.footprint(chosen) if reason is None else reason


# By kernel, conditions and GPU: the function that makes a search space of a problem.
_checked: dict[tuple[Any, ...], Callable[[Any, Machine | None], Space[Any]]] = {}


# As many as a table has workloads: a lookup asks for those of all neighbours.
@functools.lru_cache(maxsize=1024)
def space_of(kernel: str, workload: Workload, gpu: Gpu) -> Space[Any]:
    """Returns a kernel's search space for a workload. Raises ValueError where the kernel does not
    run, ImportError without its DSL.
    """
    # None of the reasons to refuse a workload depends on its shape.
    kind = kernel, workload.dtype, workload.epilogue, workload.grouping, gpu
    make = _checked.get(kind)
    if make is None:
        subject = target.of(kernel)
        prune.check(subject, workload, gpu)
        make = _checked[kind] = subject.load().space
    return make(prune.described(workload), machine_of(gpu))


@functools.lru_cache(maxsize=1024)
def config_of(kernel: str, text: str) -> Any:
    """Returns the config that a text describes. Raises ValueError for one that the kernel has not,
    ImportError without its DSL.
    """
    return from_text(target.of(kernel).load().Config, text)


def remarks(kernel: str, workload: Workload) -> list[str]:
    """Returns what a kernel does for a workload besides the GEMM, in words; empty if nothing."""
    try:
        describe = getattr(target.of(kernel).load(), "remarks", None)
    except (ValueError, ImportError):
        return []
    return describe(prune.problem(workload)) if describe else []


def suits(kernel: str, workload: Workload, problem: Problem) -> bool:
    """Returns whether a config of a kernel, which was measured with packed operands, suits those of
    a call.

    One of the production kernel does not if rows begin inside cache lines for the call's operands
    but not for packed ones, or the other way round: the kernel's default takes these lines into
    account.
    """
    if kernel != PRODUCTION:
        return True
    try:
        from outblas.hopper.gemm.operand_copies import cache_lines_per_row
    except ImportError:  # loading the kernel reports this error
        return True
    return cache_lines_per_row(problem) == cache_lines_per_row(prune.problem(workload))


def limits(kernel: str, config: str, workload: Workload, gpu: Gpu) -> str:
    """Returns what limits a config according to the model; empty where it predicts nothing."""
    footprint, machine = footprint_of(kernel, config, workload, gpu), machine_of(gpu)
    if isinstance(footprint, str) or machine is None:
        return ""
    return cost_model.predict(footprint, workload, machine).limits


def brief_text(choice: ChosenConfig) -> str:
    """Formats a kernel with the fields of its config that differ from the defaults."""
    config = short(choice.kernel, choice.config) if choice.config else ""
    return f"{choice.kernel}[{config}]" if config else choice.kernel


def short(kernel: str, config: str) -> str:
    """Returns the fields of a config that differ from the kernel's defaults, or the whole text of a
    kernel that is in no ladder.
    """
    try:
        defaults = registry.defaults(PRODUCTION if kernel == HOPPER_GROUPED.name else kernel)
    except ValueError:
        return config
    pairs = items(config)
    return ",".join(f"{name}={value}" for name, value in pairs if str(defaults.get(name)) != value)
