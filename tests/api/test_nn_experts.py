"""`patch` and the experts of models of transformers."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import outblas
from outblas import patch, unpatch

pytest.importorskip("transformers")

from support.transformers_experts import (
    EXPERTS,
    SIZES,
    Calls,
    Config,
    Settings,
    experts_of,
    made_by_decorator,
    mixtral,
    recorded_calls,
    routed,
    with_changes,
)
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::outblas.FallbackWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

Tensor = torch.Tensor
TOKENS = torch.arange(18).view(2, 9) % 7


def qwen3_moe() -> nn.Module:
    routed: Settings = {"moe_intermediate_size": 24, "num_experts": 8}
    routed |= {"num_experts_per_tok": 2, "head_dim": 16}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **routed))


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


models = pytest.mark.parametrize("make", [mixtral, qwen3_moe, deepseek_v3])


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return recorded_calls(monkeypatch)


def outcome(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the logits of a model and the gradients of its parameters."""
    model.zero_grad()
    logits = model(TOKENS).logits
    logits.square().sum().backward()
    return logits, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


# ---- what they compute
@models
def test_a_patched_model_computes_what_it_did(make: Callable[[], nn.Module], calls: Calls) -> None:
    model = make()
    logits, gradients = outcome(model)
    gradients = copy.deepcopy(gradients)

    report = patch(model)

    assert tuple(report.experts) == EXPERTS
    assert not report.kept
    found, theirs = outcome(model)
    assert len(calls) == 2
    torch.testing.assert_close(found, logits)
    assert theirs.keys() == gradients.keys()
    torch.testing.assert_close(theirs, gradients, atol=1e-4, rtol=1e-4)


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
    module, given = made_by_decorator(act, **flags), routed()
    expected = module(*given)

    report = patch(module)

    assert report.experts == {"(root)": f"4 experts are one outblas.moe_mlp with {activation}"}
    torch.testing.assert_close(module(*given), expected, atol=1e-4, rtol=1e-4)


def test_experts_of_other_ranks_contribute_nothing() -> None:
    module, (x, index, weights) = made_by_decorator(nn.SiLU()), routed()
    missing = index == 0
    expected = module(x, index, weights.masked_fill(missing, 0))
    patch(module)

    found = module(x, index.masked_fill(missing, Config.num_experts), weights)

    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_tokens_of_another_dtype_are_rounded_as_by_transformers() -> None:
    module, (x, index, weights) = made_by_decorator(nn.SiLU()).bfloat16(), routed()
    expected = module(x, index, weights)
    patch(module)

    found = module(x, index, weights)

    assert found.dtype == expected.dtype == torch.float32
    assert (found - expected).norm() / expected.norm() < 4 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_calls_moe_mlp(strict: bool) -> None:
    module, given = made_by_decorator(nn.SiLU()), routed()
    expected = module(*given)
    patch(module)

    program = torch.export.export(module, given, strict=strict)

    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert "outblas.moe_mlp.default" in called
    torch.testing.assert_close(program.module()(*given), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [
        ("eager", torch.bfloat16),
        ("batched_mm", torch.bfloat16),
        ("grouped_mm", torch.float32),
    ],
)
def test_autocast_casts_what_it_casts_for_transformers(
    implementation: str, dtype: torch.dtype, calls: Calls
) -> None:
    module: Any = experts_of(mixtral(experts_implementation=implementation))
    x, index, weights = torch.randn(5, 32), *routed()[1:]
    with torch.autocast("cpu", torch.bfloat16):
        expected = module(x, index, weights)
        patch(module)
        found = module(x, index, weights)
    found.sum().backward()

    ((tokens, first, down, *_),) = calls
    assert {tokens.dtype, first.dtype, down.dtype} == {dtype}
    assert found.dtype == expected.dtype
    assert module.down_proj.grad.dtype == torch.float32
    assert (found - expected).norm() / expected.norm() < 4 * torch.finfo(dtype).eps


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


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: made_by_decorator(Cubed()), "its activation is Cubed, which no epilogue has"),
        (
            lambda: made_by_decorator(nn.SiLU(), is_concatenated=False),
            "the columns of gate and up alternate",
        ),
        (
            lambda: made_by_decorator(nn.SiLU(), has_post_expert_norm=True),
            "it normalizes what experts return",
        ),
        (lambda: with_changes(own_gate), "Specialists has a gate of its own"),
        (
            lambda: with_changes(lambda m: setattr(m, "forward", lambda *_: None)),
            "its forward was replaced",
        ),
        (
            lambda: with_changes(lambda m: m.double()),
            "has a gate_up_proj of torch.float64, which no kernel takes",
        ),
        (
            lambda: with_changes(lambda m: delattr(m, "gate_up_proj")),
            "it has no parameter gate_up_proj",
        ),
        (
            lambda: with_changes(lambda m: setattr(m, "down_proj", nn.Parameter(torch.ones(8, 6)))),
            "its down_proj has 2 dimensions",
        ),
        (
            lambda: with_changes(lambda m: m.act_fn.register_forward_hook(lambda *_: None)),
            "its activation is SiLU, which no epilogue has",
        ),
        (
            lambda: with_changes(
                lambda m: setattr(m.config, "_experts_implementation", "deepgemm")
            ),
            "its experts_implementation is 'deepgemm'",
        ),
        (lambda: with_changes(lambda m: delattr(m, "act_fn")), "it has no act_fn"),
    ],
)
def test_experts_that_moe_mlp_cannot_compute_are_named(
    make: Callable[[], nn.Module], reason: str
) -> None:
    report = patch(make())

    assert report.experts == {}
    assert report.kept == {"(root)": reason}


# ---- which are swapped
def test_the_filter_is_asked_for_experts() -> None:
    model = mixtral()

    report = patch(model, filter=lambda name, layer: name != EXPERTS[0])

    assert tuple(report.experts) == EXPERTS[1:]
    assert report.kept == {EXPERTS[0]: "the filter does not take it"}
    assert f"{EXPERTS[0]}.down_proj" in report.unreached
    assert f"{EXPERTS[1]}.down_proj" not in report.unreached


def test_a_filter_that_expects_linear_layers_is_told_of_experts() -> None:
    model = mixtral()

    with pytest.raises(
        AttributeError,
        match=r"no torch.nn.Linear.*experts=False",
    ):
        patch(model, filter=lambda name, layer: layer.out_features > 8)

    assert not any(isinstance(layer, outblas.Linear) for layer in model.modules())


def test_a_dry_run_reports_experts_and_changes_none() -> None:
    model = mixtral()

    dry = patch(model, dry_run=True)

    assert "forward" not in vars(experts_of(model))
    real = patch(model)
    assert (dry.experts, dry.remarks, dry.unreached) == (real.experts, real.remarks, real.unreached)


# ---- back
def test_unpatch_gives_experts_their_forward_back(calls: Calls) -> None:
    model = mixtral()
    patch(model)

    report = unpatch(model)

    assert tuple(report.experts) == EXPERTS
    assert "forward" not in vars(experts_of(model))
    model(TOKENS)
    assert not calls
    assert not any(isinstance(layer, outblas.Linear) for layer in model.modules())


def test_unpatch_reaches_a_forward_that_a_wrapper_keeps(calls: Calls) -> None:
    """As accelerate's hooks do."""
    model = mixtral()
    patch(model)
    module = experts_of(model)
    module._old_forward = module.forward
    module.forward = functools.partial(lambda m, *given: m._old_forward(*given), module)

    unpatch(model)

    model(TOKENS)
    assert not calls
