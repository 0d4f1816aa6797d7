"""Random calls of outblas and of torch, side by side.

`spec` makes the description of a call from a seed and an index, `tensors` builds what it describes,
`calls` makes it, by outblas and by torch, `compare` says in what the two differ, and `known` lists
the differences that are meant. `python -m tests.fuzz --help` runs many and sums them up.
"""
