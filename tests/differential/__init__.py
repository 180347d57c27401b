"""The same programs on our engine, on PyTorch's and without sharding, compared in all they show.

`run.py` says what a program may use, `program.py` how one is declared, `compare.py` when two runs
of one agree. The programs are in files by theme; `generated.py` draws further ones.
"""
