"""libfirn.so by ctypes: the declarations of firn.h, and errors as exceptions.

A call of ctypes holds no lock of the interpreter, so other threads run while one waits. A handle belongs to the process
that opened it, so each operation opens one of its own: nothing here lives on in a child of fork().
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from ctypes import (
    CDLL,
    POINTER,
    Structure,
    byref,
    c_char_p,
    c_int,
    c_int64,
    c_size_t,
    c_uint,
    c_uint32,
    c_uint64,
    c_void_p,
    sizeof,
)
from types import TracebackType
from typing import Any, List, Optional, Tuple, Type

from ._find import library_path
from .errors import Aborted, FirnError, NotOnFirn, PathLike

LEVELS = ("held", "spilled", "partnered", "logged", "drained", "durable")
PARTNERED, LOGGED, DRAINED, DURABLE = 2, 3, 4, 5
STATES = ("whole", "written", "cut", "in-transaction", "empty", "unknown", "unreadable")
NEXT_ID = 2**64 - 1
IN_MEMORY, IN_SPILL, IN_BACKING, IN_HOLE, IN_MEMORY_FILE = range(5)


class StatusStructure(Structure):
    _fields_ = [("size", c_size_t)] + [
        (name, c_uint64)
        for name in (
            "held_bytes",
            "held_files",
            "oldest_held_ms",
            "arena_bytes",
            "arena_used_bytes",
            "spill_bytes",
            "spill_used_bytes",
            "drained_bytes",
            "drain_errors",
            "recorded_errors",
            "waiting_writers",
            "open_files",
            "pid",
        )
    ]


class RoomStructure(Structure):
    _fields_ = [
        ("size", c_size_t),
        ("memory_bytes", c_uint64),
        ("spill_bytes", c_uint64),
        ("backing_bytes", c_uint64),
    ]


class CheckpointStructure(Structure):
    _fields_ = [
        ("name", c_char_p),
        ("step", c_uint64),
        ("bytes", c_uint64),
        ("files", c_uint64),
        ("modified_s", c_int64),
        ("modified_ns", c_uint32),
        ("state", c_uint32),
        ("level", c_uint32),
        ("directory", c_uint32),
        ("reserved", c_uint64 * 2),
    ]


class RegionStructure(Structure):
    _fields_ = [
        ("size", c_size_t),
        ("address", c_void_p),
        ("bytes", c_uint64),
        ("page_bytes", c_uint64),
        ("chunk_bytes", c_uint64),
        ("path", c_char_p),
        ("offset", c_uint64),
        ("spill_address", c_void_p),
        ("spill_bytes", c_uint64),
        ("spill_path", c_char_p),
    ]


class ChunkStructure(Structure):
    _fields_ = [
        ("offset", c_uint64),
        ("bytes", c_uint64),
        ("at", c_uint64),
        ("address", c_void_p),
        ("place", c_uint32),
        ("chunk", c_uint32),
        ("reserved", c_uint64 * 2),
    ]


# Name, type of the result, types of the arguments.
_FUNCTIONS: List[Tuple[str, Any, List[Any]]] = [
    ("firn_version", c_char_p, []),
    ("firn_error_message", c_char_p, []),
    ("firn_open", c_int, [c_char_p, POINTER(c_void_p)]),
    ("firn_close", None, [c_void_p]),
    ("firn_status", c_int, [c_void_p, POINTER(StatusStructure)]),
    ("firn_get_room", c_int, [c_void_p, POINTER(RoomStructure)]),
    ("firn_get_durability", c_int, [c_void_p, c_char_p, POINTER(c_int)]),
    ("firn_drain", c_int, [c_void_p, c_char_p]),
    ("firn_wait", c_int, [c_void_p, c_char_p, c_int, c_uint64]),
    ("firn_list_checkpoints", c_int, [c_char_p, POINTER(c_void_p)]),
    ("firn_checkpoint_list_count", c_size_t, [c_void_p]),
    ("firn_checkpoint_list_items", POINTER(CheckpointStructure), [c_void_p]),
    ("firn_checkpoint_list_free", None, [c_void_p]),
    ("firn_map_region", c_int, [c_void_p, POINTER(RegionStructure)]),
    ("firn_get_chunk_meta_list", c_int, [c_void_p, c_char_p, POINTER(c_void_p)]),
    ("firn_chunk_list_bytes", c_uint64, [c_void_p]),
    ("firn_chunk_list_count", c_size_t, [c_void_p]),
    ("firn_chunk_list_pieces", POINTER(ChunkStructure), [c_void_p]),
    ("firn_chunk_list_check", c_int, [c_void_p, POINTER(c_int)]),
    ("firn_chunk_list_free", None, [c_void_p]),
    ("firn_read_chunk", c_int, [c_void_p, POINTER(ChunkStructure), c_uint64, c_void_p, c_size_t]),
    ("firn_begin_create", c_int, [c_void_p, c_char_p, c_uint]),
    ("firn_commit", c_int, [c_void_p, c_char_p, c_uint64, c_uint, POINTER(c_uint64)]),
    ("firn_abort", c_int, [c_void_p, c_char_p]),
]

_lock = threading.Lock()
_loaded: Optional[CDLL] = None


def library() -> CDLL:
    """The library; loaded at the first call.

    Raises:
        FirnError: It is missing, or of another version than this package.
    """
    global _loaded
    with _lock:
        if _loaded is None:
            _loaded = _load(library_path())
        return _loaded


def _load(path: str) -> CDLL:
    try:
        loaded = CDLL(path)
    except OSError as error:
        raise FirnError(errno.ELIBACC, f"the C library of Firn cannot be loaded ({error}): install firnfs again", path)
    for name, result, arguments in _FUNCTIONS:
        try:
            function = getattr(loaded, name)
        except AttributeError:
            raise FirnError(
                errno.ELIBBAD, f"this C library has no {name}: use the one that was installed with firnfs", path
            ) from None
        function.restype = result
        function.argtypes = arguments
    return loaded


def version() -> str:
    """Version of the C library, as ``0.1.0``."""
    text: bytes = library().firn_version()
    return text.decode()


def check(number: int, path: Optional[PathLike]) -> None:
    """Raises the exception of a call's result.

    Raises:
        FirnError: Always, unless ``number`` is 0; TimeoutError: of ``ETIMEDOUT``.
    """
    if number == 0:
        return
    message: bytes = library().firn_error_message()
    text = message.decode(errors="replace") or os.strerror(number)
    if number == errno.ENODEV:
        raise NotOnFirn(number, text, path)
    if number == errno.ECANCELED:
        raise Aborted(number, text, path)
    if number == errno.ETIMEDOUT:
        raise TimeoutError(number, text, None if path is None else os.fspath(path))
    raise FirnError(number, text, path)


def exchange_names(one: PathLike, other: PathLike) -> None:
    """Gives two objects of one directory tree each other's name, in one step.

    Raises:
        FirnError: ``EINVAL``: this file system cannot.
    """
    loaded = CDLL(None, use_errno=True)
    at_cwd, exchange = -100, 2
    done = loaded.renameat2(
        c_int(at_cwd), c_char_p(os.fsencode(one)), c_int(at_cwd), c_char_p(os.fsencode(other)), c_uint(exchange)
    )
    if done != 0:
        number = ctypes.get_errno()
        raise FirnError(number, f"two names cannot be exchanged here ({os.strerror(number)})", other)


class Handle:
    """A connection to the firnd of one mount; a context manager.

    Raises:
        NotOnFirn: The path is on no mount. FirnError: firnd cannot be asked.
    """

    def __init__(self, path: PathLike) -> None:
        self._library = library()
        self._pid = os.getpid()
        pointer = c_void_p()
        check(self._library.firn_open(os.fsencode(path), byref(pointer)), path)
        self.pointer: Optional[c_void_p] = pointer

    def __enter__(self) -> "Handle":
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection. A child of fork() only forgets it: it belongs to the parent."""
        pointer, self.pointer = self.pointer, None
        if pointer is not None and os.getpid() == self._pid:
            self._library.firn_close(pointer)

    def status(self) -> StatusStructure:
        found = StatusStructure(size=sizeof(StatusStructure))
        check(self._library.firn_status(self.pointer, byref(found)), None)
        return found

    def room(self) -> RoomStructure:
        found = RoomStructure(size=sizeof(RoomStructure))
        check(self._library.firn_get_room(self.pointer, byref(found)), None)
        return found

    def level(self, path: PathLike) -> str:
        found = c_int()
        check(self._library.firn_get_durability(self.pointer, os.fsencode(path), byref(found)), path)
        return LEVELS[found.value]

    def wait(self, path: PathLike, level: int, milliseconds: int) -> None:
        check(self._library.firn_wait(self.pointer, os.fsencode(path), level, milliseconds), path)

    def begin_create(self, path: PathLike) -> None:
        check(self._library.firn_begin_create(self.pointer, os.fsencode(path), 0o777), path)

    def commit(self, path: PathLike) -> None:
        check(self._library.firn_commit(self.pointer, os.fsencode(path), NEXT_ID, 0, None), path)

    def abort(self, path: PathLike) -> None:
        check(self._library.firn_abort(self.pointer, os.fsencode(path)), path)


def list_checkpoints(path: PathLike) -> List[Tuple[bytes, CheckpointStructure]]:
    """Names and facts of the checkpoints directly in a directory, the one modified last first."""
    loaded = library()
    pointer = c_void_p()
    check(loaded.firn_list_checkpoints(os.fsencode(path), byref(pointer)), path)
    try:
        items = loaded.firn_checkpoint_list_items(pointer)
        found = []
        for index in range(loaded.firn_checkpoint_list_count(pointer)):
            copy = CheckpointStructure.from_buffer_copy(items[index])
            found.append((bytes(copy.name), copy))
            # The name ends with the list.
            copy.name = None
        return found
    finally:
        loaded.firn_checkpoint_list_free(pointer)
