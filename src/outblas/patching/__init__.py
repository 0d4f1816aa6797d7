"""What `outblas.patch` finds in a model: layers to fuse, and products that are no linear layers."""
