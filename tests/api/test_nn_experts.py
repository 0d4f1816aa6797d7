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
from outblas.torch_ops.moe import moe_mlp

pytest.importorskip("transformers")

from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::outblas.FallbackWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

Tensor = torch.Tensor
TOKENS = torch.arange(18).view(2, 9) % 7
Settings = dict[str, Any]
SIZES: Settings = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
EXPERTS = "model.layers.0.mlp.experts", "model.layers.1.mlp.experts"


def mixtral(**changes: Any) -> nn.Module:
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, **changes))


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
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The calls of `moe_mlp` that experts make."""
    made: list[tuple[Any, ...]] = []

    def recorded(*given: Any, **named: Any) -> Tensor:
        made.append(given)
        return moe_mlp(*given, **named)

    monkeypatch.setattr("outblas.patching.experts.moe_mlp", recorded)
    return made


def outcome(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the logits of a model and the gradients of its parameters."""
    model.zero_grad()
    logits = model(TOKENS).logits
    logits.square().sum().backward()
    return logits, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def experts_of(model: nn.Module) -> Any:
    return model.get_submodule(EXPERTS[0])


# ---- what they compute
@models
def test_a_patched_model_computes_what_it_did(
    make: Callable[[], nn.Module], calls: list[tuple[Any, ...]]
) -> None:
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


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_every_implementation_of_transformers_is_replaced(
    implementation: str, calls: list[tuple[Any, ...]]
) -> None:
    model = mixtral(experts_implementation=implementation)
    logits = model(TOKENS).logits

    patch(model)

    torch.testing.assert_close(model(TOKENS).logits, logits)
    assert len(calls) == 2


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


def test_a_patched_model_compiles_to_one_graph() -> None:
    module, given = made_by_decorator(nn.SiLU()), routed()
    patch(module)

    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")

    torch.testing.assert_close(compiled(*given), module(*given))


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


def with_changes(change: Callable[[Any], object]) -> Any:
    module = made_by_decorator(nn.SiLU())
    change(module)
    return module


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


def test_modules_that_say_nothing_of_experts_are_none() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.ones(4, 12, 8))
            self.down_proj = nn.Parameter(torch.ones(4, 8, 6))
            self.act_fn = nn.SiLU()

    report = patch(Experts())

    assert report.experts == {}
    assert report.kept == {}
    assert set(report.unreached) == {"gate_up_proj", "down_proj"}


@pytest.mark.parametrize("change", ["parametrized", "a hook"])
def test_experts_that_change_later_are_computed_by_their_class(
    change: str, calls: list[tuple[Any, ...]]
) -> None:
    module, given = with_changes(lambda m: None), routed()
    patch(module)
    expected = module(*given)
    del calls[:]
    if change == "parametrized":
        nn.utils.parametrize.register_parametrization(module, "down_proj", nn.Identity())
    else:
        module.act_fn.register_forward_hook(lambda *_: None)

    found = module(*given)

    assert not calls
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


# ---- which are swapped
def test_the_filter_is_asked_for_experts() -> None:
    model = mixtral()

    report = patch(model, filter=lambda name, layer: name != EXPERTS[0])

    assert tuple(report.experts) == EXPERTS[1:]
    assert report.kept == {EXPERTS[0]: "the filter does not take it"}
    assert f"{EXPERTS[0]}.down_proj" in report.unreached
    assert f"{EXPERTS[1]}.down_proj" not in report.unreached


def test_experts_may_be_left_out() -> None:
    model = mixtral()

    report = patch(model, filter=lambda name, layer: layer.out_features > 0, experts=False)

    assert report.experts == {}
    assert report.kept == {}
    assert "forward" not in vars(experts_of(model))


def test_experts_that_were_swapped_are_reported_again() -> None:
    model = mixtral()
    first = patch(model)

    again = patch(model, experts=False)

    assert again.experts == first.experts
    assert again.unreached == first.unreached


def test_a_dry_run_reports_experts_and_changes_none() -> None:
    model = mixtral()

    dry = patch(model, dry_run=True)

    assert "forward" not in vars(experts_of(model))
    real = patch(model)
    assert (dry.experts, dry.remarks, dry.unreached) == (real.experts, real.remarks, real.unreached)


def test_a_report_shows_experts() -> None:
    report = patch(mixtral())

    assert report.remarks[EXPERTS[0]].startswith("on cpu: torch takes it")
    shown = str(report)
    assert shown.startswith("9 swapped, 0 kept, 2 swapped with experts, 2 unreached\n")
    row = next(line for line in shown.splitlines() if line.startswith(EXPERTS[0]))
    assert row.split(maxsplit=2)[1:] == [
        "swapped",
        "4 experts are one outblas.moe_mlp with swiglu; on cpu: torch takes it until it moves to "
        "an NVIDIA GPU",
    ]


def test_experts_must_be_a_bool() -> None:
    wrong: Any = "all"

    with pytest.raises(TypeError, match="experts is 'all', expected True or False"):
        patch(nn.Identity(), experts=wrong)


# ---- back
def test_unpatch_gives_experts_their_forward_back(calls: list[tuple[Any, ...]]) -> None:
    model = mixtral()
    patch(model)

    report = unpatch(model)

    assert tuple(report.experts) == EXPERTS
    assert "forward" not in vars(experts_of(model))
    model(TOKENS)
    assert not calls
    assert not any(isinstance(layer, outblas.Linear) for layer in model.modules())


def test_unpatch_reaches_a_forward_that_a_wrapper_keeps(calls: list[tuple[Any, ...]]) -> None:
    """As accelerate's hooks do."""
    model = mixtral()
    patch(model)
    module = experts_of(model)
    module._old_forward = module.forward
    module.forward = functools.partial(lambda m, *given: m._old_forward(*given), module)

    unpatch(model)

    model(TOKENS)
    assert not calls


def test_a_copy_of_a_patched_model_has_experts_of_its_own() -> None:
    model = mixtral()
    patch(model)

    other = copy.deepcopy(model)
    with torch.no_grad():
        experts_of(other).down_proj.zero_()

    x, index, weights = torch.randn(5, 32), *routed()[1:]
    assert (experts_of(other)(x, index, weights) == 0).all()
    assert (experts_of(model)(x, index, weights) != 0).any()


def test_parameters_keep_their_names() -> None:
    model = mixtral()
    names = list(model.state_dict())

    patch(model)

    assert list(model.state_dict()) == names
