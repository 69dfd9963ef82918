"""Checkpoints that count as a whole or not at all, and lists of them.

There are two ways to write one:

* In a transaction, on a mount with ``drain=commit``: the directory is made as a part of it and counts with the commit.
  firnd aborts it when this process ends, however it ends.
* Beside its name, everywhere else: its files are written to ``.NAME.TOKEN.firnfs/files``, which is renamed to ``NAME``
  when all of them are there. Names with a leading dot are no checkpoint for Firn.

Invariants:
* A name without a leading dot has all files of its checkpoint, from the moment at which it can be seen.
* The rename, or the commit, comes after what the caller was promised of the files: sync or drain.
* A checkpoint that was renamed before its files were durable has a seal, the empty directory ``.firnfs.FILES.BYTES``: names
  are in the backing at once, so after the loss of a host's memory fewer files or bytes than that tell that it is not whole.
  One that a framework writes under its name has a seal that cannot be fulfilled until it is finished.
* With ranks, each rank leaves a mark beside ``files`` when it has left the block, and whoever sees all marks renames: the
  last rank, or a reader, if the last ranks of two hosts did not see each other's marks.
* What is left of a process that died is removed by the next save of this user: of the same name, or by the same host.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import shutil
import socket
import stat
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Iterator, List, Optional

from . import _ffi
from ._state import UNREACHABLE, files_below, make_durable, sync, sync_tree, wait
from .errors import Aborted, FirnError, FirnWarning, NotOnFirn, PathLike

_SUFFIX = ".firnfs"
FILES = "files"

# Of one process: host, process id, start in clock ticks, and random digits.
_OF_PROCESS = re.compile(r"^\.(?P<name>.+)\.(?P<host>[0-9a-f]{8})-(?P<pid>\d+)-(?P<ticks>\d+)-[0-9a-f]+\.firnfs$")
# Of the ranks of a job: job, and number of ranks.
_OF_RANKS = re.compile(r"^\.(?P<name>.+)\.(?P<job>[0-9a-f]{16})\.(?P<ranks>\d+)\.firnfs$")

# Of a complete checkpoint: number of its files, and their bytes.
_SEAL = re.compile(r"^\.firnfs\.(?P<files>\d+)\.(?P<bytes>\d+)$")
# Of one that is being written under its name: more files than there can be.
_UNFINISHED = f".firnfs.{2**64 - 1}.0"

# Variables with which launchers tell ranks, in this order.
_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
# Variables that are the same in all ranks of a job: those of the first line tell it from every other job.
_UNIQUE_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "PMIX_NAMESPACE", "TORCHELASTIC_RUN_ID")
_START_VARIABLES = (
    "SLURM_RESTART_COUNT",
    "SLURM_STEP_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "MASTER_ADDR",
    "MASTER_PORT",
)

_warned = False


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint; usable as a path: ``open(checkpoint / "model.pt")``.

    Attributes:
        path: Its directory, or its file.
        step: The step in its name.
        time: When something in it was modified last, in seconds since 1970.
        size: Bytes of its files.
        files: Number of its files.
        durability: What all of its bytes survive: see ``firnfs.durability``.
    """

    path: Path
    step: int
    time: float
    size: int
    files: int
    durability: str

    def __fspath__(self) -> str:
        return str(self.path)

    def __truediv__(self, name: PathLike) -> Path:
        return self.path / name


