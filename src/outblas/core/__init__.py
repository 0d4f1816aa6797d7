"""What everything else stands on: problems, configs, the registry of kernels, the cache of compiled
code. Nothing here imports another folder of the package."""
