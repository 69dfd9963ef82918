"""``firn://`` for fsspec: files of a mount by the names that pandas, datasets, zarr and others take.

    import fsspec

    with fsspec.open("firn:///ckpt/table.parquet", "wb") as file: ...

It is a local path with a name of its own. Files that are written in an fsspec transaction each appear whole at its end, from
beside their names and not by a copy from elsewhere.
"""

from __future__ import annotations

import os
import secrets
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, List, Optional

from fsspec.implementations.local import LocalFileOpener, LocalFileSystem

from . import _checkpoint, _state

__all__ = ["FirnFileSystem"]

_PREFIX = "firn://"


class _File(LocalFileOpener):  # type: ignore[misc]
    """A local file; in a transaction one beside its name, on the same mount."""

    def _open(self) -> None:
        opened: Any = getattr(self, "f", None)
        if self.autocommit or "w" not in self.mode or not (opened is None or opened.closed):
            super()._open()
            return
        top, name = os.path.split(self.path)
        self.temp = os.path.join(top, f".{name}.{secrets.token_hex(4)}.tmp")
        self.f: Any = open(self.temp, mode=self.mode)

    def commit(self) -> None:
        """Gives the file its name."""
        os.replace(self.temp, self.path)


class FirnFileSystem(LocalFileSystem):  # type: ignore[misc]
    """Files of a Firn mount, and its checkpoints.

    Example:
        >>> fs = FirnFileSystem()
        >>> with fs.open(f"firn://{directory}/notes", "w") as file:
        ...     _ = file.write("loss 0.25")
        >>> fs.cat(f"firn://{directory}/notes")
        b'loss 0.25'
    """

    protocol = "firn"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        text = os.fspath(path)
        if text.startswith(_PREFIX):
            text = text[len(_PREFIX) :]
        return super()._strip_protocol(text)

    def unstrip_protocol(self, name: str) -> str:
        """The URL of a path."""
        return _PREFIX + str(self._strip_protocol(name))

    def _open(self, path: str, mode: str = "rb", block_size: Optional[int] = None, **options: Any) -> _File:
        path = self._strip_protocol(path)
        if self.auto_mkdir and "w" in mode:
            self.makedirs(self._parent(path), exist_ok=True)
        return _File(path, mode, fs=self, **options)

    def checkpoint(self, path: str, **options: Any) -> "AbstractContextManager[Path]":
        """``firnfs.checkpoint`` of a URL."""
        return _checkpoint.checkpoint(self._strip_protocol(path), **options)

    def latest(self, path: str, *, durable: bool = False) -> Optional[_checkpoint.Checkpoint]:
        """``firnfs.latest`` of a URL."""
        return _checkpoint.latest(self._strip_protocol(path), durable=durable)

    def steps(self, path: str) -> List[_checkpoint.Checkpoint]:
        """``firnfs.steps`` of a URL."""
        return _checkpoint.steps(self._strip_protocol(path))

    def wait(self, path: str, until: str = "durable", timeout: Optional[float] = None) -> None:
        """``firnfs.wait`` of a URL."""
        _state.wait(self._strip_protocol(path), until, timeout)

    def durability(self, path: str) -> str:
        """``firnfs.durability`` of a URL."""
        return _state.durability(self._strip_protocol(path))
