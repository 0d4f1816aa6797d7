"""Models of transformers and of diffusers with random weights compute what they did: patched, fused
and enabled.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from outblas import patch, unpatch
from outblas.torch_ops import aten
from outblas.torch_ops.aten import Rules

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")
pytest_plugins = ("support.eager_fixtures",)
pytestmark = pytest.mark.filterwarnings("ignore")

Tensor = torch.Tensor
TOKENS = torch.randint(2, 60, (2, 7))
TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
LLAMA = TEXT | {"num_key_value_heads": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}


class Case(NamedTuple):
    """A model, what it is given, and what `patch(fuse=True)` fuses in it.

    `kind` is the name of a class of diffusers, or that of a config of transformers and, after a
    colon, the rest of the name of its model.
    """

    kind: str
    settings: dict[str, Any]
    inputs: dict[str, Tensor]
    fused: Mapping[str, str] = MappingProxyType({})


def gated(activation: str) -> dict[str, str]:
    said = f"gate_proj and up_proj are one product with {activation}"
    return {"model.layers.0.mlp": said}


OF_TEXT = {"input_ids": TOKENS}
CASES = {
    "Llama": Case("Llama:ForCausalLM", LLAMA, OF_TEXT, gated("swiglu")),
    "Gemma": Case("Gemma:ForCausalLM", LLAMA | {"head_dim": 16}, OF_TEXT, gated("geglu_tanh")),
    "Mixtral": Case("Mixtral:ForCausalLM", LLAMA | {"num_local_experts": 4}, OF_TEXT),
    "GPT-2": Case(
        "GPT2:LMHeadModel",
        {"vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 2, "bos_token_id": 1}
        | {"eos_token_id": 1, "pad_token_id": 0},
        OF_TEXT,
    ),
    "BERT": Case(
        "Bert:Model",
        TEXT,
        OF_TEXT,
        {
            "encoder.layer.0.intermediate.dense": "computes the gelu of intermediate_act_fn",
        },
    ),
    "T5": Case(
        "T5:ForConditionalGeneration",
        {"vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 1, "num_heads": 2}
        | {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1},
        {"input_ids": TOKENS, "decoder_input_ids": TOKENS},
        dict.fromkeys(
            (
                "encoder.block.0.layer.1.DenseReluDense.wi",
                "decoder.block.0.layer.2.DenseReluDense.wi",
            ),
            "computes the relu of act",
        ),
    ),
    "DiT": Case(
        "DiTTransformer2DModel",
        {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "out_channels": 4}
        | {"num_layers": 1, "sample_size": 8, "num_embeds_ada_norm": 10, "norm_num_groups": 2},
        {
            "hidden_states": torch.randn(2, 4, 8, 8),
            "timestep": torch.tensor([1, 20]),
            "class_labels": torch.tensor([3, 4]),
        },
    ),
}


def made(case: Case) -> nn.Module:
    name, colon, ending = case.kind.partition(":")
    torch.manual_seed(0)
    model: nn.Module
    if colon:
        config = getattr(transformers, f"{name}Config")(**case.settings)
        model = getattr(transformers, name + ending)(config)
    else:
        diffusers = pytest.importorskip("diffusers")  # takes seconds, and few tests need it
        model = getattr(diffusers, name)(**case.settings)
    return model.eval()


def expected_of(model: nn.Module, case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    """What a model computes, and its gradients. Their graph does not stay, which would refer to the
    weights.
    """
    return output(model, case).detach(), gradients(model, case)


def output(model: nn.Module, case: Case) -> Tensor:
    results = model(**case.inputs)
    names = ("logits", "sample", "last_hidden_state")
    result: Tensor = next(results[name] for name in names if name in results)
    return result


def gradients(model: nn.Module, case: Case) -> dict[str, Tensor]:
    model.zero_grad()
    output(model, case).square().mean().backward()
    return {
        name.removeprefix("_orig_mod."): p.grad  # the prefix of a compiled model
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def assert_alike(model: nn.Module, case: Case, expected: Tensor, theirs: dict[str, Tensor]) -> None:
    """Outputs and gradients agree with torch's to float32."""
    torch.testing.assert_close(output(model, case), expected, rtol=1e-4, atol=1e-5)
    got = gradients(model, case)  # a compiled model has gradients of zero, where others have none
    got = {name: got[name] for name in theirs}
    torch.testing.assert_close(got, theirs, rtol=1e-3, atol=1e-5)


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    """A model of transformers or of diffusers."""
    return CASES[request.param]


def test_a_fused_model_computes_what_it_did_and_so_does_an_unpatched_one(case: Case) -> None:
    model, other = made(case), made(case)
    shown, (expected, theirs) = repr(model), expected_of(model, case)

    report = patch(model, fuse=True)

    assert report.swapped
    assert report.fused == case.fused
    assert_alike(model, case, expected, theirs)
    saved = {name: t.clone() for name, t in model.state_dict().items()}
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    other.load_state_dict(saved)  # from a fused model into a plain one
    assert_alike(other, case, expected, theirs)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    model.load_state_dict(other.state_dict())  # and back
    assert_alike(model, case, expected, theirs)
    assert unpatch(model).kept == {}
    assert repr(model) == shown
    assert_alike(model, case, expected, theirs)


@pytest.mark.interpreter
@pytest.mark.parametrize("cpu_plans_run", ["portable"], indirect=True)
def test_a_fused_model_computes_what_it_did_by_a_kernel(cpu_plans_run: None) -> None:
    case = CASES["Llama"]
    model = made(case)
    expected, theirs = expected_of(model, case)

    patch(model, fuse=True)

    assert_alike(model, case, expected, theirs)


@pytest.mark.interpreter
@pytest.mark.parametrize("name", ["Llama", "GPT-2", "T5"])
def test_an_enabled_model_computes_what_it_did(name: str) -> None:
    case = CASES[name]
    model = made(case)
    expected, theirs = expected_of(model, case)
    rules = Rules((torch.float32,), 0, 0, None, "CPU", "portable")

    with aten._enable(rules) as enabled:
        assert_alike(model, case, expected, theirs)

    assert aten.OURS in enabled.decisions.values()


def of_torch(model: nn.Module, folder: Path) -> Any:
    torch.save(model.state_dict(), folder / "model.pt")
    return torch.load(folder / "model.pt")


def of_save_model(model: nn.Module, folder: Path) -> Any:
    safetensors.save_model(model, str(folder / "model.safetensors"))
    return safetensors.load_file(folder / "model.safetensors")


def of_save_pretrained(model: Any, folder: Path) -> Any:
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder).state_dict()


SAVES = [of_torch, of_save_model, of_save_pretrained]


@pytest.mark.parametrize("save", SAVES)
def test_a_fused_model_is_saved(save: Callable[..., Any], tmp_path: Path) -> None:
    case = CASES["Llama"]
    model = made(case)
    plain = {n: t.clone() for n, t in model.state_dict().items()}
    size = sum(t.nbytes for t in plain.values())
    patch(model, fuse=True)
    output(model, case)

    loaded = save(model, tmp_path)

    assert len(loaded) >= len(plain) - 1  # without a tied weight
    for n, t in loaded.items():
        assert torch.equal(t, plain[n])
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < size + 100_000
