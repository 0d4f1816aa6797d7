"""The PyTorch operators: their registration, gradients, autocast and vmap, fp8 products."""
