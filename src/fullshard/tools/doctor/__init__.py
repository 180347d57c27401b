"""`fullshard doctor`: what a machine has, what its ranks can do together, and what to do about it.

facts            what was measured, as plain values
machine          measure one process and the machine it runs on
together         measure what ranks can do with each other
checks, findings from facts to findings, by a table, without measuring anything
rank, printing   run one rank of an examination, and show its report
"""
