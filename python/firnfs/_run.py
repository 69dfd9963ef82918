"""Jobs and mounts, by the program ``firn``."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from pathlib import Path
from typing import Iterator, List, Sequence, Union

from ._find import find_firn
from .errors import FirnError, NotOnFirn, PathLike

Option = Union[str, int, float, bool, None, "os.PathLike[str]"]

# Exit statuses of firn (docs/OPERATIONS.md) as numbers of errno.
_NUMBERS = {2: errno.EINVAL, 11: errno.EBUSY, 12: errno.EAGAIN, 130: errno.EINTR}
_NOT_FIRN = 10


def run(
    argv: Sequence[PathLike], *, check: bool = True, **options: Option
) -> "subprocess.CompletedProcess[bytes]":
    """Runs a program with its checkpoint directory on Firn, as ``firn run`` does: with FUSE, and without it by the
    preload library.

    Args:
        argv: The program and its arguments. It finds its directory in the variable ``FIRN_PREFIX``.
        check: Raises if the program fails.
        **options: Those of ``firn run``: ``backing`` (directory where files end up), ``prefix`` (where the program sees
            them), ``memory`` (bytes, or ``"8G"``), ``keep``, and all of ``firn mount``, with underscores.

    Returns:
        How it ended. Output goes where this process's goes.

    Raises:
        subprocess.CalledProcessError: The program, or ``firn run``, failed and ``check`` is true. The files of a
            program that failed stay in memory: the same call finds them.
        FirnError: With ``ENOENT``, if firn is not installed.

    Example:
        >>> run(["sh", "-c", "echo done > $FIRN_PREFIX/step_1"], backing=results, memory="64M", quiet=True).returncode
        0
    """
    command = [find_firn(), "run", *_flags(options), "--", *(os.fspath(word) for word in argv)]
    return subprocess.run(command, check=check)


@contextlib.contextmanager
def mount(backing: PathLike, mount_point: PathLike, **options: Option) -> Iterator[Path]:
    """Mounts a directory for the block, as ``firn mount`` and ``firn umount`` do.

    The end of the block drains all files and unmounts, also after an exception. If this process is killed, the mount
    stays.

    Args:
        backing: The directory where files end up.
        mount_point: The directory where programs see them; made if it is missing. With ``frontend="preload"`` it is on
            a tmpfs, such as ``/dev/shm``, unless root mounts.
        **options: Those of ``firn mount``, with underscores: ``arena_size="2G"``, ``close="held"``, ``drain="commit"``.

    Yields:
        The mount point. With ``frontend="preload"`` only programs that load ``preload_path()`` see the files.

    Raises:
        FirnError: With the words of ``firn``. ``EBUSY``: the directory is mounted already, or programs have files open
            at the end of the block, and it stays mounted. ``EINVAL``: an option that cannot be.

    Example:
        >>> with mount(results, mount_point, arena_size="64M") as here:
        ...     _ = (here / "notes").write_text("kept")
        >>> (results / "notes").read_text()
        'kept'
    """
    point = Path(mount_point)
    point.mkdir(parents=True, exist_ok=True)
    _firn(["mount", *_flags(options), os.fspath(backing), str(point)], point)
    try:
        yield point
    finally:
        _firn(["umount", str(point)], point)


def _firn(args: List[str], path: Path) -> None:
    done = subprocess.run([find_firn(), *args], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
    if done.returncode == 0:
        return
    lines = done.stderr.decode(errors="replace").splitlines()
    text = "; ".join(line[len("firn: ") :] if line.startswith("firn: ") else line for line in lines if line)
    text = text or f"`firn {args[0]}` ended with {done.returncode}"
    if done.returncode == _NOT_FIRN:
        raise NotOnFirn(errno.ENODEV, text, path)
    raise FirnError(_NUMBERS.get(done.returncode, errno.EIO), text, path)


def _flags(options: "dict[str, Option]") -> List[str]:
    flags = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            flags.append(flag)
        elif value is not None and value is not False:
            flags.append(f"{flag}={os.fspath(value) if isinstance(value, os.PathLike) else value}")
    return flags
