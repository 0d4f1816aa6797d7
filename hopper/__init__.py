"""The Hopper ladder: CuTe DSL kernels on TMA, wgmma and mbarriers, for sm_90."""