@contextlib.contextmanager
def checkpoint(
    path: PathLike,
    *,
    step: Optional[int] = None,
    ranks: Optional[int] = None,
    rank: Optional[int] = None,
    durable: bool = False,
) -> Iterator[Path]:
    """Writes one checkpoint: all of its files count, or none of them.

    A context manager. An exception, or the end of this process, in the block leaves everything as it was before.

    On a mount with ``drain=commit`` the block is a transaction, and durable when it ends. Elsewhere the block writes to
    a hidden directory, which gets its name when the block ends. Without ``durable`` the files may still be in memory
    then: they survive the end of every process and not the loss of the host.

    Args:
        path: The directory of all checkpoints, made if it is missing; without ``step``, the new checkpoint itself.
        step: The checkpoint is called ``step_N``.
        ranks: Number of processes, on one or several hosts, that write this checkpoint together, each in its own block.
            The checkpoint counts when all of them have left the block; none waits for the others. Each rank's files are
            in the backing when it leaves. The launcher must tell jobs apart (Slurm, Open MPI, ``torchrun --rdzv-id``);
            otherwise set ``FIRN_JOB`` to a value that is new at each start.
        rank: Number of this process among them, from 0; by default what the launcher says.
        durable: The checkpoint survives the loss of power when the block ends: with ranks, as soon as it counts.

    Yields:
        The directory to write to. Its files must be closed when the block ends.

    Raises:
        FileExistsError: There is a checkpoint of this name.
        Aborted: The transaction was ended by somebody else.
        FirnError: What Firn or the backing refuses (``ENOSPC``, ``EIO``, ``ENOTCONN``): the checkpoint does not count.
        ValueError: ``rank`` and ``ranks`` do not fit, or the job cannot be told from an earlier one.

    Warns:
        FirnWarning: Once, where the path is on no Firn mount.

    Example:
        >>> with checkpoint(directory, step=2) as new:
        ...     _ = (new / "model").write_bytes(b"weights")
        >>> latest(directory).step
        2
    """
    final = Path(path) if step is None else Path(path) / f"step_{_checked_step(step)}"
    if not final.name:
        raise ValueError(f"{path}: give the new checkpoint a name, or a step")
    number = _checked_rank(ranks, rank)
    final.parent.mkdir(parents=True, exist_ok=True)
    if ranks is not None and number is not None:
        _refuse_taken(final)
        with _by_ranks(final, ranks, number, durable) as new:
            yield new
        return
    # firnd is asked before anything is looked at: the directory of a killed process may still be there, and firnd ends the
    # transaction of that process first.
    handle = begin(final)
    if handle is not None:
        with handle, _in_transaction(handle, final) as new:
            yield new
        return
    _refuse_taken(final)
    with _beside(final, durable) as new:
        yield new


def _refuse_taken(final: Path) -> None:
    if os.path.lexists(final):
        raise FileExistsError(errno.EEXIST, "there is a checkpoint of this name: remove it first", str(final))


def _checked_step(step: int) -> int:
    if step < 0:
        raise ValueError(f"step={step}: a step is 0 or more")
    return int(step)


def _checked_rank(ranks: Optional[int], rank: Optional[int]) -> Optional[int]:
    if ranks is None:
        if rank is not None:
            raise ValueError("rank needs ranks, the number of processes that write this checkpoint")
        return None
    if rank is None:
        told = (os.environ.get(name) for name in _RANK_VARIABLES)
        known = next((int(text) for text in told if text and text.isdigit()), None)
        if known is None:
            raise ValueError("no launcher says which rank this is: give rank=")
        rank = known
    if not 0 <= rank < ranks:
        raise ValueError(f"rank={rank} is not below ranks={ranks}")
    return rank


# ---- in a transaction ------------------------------------------------------------------------------


def begin(final: Path) -> Optional[_ffi.Handle]:
    """Begins a transaction that makes a directory; None where there is none to be had."""
    try:
        handle = _ffi.Handle(final.parent)
    except NotOnFirn:
        _warn_once(final.parent)
        return None
    except FirnError as error:
        if error.errno in UNREACHABLE:
            return None
        raise
    try:
        handle.begin_create(final)
        return handle
    except FirnError as error:
        handle.close()
        # No transactions there, with other hosts, or the parent is in one, of which this checkpoint is a part.
        if error.errno in (errno.EOPNOTSUPP, errno.EBUSY):
            return None
        if error.errno == errno.EEXIST:
            raise FileExistsError(errno.EEXIST, str(error.strerror), str(final)) from None
        raise
    except BaseException:
        handle.close()
        raise


@contextlib.contextmanager
def _in_transaction(handle: _ffi.Handle, final: Path) -> Iterator[Path]:
    owner = os.getpid()
    try:
        yield final
        _refuse_child(owner, final)
        handle.commit(final)
    except BaseException:
        if os.getpid() == owner:
            abort(handle, final)
        raise


