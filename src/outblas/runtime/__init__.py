"""From a checked call to a launch: the choice of a kernel, CUDA graphs, and the fallback to
torch.
"""
