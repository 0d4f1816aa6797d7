"""Reports of measurements, compared with the figures of the seed documents: ladders, rooflines,
orders of tiles, memory accesses, sweeps, HTML pages and the README's tables.
"""
