"""Kernels of Triton and Gluon by all that their code depends on: compiled without a GPU, and kept
as machine code with what a launch has to know.
"""

import ctypes
import importlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from outblas.base import cache
from outblas.base.facts import version_of
from outblas.device import sources
from outblas.device.launch import Specialization

Place = tuple[int, ...]  # positions that lead to an argument, or into a tuple
NUMBERS = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}
_IN_PTX = {"i32": "u32", "i64": "u64", "fp32": "f32"}  # pointers are u64
SCRATCH = ("global_scratch_size", "profile_scratch_size")


@dataclass(frozen=True)
class TritonVariant:
    """The key of one compile.

    Attributes:
        module, function: Where the kernel is defined.
        signature: The types of its arguments by name: "constexpr" for those that are known, and a
            tuple of types for a tuple.
        constants: The values of those that are known, by place.
        divisors: Numbers that divide the others, by place.
        options: What Triton is told besides.
        arch: The architecture (90 is sm_90).
    """

    keeper: ClassVar[str] = f"{__name__}:TritonVariant.keep"
    module: str
    function: str
    signature: tuple[tuple[str, Any], ...]
    constants: tuple[tuple[Place, Any], ...]
    divisors: tuple[tuple[Place, int], ...]
    options: tuple[tuple[str, Any], ...]
    arch: int

    @staticmethod
    def of(kernel: Any, given: Specialization, arch: int) -> "TritonVariant":
        """Returns the key of a jitted function with a specialization."""
        names = [name for name, _ in given.signature]
        assert names == kernel.arg_names, "the host passes what the kernel takes"
        return TritonVariant(
            kernel.fn.__module__,
            kernel.fn.__name__,
            given.signature,
            given.constants,
            given.divisors,
            tuple(sorted(given.options.items())),
            arch,
        )

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"{self.module.rpartition('.')[2]}.{self.function}"

    @property
    def cache_key_fields(self) -> dict[str, object]:
        """Returns the facts that the machine code depends on."""
        return {
            "kernel": self.name,
            "signature": repr(self.signature),
            "constants": repr(self.constants),
            "divisors": repr(self.divisors),
            "triton_options": repr(self.options),
        } | toolchain_fields(self.arch, self.module)

    @property
    def parameters(self) -> list[tuple[Place, str]]:
        """The place and the type of each argument that the machine code takes, in its order."""
        types = (kind for _, kind in self.signature)
        return [pair for i, kind in enumerate(types) for pair in _flat((i,), kind)]

    def compile(self) -> Any:
        """Returns what Triton compiles."""
        import triton

        from outblas.base.compat.triton_private import ASTSource, GluonASTSource, GPUTarget
        from outblas.device import language

        kernel = getattr(importlib.import_module(self.module), self.function)
        attributes = {place: [["tt.divisibility", by]] for place, by in self.divisors}
        with language.lock:
            language_of = GluonASTSource if kernel.is_gluon() else ASTSource
            source = language_of(kernel, dict(self.signature), dict(self.constants), attributes)
            target = GPUTarget("cuda", self.arch, 32)
            return triton.compile(source, target=target, options=dict(self.options))

    def keep(self) -> dict[str, object]:
        """Compiles onto disk, and returns the facts that the code is found by. Raises ValueError
        for a kernel that `Kept` cannot describe.
        """
        cache.warm(self.cache_key_fields, build=self.compile, save=self._save)
        return self.cache_key_fields

    def kept(self, load: Callable[[bytes], Any]) -> Any:
        """Returns what `load` makes of the machine code (`Kept`) in a pack or on disk, or what
        `compile` returns where the disk does not keep it. Raises as `cache.fetch`.
        """
        return cache.fetch(
            self.cache_key_fields,
            build=self.compile,
            save=self._save,
            load=load,
            key=self,
        )

    def _save(self, compiled: Any, path: Path) -> None:
        path.write_bytes(Kept.of(compiled, self).to_bytes())


def _flat(place: Place, kind: Any) -> Iterator[tuple[Place, str]]:
    if isinstance(kind, tuple):
        for i, each in enumerate(kind):
            yield from _flat((*place, i), each)
    elif kind != "constexpr":
        yield place, kind


class Kept(NamedTuple):
    """The machine code of a kernel, and how it is launched.

    name: that of its entry. shared: bytes of shared memory. threads: those of a CTA. types: those
    of its parameters. scratch: how many pointers to memory that it does not use follow them.
    """

    name: str
    shared: int
    threads: int
    types: list[str]
    scratch: int
    cubin: bytes

    @staticmethod
    def of(compiled: Any, variant: TritonVariant) -> "Kept":
        """Returns that of a compiled kernel. Raises ValueError for one that needs memory of its
        own, clusters, or a launch of another kind.
        """
        facts = compiled.metadata._asdict()
        unusual = ("launch_cooperative_grid", "launch_pdl", "tmem_size", *SCRATCH)
        asked = [name for name in unusual if facts.get(name)]
        if asked or facts.get("num_ctas", 1) != 1:
            raise ValueError(f"{variant.name} needs {', '.join(asked) or 'clusters'}")
        types = [kind for _, kind in variant.parameters]
        if others := {kind for kind in types if kind[0] != "*" and kind not in NUMBERS}:
            raise ValueError(f"{variant.name} has parameters of type {', '.join(sorted(others))}")
        entry = re.search(r"\.entry[^{]*\{", compiled.asm["ptx"], re.DOTALL)
        assert entry, "a kernel has an entry"
        found = re.findall(r"\.param \.(\w+)", entry[0])
        scratch = len(found) - len(types)
        if not 0 <= scratch <= len(SCRATCH):
            raise ValueError(f"{variant.name} has {scratch} parameters more than arguments")
        wanted = [_IN_PTX.get(kind, "u64") for kind in types]
        if found != wanted + ["u64"] * scratch:
            raise ValueError(f"{variant.name} has parameters {found}, expected {wanted} first")
        threads = facts["num_warps"] * facts["warp_size"]
        cubin = bytes(compiled.asm["cubin"])
        return Kept(facts["name"], facts["shared"], threads, types, scratch, cubin)

    def to_bytes(self) -> bytes:
        """Returns what `from_bytes` reads."""
        *facts, cubin = self
        return json.dumps(facts).encode() + b"\0" + cubin

    @staticmethod
    def from_bytes(content: bytes) -> "Kept":
        """Reads what `to_bytes` returned. Raises ValueError for anything else."""
        head, _, cubin = content.partition(b"\0")
        facts = json.loads(head)
        if type(facts) is not list or len(facts) != len(Kept._fields) - 1:
            raise ValueError("the code is not that of a kernel of Triton")
        return Kept._make((*facts, cubin))


def toolchain_fields(arch: int = 90, module: str = "outblas.kernels") -> dict[str, object]:
    """Returns the facts that all kernels of Triton in the folder of a module depend on."""
    return {
        "arch": f"sm_{arch}",
        "triton": version_of("triton"),
        "source": sources.fingerprint(importlib.import_module(module)),
    }
