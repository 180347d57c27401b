"""`fullshard verify train.py`: a script of the user's as it is, run sharded and then whole.

names       puts other functions and classes where the script finds those that shard
models      which models it shards, and what their modules are called
whole       what is there instead of sharding, on the whole side
averaging   averages gradients over ranks after each backward, by plain collectives
sides       what each side does at the moments that are recorded
watching    sees these moments, process-wide: forwards, backwards, optimizer steps
rank        one rank of one side, from start to end
running     both launches, and the report

No code of the engine takes part in the whole side.
"""
