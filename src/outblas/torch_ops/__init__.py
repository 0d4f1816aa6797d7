"""The PyTorch operators: registration, gradients, autocast and vmap, and fp8 products."""
