"""`fullshard verify`, and `fullshard compare`, which is another pair of sides.

Does the sharded model, or a script, compute what it computes when nothing is sharded?

options            what was typed
running, rank      the whole of it; one process of one side
program            trains a model of the user's functions: the script of those who have none
sides              what each side does at the moments that are recorded: sharded, one process, whole
watching           sees these moments, process-wide: forwards, backwards, optimizer steps; what modules return
models             which models are trained; puts other functions where a script finds those that shard
whole, casting, averaging    what is there instead of sharding; its mixed precision; means over ranks, by plain collectives
record             what each process writes down, however it ends
comparing, judging, judge_failures, printing    from records to differences, findings, and the report
engines            the two sides of `fullshard compare`: a script on PyTorch's engine and on fullshard; times and memory
switch             the whole of that command: runs in turn, values, costs, and a verdict in one sentence

No code of the engine takes part in the whole side, nor in the one process.
"""
