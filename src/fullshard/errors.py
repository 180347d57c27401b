"""Every exception that fullshard raises on purpose.

    FullshardError
    ├── ShardingError (ValueError)    a module, parameter or option that cannot be sharded as asked
    │   ├── UnsupportedError  (also NotImplementedError)
    │   └── MisuseError       (also AssertionError)
    ├── MeshError     (ValueError)    a device mesh that does not fit
    ├── LayoutError   (ValueError)    shapes or sizes no layout exists for
    ├── StateError    (RuntimeError)  a call at a moment where it cannot work
    │   ├── DivergenceError           ranks took different paths through the model
    │   └── CheckpointError           a checkpoint that cannot be written, read, or does not fit
    │       └── DamagedCheckpointError    its files are not as they were written
    ├── AllocationError (RuntimeError, also MemoryError)  too little memory or disk, or too few files
    ├── LaunchError   (RuntimeError)  ranks that `launch` has started failed, or cannot be started
    └── CommError     (RuntimeError)  communication failed
        ├── PeerLostError             a rank died or left while others waited for it
        └── PeerTimeoutError          a rank is alive but did not arrive in time

A message says where (module and rank), what, and what to do. The ``ValueError`` branch is for
arguments and is raised before anything has been changed. Where PyTorch raises another built-in type
for the same mistake, ours is of both types, and the message begins as PyTorch's does.
"""


class FullshardError(Exception):
    """Base of all exceptions of fullshard."""


class ShardingError(FullshardError, ValueError):
    """A module, parameter or option cannot be sharded as asked."""


class UnsupportedError(ShardingError, NotImplementedError):
    """The call asks for something that neither PyTorch's FSDP nor fullshard does."""


class MisuseError(ShardingError, AssertionError):
    """A wrong call that PyTorch's FSDP refuses by an assertion."""


class MeshError(FullshardError, ValueError):
    """A device mesh does not fit the call."""


class LayoutError(FullshardError, ValueError):
    """No layout exists for these shapes and sizes."""


class StateError(FullshardError, RuntimeError):
    """The call cannot work at this moment; the message says what has to happen first."""


class DivergenceError(StateError):
    """Ranks took different paths: at one place in their sequences, their operations differ."""


class CheckpointError(StateError):
    """A checkpoint cannot be written or read, is damaged, or does not fit the model."""


class DamagedCheckpointError(CheckpointError):
    """A file of a checkpoint is missing, cut short, or holds other bytes than were written."""


class AllocationError(FullshardError, RuntimeError, MemoryError):
    """There is too little memory or space on a disk, or a limit of this process is too low."""


class LaunchError(FullshardError, RuntimeError):
    """Ranks that `fullshard.launch` started failed, or it could not start them.

    rank: the one that failed first; None if none did. What it raised is the cause (`__cause__`), if
    that can be pickled.
    """

    rank: int | None = None


class CommError(FullshardError, RuntimeError):
    """Communication between ranks failed."""


class PeerLostError(CommError):
    """A rank died or left while this one waited for it."""


class PeerTimeoutError(CommError):
    """A rank is alive but did not arrive in time."""


def message_of(error: BaseException) -> str:
    """Return an exception's message for what others write: a terminal obeys nothing in it, and a class may not make it."""
    try:
        text = str(error)
    except Exception:
        text = "(its message cannot be made)"
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
