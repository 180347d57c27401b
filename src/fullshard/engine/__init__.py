"""Execution: the only code that touches devices and process groups."""
