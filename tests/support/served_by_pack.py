"""Packs in tests: forgetting them, and a program that loads from a pack all kernels of the products
that its arguments name, a line each, and fails where anything is compiled. It prints how many they
are.
"""

from outblas.base import pack


def forget_packs() -> None:
    """Also that of the environment. Kernels that were taken from them stay."""
    pack._loaded.clear()
    pack._shipped.clear()
    pack._warned.clear()
    pack._environment_read = False


SERVED = """
import sys
import triton
from outblas.device.triton_variant import Kept, TritonVariant
from outblas.base import machines, pack
from outblas.hopper.parts import compile
from outblas.packing import build
from outblas.call.products import parse_line

def never(*given, **options):
    raise AssertionError("something was compiled")

machine, (loaded,) = machines.find("H100"), pack.loaded()
index = build.index_of({name: loaded.table(name) for name in loaded.tables}, machine)
products = [parse_line(line) for line in sys.argv[1:]]
variants, _ = build._variants(products, machine, lambda text: None, index)
triton.compile = never
for variant in variants:
    if isinstance(variant, TritonVariant):
        code = pack.packed_code(variant.cache_key_fields)
        assert Kept.from_bytes(code).cubin.startswith(b"\\x7fELF")
    else:
        assert callable(compile.load(variant, never))
print(len(variants))
"""
