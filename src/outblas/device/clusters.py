"""What clusters of sm_90 cost, in cycles; imports no DSL. Estimates: EXCHANGE and EXCHANGED are set
by hand from one exchange of 32 KB, which takes 1800 cycles on an H100, TOGETHER is fitted to a
sweep (WORKLOG.md), CROWDED not measured.
"""

TOGETHER = 1000.0  # by which the CTAs of a cluster begin and end later than CTAs alone
EXCHANGE = 500.0  # until partial sums are in another CTA's shared memory, and
EXCHANGED = 25.0  # bytes of them a cycle
# of the SMs, those that clusters of four or eight can use: GPCs have no multiple of as many
CROWDED = 0.85


def at_once(sms: int, cluster: int) -> int:
    """Clusters that surely run at the same time on so many SMs."""
    return max(1, int(sms * CROWDED if cluster > 2 else sms) // cluster)


def exchange(size: float) -> float:
    """To send so many bytes of partial sums to the other CTAs of a cluster."""
    return EXCHANGE + size / EXCHANGED