def abort(handle: _ffi.Handle, final: Path) -> None:
    """Ends a transaction without its changes. The end of the connection does it too; what is committed stays."""
    with contextlib.suppress(OSError):
        handle.abort(final)


def _refuse_child(owner: int, final: Path) -> None:
    """A child of fork() that leaves the block with a copy of it must not end the checkpoint of its parent."""
    if os.getpid() != owner:
        raise Aborted(errno.ECANCELED, "the block was left by a child of fork(): end children by os._exit()", final)


def _warn_once(path: Path) -> None:
    global _warned
    if _warned:
        return
    _warned = True
    warnings.warn(
        f"{path} is on no Firn mount: checkpoints are written beside their names, synced and renamed, at the speed of "
        "that file system. `firn mount` or `firn run` puts Firn there",
        FirnWarning,
        stacklevel=6,
    )


# ---- beside its name -------------------------------------------------------------------------------


@contextlib.contextmanager
def _beside(final: Path, durable: bool) -> Iterator[Path]:
    owner = os.getpid()
    staging = make_staging(final)
    try:
        files = staging / FILES
        yield files
        _refuse_child(owner, final)
        publish(files, final, durable)
    finally:
        if os.getpid() == owner:
            remove_staging(staging)


def make_staging(final: Path) -> Path:
    """Makes a hidden directory of this process beside a new checkpoint, with ``files`` in it."""
    _remove_of_dead_processes(final.parent)
    token = f"{_host()}-{os.getpid()}-{_start_ticks(os.getpid())}-{secrets.token_hex(4)}"
    staging = final.parent / f".{final.name}.{token}{_SUFFIX}"
    os.mkdir(staging, 0o700)
    os.mkdir(staging / FILES)
    return staging


def remove_staging(staging: Path) -> None:
    """Removes a hidden directory, with what is left in it."""
    shutil.rmtree(staging, ignore_errors=True)


def publish(files: Path, final: Path, durable: bool, *, replaces: bool = False) -> None:
    """Gives a complete checkpoint its name; it is synced before and after, if it is to be durable or is not on Firn.

    With ``replaces`` a checkpoint of this name is then where ``files`` was.
    """
    durable = settle(files, durable)
    if replaces and os.path.lexists(final):
        _ffi.exchange_names(files, final)
    else:
        _name(files, final)
    if durable:
        sync(final.parent)
    _remove_of_name(final)


def settle(files: Path, durable: bool) -> bool:
    """Makes a complete checkpoint ready for its name: durable, or sealed; whether it is durable then."""
    durable = durable or not is_firn(files)
    if durable:
        make_durable(files)
    else:
        _seal(files)
    return durable


def _seal(files: Path) -> None:
    """Notes in a name how much a checkpoint has."""
    if _seals(files):
        return
    sizes = _sizes(files)
    with contextlib.suppress(FileExistsError):
        os.mkdir(files / f".firnfs.{len(sizes)}.{sum(sizes)}")


def _seals(checkpoint: Path) -> List["re.Match[str]"]:
    return [match for match in map(_SEAL.match, os.listdir(checkpoint)) if match is not None]


# ---- under its name --------------------------------------------------------------------------------


def is_unfinished(checkpoint: Path) -> bool:
    """Whether it was begun by `mark_unfinished`, and not finished."""
    return (checkpoint / _UNFINISHED).is_dir()


def mark_unfinished(checkpoint: Path) -> None:
    """Begins a checkpoint that is written under its name: until `finish` it has a seal of more files than there can be."""
    checkpoint.mkdir(parents=True, exist_ok=True)
    for seal in _seals(checkpoint):
        os.rename(checkpoint / seal[0], checkpoint / _UNFINISHED)
    (checkpoint / _UNFINISHED).mkdir(exist_ok=True)
    if not is_firn(checkpoint):
        sync(checkpoint)


