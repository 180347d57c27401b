"""Descriptions, memory reports and traces: code that only reads the engine.

It is told of each model that runs, for the table that is written when memory is lacking.
"""

from fullshard.watch.out_of_memory import watch_roots

watch_roots()
