"""The host side of a Gluon rung: the functions that dispatch calls, composed of the parts in which
ladders differ.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, TypeVar

import torch

from outblas.base import compiling, gpus, machines
from outblas.base.configs import mistyped, unread_reason
from outblas.base.registry import Kernel
from outblas.base.space import Axes, Footprint, Space
from outblas.call.artifact import Artifact, example
from outblas.call.epilogue import NONE
from outblas.call.problem import Launch, Problem, dtype_name
from outblas.device import gluon, launch, triton_artifact
from outblas.device.cubin import kernel_of
from outblas.device.grid import MAX_PROGRAMS, Tile, chunks_of, tiles
from outblas.device.launch import Specialization
from outblas.device.triton_variant import TritonVariant

C = TypeVar("C", bound=Tile)


Entry = tuple[
    Callable[..., str | None],
    Callable[..., Launch],
    Callable[..., Artifact],
    Callable[..., None],
    Callable[..., Space[C]],
]


class Rung(ABC, Generic[C]):
    """One rung: its registry entry, the body of its kernel, and its default config. Each ladder
    defines the rest in a subclass.
    """

    base: ClassVar[type]  # the base class of the configs of all rungs of the ladder
    dtype: ClassVar[torch.dtype]  # the dtype for which `artifact` compiles by default
    layout: ClassVar[str]  # the layout for which `artifact` compiles by default

    def __init__(self, kernel: Kernel, body: Any, own: type[C]) -> None:
        self.kernel, self.body, self.own = kernel, body, own

    def entry(self) -> Entry[C]:
        """Returns the functions that the rung's module exports: `unsupported`, `plan`, `artifact`,
        `precompile` and `space`.
        """
        return self.unsupported, self.plan, self.artifact, self.precompile, self.space

    @property
    def fused(self) -> bool:
        """Whether the kernel supports epilogues."""
        return "EPILOGUE" in self.body.arg_names

    @property
    @abstractmethod
    def unread(self) -> tuple[str, ...]:
        """The fields of a config that the body does not read."""

    @abstractmethod
    def invalid_reason(self, config: C, limit: int) -> str | None:
        """Returns why no kernel can be built from a config with this limit of shared memory in
        bytes; None if it can.
        """

    @abstractmethod
    def unsupported_reason(self, problem: Problem, config: C, arch: int) -> str | None:
        """Returns why the kernel cannot take a call on an architecture, apart from the operands'
        dtypes; None if it can.
        """

    @abstractmethod
    def ladder_constants(self, config: C, problem: Problem, arch: int) -> dict[str, Any]:
        """Returns the constants that all kernels of the ladder have, by parameter name."""

    def constants(self, config: C, problem: Problem, arch: int) -> dict[str, Any]:
        """Returns the constants that the body has parameters for, in the order of those."""
        values = self.ladder_constants(config, problem, arch)
        return {name: values[name] for name in self.body.arg_names if name in values}

    @abstractmethod
    def specialization(
        self, config: C, problem: Problem, constants: dict[str, Any], arch: int
    ) -> Specialization:
        """Returns what the compiler is told for an architecture."""

    @abstractmethod
    def described(self, config: C, problem: Problem) -> Mapping[str, Any]:
        """Returns the artifact's fields that not every Gluon kernel has: at least `stages`."""

    def target(self, config: C, arch: int) -> int:
        """Returns the architecture to compile for, given that of the GPU."""
        return arch

    def default(self, problem: Problem, sms: int, limit: int) -> C:
        """Returns the config of a call that names none, on a GPU with this many SMs and this limit
        of shared memory per CTA.
        """
        return self.own()

    @property
    @abstractmethod
    def axes(self) -> Axes:
        """Returns the axes along which configs of the ladder differ. A sweep leaves out the fields
        that the body does not read.
        """

    @abstractmethod
    def footprint(self, config: C, problem: Problem) -> Footprint:
        """Describes the resources that a config uses on a GPU."""

    def space(self, problem: Problem, machine: machines.Machine) -> Space[C]:
        """Returns the configs that are worth trying for a problem on a GPU."""
        unread = set(self.unread)
        axes = {
            axis: values
            for axis, values in self.axes.items()
            if unread.isdisjoint((axis,) if isinstance(axis, str) else axis)
        }

        def invalid_reason(config: C) -> str | None:
            reason = self._invalid(
                config, machine.shared_memory_per_cta
            ) or self.unsupported_reason(problem, config, machine.arch)
            return reason.removeprefix("config: ") if reason else None

        def describe(config: C) -> Footprint:
            return self.footprint(config, problem)

        own = self.default(problem, machine.sms, machine.shared_memory_per_cta)
        return Space(own=own, axes=axes, invalid_reason=invalid_reason, footprint=describe)

    def precompile(self, problem: Problem, config: C, arch: int) -> None:
        """Compiles what `plan` would load for a supported problem into Triton's cache. Needs no GPU
        and loads nothing.
        """
        self._compiled(config, problem, self.constants(config, problem, arch), arch, None)

    def _invalid(self, config: C, limit: int) -> str | None:
        if not isinstance(config, self.base):
            return f"config is a {type(config).__name__}, expected the Config of {self.kernel.name}"
        reason = (
            mistyped(config)
            or self.invalid_reason(config, limit)
            or unread_reason(config, self.own(), self.kernel.name, self.unread)
        )
        return f"config: {reason}" if reason else None

    def unsupported(self, problem: Problem, config: C | None = None) -> str | None:
        """Returns why this kernel cannot take a call (with this config); None if it can."""
        if reason := self._unsupported_problem(problem):
            return reason
        if problem.device.type != "cuda":
            return f"needs CUDA tensors, but was given tensors on {problem.device}"
        limit = gpus.shared_memory_limit(problem.device)
        chosen = config or self.default(problem, gpus.sm_count(problem.device), limit)
        return self._unsupported_config(problem, chosen, gpus.arch_of(problem.device), limit)

    def _unsupported_config(self, problem: Problem, config: C, arch: int, limit: int) -> str | None:
        if reason := self._invalid(config, limit):
            return reason
        if reason := self.unsupported_reason(problem, config, arch):
            return reason
        if tiles(config, problem) > MAX_PROGRAMS:
            return f"needs at most {MAX_PROGRAMS} tiles, but was given {tiles(config, problem)}"
        return None

    def _unsupported_problem(self, problem: Problem) -> str | None:
        if reason := launch.unsupported_dtype(problem):
            return reason
        if problem.epilogue != NONE and not self.fused:
            return f"has no epilogue besides alpha and C, but was given {problem.epilogue}"
        return None

    def plan(self, problem: Problem, config: C | None = None) -> Launch:
        """Compiles a kernel for a call, and returns its launch for the current device and stream.
        Raises ValueError when the call or the config is not supported.
        """
        if reason := self.unsupported(problem, config):
            raise ValueError(f"kernel {self.kernel.name!r}: {reason}")
        device = problem.device
        config = config or self.default(
            problem, gpus.sm_count(device), gpus.shared_memory_limit(device)
        )
        arch = gpus.arch_of(device)
        constants = self.constants(config, problem, arch)
        with torch.cuda.device(device):
            compiled = self._compiled(config, problem, constants, arch, torch.cuda.current_device())
            return launch.bind(
                problem,
                chunks_of(problem, config),
                lambda programs: compiled[programs, 1, 1],
                constants,
            )

    def pack_variant(
        self, problem: Problem, machine: machines.Machine, config: C | None = None
    ) -> TritonVariant:
        """Returns the kernel that `plan` would launch on a GPU that need not be there. Raises
        ValueError when the call or the config is not supported.
        """
        arch, limit = machine.arch, machine.shared_memory_per_cta
        chosen = config or self.default(problem, machine.sms, limit)
        reason = self._unsupported_problem(problem)
        if reason := reason or self._unsupported_config(problem, chosen, arch, limit):
            raise ValueError(f"kernel {self.kernel.name!r}: {reason}")
        constants = self.constants(chosen, problem, arch)
        specialization = self.specialization(chosen, problem, constants, arch)
        return TritonVariant.of(self.body, specialization, arch)

    def artifact(
        self,
        config: C | None = None,
        *,
        arch: int | None = None,
        dtype: torch.dtype | None = None,
        out_dtype: torch.dtype | None = None,
        layout: str | None = None,
        shape: tuple[int, int, int] = (4096, 4096, 4096),
        problem: Problem | None = None,
    ) -> Artifact:
        """Compiles what `plan` would launch on the reference GPU of an architecture (90 without
        one). Needs no GPU.

        `problem` replaces the aligned product with a row-major output that `dtype`, `out_dtype`,
        `layout` and `shape` describe. Raises ValueError for a problem or an architecture that the
        kernel does not support.
        """
        machine = machines.reference(90 if arch is None else arch)
        if machine.arch < self.kernel.min_arch:
            raise ValueError(
                f"arch is {machine.arch}, expected at least {self.kernel.min_arch} for "
                f"{self.kernel.name}"
            )
        layout = layout or self.layout
        given = problem or example(dtype or self.dtype, out_dtype, layout, shape)
        if dtype_name(given.dtype) not in self.kernel.dtypes:
            raise ValueError(
                f"dtype is {dtype_name(given.dtype)}, expected {' or '.join(self.kernel.dtypes)}"
            )
        if given.epilogue != NONE and not self.fused:
            raise ValueError(f"has no epilogue besides alpha and C, but was given {given.epilogue}")
        config = config or self.default(given, machine.sms, machine.shared_memory_per_cta)
        if reason := self._invalid(
            config, machine.shared_memory_per_cta
        ) or self.unsupported_reason(given, config, machine.arch):
            raise ValueError(reason)
        constants = self.constants(config, given, machine.arch)
        return triton_artifact.from_compiled(
            self._compiled(config, given, constants, machine.arch, None),
            machine_arch=machine.arch,
            kernel=self.kernel.name,
            config=config,
            dtype=given.dtype,
            out_dtype=given.out_dtype,
            layout=layout,
            tile=(config.block_m, config.block_n, config.block_k),
            **self.described(config, given),
        )

    def _compiled(
        self, config: C, problem: Problem, constants: dict[str, Any], arch: int, device: int | None
    ) -> Any:
        target = self.target(config, arch)
        specialization = self.specialization(config, problem, constants, target)
        variant = TritonVariant.of(self.body, specialization, target)
        if target == arch:
            return kernel_of(variant, device, self.kernel.name)
        if device is not None:
            compiling.check_allowed(self.kernel.name)
        return gluon.as_ptx(variant, device)