def finish(checkpoint: Path, durable: bool) -> None:
    """Lets it count, in one step."""
    durable = durable or not is_firn(checkpoint)
    if durable:
        make_durable(checkpoint)
    sizes = _sizes(checkpoint)
    os.rename(checkpoint / _UNFINISHED, checkpoint / f".firnfs.{len(sizes)}.{sum(sizes)}")
    if durable:
        sync(checkpoint)


def _sizes(checkpoint: Path) -> List[int]:
    """Sizes of its files, also of those that other hosts wrote: an open sees what stat(2) may have from a cache."""
    sizes = []
    for file in files_below(checkpoint):
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            sizes.append(os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)
    return sizes


def _is_as_sealed(checkpoint: Path, files: int, size: int) -> bool:
    """Whether so many files and bytes are as much as the checkpoint had when it was complete, where that is noted."""
    try:
        seals = _seals(checkpoint)
    except NotADirectoryError:
        return True
    except FileNotFoundError:
        return False
    return all(files >= int(seal["files"]) and size >= int(seal["bytes"]) for seal in seals)


def _name(files: Path, final: Path) -> None:
    """Gives a complete checkpoint its name, unless that is taken."""
    if os.path.lexists(final):
        raise FileExistsError(errno.EEXIST, "there is a checkpoint of this name by now", str(final))
    try:
        os.rename(files, final)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise FileExistsError(errno.EEXIST, "there is a checkpoint of this name by now", str(final)) from None
        raise


def is_firn(path: Path) -> bool:
    try:
        _ffi.Handle(path).close()
        return True
    except FirnError as error:
        if error.errno in (errno.ENODEV, *UNREACHABLE):
            return False
        raise


def _host() -> str:
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


def _start_ticks(pid: int) -> Optional[int]:
    """When a process began, which tells it from a later one of its number; None: there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The name in parentheses may have anything in it.
    return int(text.rsplit(b")", 1)[1].split()[19])


def _own_stagings(parent: Path) -> List[str]:
    """Names of hidden directories of this user in `parent`."""
    found = []
    with os.scandir(parent) as entries:
        for entry in entries:
            if not (entry.name.startswith(".") and entry.name.endswith(_SUFFIX)):
                continue
            with contextlib.suppress(OSError):
                facts = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid():
                    found.append(entry.name)
    return found


def _remove_of_dead_processes(parent: Path) -> None:
    for name in _own_stagings(parent):
        match = _OF_PROCESS.match(name)
        if match is None or match["host"] != _host():
            continue
        if _start_ticks(int(match["pid"])) != int(match["ticks"]):
            shutil.rmtree(parent / name, ignore_errors=True)


def _remove_of_name(final: Path) -> None:
    """Removes what dead processes left of a checkpoint that is complete now."""
    for name in _own_stagings(final.parent):
        match = _OF_PROCESS.match(name) or _OF_RANKS.match(name)
        if match is not None and match["name"] == final.name:
            shutil.rmtree(final.parent / name, ignore_errors=True)


# ---- by ranks --------------------------------------------------------------------------------------


@contextlib.contextmanager
def _by_ranks(final: Path, ranks: int, rank: int, durable: bool) -> Iterator[Path]:
    staging = final.parent / f".{final.name}.{_job()}.{ranks}{_SUFFIX}"
    with contextlib.suppress(FileExistsError):
        os.mkdir(staging, 0o700)
    facts = os.lstat(staging)
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid():
        raise FirnError(errno.EPERM, "another user put something in the place of this checkpoint: remove it", staging)
    files = staging / FILES
    with contextlib.suppress(FileExistsError):
        os.mkdir(files)
    mark = staging / f"left-{rank}"
    # A rank that tries again.
    with contextlib.suppress(FileNotFoundError):
        os.unlink(mark)
    owner = os.getpid()
    yield files
    _refuse_child(owner, final)
    # Another host may rename the directory, and finds in the backing what is drained by then.
    if durable:
        make_durable(files)
    else:
        bring_to_backing(files)
    os.close(os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    if durable:
        sync(staging)
    _complete(staging, final, ranks)
    if durable and os.path.lexists(final):
        sync(final.parent)


def bring_to_backing(files: Path) -> None:
    try:
        wait(files, "logged")
    except FirnError as error:
        if error.errno not in UNREACHABLE:
            raise
    if not is_firn(files):
        # Also of a mount that cannot be asked.
        sync_tree(files)


def _complete(staging: Path, final: Path, ranks: int) -> None:
    """Gives the checkpoint its name if all ranks have left it."""
    try:
        names = set(os.listdir(staging))
        if not all(f"left-{rank}" in names for rank in range(ranks)):
            return
        _seal(staging / FILES)
        _name(staging / FILES, final)
    except (FileNotFoundError, FileExistsError):
        # Another rank, or a reader, was first.
        if not os.path.lexists(final):
            return
    _remove_of_name(final)


def _complete_all(parent: Path) -> None:
    """Does it for the last ranks of two hosts that did not see each other's marks."""
    with contextlib.suppress(OSError):
        for name in _own_stagings(parent):
            match = _OF_RANKS.match(name)
            if match is not None:
                _complete(parent / name, parent / match["name"], int(match["ranks"]))


