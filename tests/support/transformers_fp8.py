"""fp8 layers of transformers for the tests of `patch`: models and single layers with random
weights, and what their dequantized operands give in float64.
"""

import copy
import functools
from typing import Any

import torch
from torch import nn

from outblas import quantize
from support.fp8 import scaled

Tensor = torch.Tensor
Settings = dict[str, Any]
SIZES: Settings = {
    "vocab_size": 64,
    "hidden_size": 160,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
TOKENS = torch.arange(18).view(2, 9) % 7


def qwen3() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return in_fp8(Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=80)))


def deepseek_v3() -> Any:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    heads: Settings = {"q_lora_rank": 48, "kv_lora_rank": 48, "qk_rope_head_dim": 16}
    heads |= {"qk_nope_head_dim": 16, "v_head_dim": 32, "first_k_dense_replace": 2}
    return in_fp8(DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES, **heads)))


def qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    routed: Settings = {"moe_intermediate_size": 128, "num_experts": 4, "head_dim": 80}
    config = Qwen3MoeConfig(**SIZES | {"num_hidden_layers": 1}, **routed, num_experts_per_tok=2)
    return in_fp8(Qwen3MoeForCausalLM(config))


def in_fp8(model: Any) -> Any:
    """Returns a model whose linear layers, but for the head, have become fp8 layers."""
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

    weights = {name: p.detach() for name, p in model.named_parameters()}
    model = replace_with_fp8_linear(model, ["lm_head"], FineGrainedFP8Config())
    for name, layer in fp8_layers(model).items():
        fill(layer, weights[f"{name}.weight"])
    return model.eval()


def fp8_layers(model: nn.Module) -> dict[str, Any]:
    """The fp8 layers of a model by name."""
    return {
        name: layer for name, layer in model.named_modules() if type(layer).__name__ == "FP8Linear"
    }


def fill(layer: Any, weight: Tensor) -> None:
    """Gives a layer the quantized weight."""
    values, scale = quantize(weight, "128x128")
    layer.weight, layer.weight_scale_inv = nn.Parameter(values), nn.Parameter(scale)


def fp8_layer(K: int = 300, N: int = 200, **how: Any) -> Any:
    """Returns a layer with random weights."""
    from transformers.integrations.finegrained_fp8 import FP8Linear

    layer = FP8Linear(K, N, **{"block_size": (128, 128)} | how)
    if how.get("block_size", (128, 128)) == (128, 128):
        fill(layer, torch.randn(N, K))
    if layer.bias is not None:
        nn.init.normal_(layer.bias)
    return layer


def reference(layer: Any, x: Tensor) -> Tensor:
    """The product of the dequantized operands in float64, rounded to the dtype of x."""
    values, scale = quantize(x.reshape(-1, x.shape[-1]), "1x128")
    weight = scaled(layer.weight, layer.weight_scale_inv, "128x128")
    y = scaled(values, scale, "1x128") @ weight.t()
    y = y if layer.bias is None else y + layer.bias.double()
    return y.to(x.dtype).view(*x.shape[:-1], weight.shape[0])


def with_references(model: nn.Module) -> Any:
    """Returns a copy of a model whose fp8 layers compute `reference`."""
    model = copy.deepcopy(model)
    for layer in fp8_layers(model).values():
        layer.forward = functools.partial(reference, layer)
    return model
