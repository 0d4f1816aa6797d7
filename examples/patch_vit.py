"""`outblas.patch` on a vision transformer, and on torch's own transformer layer.

The first is the ViT of Hugging Face's transformers with random weights. The second is
`torch.nn.TransformerEncoderLayer`, whose fast path reads the weights of linear layers and never
calls them: patch says so, and a profile shows it.

    pip install transformers
    python examples/patch_vit.py
"""

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import ViTConfig, ViTModel

import outblas


def main() -> None:
    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    torch.manual_seed(0)

    # A ViT: every layer is a torch.nn.Linear that is called, so every layer is swapped.
    if on_gpu:
        config, images = ViTConfig(), torch.randn(64, 3, 224, 224)  # ViT-B/16
    else:
        config = ViTConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=32,
            patch_size=8,
        )
        images = torch.randn(2, 3, 32, 32)
    vit, images = ViTModel(config).to(device, dtype).eval(), images.to(device, dtype)
    with torch.no_grad():
        before = vit(images).last_hidden_state
        report = outblas.patch(vit)
        after = vit(images).last_hidden_state
    difference = (after - before).abs().max() / before.abs().max()
    print(f"ViT: {len(report.swapped)} layers swapped, {len(report.kept)} kept")
    print(f"largest difference of the last hidden state: {difference:.1e} of the largest")
    assert difference < 5e-2

    # torch's own layer: its fast path goes past the layers that were swapped.
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).to(device, dtype).eval()
    x = torch.randn(2, 16, 64, device=device, dtype=dtype)
    print(f"\nTransformerEncoderLayer: {outblas.patch(layer)}")
    print(f"with the fast path     {operators(layer, x)}")
    torch.backends.mha.set_fastpath_enabled(False)
    print(f"without the fast path  {operators(layer, x)}")
    torch.backends.mha.set_fastpath_enabled(True)


@torch.no_grad()
def operators(layer: torch.nn.Module, x: torch.Tensor) -> list[str]:
    """Which operators computed the layer's products."""
    products = ("outblas::", "aten::addmm", "aten::_transformer_encoder_layer_fwd")
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        layer(x)
    return sorted({e.key for e in recorded.key_averages() if e.key.startswith(products)})


if __name__ == "__main__":
    main()
