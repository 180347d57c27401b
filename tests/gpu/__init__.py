"""Checks of the CUDA path on one GPU.

    python -m tests.gpu                    every check, one line each; 1 if one failed, 2 without a GPU
    python -m tests.gpu --only overlap     those whose name contains a word, or one of several
    python -m tests.gpu --budget-s 300     start none later than this
    python -m tests.gpu --device cpu       those that have a meaning there, over Gloo

Needs nothing but torch, and those of float8 torchao, without which they are skipped. pytest runs the same checks
through `test_gpu.py` where there is one. Every rank of a check is a process of its own, so that one that fails
takes no other with it.
"""
