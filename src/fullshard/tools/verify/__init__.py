"""`fullshard verify`: does the sharded model, or a script, compute what it computes when nothing is sharded?

options, program    what was typed; the user's functions, and what stands in for them
alone, rank         the two sides: one process with the whole model, and one rank of the sharded one
training, outputs, measures, gathering, supervision    what both do alike
record, facts       what each writes down
comparing, judging  from records to differences, and from these to findings, without running anything
running, printing   the whole of it, and its report
script              the same for a training script as it is
"""
