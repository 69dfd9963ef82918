"""Where the program and the libraries of Firn are."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Iterator, List, Optional

from .errors import FirnError

PACKAGE = Path(__file__).resolve().parent
PRELOAD_NAME = "libfirn_preload.so"


def find_firn() -> str:
    """Finds the program ``firn``.

    The variable ``FIRN_BIN`` comes first, then the program that was installed together with this package, then
    ``PATH``.

    Returns:
        The path of the program.

    Raises:
        FirnError: With ``ENOENT``, if there is none.

    Example:
        >>> import os, firnfs
        >>> os.access(firnfs.find_firn(), os.X_OK)
        True
    """
    named = os.environ.get("FIRN_BIN")
    if named:
        if _is_program(Path(named)):
            return named
        raise FirnError(errno.ENOENT, "FIRN_BIN names no program: unset it, or build it", named)
    for directory in _script_directories():
        if _is_program(directory / "firn"):
            return str(directory / "firn")
    found = shutil.which("firn")
    if found is None:
        raise FirnError(errno.ENOENT, "the program firn is not installed: `pip install firnfs`, or put it into PATH")
    return found


def preload_path() -> str:
    """Finds the preload library, by which programs reach the files of a mount without FUSE.

    Returns:
        The path of ``libfirn_preload.so``, for ``LD_PRELOAD``.

    Raises:
        FirnError: With ``ENOENT``, if there is none.

    Example:
        >>> import os, firnfs
        >>> os.path.basename(firnfs.preload_path())
        'libfirn_preload.so'
    """
    return _find_library([PRELOAD_NAME])


def library_path() -> str:
    """Finds the C library: ``FIRN_LIB`` first, then the one of this package, then the one beside ``firn``."""
    named = os.environ.get("FIRN_LIB")
    return named if named else _find_library(["libfirn.so", "libfirn.so.0"])


def _find_library(names: List[str]) -> str:
    for directory in _library_directories():
        for name in names:
            if (directory / name).is_file():
                return str(directory / name)
    raise FirnError(errno.ENOENT, f"{names[0]} is not installed: `pip install firnfs`, or install it beside firn")


def _library_directories() -> Iterator[Path]:
    yield PACKAGE / "_lib"
    try:
        beside = Path(find_firn()).resolve().parent
    except FirnError:
        return
    yield beside
    for lib in ("lib", "lib64", "lib/firn"):
        yield beside.parent / lib


def _script_directories() -> Iterator[Path]:
    yield Path(sysconfig.get_path("scripts"))
    yield Path(sysconfig.get_path("scripts", vars={"base": sys.base_prefix}))
    # pip install --prefix DIR: DIR/lib/pythonX.Y/site-packages/firnfs.
    if len(PACKAGE.parents) > 3:
        yield PACKAGE.parents[3] / "bin"
    # pip install --target DIR.
    yield PACKAGE.parent / "bin"
    user = _user_scheme()
    if user is not None:
        yield Path(sysconfig.get_path("scripts", scheme=user))


def _user_scheme() -> Optional[str]:
    if sys.version_info >= (3, 10):
        return sysconfig.get_preferred_scheme("user")
    return "posix_user"


def _is_program(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)
