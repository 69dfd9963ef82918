"""Distributed checkpoints of PyTorch (``torch.distributed.checkpoint``, DCP) that count as a whole or not at all.

    import torch.distributed.checkpoint as dcp
    from firnfs.torch import Reader, Stager, Writer

    dcp.save(state_dict, storage_writer=Writer("/ckpt/step_100"))
    dcp.load(state_dict, storage_reader=Reader("/ckpt"))

    stager = Stager()                                              # writes at once instead of making a copy
    future = dcp.async_save(state_dict, storage_writer=stager.writer("/ckpt/step_200"))
    future.result()                                                # the checkpoint is durable
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import shutil
import threading
from pathlib import Path
from typing import Any, Iterator, List, Optional, Set

from torch import serialization
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from . import _checkpoint, _state
from .errors import FirnError, PathLike

__all__ = ["Reader", "Stager", "Writer"]

_METADATA = ".metadata"

# A signal, as of Ctrl-C, and the end of a save that failed are looked at between two waits.
_SLICE_SECONDS = 0.25


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where the ranks write; the coordinator tells it to them with their plans."""

    files: str
    ranks: int
    of_base: Any


class Writer(FileSystemWriter):
    """Writes a distributed checkpoint beside its name; the coordinator renames it when all ranks have written.

    A rank that fails or dies leaves everything as it was before. All ranks see the same directory, on one host or
    several. The checkpoint is read by ``Reader`` and by ``FileSystemReader``.

    Args:
        path: The new checkpoint, such as ``/ckpt/step_100``; with ``dcp.save(checkpoint_id=…)`` that one counts.
        durable: The checkpoint survives the loss of power when ``save`` returns, or the future of ``async_save``
            has its result.
        overwrite: The new checkpoint takes the place of one of its name in one step, where the file system can
            exchange two names (ext4, XFS, Btrfs, tmpfs, and Firn over them). Until then the old one is whole.
        crc32: Has ``torch.save`` compute the CRC32 of each tensor, at which no reader of such checkpoints looks. It takes
            longer than the write itself. PyTorch before 2.6 always computes it.
        **options: Those of ``FileSystemWriter`` (``thread_count``, ...).

    Raises:
        FileExistsError: From ``save``: there is a checkpoint of this name, and ``overwrite`` is not set.
        ValueError: From ``save``: with ``use_collectives=False`` nothing tells when all ranks have written.

    Example:
        >>> state = {"weights": torch.ones(3)}
        >>> _ = dcp.save(state, storage_writer=Writer(directory / "step_1"))
        >>> firnfs.latest(directory).step
        1
    """

    def __init__(
        self, path: PathLike, *, durable: bool = False, overwrite: bool = False, crc32: bool = False, **options: Any
    ) -> None:
        # What is durable is synced as a whole, before the rename.
        options.setdefault("sync_files", False)
        options.setdefault("single_file_per_rank", True)
        super().__init__(path, **options)
        self.durable = durable
        self.crc32 = crc32
        self._replaces = overwrite
        self._final = Path(path)
        self._staging: Optional[Path] = None
        # Of a stager: it is told when the checkpoint has its name, and what is to be durable is synced after that.
        self._stager: Optional[Stager] = None
        self._named: Optional[threading.Event] = None

    def reset(self, checkpoint_id: Optional[PathLike] = None) -> None:
        """Begins another checkpoint."""
        super().reset(checkpoint_id)
        if checkpoint_id:
            self._final = Path(checkpoint_id)

    @property
    def checkpoint_id(self) -> PathLike:
        """The checkpoint that is written."""
        return self._final

    def stage(self, state_dict: Any) -> Any:
        """Gives `async_save` what it writes: a copy, or with a stager the state itself."""
        return super().stage(state_dict) if self._stager is None else self._stager.stage(state_dict)

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Whether `async_save` waits for `synchronize_staging`."""
        return self._stager is not None or bool(super().should_synchronize_after_execute)

    def synchronize_staging(self) -> None:
        """Waits as the stager does."""
        if self._stager is not None:
            self._stager.synchronize_staging()

    def prepare_local_plan(self, plan: Any) -> Any:
        """Refuses a name that is taken. Nothing is made yet."""
        if not getattr(self, "use_collectives", True):
            raise ValueError("use_collectives=False: use firnfs.checkpoint(ranks=) around dcp.save() instead")
        if not self._replaces and os.path.lexists(self._final):
            raise FileExistsError(
                errno.EEXIST, "there is a checkpoint of this name: remove it, or use overwrite=True", str(self._final)
            )
        return plan

    def prepare_global_plan(self, plans: List[Any]) -> List[Any]:
        """Makes the directory to write to, on the coordinator."""
        self._remove_staging()
        self._final.parent.mkdir(parents=True, exist_ok=True)
        self._staging = _checkpoint.make_staging(self._final)
        self.path = self._staging / _checkpoint.FILES
        return [
            dataclasses.replace(plan, storage_data=_Place(str(self.path), len(plans), plan.storage_data))
            for plan in super().prepare_global_plan(plans)
        ]

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Writes the files of this rank, and brings them to where the coordinator's host finds them."""
        place: _Place = plan.storage_data
        self.path = Path(place.files)
        with contextlib.nullcontext() if self.crc32 else _without_crc32():
            written = super().write_data(dataclasses.replace(plan, storage_data=place.of_base), planner)
        written.wait()
        if self.durable and self._named is None:
            _state.make_durable(self.path)
        elif place.ranks > 1 and not _is_one_host(place.ranks):
            _checkpoint.bring_to_backing(self.path)
        if self._named is not None and self._staging is None:
            # Its name comes from the coordinator.
            self._named.set()
        return written

    def finish(self, metadata: Any, results: List[Any]) -> None:
        """Writes the metadata and gives the checkpoint its name, on the coordinator."""
        try:
            super().finish(metadata, results)
            durable = self.durable and self._named is None
            _checkpoint.publish(self.path, self._final, durable, replaces=self._replaces)
        finally:
            self._remove_staging()
        if self._named is None:
            return
        self._named.set()
        if self.durable:
            _state.make_durable(self._final)
            _state.sync(self._final.parent)

    def _remove_staging(self) -> None:
        staging, self._staging = self._staging, None
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)
        self.path = self._final


