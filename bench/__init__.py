"""Benchmarks of fullshard against PyTorch's own data parallelism and DeepSpeed.

One script per question, each printing ratios against peers measured in the same run:

    python -m bench.step          step time, losses and host memory of training
    python -m bench.alone         what one rank costs over the unwrapped model, to a percent
    python -m bench.host          host time per unit, at 8 and at 1,024 ranks
    python -m bench.launches      operations that a device is given in a step
    python -m bench.memory        peak tensor bytes per rank over what must be there
    python -m bench.collectives   all-gather and reduce-scatter against a memory copy and Gloo
    python -m bench.disk          state on a disk, against the disk by itself
    python -m bench.gpu           training on one GPU (`make gpu-check`)
    python -m bench.run_all       all of them in one table beside the goals (`make bench`)

Run them from the repository root, on Linux (memory is read from /proc). Every script takes
`--help` and `--json`, and `--out` to write its results; where no path is given, they go to
`bench/results`, which git ignores: what is worth keeping is added by `git add --force`. The other files are shared by them: `model`
(what is trained), `implementations` and `zero3` (who trains it), `ranks` (the processes), `resident`
and `tensor_bytes` (two ways to measure memory), `overlap` (what a trace says), `goals` (what ours should
reach), `tables` (printing and JSON); `gpu_settings`, `gpu_training` and `gpu_page` are parts of `gpu`. `LOG.md` has the decisions that stand for speed and memory, with what was rejected and
what was measured.
"""
