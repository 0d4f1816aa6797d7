"""What the Hopper rungs share: configs, barriers, warp roles, compiling, launching."""
