"""What outblas computes of whole models, and how fast they are with it beside torch alone.

Builds models of transformers with random weights, a few layers each, so that nothing is downloaded.
It counts which share of the FLOPs of a training step runs on kernels of outblas under
`outblas.enable`, and times a training step and the decoding of tokens: by torch, enabled, and with
the layers patched and fused, in turns. On a CPU the models are tiny, and torch computes them.

    pip install transformers
    python examples/whole_models.py
    python examples/whole_models.py --models Llama,BERT --json times.json
"""

import argparse
import json
import math
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import outblas
from outblas.torch_ops.aten import Product

ON_GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)
WIDTH = 2048 if ON_GPU else 64
TOKENS = 4096 if ON_GPU else 16  # of a training step
NEW_TOKENS = 32 if ON_GPU else 2
SEQUENCES = 8 if ON_GPU else 2  # that are decoded at a time
TEXT = {
    "vocab_size": 8192 if ON_GPU else 64,
    "hidden_size": WIDTH,
    "intermediate_size": 4 * WIDTH,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
}
LLAMA = TEXT | {"num_key_value_heads": 4, "bos_token_id": 1, "eos_token_id": None}

# For each model: its config, the rest of its class's name, its settings.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama": ("Llama", "ForCausalLM", LLAMA),
    "Mistral": ("Mistral", "ForCausalLM", LLAMA),
    "Mixtral": ("Mixtral", "ForCausalLM", LLAMA | {"num_local_experts": 8}),
    "GPT-2": (
        "GPT2",
        "LMHeadModel",
        {"vocab_size": TEXT["vocab_size"], "n_embd": WIDTH, "n_layer": 4, "n_head": 16}
        | {"n_positions": 4096, "bos_token_id": 1, "eos_token_id": None},
    ),
    "BERT": ("Bert", "Model", TEXT | {"max_position_embeddings": 4096}),
    "T5": (
        "T5",
        "ForConditionalGeneration",
        {"vocab_size": TEXT["vocab_size"], "d_model": WIDTH, "d_ff": 4 * WIDTH, "num_layers": 2}
        | {"num_heads": 16, "d_kv": WIDTH // 16, "decoder_start_token_id": 0},
    ),
    "ViT": (
        "ViT",
        "Model",
        {name: value for name, value in TEXT.items() if name != "vocab_size"}
        | {"image_size": 224 if ON_GPU else 32, "patch_size": 14 if ON_GPU else 8},
    ),
    "Swin": (
        "Swin",
        "Model",
        {"image_size": 224, "embed_dim": 192, "depths": [2, 2, 2], "num_heads": [6, 12, 24]}
        if ON_GPU
        else {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1], "num_heads": [2]}
        | {"window_size": 4},
    ),
}
DECODERS = "Llama", "Mistral", "Mixtral", "GPT-2"
PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}  # where A stands among the arguments


class Products(TorchDispatchMode):
    """Counts the FLOPs of aten's products, by the kinds that `Enabled.decisions` has."""

    def __init__(self) -> None:
        super().__init__()
        self.flops: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in PRODUCTS:
            a, b = args[PRODUCTS[name] : PRODUCTS[name] + 2]
            batch = a.shape[0] if a.dim() == 3 else 1
            (M, K), N = a.shape[-2:], b.shape[-1]
            kind = Product(name, batch, M, N, K, a.dtype)
            self.flops[str(kind)] += 2 * batch * M * N * K
        elif name == "_grouped_mm":
            a, b = args[:2]
            self.flops[name] += 2 * math.prod(a.shape) * b.shape[-1]
        return func(*args, **(kwargs or {}))


def made(name: str) -> torch.nn.Module:
    config, ending, settings = MODELS[name]
    torch.manual_seed(0)
    given = getattr(transformers, f"{config}Config")(**settings)
    model: torch.nn.Module = getattr(transformers, config + ending)(given)
    return model.to(DEVICE, DTYPE)


