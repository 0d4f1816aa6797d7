"""`patch` and the experts of models of transformers: as they are, changed later, and copied."""

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import outblas
from outblas import patch, unpatch
from outblas.patching import preparing
from outblas.patching.replaced import compute
from outblas.torch_ops.moe import moe_mlp

pytest.importorskip("transformers")

from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)
from transformers.integrations.moe import use_experts_implementation

pytestmark = [
    pytest.mark.filterwarnings("ignore::outblas.FallbackWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

Tensor = torch.Tensor
Settings = dict[str, Any]
TOKENS = torch.arange(18).view(2, 9) % 7
SIZES: Settings = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
EXPERTS = "model.layers.0.mlp.experts", "model.layers.1.mlp.experts"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The operands of each `moe_mlp` that experts call."""
    operands: list[tuple[Any, ...]] = []

    def recording(*args: Any, **options: Any) -> Tensor:
        operands.append(args)
        return moe_mlp(*args, **options)

    monkeypatch.setattr("outblas.patching.experts.moe_mlp", recording)
    return operands


# ---- models and modules
def mixtral(**changes: Any) -> nn.Module:
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, **changes))


def deepseek_v3() -> nn.Module:
    routed: Settings = {
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
    }
    routed |= {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 0, "n_shared_experts": 1}
    heads: Settings = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8}
    heads |= {"qk_nope_head_dim": 8, "v_head_dim": 16}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES, **routed, **heads))


def gpt_oss() -> nn.Module:
    return GptOssForCausalLM(GptOssConfig(**SIZES, num_local_experts=4, head_dim=16))


def experts_of(model: nn.Module) -> Any:
    return model.get_submodule(EXPERTS[0])


class Config:
    """What transformers' decorator reads."""

    _experts_implementation = "grouped_mm"
    num_experts, hidden, inner = 4, 16, 8


def made_by_decorator(act: nn.Module, **flags: Any) -> nn.Module:
    """Returns experts of a name of their own, made for transformers by its decorator."""
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


def outcome(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the logits of a model and the gradients of its parameters."""
    model.zero_grad()
    logits = model(TOKENS).logits
    logits.square().sum().backward()
    return logits.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


# ---- what they compute
@pytest.mark.parametrize("make", [mixtral, deepseek_v3])
def test_a_patched_model_computes_what_it_did(
    make: Callable[[], nn.Module], calls: list[Any]
) -> None:
    model = make()
    logits, gradients = copy.deepcopy(outcome(model))

    dry = patch(model, dry_run=True)
    report = patch(model)

    assert tuple(report.experts) == EXPERTS
    assert not report.kept
    assert report == replace(dry, dry_run=False)
    ours, our_gradients = outcome(model)
    assert len(calls) == 2
    torch.testing.assert_close(ours, logits)
    torch.testing.assert_close(our_gradients, gradients, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("act", "flags", "activation"),
    [
        (nn.SiLU(), {}, "swiglu"),
        (nn.GELU(), {}, "geglu"),
        (nn.SiLU(), {"is_transposed": True, "has_bias": True}, "swiglu"),
        (nn.ReLU(), {"has_gate": False, "has_bias": True}, "relu"),
    ],
)
def test_experts_are_known_by_what_they_say_of_themselves(
    act: nn.Module, flags: dict[str, bool], activation: str
) -> None:
    module, operands = made_by_decorator(act, **flags), routed()
    expected = module(*operands)

    report = patch(module)

    assert report.experts == {"(root)": f"4 experts are one outblas.moe_mlp with {activation}"}
    torch.testing.assert_close(module(*operands), expected, atol=1e-4, rtol=1e-4)


def test_experts_of_other_ranks_contribute_nothing() -> None:
    module, (x, index, weights) = made_by_decorator(nn.SiLU()), routed()
    missing = index == 0
    expected = module(x, index, weights.masked_fill(missing, 0))
    patch(module)

    y = module(x, index.masked_fill(missing, Config.num_experts), weights)

    torch.testing.assert_close(y, expected, atol=1e-4, rtol=1e-4)


def test_an_exported_program_calls_moe_mlp() -> None:
    module, operands = made_by_decorator(nn.SiLU()), routed()
    expected = module(*operands)
    patch(module)

    program = torch.export.export(module, operands, strict=True)

    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert "outblas.moe_mlp.default" in called
    torch.testing.assert_close(program.module()(*operands), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [
        ("eager", torch.bfloat16),
        ("batched_mm", torch.bfloat16),
        ("grouped_mm", torch.float32),
    ],
)
def test_autocast_casts_what_it_casts_for_transformers(
    implementation: str, dtype: torch.dtype, calls: list[Any]
) -> None:
    module: Any = experts_of(mixtral(experts_implementation=implementation))
    x, index, weights = torch.randn(5, 32), *routed()[1:]
    with torch.autocast("cpu", torch.bfloat16):
        expected = module(x, index, weights)
        patch(module)
        y = module(x, index, weights)
    y.sum().backward()

    ((tokens, first, down, *_),) = calls
    assert {tokens.dtype, first.dtype, down.dtype} == {dtype}
    assert y.dtype == expected.dtype
    assert module.down_proj.grad.dtype == torch.float32
    assert (y - expected).norm() / expected.norm() < 4 * torch.finfo(dtype).eps


# ---- what is kept
def test_experts_that_compute_something_else_are_kept() -> None:
    """Those of GPT-OSS clamp, and columns of their gate alternate with others."""
    model = gpt_oss()
    logits = model(TOKENS).logits

    report = patch(model)

    assert report.experts == {}
    assert tuple(report.kept) == EXPERTS
    assert f"{EXPERTS[0]}.gate_up_proj" in report.unreached
    torch.testing.assert_close(model(TOKENS).logits, logits)


class Cubed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x**3


def own_gate(module: Any) -> None:
    type(module)._apply_gate = lambda self, x: x.chunk(2, -1)[0]


# By the reason that is reported: flags of the decorator, or what is done to a module.
KEPT: dict[str, dict[str, bool] | Callable[[Any], object]] = {
    "its activation is Cubed, which no epilogue has": lambda m: setattr(m, "act_fn", Cubed()),
    "its activation is SiLU, which no epilogue has": (
        lambda m: m.act_fn.register_forward_hook(lambda *_: None)
    ),
    "it has no act_fn": lambda m: delattr(m, "act_fn"),
    "the columns of gate and up alternate": {"is_concatenated": False},
    "it normalizes what experts return": {"has_post_expert_norm": True},
    "Specialists has a gate of its own": own_gate,
    "its forward was replaced": lambda m: setattr(m, "forward", lambda *_: None),
    "its experts_implementation is 'deepgemm'": (
        lambda m: setattr(m.config, "_experts_implementation", "deepgemm")
    ),
    "it has no parameter gate_up_proj": lambda m: delattr(m, "gate_up_proj"),
    "has a gate_up_proj of torch.float64, which no kernel takes": nn.Module.double,
    "its down_proj has 2 dimensions": (
        lambda m: setattr(m, "down_proj", nn.Parameter(torch.ones(8, 6)))
    ),
}


@pytest.mark.parametrize("reason", KEPT)
def test_experts_that_moe_mlp_cannot_compute_are_named(reason: str) -> None:
    change = KEPT[reason]
    module = made_by_decorator(nn.SiLU(), **(change if isinstance(change, dict) else {}))
    if callable(change):
        change(module)

    report = patch(module)

    assert report.experts == {}
    assert report.kept == {"(root)": reason}


def test_the_filter_is_asked_for_experts() -> None:
    model = mixtral()

    report = patch(model, filter=lambda name, layer: name != EXPERTS[0])

    assert tuple(report.experts) == EXPERTS[1:]
    assert report.kept == {EXPERTS[0]: "the filter does not take it"}
    assert f"{EXPERTS[0]}.down_proj" in report.unreached
    assert f"{EXPERTS[1]}.down_proj" not in report.unreached


def test_a_filter_that_expects_linear_layers_is_told_of_experts() -> None:
    model = mixtral()

    with pytest.raises(AttributeError, match=r"no torch.nn.Linear.*experts=False"):
        patch(model, filter=lambda name, layer: layer.out_features > 8)

    assert not any(isinstance(layer, outblas.Linear) for layer in model.modules())


# ---- what changes later
def with_another_activation(module: Any) -> None:
    module.act_fn = nn.GELU()


def parametrized(module: Any) -> None:
    nn.utils.parametrize.register_parametrization(module, "down_proj", nn.Identity())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (parametrized, "it has no parameter down_proj: Parametrized"),
        (
            with_another_activation,
            "its activation is not the silu that patch found: Specialists computes as without",
        ),
    ],
)
def test_experts_that_change_later_are_computed_by_their_class(
    change: Callable[[Any], None], reason: str, calls: list[Any]
) -> None:
    module, operands = made_by_decorator(nn.SiLU()), routed()
    report = patch(module)

    change(module)

    torch.testing.assert_close(module(*operands), compute(module, *operands))
    assert not calls
    again = patch(module)
    assert again.experts == report.experts
    assert again.remarks["(root)"].startswith(reason)


def replica_of(module: Any) -> Any:
    """Returns a replica whose matrices are twice as large, as `nn.DataParallel` makes them: without
    parameters, and with tensors in their place.
    """
    replica = module._replicate_for_data_parallel()
    for name in ("gate_up_proj", "down_proj"):
        setattr(replica, name, (2 * getattr(module, name)).detach())
    return replica


def test_a_replica_computes_with_its_own_tensors(calls: list[Any]) -> None:
    module, operands = made_by_decorator(nn.SiLU()), routed()
    patch(module)

    for replica in (first := replica_of(module), replica_of(first)):
        del calls[:]
        torch.testing.assert_close(replica(*operands), compute(replica, *operands))
        assert len(calls) == 1
        assert (replica(*operands) != module(*operands)).any()


# ---- back
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_unpatch_gives_experts_their_forward_back(is_wrapped: bool, calls: list[Any]) -> None:
    """Also where a wrapper keeps the forward, as accelerate's hooks do."""
    model = mixtral()
    patch(model)
    module = experts_of(model)
    if is_wrapped:
        module._old_forward = module.forward
        module.forward = functools.partial(lambda m, *operands: m._old_forward(*operands), module)

    report = unpatch(model)

    assert tuple(report.experts) == EXPERTS
    assert not any("outblas" in name for name in vars(module))
    model(TOKENS)
    assert not calls
    assert not any(isinstance(layer, outblas.Linear) for layer in model.modules())


def test_experts_are_run_to_prepare_them(
    calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of equal layers once."""
    monkeypatch.setattr(preparing, "is_on_gpu", lambda t: True)
    model = mixtral()

    patch(model).prepare(rows=4)

    assert [tuple(x.shape) for x, *_ in calls] == [(1, 32), (2, 32), (4, 32)]
