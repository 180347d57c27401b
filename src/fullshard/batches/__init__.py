"""Ranks whose batches differ: in how much they count, and in how many there are."""
