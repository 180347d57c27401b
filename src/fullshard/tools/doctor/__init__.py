"""`fullshard doctor`: what a machine has, what its ranks can do together, and what to do about it.

facts      what was measured, as frozen values
machine, devices                   measure one process and the machine it runs on
meeting, links, together           measure what ranks can do with each other
judging, judge_*, environment      from facts to findings, without measuring anything
rank, printing                     run one rank of an examination, and show its report
"""
