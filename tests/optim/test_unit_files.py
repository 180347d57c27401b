"""`UnitFiles`: what is written comes back, in the order asked for; errors name the file; nothing is left behind."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import os
import resource
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fullshard.errors import AllocationError, ShardingError, StateError
from fullshard.optim import unit_files
from fullshard.optim.unit_files import ALIGNMENT, Ticket, UnitFile, UnitFiles, padded
from tests.fresh import in_warm_forks

_SMALL = 2 * ALIGNMENT  # for `_CHUNK`, so that small files have many


@pytest.fixture
def files(tmp_path: Path) -> Iterator[UnitFiles]:
    with contextlib.closing(UnitFiles(tmp_path, rank=3)) as files:
        yield files


def _buffer(nbytes: int, value: int = 0) -> torch.Tensor:
    return UnitFiles.new_buffer(nbytes, pin_memory=False).fill_(value)


def _limited(kind: int, value: int) -> contextlib.AbstractContextManager[Any]:
    before, hard = resource.getrlimit(kind)
    stack = contextlib.ExitStack()
    resource.setrlimit(kind, (value, hard))
    stack.callback(resource.setrlimit, kind, (before, hard))
    return stack


def _open_files() -> list[str]:
    """Return what descriptors of this process lead to files of ours."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(str(descriptor.readlink()))
    return [path for path in found if path.endswith(" (deleted)")]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(0, 9 * ALIGNMENT), min_size=1, max_size=4),
    asked=st.lists(st.tuples(st.integers(0, 3), st.sampled_from(("write", "read", "view")))),
    num_workers=st.integers(1, 4),
)
def test_each_read_gives_what_was_asked_to_be_written_before_it(
    tmp_path: Path, sizes: list[int], asked: list[tuple[int, str]], num_workers: int
) -> None:
    with (
        mock.patch.object(unit_files, "_CHUNK", _SMALL),
        contextlib.closing(UnitFiles(tmp_path, rank=0, num_workers=num_workers)) as files,
    ):
        made = [files.create(f"unit {n}", nbytes) for n, nbytes in enumerate(sizes)]
        content = [torch.zeros(nbytes, dtype=torch.uint8) for nbytes in sizes]
        expected: list[tuple[Ticket, torch.Tensor, torch.Tensor]] = []
        for count, (which, what) in enumerate(asked, 1):
            n = which % len(made)
            if what == "view":
                assert torch.equal(files.view(made[n]), content[n])
                continue
            buffer = _buffer(max(sizes), count)
            if what == "write":
                content[n] = torch.arange(sizes[n]).add(count).to(torch.uint8)
                buffer[: sizes[n]] = content[n]
            ticket = getattr(files, what)(made[n], buffer)
            expected.append((ticket, buffer[: sizes[n]], content[n]))
        for ticket, buffer, there in expected:
            ticket.wait()
            assert ticket.is_done
            assert torch.equal(buffer, there)


def test_a_read_waits_for_the_write_before_it_and_not_for_other_files(files: UnitFiles) -> None:
    held, other = files.create("held", _SMALL), files.create("other", _SMALL)
    goes_on, write = threading.Event(), os.pwritev

    def late(*arguments: Any) -> int:
        assert goes_on.wait(30)
        return write(*arguments)

    content = _buffer(_SMALL)
    with mock.patch.object(os, "pwritev", late):
        written = files.write(held, _buffer(_SMALL, 7))
        files.read(other, content).wait()
        read = files.read(held, content)
        assert not written.is_done
        assert not read.is_done
        goes_on.set()
        read.wait()
    assert written.is_done
    assert set(content.tolist()) == {7}


def test_a_view_shows_later_writes_keeps_no_descriptor_and_outlives_the_files(
    files: UnitFiles,
) -> None:
    file = files.create("unit", 5 * ALIGNMENT + 3)
    before = len(_open_files())
    view = files.view(file)
    assert len(_open_files()) == before
    for value in (1, 2):
        files.write(file, _buffer(file.nbytes, value)).wait()
        assert (view.shape, set(view.tolist())) == ((5 * ALIGNMENT + 3,), {value})
    view[0] = 9
    files.follow_view(file)
    content = _buffer(file.nbytes)
    files.read(file, content).wait()
    assert (content[0], content[1]) == (9, 2)
    files.close()
    assert view[-1] == 2