@contextlib.contextmanager
def _without_crc32() -> Iterator[None]:
    """For this thread: newer PyTorch keeps the option by thread, and older releases lack it."""
    if not hasattr(serialization, "set_crc32_options"):
        yield
        return
    before = serialization.get_crc32_options()
    serialization.set_crc32_options(False)
    try:
        yield
    finally:
        serialization.set_crc32_options(before)


def _is_one_host(ranks: int) -> bool:
    """Whether one firnd serves all ranks, as far as the launcher tells."""
    return os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE")) == str(ranks)


class Reader(FileSystemReader):
    """Reads a distributed checkpoint, or the newest complete one of a directory.

    Args:
        path: A checkpoint, or a directory of checkpoints.
        **options: Those of ``FileSystemReader``.

    Raises:
        FirnError: With ``ENOENT``, if there is no complete checkpoint.

    Example:
        >>> state = {"weights": torch.zeros(3)}
        >>> dcp.load(state, storage_reader=Reader(directory))
        >>> state["weights"]
        tensor([1., 1., 1.])
    """

    def __init__(self, path: PathLike, **options: Any) -> None:
        super().__init__(_checkpoint_at(path), **options)

    def reset(self, checkpoint_id: Optional[PathLike] = None) -> None:
        """Begins with another checkpoint."""
        super().reset(_checkpoint_at(checkpoint_id) if checkpoint_id else None)


def _checkpoint_at(path: PathLike) -> Path:
    if os.path.lexists(os.path.join(path, _METADATA)):
        return Path(path)
    for found in reversed(_checkpoint.steps(path)):
        if (found / _METADATA).exists():
            return found.path
    raise FirnError(errno.ENOENT, "there is no complete distributed checkpoint here", path)


class Stager:
    """Lets ``dcp.async_save`` write to the mount at once, instead of copying all tensors first.

    ``async_save`` returns on the coordinator when the checkpoint has its name, in the memory of Firn, and on the other ranks
    when their tensors are written: they may change from then on, and the checkpoint survives the end of every process. Only
    the sync goes on in the background. It needs no memory of this process. Tensors on a GPU are read as ``dcp.save`` reads
    them. With ranks on several hosts the files go to the backing first.

    Use one stager for one save after the other, with a writer of its own for each: the writer brings it along, and
    ``async_save(async_stager=)`` need not be given.

    Example:
        >>> stager = Stager()
        >>> writer = stager.writer(directory / "step_2", durable=True)
        >>> future = dcp.async_save({"weights": torch.ones(3)}, storage_writer=writer)
        >>> _ = future.result()
        >>> firnfs.latest(directory, durable=True).step
        2
    """

    should_synchronize_after_execute = True
    _synchronize_after_execute = True

    def __init__(self) -> None:
        self._named = threading.Event()
        self._threads: Set[threading.Thread] = set()

    def writer(self, path: PathLike, *, durable: bool = True, **options: Any) -> Writer:
        """Makes the writer of the next save.

        Args:
            path: The new checkpoint.
            durable: The future has its result when the checkpoint survives the loss of power.
            **options: Those of ``Writer``.
        """
        made = Writer(path, durable=durable, **options)
        made._stager, made._named = self, self._named
        return made

    def stage(self, state_dict: Any, **options: Any) -> Any:
        """Gives the state itself."""
        self._named.clear()
        self._threads = set(threading.enumerate())
        return state_dict

    def synchronize_staging(self) -> None:
        """Waits until the checkpoint has its name, or the save has ended without that."""
        own = [thread for thread in threading.enumerate() if thread not in self._threads]
        # DCP tells an error by its future alone. Its thread ends with the save.
        while not self._named.wait(_SLICE_SECONDS):
            if not any(thread.is_alive() for thread in own):
                return

    def close(self) -> None:
        """Has nothing to end."""
