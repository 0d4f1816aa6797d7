"""The choice of a config among those whose kernels a pack has: packs of a release say in `configs`
which ones they have of each kind of problem, and serve every size of it with them.
"""

import functools

from outblas.base import configs, pack
from outblas.base.pack import Pack
from outblas.call.problem import Problem, dtype_name
from outblas.hopper.gemm import heuristic
from outblas.hopper.gemm.config import Config
from outblas.hopper.gemm.heuristic import Keys
from outblas.hopper.gemm.rule_cycles import Rates
from outblas.hopper.gemm.variant import Variant, example_variant
from outblas.hopper.parts.config import HopperConfig, compile_key


def config(problem: Problem, gpu: Rates) -> HopperConfig:
    """Returns the config for a problem that no tuning result suits: the best of those in a pack,
    where it has the kernel, else the best of all. Raises ValueError where there is none.
    """
    return packed_config(problem, gpu) or heuristic.config(problem, gpu)


def packed_config(problem: Problem, gpu: Rates) -> HopperConfig | None:
    """Returns the best config whose kernel a pack has, None without one."""
    packs = pack.loaded()
    keys = _keys(packs, kind(problem))
    try:
        best = heuristic.config(problem, gpu, keys) if keys else None
    except ValueError:
        return None
    is_packed = best and _is_packed(packs, example_variant(problem, best, gpu.sms))
    return best if is_packed else None


def kind(problem: Problem) -> str:
    """Returns what the configs of a problem depend on besides its sizes and strides: the formats of
    its operands, and whether it has gated pairs.
    """
    formats = problem.formats or dtype_name(problem.dtype)
    return f"{formats} gated" if problem.epilogue.gated else formats


@functools.lru_cache(maxsize=256)
def _keys(packs: tuple[Pack, ...], kind: str) -> Keys:
    texts = [text for each in packs for text in each.about.get("configs", {}).get(kind, ())]
    return frozenset(compile_key(configs.from_text(Config, text)) for text in texts)


@functools.lru_cache(maxsize=4096)
def _is_packed(packs: tuple[Pack, ...], variant: Variant) -> bool:
    facts = variant.cache_key_fields
    return any(each.name_of(facts) in each.objects for each in packs)
