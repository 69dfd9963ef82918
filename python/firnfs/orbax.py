"""Orbax: a step counts when all of its files are durable.

    import orbax.checkpoint as ocp
    from firnfs.orbax import TemporaryPath

    options = ocp.CheckpointManagerOptions(temporary_path_class=TemporaryPath)
    manager = ocp.CheckpointManager("/ckpt", options=options)

Orbax writes each step to a directory beside and renames it, on its primary host and in the background. It syncs nothing: after
the loss of a host a step may have its name and lack files. Here they are synced before the rename, so that
``wait_until_finished`` says what it promises.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from orbax.checkpoint._src.path import atomicity

from . import _checkpoint, _state

__all__ = ["HeldTemporaryPath", "TemporaryPath"]

if not asyncio.iscoroutinefunction(atomicity.AtomicRenameTemporaryPath.finalize):
    raise ImportError("firnfs.orbax needs a newer Orbax: `pip install --upgrade orbax-checkpoint`")


class TemporaryPath(atomicity.AtomicRenameTemporaryPath):
    """A step that is durable when it gets its name.

    With several hosts each brings its files to the backing at their close (``close=drain``, the default of a mount).

    Example:
        >>> import asyncio
        >>> from etils import epath
        >>> new = TemporaryPath.from_final(epath.Path(directory) / "7")
        >>> made = asyncio.run(new.create())
        >>> _ = (made / "weights").write_bytes(b"weights")
        >>> asyncio.run(new.finalize())
        >>> firnfs.durability(directory / "7")
        'durable'
    """

    durable = True

    async def finalize(self) -> None:
        """Syncs the files, then renames; the primary host calls it in a background thread."""
        await asyncio.to_thread(_checkpoint.settle, Path(self.get()), self.durable)
        await super().finalize()
        if self.durable:
            final = Path(self.get_final())
            await asyncio.to_thread(_state.make_durable, final)
            await asyncio.to_thread(_state.sync, final.parent)


class HeldTemporaryPath(TemporaryPath):
    """A step that counts when it is in the memory of the mount: it survives the end of every process.

    It has a note of how much it has, so that ``firnfs.latest`` passes over it if a lost host took some of it.
    """

    durable = False
