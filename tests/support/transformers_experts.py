"""Experts of transformers for the tests of `patch`: a model, modules that its decorator makes, and
the calls of `moe_mlp` that they make.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from outblas.torch_ops.moe import moe_mlp

Tensor = torch.Tensor
Settings = dict[str, Any]
Calls = list[tuple[Any, ...]]
SIZES: Settings = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
EXPERTS = "model.layers.0.mlp.experts", "model.layers.1.mlp.experts"


def recorded_calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Returns a list that gets the operands of each `moe_mlp` that experts call."""
    made: Calls = []

    def recorded(*given: Any, **named: Any) -> Tensor:
        made.append(given)
        return moe_mlp(*given, **named)

    monkeypatch.setattr("outblas.patching.experts.moe_mlp", recorded)
    return made


def mixtral(**changes: Any) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, **changes))


def experts_of(model: nn.Module) -> Any:
    return model.get_submodule(EXPERTS[0])


class Config:
    """What transformers' decorator reads."""

    _experts_implementation = "grouped_mm"
    num_experts, hidden, inner = 4, 16, 8


def made_by_decorator(act: nn.Module, **flags: Any) -> nn.Module:
    """Returns experts of a name of their own, made for transformers by its decorator."""
    from transformers.integrations.moe import use_experts_implementation

    is_transposed = flags.get("is_transposed", False)
    first = "gate_up_proj" if flags.get("has_gate", True) else "up_proj"

    def matrix(rows: int, columns: int) -> nn.Parameter:
        shape = (columns, rows) if is_transposed else (rows, columns)
        return nn.Parameter(torch.randn(Config.num_experts, *shape))

    @use_experts_implementation(**flags)
    class Specialists(nn.Module):
        def __init__(self, config: Config) -> None:
            super().__init__()
            self.num_experts = config.num_experts
            width = config.inner * (2 if first == "gate_up_proj" else 1)
            self.register_parameter(first, matrix(width, config.hidden))
            self.down_proj = matrix(config.hidden, config.inner)
            if flags.get("has_bias"):
                sizes = {f"{first}_bias": width, "down_proj_bias": config.hidden}
                for name, size in sizes.items():
                    self.register_parameter(
                        name, nn.Parameter(torch.randn(config.num_experts, size))
                    )
            self.act_fn = act

        def forward(
            self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
        ) -> Tensor:
            raise NotImplementedError

    return Specialists(Config())


def routed(tokens: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    weights, index = torch.rand(tokens, Config.num_experts).topk(2)
    return torch.randn(tokens, Config.hidden), index, weights


def with_changes(change: Callable[[Any], object]) -> Any:
    module = made_by_decorator(nn.SiLU())
    change(module)
    return module
