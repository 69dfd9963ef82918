"""Errors of Firn: all are ``OSError``, with ``errno`` and ``path``."""

from __future__ import annotations

import os
from typing import Optional, Union

PathLike = Union[str, "os.PathLike[str]"]

__all__ = ["Aborted", "FirnError", "FirnWarning", "NotOnFirn"]


class FirnError(OSError):
    """What Firn refused or could not do.

    Attributes:
        errno: The number of ``errno`` that says it best.
        strerror: What happened, and what to do.
        path: The file or directory it is about, or None.
    """

    def __init__(self, number: int, text: str, path: Optional[PathLike] = None) -> None:
        if path is None:
            super().__init__(number, text)
        else:
            super().__init__(number, text, os.fspath(path))

    @property
    def path(self) -> Optional[str]:
        """The file or directory the error is about, or None."""
        name: Optional[str] = self.filename
        return name


class NotOnFirn(FirnError):
    """The path is on no Firn mount (``ENODEV``)."""


class Aborted(FirnError):
    """The checkpoint does not count: something ended it before it was complete (``ECANCELED``)."""


class FirnWarning(UserWarning):
    """Firn works, with other promises than a Firn mount gives."""
