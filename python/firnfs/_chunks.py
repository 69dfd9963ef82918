"""The bytes of a held file where they are, without a copy."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from ctypes import byref, c_int, c_void_p, sizeof
from types import TracebackType
from typing import Any, Iterator, List, Optional, Type

from . import _ffi
from .errors import PathLike


class Chunks:
    """The pieces of a file, in its order; a context manager. See ``firnfs.chunks``."""

    def __init__(self, path: PathLike) -> None:
        self._path = path
        self._handle = _ffi.Handle(path)
        self._list: Optional[c_void_p] = None
        self._views: List[memoryview] = []
        # A slice of a view is one of its own, and keeps the array below it alive.
        self._arrays: List["weakref.ref[Any]"] = []
        try:
            self._list_file()
        except BaseException:
            self.close()
            raise

    def _list_file(self) -> None:
        loaded, handle = _ffi.library(), self._handle.pointer
        region = _ffi.RegionStructure(size=sizeof(_ffi.RegionStructure))
        _ffi.check(loaded.firn_map_region(handle, byref(region)), self._path)
        found = c_void_p()
        _ffi.check(loaded.firn_get_chunk_meta_list(handle, os.fsencode(self._path), byref(found)), self._path)
        self._list = found
        pieces = loaded.firn_chunk_list_pieces(found)
        for index in range(loaded.firn_chunk_list_count(found)):
            self._views.append(self._view(pieces[index]))

    def _view(self, piece: _ffi.ChunkStructure) -> memoryview:
        if piece.place == _ffi.IN_MEMORY:
            array = (ctypes.c_ubyte * piece.bytes).from_address(piece.address)
            self._arrays.append(weakref.ref(array))
            return memoryview(array).cast("B").toreadonly()
        if piece.place in (_ffi.IN_SPILL, _ffi.IN_MEMORY_FILE):
            # A copy: a device that fails would end this process at the mapping, and a memory file has no address here.
            buffer = ctypes.create_string_buffer(piece.bytes)
            result = _ffi.library().firn_read_chunk(self._handle.pointer, byref(piece), 0, buffer, piece.bytes)
            _ffi.check(result, self._path)
            return memoryview(buffer).cast("B").toreadonly()
        if piece.place == _ffi.IN_HOLE:
            # Pages of zeros that take no memory.
            return memoryview(mmap.mmap(-1, piece.bytes, prot=mmap.PROT_READ))
        return self._read(piece.offset, piece.bytes)

    def _read(self, offset: int, length: int) -> memoryview:
        parts = bytearray()
        descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while len(parts) < length:
                part = os.pread(descriptor, min(length - len(parts), 16 << 20), offset + len(parts))
                if not part:
                    break
                parts += part
        finally:
            os.close(descriptor)
        return memoryview(parts).toreadonly()

    def __enter__(self) -> "Chunks":
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        try:
            if kind is None:
                self.changed()
        finally:
            self.close()

    def __iter__(self) -> Iterator[memoryview]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

    @property
    def nbytes(self) -> int:
        """Bytes of the file when it was listed."""
        return sum(view.nbytes for view in self._views)

    def changed(self) -> bool:
        """Tells whether the file was changed since it was listed.

        Raises:
            FirnError: With ``ESTALE``: firnd ended meanwhile, and what was read may be wrong.
        """
        found = c_int()
        _ffi.check(_ffi.library().firn_chunk_list_check(self._list, byref(found)), self._path)
        return bool(found.value)

    def close(self) -> None:
        """Gives the pieces back. Views that are used later raise ValueError.

        Raises:
            BufferError: An array still uses a view: delete it first. Until then the pieces are kept.
        """
        for view in self._views:
            view.release()
        self._views = []
        if any(array() is not None for array in self._arrays):
            raise BufferError("parts of the file are still in use: delete the arrays and slices of its views first")
        list_, self._list = self._list, None
        if list_ is not None:
            _ffi.library().firn_chunk_list_free(list_)
        self._handle.close()

    def __del__(self) -> None:
        # As long as somebody can read the pieces they must stay: then they are held until this process ends.
        with contextlib.suppress(BufferError, AttributeError):
            self.close()


def chunks(path: PathLike) -> Chunks:
    """Gives the bytes of a file of a mount where they are in shared memory, without a copy.

    What is in memory keeps its place and its bytes until the block ends, whatever is done to the file. What was
    spilled, is in a memory file, or is in the backing only, is copied.

    Args:
        path: A file on a mount of this user.

    Returns:
        A context manager, iterable: read-only memoryviews in the order of the file, without gap. Its end raises
        FirnError with ``ESTALE`` if firnd ended meanwhile, and BufferError if an array still uses a view.

    Raises:
        NotOnFirn: The path is on no mount.
        FirnError: ``ENOENT``, ``EISDIR``, ``EAGAIN`` and others of ``firn_get_chunk_meta_list()``.

    Example:
        >>> with chunks(held_file) as views:
        ...     sum(view.nbytes for view in views)
        4194304
    """
    return Chunks(path)
