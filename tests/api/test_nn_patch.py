"""`patch` with a filter, `patch` that changes nothing, and products that it does not reach."""

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.layers import Net, names_of_ours
from torch import nn

import outblas
from outblas import patch, unpatch
from outblas.core.problem import dtype_name
from outblas.nn import Report
from outblas.runtime import hooks

pytestmark = pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")


# ---- a filter
def test_a_filter_chooses_by_the_name() -> None:
    net = Net()

    report = patch(net, filter=lambda name, layer: name != "down")

    assert report.swapped == ("up", "back")
    assert report.kept == {"down": "the filter does not take it"}
    assert names_of_ours(net) == ["up", "back"]


def test_a_filter_that_raises_changes_nothing() -> None:
    net = Net()

    def refuse_the_last(name: str, layer: nn.Linear) -> bool:
        if name == "back":
            raise KeyError(name)
        return True

    with pytest.raises(KeyError):
        patch(net, filter=refuse_the_last)

    assert names_of_ours(net) == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"filter": "up"}, "filter is 'up', expected a function of a name and a layer, or None"),
        ({"dry_run": "yes"}, "dry_run is 'yes', expected True or False"),
    ],
)
def test_arguments_of_another_type_are_refused(given: dict[str, Any], message: str) -> None:
    net = Net()

    with pytest.raises(TypeError, match=message):
        patch(net, **given)

    assert names_of_ours(net) == []


# ---- a dry run


def test_a_dry_run_reports_what_patch_does() -> None:
    net = Net()

    before = patch(net, filter=lambda name, layer: name != "up", dry_run=True)
    after = patch(net, filter=lambda name, layer: name != "up")

    assert (before.swapped, before.kept, before.remarks) == (
        after.swapped,
        after.kept,
        after.remarks,
    )


def test_a_report_says_what_became_of_layers() -> None:
    net = Net()

    assert str(patch(net, dry_run=True)).startswith("3 would swap, 0 kept\nup    would swap")
    assert str(patch(net)).startswith("3 swapped, 0 kept\nup    swapped")
    assert str(unpatch(net)).startswith("3 restored, 0 kept\nup    restored")
    shown = str(patch(nn.MultiheadAttention(8, 2)))
    assert shown.startswith("0 swapped, 1 kept, 1 unreached\n")
    assert "in_proj_weight  unreached  nn.MultiheadAttention multiplies by it" in shown
    experts = Report(experts={"moe": "4 experts"}, remarks={"moe": "on cpu"})
    assert str(experts) == (
        "0 swapped, 0 kept, 1 swapped with experts\nmoe  swapped  4 experts; on cpu"
    )


def test_equal_layers_have_one_row() -> None:
    blocks = [nn.ModuleDict({"q": nn.Linear(8, 8), "gate": nn.Linear(8, 8)}) for _ in range(12)]
    blocks[3]["q"] = nn.Linear(8, 8, dtype=torch.float64)
    net = nn.ModuleDict({"layers": nn.ModuleList(blocks), "head": nn.Linear(8, 8)})

    shown = str(patch(net)).splitlines()

    assert shown[0] == "24 swapped, 1 kept"
    assert [line.split("  ")[0].strip() for line in shown[1:5]] == [
        "layers.{0,1,2,4,5,6,7,8,9,10,11}.q (11)",
        "layers.{0..11}.gate (12)",
        "head",
        "layers.3.q",
    ]


# ---- products that are no linear layers
def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_local_experts=4,
        )
    )


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTModel

    return ViTModel(
        ViTConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=16,
            patch_size=8,
        )
    )


class Routed(nn.Module):
    """A module of a user's own that multiplies by what is no linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 8))
        self.experts = nn.Parameter(torch.zeros(4, 8, 8))
        self.scale = nn.Parameter(torch.zeros(4, 8))
        self.positions = nn.Parameter(torch.zeros(1, 16, 8))


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, str]]] = {
    "linear layers": (Net, {}),
    "embeddings and convolutions": (
        lambda: nn.Sequential(nn.Embedding(4, 8), nn.Conv1d(8, 8, 3), nn.LayerNorm(8)),
        {},
    ),
    "attention": (
        lambda: nn.MultiheadAttention(8, 2),
        {"in_proj_weight": "nn.MultiheadAttention multiplies by it: outblas.enable reaches it"},
    ),
    "attention of other sizes": (
        lambda: nn.MultiheadAttention(8, 2, kdim=4, vdim=4),
        dict.fromkeys(
            ("q_proj_weight", "k_proj_weight", "v_proj_weight"),
            "nn.MultiheadAttention multiplies by it: outblas.enable reaches it",
        ),
    ),
    "recurrent": (
        lambda: nn.Sequential(nn.GRU(4, 5)),
        dict.fromkeys(
            ("0.weight_ih_l0", "0.weight_hh_l0"), "it is inside of torch's kernel for nn.GRU"
        ),
    ),
    "own code": (
        Routed,
        {
            "weight": "Routed multiplies by it: outblas.enable reaches its mm, bmm and linear",
            "experts": "Routed multiplies by 4 matrices: outblas.enable reaches its mm, bmm and "
            "linear",
        },
    ),
    "GPT-2": (
        gpt2,
        dict.fromkeys(
            (
                "transformer.h.0.attn.c_attn.weight",
                "transformer.h.0.attn.c_proj.weight",
                "transformer.h.0.mlp.c_fc.weight",
                "transformer.h.0.mlp.c_proj.weight",
            ),
            "Conv1D of transformers calls torch.addmm: outblas.enable reaches it",
        ),
    ),
    "Mixtral": (
        mixtral,
        {
            "model.layers.0.mlp.gate.weight": "MixtralTopKRouter multiplies by it: outblas.enable "
            "reaches its mm, bmm and linear",
        },
    ),
    "ViT": (vit, {}),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_report_names_products_that_are_no_linear_layers(name: str) -> None:
    make, expected = MODELS[name]

    assert patch(make()).unreached == expected


def test_a_weight_that_two_modules_share_is_named_once() -> None:
    one, other = nn.MultiheadAttention(8, 2), nn.MultiheadAttention(8, 2)
    other.in_proj_weight = one.in_proj_weight

    assert list(patch(nn.ModuleList([one, other])).unreached) == ["0.in_proj_weight"]


# ---- what was measured
def test_a_report_shows_what_layers_gain() -> None:
    report = Report(("up", "down"), remarks={"up": "on cpu"}, gains={"up": {16: 1.25, 1: 1.0612}})

    assert str(report).splitlines()[1:] == [
        "up    swapped  on cpu; × cuBLAS by rows: 1.061 at 1, 1.250 at 16",
        "down  swapped",
    ]


@pytest.mark.gpu
def test_layers_on_a_gpu_gain_what_the_tuner_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def gains(device: torch.device, N: int, K: int, dtype: torch.dtype) -> dict[int, float]:
        return {16: 1.25} if (N, K, dtype_name(dtype)) == (24, 8, "bfloat16") else {}

    monkeypatch.setattr(hooks.tuner, "_loaded", Mock(measured_gains=gains))
    net = nn.Sequential(nn.Linear(8, 24), nn.Linear(24, 8)).to("cuda", torch.bfloat16)

    assert outblas.patch(net).gains == {"0": {16: 1.25}}
