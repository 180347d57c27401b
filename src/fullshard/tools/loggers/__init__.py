"""Where the numbers of `fullshard train` go while it runs: `--log tensorboard`, or a class of one's own."""

from fullshard.tools.loggers.interface import RunInfo, RunLogger

__all__ = ["RunInfo", "RunLogger"]