# How a filesystem refuses direct I/O, if it does: before a file is used, or then.


def _no_direct_files(*arguments: Any, call: Callable[..., int] = fcntl.fcntl) -> int:
    if arguments[1] == fcntl.F_SETFL:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return call(*arguments)


def _no_direct_reads(descriptor: int, *arguments: Any, call: Callable[..., int] = os.preadv) -> int:
    if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return call(descriptor, *arguments)


@pytest.mark.parametrize(
    ("module", "name", "refusal"),
    [(fcntl, "fcntl", _no_direct_files), (os, "preadv", _no_direct_reads)],
    ids=["at its opening", "at its use"],
)
def test_without_direct_io_it_goes_through_the_page_cache_and_says_so(
    tmp_path: Path, module: Any, name: str, refusal: Any
) -> None:
    with (
        mock.patch.object(module, name, refusal),
        contextlib.closing(UnitFiles(tmp_path, rank=0)) as files,
    ):
        assert files.how == "buffered"
        file = files.create("unit", _SMALL)
        flags = []
        write = os.pwritev
        with mock.patch.object(os, "pwritev", lambda *a: flags.append(a[3]) or write(*a)):
            files.write(file, _buffer(_SMALL, 5)).wait()
        assert flags == [os.RWF_DSYNC]  # so that the disk's errors are this write's
        content = _buffer(_SMALL)
        files.read(file, content).wait()
        assert set(content.tolist()) == set(files.view(file).tolist()) == {5}


@pytest.mark.parametrize("folder", ["missing", "a file", "/proc"])
def test_a_folder_where_no_file_can_be_is_refused(tmp_path: Path, folder: str) -> None:
    (tmp_path / "a file").touch()
    with pytest.raises(ShardingError, match=f"{folder} .rank 2"):
        UnitFiles(tmp_path / folder, rank=2)


@pytest.mark.parametrize(("kind", "why"), [("tmpfs", "memory"), ("nfs4", "network")])
def test_a_folder_that_is_on_no_disk_is_warned_of_once_for_all_ranks(
    tmp_path: Path, kind: str, why: str
) -> None:
    with mock.patch.object(unit_files, "filesystem", return_value=kind):
        with pytest.warns(UserWarning, match=rf"{kind}: .*{why}"):
            UnitFiles(tmp_path, rank=0).close()
        UnitFiles(tmp_path, rank=1).close()


def test_more_than_the_filesystem_has_is_refused_by_numbers(files: UnitFiles) -> None:
    with pytest.raises(
        AllocationError, match=r"\(rank 3\): .* of layer takes 4,503,.* has [\d,]+ "
    ):
        files.create("layer", 1 << 52)


@pytest.mark.parametrize(
    ("kind", "value"), [(resource.RLIMIT_FSIZE, ALIGNMENT), (resource.RLIMIT_NOFILE, 0)]
)
def test_a_limit_of_the_process_is_named(files: UnitFiles, kind: int, value: int) -> None:
    with _limited(kind, value), pytest.raises(AllocationError, match=r"layer takes .*ulimit -[fn]"):
        files.create("layer", _SMALL)
    files.create("layer", _SMALL)


def test_a_folder_that_was_removed_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    files = UnitFiles(folder, rank=0)
    folder.rmdir()
    with pytest.raises(StateError, match="create it"):
        files.create("layer", _SMALL)
    files.close()


def test_a_disk_that_fills_up_while_space_is_reserved_is_refused(files: UnitFiles) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    before = _open_files()
    with (
        mock.patch.object(os, "posix_fallocate", side_effect=full),
        pytest.raises(AllocationError, match="layer"),
    ):
        files.create("layer", _SMALL)
    assert _open_files() == before


