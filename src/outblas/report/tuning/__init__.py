"""Reports on sweeps: what one found, and what the shipped tables hold."""
