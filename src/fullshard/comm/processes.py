"""Whether processes of this host run."""

from pathlib import Path


def is_running(pid: int) -> bool:
    """Return whether a process of this host runs; True if that cannot be found out."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # gone before, or while it was read
        return not Path("/proc/self").exists()  # without /proc, every process seems to be gone
    return state not in "ZX"  # zombie or dead: its parent has not asked for its exit status yet
