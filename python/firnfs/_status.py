"""The state of a mount as a small table."""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import List, Tuple

from . import _ffi
from ._checkpoint import Checkpoint, steps
from .errors import PathLike

_SHOWN_CHECKPOINTS = 5


@dataclass(frozen=True)
class Status:
    """The state of a mount. Sizes are bytes, times seconds. A notebook shows a table, and ``print`` plain text.

    Attributes:
        path: As it was asked about.
        held_bytes: Written by programs, and not in the backing yet ...
        held_files: ... in so many files ...
        oldest_held: ... for so many seconds at most.
        memory_bytes: Memory that the mount may use.
        memory_used_bytes: Memory that it uses.
        drained_bytes: Written to the backing since firnd began.
        drain_errors: Writes to the backing that failed since then.
        waiting_writers: Writers that wait for room in memory.
        pid: Process id of firnd.
        checkpoints: The newest complete checkpoints directly in the path, the newest first.
    """

    path: str
    held_bytes: int
    held_files: int
    oldest_held: float
    memory_bytes: int
    memory_used_bytes: int
    drained_bytes: int
    drain_errors: int
    waiting_writers: int
    pid: int
    checkpoints: Tuple[Checkpoint, ...]

    def _rows(self) -> List[Tuple[str, str]]:
        held = "everything is drained"
        if self.held_bytes:
            held = f"{_size(self.held_bytes)} in {self.held_files} files, for {self.oldest_held:.1f} s at most"
        rows = [
            ("not in the backing", held),
            ("memory", f"{_size(self.memory_used_bytes)} of {_size(self.memory_bytes)} in use"),
            ("drained", _size(self.drained_bytes)),
        ]
        if self.waiting_writers:
            rows.append(("waiting", f"{self.waiting_writers} writers, for room in memory"))
        if self.drain_errors:
            rows.append(("errors", f"{self.drain_errors} writes to the backing failed: `firn status` names them"))
        for one in self.checkpoints:
            rows.append((f"step {one.step}", f"{_size(one.size)} in {one.files} files, {one.durability}"))
        return rows

    def __str__(self) -> str:
        rows = self._rows()
        width = max(len(name) for name, _ in rows)
        return "\n".join([self.path, *(f"  {name:<{width}}  {value}" for name, value in rows)])

    def _repr_html_(self) -> str:
        cells = "".join(
            f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
            f"<td style='text-align:left'>{html.escape(value)}</td></tr>"
            for name, value in self._rows()
        )
        return f"<table><caption>{html.escape(self.path)}</caption>{cells}</table>"


def status(path: PathLike) -> Status:
    """Tells the state of the mount that a path is on, and its newest checkpoints.

    Args:
        path: A directory on a mount; its checkpoints are shown.

    Returns:
        The state, which shows itself as a table.

    Raises:
        NotOnFirn: The path is on no mount.
        FirnError: firnd cannot be asked.

    Example:
        >>> status(directory).drain_errors
        0
    """
    with _ffi.Handle(path) as handle:
        found = handle.status()
    newest = list(reversed(steps(path)))[:_SHOWN_CHECKPOINTS]
    return Status(
        path=str(path),
        held_bytes=found.held_bytes,
        held_files=found.held_files,
        oldest_held=found.oldest_held_ms / 1000,
        memory_bytes=found.arena_bytes,
        memory_used_bytes=found.arena_used_bytes,
        drained_bytes=found.drained_bytes,
        drain_errors=found.drain_errors,
        waiting_writers=found.waiting_writers,
        pid=found.pid,
        checkpoints=tuple(newest),
    )


def _size(count: float) -> str:
    if count < 1024:
        return f"{int(count)} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"
