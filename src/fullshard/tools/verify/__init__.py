"""`fullshard verify`, and `fullshard compare`, which is another pair of sides.

Does the sharded model, or a script, compute what it computes when nothing is sharded? `program` or a script runs on two
`sides`, `watching` records it, and `comparing`, `judging` and `printing` lead from records to a report. No code of the engine
takes part in the whole side, nor in the one process.
"""
