"""Autotuning: search spaces, pruning, parallel compiles, isolated measurement, a store of trials, choice of configs."""
