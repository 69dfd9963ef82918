"""Firn, a file system for checkpoints, from Python.

Save and resume:

    import firnfs

    last = firnfs.latest("/ckpt")
    first = load(last / "model") if last else 0
    for step in range(first, 1000):
        ...
        with firnfs.checkpoint("/ckpt", step=step) as new:
            save(new / "model")

Modules for frameworks are imported by those who use them. docs/PYTHON.md has them all.
"""

import sys

if sys.platform != "linux":
    raise ImportError("firnfs is for Linux: memory and mounts of Firn are those of Linux")

from ._checkpoint import Checkpoint, checkpoint, latest, steps
from ._chunks import Chunks, chunks
from ._find import find_firn, preload_path
from ._run import mount, run
from ._state import Room, durability, room, wait
from ._status import Status, status
from .errors import Aborted, FirnError, FirnWarning, NotOnFirn

__version__ = "0.1.0"

__all__ = [
    "Aborted",
    "Checkpoint",
    "Chunks",
    "FirnError",
    "FirnWarning",
    "NotOnFirn",
    "Room",
    "Status",
    "checkpoint",
    "chunks",
    "durability",
    "find_firn",
    "latest",
    "mount",
    "preload_path",
    "room",
    "run",
    "status",
    "steps",
    "wait",
]
