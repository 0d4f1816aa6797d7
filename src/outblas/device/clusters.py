"""The cost of sm_90 clusters in cycles; imports no DSL.

The numbers are estimates: EXCHANGE and EXCHANGED were set by hand from one exchange of 32 KB, which
takes 1800 cycles on an H100; TOGETHER was fitted to a sweep (WORKLOG.md); CROWDED was not measured,
but 32 clusters of four did not run at once on an H100, which has 132 SMs.
"""

TOGETHER = 1000.0  # extra cycles per launch: the CTAs of a cluster start and end together
EXCHANGE = 500.0  # latency of sending partial sums to another CTA's shared memory
EXCHANGED = 25.0  # bytes of partial sums per cycle after that latency
# Fraction of the SMs that clusters of four or eight can use: the SMs of a GPC are not a multiple of
# those sizes.
CROWDED = 0.85


def at_once(sms: int, cluster: int) -> int:
    """Returns how many clusters run at the same time on this many SMs: an estimate, which is to be
    too low rather than too high. Nothing may depend on it but speed and the choice of a variant.
    """
    return max(1, int(sms * CROWDED if cluster > 2 else sms) // cluster)


def exchange(size: float) -> float:
    """Returns the cycles to send this many bytes of partial sums to the other CTAs of a cluster."""
    return EXCHANGE + size / EXCHANGED
