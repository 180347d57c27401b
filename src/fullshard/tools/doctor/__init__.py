"""`fullshard doctor`: what a machine has, what its ranks can do together, and what to do about it."""
