"""Distributed checkpoints of PyTorch (``torch.distributed.checkpoint``) that count as a whole or not at all.

    import torch.distributed.checkpoint as dcp
    from firnfs.torch import Writer

    dcp.save(state_dict, storage_writer=Writer("/ckpt/step_100"))
    dcp.load(state_dict, storage_reader=dcp.FileSystemReader(firnfs.latest("/ckpt")))
"""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
from pathlib import Path
from typing import Any, List, Optional

from torch.distributed.checkpoint import FileSystemWriter

from . import _checkpoint, _state
from .errors import PathLike

__all__ = ["Writer"]


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where the ranks write; the coordinator tells it to them with their plans."""

    files: str
    ranks: int
    of_base: Any


class Writer(FileSystemWriter):  # type: ignore[misc]
    """Writes a distributed checkpoint beside its name; the coordinator renames it when all ranks have written.

    A rank that fails or dies leaves everything as it was before. All ranks see the same directory, on one host or
    several. The checkpoint is read by ``FileSystemReader``.

    Args:
        path: The new checkpoint, such as ``/ckpt/step_100``; with ``dcp.save(checkpoint_id=…)`` that one counts.
        durable: The checkpoint survives the loss of power when ``save`` returns.
        **options: Those of ``FileSystemWriter`` (``thread_count``, ...).

    Raises:
        FileExistsError: From ``save``: there is a checkpoint of this name.
        ValueError: From ``save``: with ``use_collectives=False`` nothing tells when all ranks have written.
    """

    def __init__(self, path: PathLike, *, durable: bool = False, **options: Any) -> None:
        # What is durable is synced as a whole, before the rename.
        options.setdefault("sync_files", False)
        options.setdefault("single_file_per_rank", True)
        super().__init__(path, **options)
        self.durable = durable
        self._final = Path(path)
        self._staging: Optional[Path] = None

    def reset(self, checkpoint_id: Optional[PathLike] = None) -> None:
        """Begins another checkpoint."""
        super().reset(checkpoint_id)
        if checkpoint_id:
            self._final = Path(checkpoint_id)

    @property
    def checkpoint_id(self) -> PathLike:
        """The checkpoint that is written."""
        return self._final

    def prepare_local_plan(self, plan: Any) -> Any:
        """Refuses a name that is taken. Nothing is made yet."""
        if not getattr(self, "use_collectives", True):
            raise ValueError("use_collectives=False: use firnfs.checkpoint(ranks=) around dcp.save() instead")
        if os.path.lexists(self._final):
            raise FileExistsError(
                errno.EEXIST, "there is a checkpoint of this name: remove it first", str(self._final)
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
        written = super().write_data(dataclasses.replace(plan, storage_data=place.of_base), planner)
        written.wait()
        if self.durable:
            _state.make_durable(self.path)
        elif place.ranks > 1:
            _checkpoint.bring_to_backing(self.path)
        return written

    def finish(self, metadata: Any, results: List[Any]) -> None:
        """Writes the metadata and gives the checkpoint its name, on the coordinator."""
        try:
            super().finish(metadata, results)
            _checkpoint.publish(self.path, self._final, self.durable)
        finally:
            self._remove_staging()

    def _remove_staging(self) -> None:
        staging, self._staging = self._staging, None
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)
        self.path = self._final
