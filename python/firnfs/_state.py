"""What files would survive, waiting for more, and room."""

from __future__ import annotations

import errno
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, List, Optional

from . import _ffi
from .errors import FirnError, NotOnFirn, PathLike

_LEVELS = {"partnered": _ffi.PARTNERED, "logged": _ffi.LOGGED, "drained": _ffi.DRAINED, "durable": _ffi.DURABLE}

# Errors of a mount whose firnd this process cannot ask: another user's, or one outside of this container. Files can be
# written and synced all the same; where firnd is dead, that fails too.
UNREACHABLE = (errno.EACCES, errno.EPERM, errno.ENOTCONN)

# A signal, as of Ctrl-C, is looked at between two calls.
_SLICE_SECONDS = 0.25


@dataclass(frozen=True)
class Room:
    """Bytes that can be written next; others may take them meanwhile.

    Attributes:
        memory: Free in the memory of the mount, or taken by drained data that makes way; 0 on other file systems.
        spill: Free in the spill file; 0 where there is none.
        backing: Available in the directory where files end up, less what held data will take.
    """

    memory: int
    spill: int
    backing: int


def durability(path: PathLike) -> str:
    """Tells what all bytes of a file or directory survive now.

    Args:
        path: A file, or a directory with files.

    Returns:
        ``held`` or ``spilled``: the end of every process; ``partnered``: the loss of this host, by a copy in the
        memory of another one; ``logged`` or ``drained``: the loss of this host, in the backing; ``durable``: also the
        loss of power there. It is the lowest level of all files. On another file system than Firn, ``drained``.

    Raises:
        FirnError: With ``ENOENT``, if the path does not exist, and ``ENODATA``, if there is no file in it.

    Example:
        >>> durability(directory / "step_1")
        'durable'
    """
    try:
        with _ffi.Handle(path) as handle:
            return handle.level(path)
    except NotOnFirn:
        if not any(True for _ in files_below(Path(path))):
            raise FirnError(errno.ENODATA, "there is no file here", path) from None
        return "drained"


def wait(
    path: PathLike, until: str = "durable", timeout: Optional[float] = None, *, progress: bool = False
) -> None:
    """Waits until the files at or below a path survive more than the end of this process.

    Other threads go on meanwhile, and Ctrl-C ends the wait. The drain goes on also after a timeout.

    Args:
        path: A file or directory. What is written to it after the call is not waited for.
        until: ``durable``: the loss of power; ``drained`` or ``logged``: the loss of this host; ``partnered``: the
            loss of this host, by a copy in the memory of the mount's partner. See ``durability``.
        timeout: Seconds, or None: as long as it takes.
        progress: Shows a bar of the bytes that the mount holds, if the package tqdm is installed.

    Raises:
        TimeoutError: The level was not reached in time.
        ValueError: There is no such level to wait for.
        NotOnFirn: ``partnered`` is asked for on another file system.
        FirnError: What the backing refused (``ENOSPC``, ``EIO``): the data is kept. ``EBUSY``: programs on other
            hosts still write to a file in logs.

    Example:
        >>> wait(directory / "step_1", timeout=60)
    """
    if until not in _LEVELS:
        raise ValueError(f"until={until!r}: use one of {', '.join(map(repr, _LEVELS))}")
    deadline = None if timeout is None else time.monotonic() + timeout
    try:
        with _ffi.Handle(path) as handle:
            _wait_on(handle, path, _LEVELS[until], deadline, progress)
    except NotOnFirn:
        if until == "partnered":
            raise
        if until == "durable":
            sync_tree(Path(path))
        else:
            os.stat(path)


def _wait_on(
    handle: _ffi.Handle, path: PathLike, level: int, deadline: Optional[float], progress: bool
) -> None:
    bar = _Bar(handle) if progress else None
    try:
        while True:
            left = _SLICE_SECONDS if deadline is None else min(_SLICE_SECONDS, deadline - time.monotonic())
            try:
                handle.wait(path, level, max(0, int(left * 1000)))
                return
            except TimeoutError:
                if deadline is not None and time.monotonic() >= deadline:
                    raise
            if bar is not None:
                bar.update()
    finally:
        if bar is not None:
            bar.close()


class _Bar:
    """Progress of a wait by tqdm; nothing where that is not installed."""

    def __init__(self, handle: _ffi.Handle) -> None:
        self._handle = handle
        self._total = handle.status().held_bytes
        self._bar: Any = None
        try:
            from tqdm.auto import tqdm
        except ImportError:
            return
        self._bar = tqdm(total=self._total, unit="B", unit_scale=True, unit_divisor=1024, desc="draining")

    def update(self) -> None:
        if self._bar is not None:
            self._bar.n = max(self._bar.n, self._total - self._handle.status().held_bytes)
            self._bar.refresh()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def room(path: PathLike) -> Room:
    """Tells how many bytes a new checkpoint may take.

    Args:
        path: Anything on the mount, or on another file system.

    Returns:
        The room in bytes. A checkpoint that is larger than ``memory`` makes its writers wait for the drain.

    Raises:
        FirnError: firnd cannot be asked.

    Example:
        >>> room(directory).backing > 0
        True
    """
    try:
        with _ffi.Handle(path) as handle:
            found = handle.room()
            return Room(found.memory_bytes, found.spill_bytes, found.backing_bytes)
    except NotOnFirn:
        of_fs = os.statvfs(path)
        return Room(0, 0, of_fs.f_bavail * of_fs.f_frsize)


def make_durable(path: Path) -> None:
    """Makes what is at or below a path durable, on Firn and elsewhere."""
    try:
        with _ffi.Handle(path) as handle:
            _wait_on(handle, path, _ffi.DURABLE, None, False)
        return
    except FirnError as error:
        # Not Firn, not to be asked, or a file in logs that others write: fsync(2) covers what is there.
        if error.errno not in (errno.ENODEV, errno.EBUSY, *UNREACHABLE):
            raise
    sync_tree(path)


def sync_tree(path: Path) -> None:
    """Syncs the regular files and directories at or below a path; symbolic links are not followed."""
    for file in files_below(path):
        sync(file)
    if path.is_dir():
        for directory in _directories(path):
            sync(directory)


def sync(path: Path) -> None:
    """Syncs one file or directory."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def files_below(path: Path) -> Iterator[Path]:
    """The regular files below a directory, or the file itself; symbolic links are not followed."""
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        yield path
        return
    for top, _, names in os.walk(path, onerror=_raise):
        for name in names:
            file = Path(top, name)
            if stat.S_ISREG(os.lstat(file).st_mode):
                yield file


def _directories(path: Path) -> List[Path]:
    """The deepest first."""
    return [Path(top) for top, _, _ in os.walk(path, topdown=False, onerror=_raise)]


def _raise(error: OSError) -> None:
    raise error