def inputs(name: str) -> dict[str, torch.Tensor]:
    if name in ("ViT", "Swin"):
        side = MODELS[name][2]["image_size"]
        images = max(1, TOKENS * (1 if name == "ViT" else 4) // 256)
        return {"pixel_values": torch.randn(images, 3, side, side, device=DEVICE, dtype=DTYPE)}
    tokens = torch.randint(2, 60, (4, TOKENS // 4), device=DEVICE)
    more = {"decoder_input_ids": tokens} if name == "T5" else {}
    return {"input_ids": tokens} | more


def training_step(model: torch.nn.Module, name: str) -> Callable[[], None]:
    given = inputs(name)

    def step() -> None:
        model.zero_grad()
        found = model(**given)
        output = found["logits"] if "logits" in found else found["last_hidden_state"]
        output.float().pow(2).mean().backward()

    return step


def decoding(model: Any) -> Callable[[], None]:
    prompt = torch.randint(2, 60, (SEQUENCES, 64 if ON_GPU else 4), device=DEVICE)

    def decode() -> None:
        with torch.no_grad():
            model.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)

    return decode


def seconds(call: Callable[[], None]) -> float:
    if ON_GPU:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def times(model: torch.nn.Module, call: Callable[[], None], turns: int) -> dict[str, float]:
    """Returns the least milliseconds of a call by torch, enabled, and patched and fused."""
    best: dict[str, float] = {}

    def timed(way: str, count: int) -> None:
        for _ in range(count):
            best[way] = min(best.get(way, math.inf), 1e3 * seconds(call))

    call()
    for _ in range(turns):
        timed("torch", 2)
        with outblas.enable():
            call()
            timed("enabled", 2)
        outblas.patch(model, fuse=True)
        try:
            call()
            timed("patched and fused", 2)
        finally:
            outblas.unpatch(model)
    return best


def share(step: Callable[[], None]) -> tuple[float, float]:
    """Returns which share of the FLOPs of products runs on kernels of outblas under `enable`, and
    which share of all FLOPs that torch counts: attention and convolutions have others.
    """
    every = FlopCounterMode(display=False)
    with outblas.enable() as enabled, Products() as seen:
        step()
    try:
        with every:
            step()
        total = every.get_total_flops()
    except AssertionError:  # torch 2.11 cannot count attention whose heads share keys
        total = math.nan
    decided = enabled.decisions
    grouped = [by == "outblas" for kind, by in decided.items() if kind.startswith("_grouped_mm")]
    ours = sum(
        flops
        for kind, flops in seen.flops.items()
        if decided.get(kind) == "outblas" or (kind == "_grouped_mm" and grouped and all(grouped))
    )
    products = sum(seen.flops.values())
    return ours / products, ours / max(total, products)


def main() -> None:
    parser = argparse.ArgumentParser(description="Share and speed of outblas in whole models.")
    parser.add_argument("--models", default=",".join(MODELS) if ON_GPU else "Llama,ViT")
    parser.add_argument("--turns", type=int, default=3 if ON_GPU else 1)
    parser.add_argument("--json", help="a file to write the figures to")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ["OUTBLAS_COMPILE"] = "block"  # kernels are timed, and not what stands in for them

    figures: dict[str, Any] = {}
    print(f"{DEVICE}, {DTYPE}, {TOKENS} tokens a step, {SEQUENCES} sequences decoded")
    for name in given.models.split(","):
        model = made(name)
        step = training_step(model, name)
        of_products, of_all = share(step)
        counted = "" if math.isnan(of_all) else f", {of_all:.1%} of all FLOPs"
        print(f"{name}: {of_products:.1%} of the FLOPs of products{counted}")
        figures[name] = {"of_products": of_products, "of_all": of_all}
        works = {"training step": step}
        if name in DECODERS:
            works["decoding"] = decoding(model)
        for work, call in works.items():
            found = figures[name][work] = times(model, call, given.turns)
            ratios = (f"{way} {found['torch'] / ms:.3f}" for way, ms in found.items())
            print(f"  {work}: torch {found['torch']:.2f} ms, torch over {', '.join(ratios)}")
    if given.json:
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()
