"""Execution: what a step does, when, and on which stream. How bytes travel is in `comm`."""
