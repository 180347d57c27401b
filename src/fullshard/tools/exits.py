"""What the exit codes of `fullshard` mean."""

import enum


class Exit(enum.IntEnum):
    """Exit codes of every command, of the launcher of `fullshard train` and of its ranks."""

    OK = 0
    FAILED = 1
    USAGE = 2
    RANK_LOST = 3
    DAMAGED = 4  # `fullshard ckpt verify`
    DIFFERENT = 5  # `fullshard ckpt diff`
    UNWRITABLE = 74  # sysexits' EX_IOERR: standard output takes nothing
    STOPPED = 75  # sysexits' EX_TEMPFAIL: stopped on request, saved, to be resumed
    INTERRUPTED = 130  # as a shell says of SIGINT: asked to stop before the first step
