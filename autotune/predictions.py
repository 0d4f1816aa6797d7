"""What the analytic model predicts for the configs that tables name, at one workload after another.

A lookup asks for many configs at every new shape. What no shape changes is therefore kept: a
config that was parsed, and its terms in the model (`cost_model.ConfigModel`).
"""

import contextlib
from typing import Any

from ..core.machines import Machine
from ..core.space import Space
from .named_configs import config_of, space_of
from .search.cost_model import Call, ConfigModel
from .search.gpu import machine as machine_of
from .store.records import Gpu, Workload


class KnownConfig:
    """A config on one GPU; None where the kernel has no such config."""

    def __init__(self, config: Any, machine: Machine | None) -> None:
        self.config, self._machine = config, machine
        # By the dtypes and the space's `footprint_key`.
        self._models: dict[tuple[object, ...], ConfigModel] = {}

    def model(self, space: Space[Any], dtype: str, out_dtype: str) -> ConfigModel:
        """Returns the model of the config for workloads of a space."""
        assert self._machine is not None
        if space.footprint_key is None:
            return ConfigModel(space.footprint(self.config), self._machine, dtype, out_dtype)
        key = dtype, out_dtype, space.footprint_key(self.config)
        found = self._models.get(key)
        if found is None:
            found = ConfigModel(space.footprint(self.config), self._machine, dtype, out_dtype)
            self._models[key] = found
        return found


class GpuModel:
    """The model of one GPU; `machine` is None where it predicts nothing."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.machine = gpu, machine_of(gpu)
        self._named: dict[tuple[str, str], KnownConfig] = {}
        self._defaults: dict[Any, KnownConfig] = {}

    def at(self, workload: Workload) -> "Predictions":
        """Returns the predictions for a workload."""
        return Predictions(self, workload)

    def named(self, kernel: str, text: str) -> KnownConfig:
        """Returns a config by the text that a table has."""
        found = self._named.get((kernel, text))
        if found is None:
            config: Any = None
            with contextlib.suppress(ValueError, ImportError):
                config = config_of(kernel, text)
            found = self._named[kernel, text] = KnownConfig(config, self.machine)
        return found

    def default(self, config: Any) -> KnownConfig:
        """Returns a config that a kernel has chosen."""
        found = self._defaults.get(config)
        if found is None:
            found = self._defaults[config] = KnownConfig(config, self.machine)
        return found


class Predictions:
    """The predictions of the model for one workload."""

    def __init__(self, model: GpuModel, workload: Workload) -> None:
        self._model, self._workload = model, workload
        self._call = None if model.machine is None else Call.of(workload, model.machine)
        self._spaces: dict[str, Space[Any] | None] = {}
        self._found: dict[tuple[str, str], float | None] = {}

    def us(self, kernel: str, config: str) -> float | None:
        """Returns the µs that the model predicts for a config ("": the kernel's default); None
        where it predicts nothing, or the config does not run.
        """
        named = kernel, config
        if named in self._found:
            return self._found[named]
        us = self._found[named] = self._us(kernel, config)
        return us

    def _us(self, kernel: str, text: str) -> float | None:
        space, call = self._space(kernel), self._call
        if space is None or call is None:
            return None
        workload = self._workload
        if text:
            named = self._model.named(kernel, text)
            if named.config is None or space.invalid_reason(named.config) is not None:
                return None
            return named.model(space, workload.dtype, workload.out_dtype).us(call)
        return self._us_of_default(space, call)

    def _us_of_default(self, space: Space[Any], call: Call) -> float | None:
        workload = self._workload
        try:
            own = space.own
        except (ValueError, ImportError):
            return None
        if space.invalid_reason(own) is not None:
            return None
        return self._model.default(own).model(space, workload.dtype, workload.out_dtype).us(call)

    def _space(self, kernel: str) -> Space[Any] | None:
        """Returns a kernel's search space; None where the kernel does not run."""
        if kernel not in self._spaces:
            try:
                self._spaces[kernel] = space_of(kernel, self._workload, self._model.gpu)
            except (ValueError, ImportError):
                self._spaces[kernel] = None
        return self._spaces[kernel]
