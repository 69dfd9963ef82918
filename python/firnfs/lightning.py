"""Lightning (``lightning``, and Fabric): checkpoints that are streamed to the mount and count as a whole.

    from firnfs.lightning import CheckpointIO

    trainer = Trainer(plugins=[CheckpointIO()])

Lightning's own plugin builds the whole file in memory first, and ``AsyncCheckpointIO`` copies all tensors. This one writes
straight to a file beside and renames it: it takes no memory of the process.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, Optional

import torch

if TYPE_CHECKING or importlib.util.find_spec("lightning") is not None:
    from lightning.fabric.plugins import TorchCheckpointIO
else:
    # Of the package pytorch_lightning, which has the Trainer alone.
    from lightning_fabric.plugins import TorchCheckpointIO

from . import _checkpoint, _state

__all__ = ["CheckpointIO"]


class CheckpointIO(TorchCheckpointIO):
    """Writes each checkpoint to a file beside its name, which the whole file gets.

    Args:
        durable: The file survives the loss of power when it gets its name.

    Example:
        >>> io = CheckpointIO(durable=True)
        >>> io.save_checkpoint({"weights": torch.ones(3)}, directory / "epoch=1-step=20.ckpt")
        >>> io.load_checkpoint(directory / "epoch=1-step=20.ckpt")["weights"]
        tensor([1., 1., 1.])
        >>> firnfs.latest(directory, durable=True).step
        20
    """

    def __init__(self, *, durable: bool = False) -> None:
        super().__init__()
        self.durable = durable

    def save_checkpoint(self, checkpoint: Dict[str, Any], path: Any, storage_options: Optional[Any] = None) -> None:
        """Saves a checkpoint. A file of this name is replaced in one step; a kill leaves the one before."""
        if storage_options is not None:
            raise TypeError("storage_options: a file of a mount has none")
        final = Path(path)
        final.parent.mkdir(parents=True, exist_ok=True)
        durable = self.durable or not _checkpoint.is_firn(final.parent)
        staging = _checkpoint.make_staging(final)
        try:
            file = staging / _checkpoint.FILES / final.name
            torch.save(checkpoint, file)
            if durable:
                _state.make_durable(file)
            os.replace(file, final)
            if durable:
                _state.sync(final.parent)
        finally:
            _checkpoint.remove_staging(staging)

    def remove_checkpoint(self, path: Any) -> None:
        """Removes a checkpoint."""
        with contextlib.suppress(FileNotFoundError):
            super().remove_checkpoint(path)
