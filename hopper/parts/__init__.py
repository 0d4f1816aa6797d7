"""The parts that the Hopper rungs share: configs, barriers, warp roles, compilation and launch."""
