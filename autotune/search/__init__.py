"""Which configs a search tries, and in which order: pruning, models, ranking."""