def test_a_write_that_fails_names_the_file_and_nobody_reads_what_it_left(files: UnitFiles) -> None:
    with mock.patch.object(unit_files, "_CHUNK", _SMALL):
        file, other = (files.create(name, 4 * _SMALL) for name in ("blocks.3", "blocks.4"))
        content = _buffer(file.nbytes)
        with _limited(resource.RLIMIT_FSIZE, 2 * _SMALL):  # a real refusal, in a worker
            ticket = files.write(file, _buffer(file.nbytes, 1))
            for _ in range(2):
                with pytest.raises(StateError, match=r"\(rank 3\): .* blocks\.3 .* byte 16,384: "):
                    ticket.wait()
        with pytest.raises(StateError, match=r"blocks\.3 was not written"):
            files.read(file, content).wait()
        with pytest.raises(StateError, match=r"blocks\.3"):
            files.view(file)
        files.read(other, content).wait()
        files.write(file, _buffer(file.nbytes, 2)).wait()
        files.read(file, content).wait()
        assert set(content.tolist()) == {2}


def test_a_read_that_fails_names_the_file_and_may_be_repeated(files: UnitFiles) -> None:
    file, content = files.create("blocks.3", _SMALL), _buffer(_SMALL, 1)
    broken = OSError(errno.EIO, os.strerror(errno.EIO))
    with mock.patch.object(os, "preadv", side_effect=broken):
        ticket = files.read(file, content)
        with pytest.raises(StateError, match=r"blocks\.3 cannot be read at byte 0: Input/output"):
            ticket.wait()
    files.read(file, content).wait()
    assert set(content.tolist()) == {0}


def test_requests_that_the_system_cuts_short_are_continued_at_a_block(files: UnitFiles) -> None:
    file, content = files.create("unit", 3 * _SMALL + 1), _buffer(4 * _SMALL)
    wanted = torch.arange(content.numel()).remainder(251).to(torch.uint8)
    content.copy_(wanted)
    read, write = os.preadv, os.pwritev
    most = ALIGNMENT + 100

    def cut(call: Callable[..., int]) -> Callable[..., int]:
        # As after a signal or at the end of space: some of it is done, to no whole block.
        def short(descriptor: int, memory: list[memoryview], *where: int) -> int:
            return min(call(descriptor, memory, *where), most)

        return short

    with mock.patch.multiple(os, preadv=cut(read), pwritev=cut(write)):
        files.write(file, content).wait()
        content.zero_()
        files.read(file, content).wait()
    assert torch.equal(content[: file.nbytes], wanted[: file.nbytes])
    os.ftruncate(file._descriptor, ALIGNMENT)
    with pytest.raises(StateError, match=r"unit cannot be read"):
        files.read(file, content).wait()


def test_closing_drops_what_waits_and_frees_the_disk(tmp_path: Path) -> None:
    before = _open_files()
    files = UnitFiles(tmp_path, rank=0, num_workers=1)
    file = files.create("unit", _SMALL)
    runs, goes_on, write = threading.Event(), threading.Event(), os.pwritev

    def late(*arguments: Any) -> int:
        assert not runs.is_set()
        runs.set()
        assert goes_on.wait(30)
        return write(*arguments)

    with mock.patch.object(os, "pwritev", late):
        first, second = (files.write(file, _buffer(_SMALL)) for _ in range(2))
        assert runs.wait(30)
        closing = threading.Thread(target=files.close)
        closing.start()
        with pytest.raises(StateError, match="closed"):
            second.wait()
        assert not first.is_done  # the disk is still at it
        assert len(_open_files()) == len(before) + 1
        goes_on.set()
        closing.join()
        first.wait()
    assert _open_files() == before
    for refused in (lambda: files.create("unit", 1), lambda: files.view(file)):
        with pytest.raises(StateError, match="closed"):
            refused()
    with pytest.raises(StateError, match="closed"):
        files.read(file, _buffer(_SMALL))
    files.close()


