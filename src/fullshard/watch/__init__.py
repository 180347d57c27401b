"""Descriptions, memory reports and traces: code that only reads the engine.

It is told of each model that runs, for what is said when memory is lacking or an exception ends the program.
"""

from fullshard.engine.module_state import ModuleState
from fullshard.engine.observer import on_root
from fullshard.peers.waits import explain_loss
from fullshard.watch.out_of_memory import explain_lack, note_host_memory, observe_allocator
from fullshard.watch.recomputation import explain_recomputation
from fullshard.watch.uncaught import (
    explain_early_use,
    explain_sharded_use,
    explainers,
    roots,
)


def _watch_root(root: ModuleState) -> None:
    roots.add(root)
    note_host_memory()
    observe_allocator(root)


on_root.append(_watch_root)
explainers.extend(
    (explain_lack, explain_loss, explain_sharded_use, explain_early_use, explain_recomputation)
)
