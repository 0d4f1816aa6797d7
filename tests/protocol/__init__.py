"""A model of the Hopper kernels' protocols: their own source, run on a simulated GPU.

`machine` is the GPU, with `memory`: mbarriers that are waited for by parity, named barriers, shared
memory with asynchronous readers and writers, tensor cores that read shared memory while the program
goes on, delays drawn at random. `dsl` stands in for CuTe DSL, so that the source of `hopper/` runs
on it as plain Python: arrival counts, phases and the order of waits are the kernel's own and cannot
drift apart from a copy. `launch` makes the launch of a config and checks what it computed.

What the model leaves out: arithmetic (a sum is the list of its products), layouts inside a stage,
L1, and the fences between the generic proxy and TMA loads.
"""
