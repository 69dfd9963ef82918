"""Storage for the package torch_checkpointing: its checkpoints are durable when its future says so.

    from torch_checkpointing import CheckpointManager
    from firnfs.torch_checkpointing import StorageConfig

    manager = CheckpointManager.Config(storage_config=StorageConfig()).build()
    manager.save("/ckpt/step_100", {"model": model.state_dict()}).result()

The package writes to a directory beside, and renames it when all ranks have written. Here the rename comes after a sync of all
files, in its background process, so that the training does not wait. Without this storage the same files are written, and
count before they are durable.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from torch_checkpointing.storage.filesystem import LocalFileSystemStorage, LocalFileSystemStorageConfig

from . import _checkpoint, _state

__all__ = ["Storage", "StorageConfig"]


@dataclass
class StorageConfig(LocalFileSystemStorageConfig):
    """Says how checkpoints are stored; ``CheckpointManager.Config(storage_config=StorageConfig())``.

    Attributes:
        durable: A directory gets its name when all of its files survive the loss of power; else with a note of how much it
            has, so that ``firnfs.latest`` passes over it if a lost host took some of it.
        use_direct_io: Opens files with ``O_DIRECT``, which Firn has no use for: its memory is not copied twice.

    Example:
        >>> storage = StorageConfig().create_storage()
        >>> storage.mkdir(directory / "tmp_step_1")
        >>> storage.write(directory / "tmp_step_1" / "model", b"weights")
        >>> storage.rename(directory / "tmp_step_1", directory / "step_1", is_directory=True)
        >>> firnfs.latest(directory, durable=True).step
        1
    """

    durable: bool = True
    use_direct_io: bool = False

    def create_storage(self) -> "Storage":
        """Makes the storage, in each process that uses it."""
        return Storage(config=self)


class Storage(LocalFileSystemStorage):
    """Files of a mount, or of any directory."""

    def __init__(self, config: StorageConfig) -> None:
        super().__init__(config=config)
        self._durable = config.durable

    def rename(
        self, src_path: Path, dst_path: Path, is_directory: bool = False, background_cleanup: bool = False
    ) -> None:
        """Gives a directory its name when what it has is durable. What is there is not replaced."""
        if is_directory:
            _checkpoint.settle(Path(src_path), self._durable)
        super().rename(src_path, dst_path, is_directory=is_directory, background_cleanup=background_cleanup)
        if is_directory and self._durable:
            _state.sync(Path(os.path.dirname(dst_path) or "."))