def _job() -> str:
    """Sixteen digits that are the same in all ranks of a job, and others in every other start."""
    own = os.environ.get("FIRN_JOB")
    if own:
        return hashlib.sha256(own.encode()).hexdigest()[:16]
    unique = [name for name in _UNIQUE_VARIABLES if os.environ.get(name) not in (None, "", "none")]
    if not unique:
        raise ValueError(
            "nothing tells this job from an earlier one, of which marks may be left: set FIRN_JOB to a value that is "
            "the same in all ranks and new at each start"
        )
    parts = [f"{name}={os.environ.get(name, '')}" for name in (*unique, *_START_VARIABLES)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


# ---- lists -----------------------------------------------------------------------------------------


def steps(path: PathLike) -> List[Checkpoint]:
    """Lists the complete checkpoints directly in a directory, as ``firn history`` finds them whole.

    They need not have been written by ``checkpoint``: any directory or file of yours with a step in its name counts,
    such as ``step_100``, ``checkpoint-500`` or ``epoch=3-step=900.ckpt``. On a path that is on no mount nobody knows
    whether writers were killed: there, what has files counts.

    Args:
        path: The directory.

    Returns:
        The checkpoints, the one that was modified first first; none, if the directory does not exist.

    Raises:
        FirnError: With ``ENOTCONN``, if the mount is dead, or the memory of an earlier mount has files that the
            directory lacks: mount it again first.

    Example:
        >>> [one.step for one in steps(directory)]
        [1, 2]
    """
    parent = Path(path)
    if not parent.exists():
        return []
    _complete_all(parent)
    found = []
    for name, facts in _ffi.list_checkpoints(parent):
        state = _ffi.STATES[facts.state]
        if not (state == "whole" or (state == "unknown" and facts.files > 0)):
            continue
        one = parent / os.fsdecode(name)
        files, size = facts.files, facts.bytes
        if not _is_as_sealed(one, files, size):
            try:
                sizes = _sizes(one)
            except FileNotFoundError:
                continue
            files, size = len(sizes), sum(sizes)
            if not _is_as_sealed(one, files, size):
                continue
        modified = facts.modified_s + facts.modified_ns / 1e9
        level = _ffi.LEVELS[facts.level]
        found.append(Checkpoint(one, step=facts.step, time=modified, size=size, files=files, durability=level))
    found.reverse()
    return found


def latest(path: PathLike, *, durable: bool = False) -> Optional[Checkpoint]:
    """Finds the newest complete checkpoint directly in a directory.

    Args:
        path: The directory.
        durable: Takes only one that survives the loss of power. One that is in the backing is synced first; one that is
            in memory only is passed over.

    Returns:
        The checkpoint that was modified last, or None.

    Raises:
        FirnError: As for ``steps``.

    Example:
        >>> with open(latest(directory) / "model", "rb") as file:
        ...     file.read()
        b'weights'
    """
    for found in reversed(steps(path)):
        if not durable or found.durability == "durable":
            return found
        if _ffi.LEVELS.index(found.durability) >= _ffi.LOGGED:
            make_durable(found.path)
            return replace(found, durability="durable")
    return None
