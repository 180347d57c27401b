"""Faults planted in running jobs: every one is named on every rank, or proven harmless."""
