"""`outblas.patch` on a language model of Hugging Face's transformers, with random weights.

Builds a Llama from its config, so that nothing is downloaded, swaps its linear layers in place,
and compares the logits with those before. On a GPU the model has layers of real size.

    pip install transformers
    python examples/patch_hugging_face.py
    python examples/patch_hugging_face.py --model gpt2
"""

import argparse
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import outblas


def llama(on_gpu: bool) -> torch.nn.Module:
    if on_gpu:  # layers as those of Llama-3-8B, four of them
        config = LlamaConfig(
            vocab_size=32_000,
            hidden_size=4096,
            intermediate_size=14_336,
            num_hidden_layers=4,
            num_attention_heads=32,
            num_key_value_heads=8,
        )
    else:
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    return LlamaForCausalLM(config)


def gpt2(on_gpu: bool) -> torch.nn.Module:
    width, layers, heads = (768, 12, 12) if on_gpu else (64, 2, 4)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(vocab_size=256, n_embd=width, n_layer=layers, n_head=heads, **ends)
    return GPT2LMHeadModel(config)


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description="Patch a model of Hugging Face's transformers.")
    parser.add_argument("--model", choices=("llama", "gpt2"), default="llama")
    parser.add_argument("--tokens", type=int, default=2048 if on_gpu else 16)
    given = parser.parse_args()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)

    torch.manual_seed(0)
    model = {"llama": llama, "gpt2": gpt2}[given.model](on_gpu).to(device, dtype).eval()
    tokens = torch.randint(0, 256, (1, given.tokens), device=device)

    # [patch]
    with torch.no_grad():
        before = model(tokens).logits
    report = outblas.patch(model)
    with torch.no_grad():
        after = model(tokens).logits
    # [end]

    print(f"{len(report.swapped)} layers swapped, {len(report.kept)} kept")
    for name in report.swapped[:3]:
        print(f"  {name}  {report.remarks.get(name, '')}".rstrip())
    for name, why in report.kept.items():
        print(f"  {name}: {why}")

    difference = (after - before).abs().max() / before.abs().max()
    print(f"largest difference of the logits: {difference:.1e} of the largest")
    assert difference < 5e-2

    if on_gpu:
        outblas.warmup(milliseconds, model, tokens)  # waits for kernels
        print(f"  outblas  {milliseconds(model, tokens):.2f} ms")
        outblas.unpatch(model)
        print(f"  torch    {milliseconds(model, tokens):.2f} ms")

    outblas.unpatch(model)
    assert not any(isinstance(layer, outblas.Linear) for layer in model.modules())


@torch.no_grad()
def milliseconds(model: torch.nn.Module, tokens: torch.Tensor, calls: int = 10) -> float:
    """The time of a forward pass: the mean of a burst, after two passes to warm up."""
    for _ in range(2):
        model(tokens)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        model(tokens)
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begin) / calls


if __name__ == "__main__":
    main()