def test_a_file_goes_with_its_last_reference_but_not_under_a_request(files: UnitFiles) -> None:
    before = _open_files()
    file: UnitFile | None = files.create("unit", _SMALL)
    goes_on, read = threading.Event(), os.preadv

    def late(*arguments: Any) -> int:
        assert goes_on.wait(30)
        return read(*arguments)

    with mock.patch.object(os, "preadv", late):
        ticket: Ticket | None = files.read(file, _buffer(_SMALL))
        chunks = ticket._chunks
        file = ticket = None
        gc.collect()
        assert len(_open_files()) == len(before) + 1
        goes_on.set()
        for chunk in chunks:
            chunk.result()
    files._pool.submit(int).result()  # by then the worker has let go
    gc.collect()
    assert _open_files() == before


@pytest.mark.parametrize("without_names", [True, False], ids=["O_TMPFILE", "unlinked"])
def test_no_file_ever_has_a_name(
    tmp_path: Path, without_names: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "_O_TMPFILE_WORKS", without_names)
    with contextlib.closing(UnitFiles(tmp_path, rank=0)) as files:
        file = files.create("unit", _SMALL)
        files.write(file, _buffer(_SMALL, 1)).wait()
        assert list(tmp_path.iterdir()) == []
        assert set(files.view(file).tolist()) == {1}


@pytest.mark.parametrize("misaligned", [0, 64])
def test_pinned_buffers_begin_at_a_block_without_torchs_next_power_of_two(misaligned: int) -> None:
    asked = []

    def pinned(nbytes: int, *, pin_memory: bool, **options: Any) -> torch.Tensor:
        assert pin_memory  # which takes a GPU
        asked.append(nbytes)
        return _buffer(nbytes + misaligned)[misaligned : misaligned + nbytes]

    with mock.patch.object(torch, "empty", pinned):
        buffer = UnitFiles.new_buffer(ALIGNMENT + 1, pin_memory=True)
    assert buffer.data_ptr() % ALIGNMENT == 0
    assert buffer.numel() == padded(ALIGNMENT + 1) == 2 * ALIGNMENT
    assert asked == [2 * ALIGNMENT, 3 * ALIGNMENT][: 2 if misaligned else 1]


_PROGRAM = """
import os, signal, sys, threading, warnings
from pathlib import Path
from fullshard.errors import StateError
from fullshard.optim.unit_files import UnitFiles

assert threading.active_count() == 1
folder = Path.cwd()
files = UnitFiles(folder, rank=0)
file = files.create("unit", 1 << 20)
buffer = files.new_buffer(1 << 20, pin_memory=False).fill_(3)
assert threading.active_count() == 1  # ranks may still be forked
files.write(file, buffer).wait()
"""

_FORKS = """
warnings.simplefilter("ignore", DeprecationWarning)  # of threads in a process that forks
descriptor, goes_on, read = file._descriptor, threading.Event(), os.preadv
os.preadv = lambda *arguments: goes_on.wait() and read(*arguments)
ticket = files.read(file, buffer)
if not (child := os.fork()):
    refused = 0
    requests = (lambda: files.read(file, buffer), lambda: files.view(file), lambda: files.create("a", 1))
    for call in (*requests, ticket.wait):
        try:
            call()
        except StateError:
            refused += 1
    try:
        os.fstat(descriptor)
    except OSError:
        refused += 1
    sys.exit(refused)  # which also joins what threads Python believes in
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
goes_on.set()
ticket.wait()
files.read(file, buffer).wait()
print(set(buffer.tolist()))
"""


def test_a_fork_leaves_the_files_to_its_parent(tmp_path: Path) -> None:
    (ended,) = in_warm_forks(_PROGRAM + _FORKS, folder=tmp_path)
    assert (ended.code, ended.out, ended.err) == (0, "5\n{3}\n", "")


def test_a_process_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    kill = "files.write(file, buffer)\nos.kill(os.getpid(), signal.SIGKILL)"
    (ended,) = in_warm_forks(_PROGRAM + kill, folder=tmp_path)
    assert ended.code == -9, ended.err
    assert list(tmp_path.iterdir()) == []
